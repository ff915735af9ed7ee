"""Reports as text and as HTML, for ``print`` and for the cells of a notebook."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nest_megatron.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nest_megatron.parallel.plan import ParallelPlan

#: The font of the terminal's tables.
_PRE = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace\">{code}</pre>"
)
_FRAME = (
    '<iframe title="{title}" srcdoc="{page}" sandbox="" '
    'style="width:100%;height:{height_px}px;border:0"></iframe>'
)
_WIDTH = 100


def as_text(parts: Iterable[RenderableType], width: int = 80) -> str:
    """What a terminal without colours shows of a report."""
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=width, markup=False, highlight=False, emoji=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def as_html(parts: Iterable[RenderableType]) -> str:
    """What a terminal shows of a report, as a fragment of HTML."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(), record=True, width=_WIDTH, markup=False, highlight=False, emoji=False
    )
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return console.export_html(inline_styles=True, code_format=_PRE)


def framed(page: str, title: str, height_px: int = 900) -> str:
    """A whole page as a frame of a notebook, which keeps its styles and its policy to itself."""
    return _FRAME.format(title=html.escape(title), page=html.escape(page), height_px=height_px)


def short_form(plan: ParallelPlan) -> str:
    """A plan in one line: the job, every degree above 1, the step."""
    chosen = plan.parallel
    degrees = {
        "TP": chosen.tensor_model_parallel_size,
        "PP": chosen.pipeline_model_parallel_size,
        "VPP": chosen.virtual_pipeline_model_parallel_size or 1,
        "CP": chosen.context_parallel_size,
        "EP": chosen.expert_model_parallel_size,
        "DP": chosen.data_parallel_size,
    }
    words = [f"{name} {size}" for name, size in degrees.items() if size > 1] or ["one rank"]
    step = format_seconds(plan.predicted.iteration_time_s)
    job = f"{plan.model.name} on {plan.cluster.describe()}"
    return f"{job}: {' '.join(words)}, batch {plan.train.global_batch_size}, {step} a step"
