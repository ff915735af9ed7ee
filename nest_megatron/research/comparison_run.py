"""``compare``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse, refuse_sweeps
from nest_megatron.config.request import request_of
from nest_megatron.errors import ENDED_EARLY, NOTHING_FITS, OK, UserInputError
from nest_megatron.plain import to_plain
from nest_megatron.planner import PlanRequest
from nest_megatron.report.console import say, show, show_json
from nest_megatron.report.terminal import notes_report
from nest_megatron.research.comparison import PLANNERS, Compared, compare
from nest_megatron.research.report.comparison import (
    check_chart,
    comparison_report,
    tokens_per_s,
    why,
    write_comparison,
)


def run_compare(
    *, overrides: Sequence[str], config_dir: Path | None, chart: Path | None, as_json: bool
) -> int:
    """Compare planners on one job, and print or draw the result."""
    names, rest = split_planners(overrides)
    settings = parse(rest, config_dir)
    refuse_sweeps(settings)
    if chart is not None:
        check_chart(chart)
    composed = compose(settings, config_dir)
    if composed.config.out is not None:
        raise UserInputError(
            "out",
            value=composed.config.out,
            limit="a comparison writes no plan",
            fix="Use --chart for a picture, or `nest-megatron plan` for the plan.",
        )
    request = request_of(composed)  # layers are carried out as the other planners have them
    with _told() as on_planner:
        rows = compare(request, names, on_planner)
    title = f"{request.spec.name} on {request.cluster.describe()}, {request.cluster.name}"
    if chart is not None:
        write_comparison(rows, chart, title)
    if as_json:
        show_json(_plain(request, rows))
    else:
        show(Text(title), comparison_report(rows), "")
        if request.notes:
            show(notes_report(request.notes))
        if chart is not None:
            say(f"Drawn into {chart}.")
    if rows[0].plan is not None:
        return OK
    return ENDED_EARLY if rows[0].ended_early else NOTHING_FITS


def split_planners(overrides: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Names of ``planners=[...]``, and the other settings.

    >>> split_planners(["model=llama3_8b", "planners=[nest, mist]"])
    (('nest', 'mist'), ['model=llama3_8b'])
    """
    given = [text for text in overrides if text.partition("=")[0] == "planners"]
    rest = [text for text in overrides if text not in given]
    if not given:
        return PLANNERS, rest
    text = given[-1].partition("=")[2].strip().strip("[]()")
    names = tuple(name.strip().strip("'\"") for name in text.split(",") if name.strip())
    if not names:
        raise UserInputError(
            "planners",
            value=given[-1],
            limit="it names no planner",
            fix=f"Name some of {', '.join(PLANNERS)}, or leave it out for all.",
        )
    return names, rest


@contextlib.contextmanager
def _told() -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says which planner is at work."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console

    with Console(stderr=True).status("planning") as status:
        yield lambda name: status.update(f"planning: {name}")


def _plain(request: PlanRequest, rows: Sequence[Compared]) -> dict[str, Any]:
    return {
        "model": request.spec.name,
        "cluster": request.cluster.name,
        "num_gpus": request.cluster.num_gpus,
        "global_batch_size": request.global_batch_size,
        "planners": [_plain_row(row) for row in rows],
        "notes": list(request.notes),
    }


def _plain_row(row: Compared) -> dict[str, Any]:
    """One planner for programs; what it has no plan for is null."""
    found, worst = row.plan, row.worst_term
    return {
        "name": row.name,
        "title": row.title,
        "iteration_time_s": found and found.predicted.iteration_time_s,
        "tokens_per_s": found and tokens_per_s(found),
        "relative_throughput": row.relative_throughput,
        "chance_slower": row.chance_slower,
        "tie": None if row.chance_slower is None else row.is_tie,
        "peak_memory_bytes": found and found.predicted.peak_memory_bytes,
        "micro_batch_size": found and found.train.micro_batch_size,
        "parallel": found and to_plain(found.parallel),
        "rank_order": found and str(found.placement.rank_order),
        "terms": found and row.terms,
        "worst_term": worst and {"term": worst, "seconds": row.differences[worst]},
        "why": why(row),
        "reason": row.reason,
        "candidates": row.candidates,
        "search_s": row.search_s,
    }
