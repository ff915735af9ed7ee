"""A chart of a layer: its operators from top to bottom, what they cost, and which collectives run.

The left half is the forward pass, read downwards; the right one the backward pass, read upwards.
A bar is as long as its operator takes on an accelerator that is limited by its arithmetic or
by its memory, whichever takes longer; its colour says which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from nest_megatron.model.graph import Group, LayerCollective, LayerGraph, Operator
from nest_megatron.report.charts import INK, PAPER, SOFT, TERM_COLOURS, ink_on, write_chart
from nest_megatron.report.operator_flow import Step, steps

#: FLOPs that an accelerator does while it moves a byte: 989 TFLOP/s and 3.35 TB/s of an H100 SXM
#: (NVIDIA's data sheet), which is close to that of its neighbours.
FLOPS_PER_BYTE = 295.0
ARITHMETIC, TRAFFIC = "#2f6fb7", "#c98a00"
GROUP_COLOURS = {
    Group.TENSOR: TERM_COLOURS["tp_communication"],
    Group.CONTEXT: TERM_COLOURS["dp_communication"],
    Group.EXPERT: "#1f8a70",
    Group.EXPERT_TENSOR: "#8fd0bd",
}
_GROUP_WORDS = {
    Group.TENSOR: "tensor parallel",
    Group.CONTEXT: "context parallel",
    Group.EXPERT: "expert parallel",
    Group.EXPERT_TENSOR: "expert tensor parallel",
}
_BAND = "#f5f6f8"
#: Inches: the whole width, a row, and what is above and below the rows.
_WIDTH, _ROW, _AROUND = 13.0, 0.24, 2.0
#: End of an axis on which the longest bar ends at 1, with space for its figures.
_END = 1.45


@dataclass(frozen=True, slots=True)
class _Row:
    """An operator, or collectives that lie between two operators."""

    part: str
    operator: Operator | None = None
    forward: LayerCollective | None = None
    backward: LayerCollective | None = None


def draw_layer(graph: LayerGraph, path: Path, title: str) -> None:
    """Draw a layer into a ``.png`` or ``.svg`` file.

    Raises:
        UserInputError: for another suffix, a file that cannot be written, or without matplotlib.
    """
    size = (_WIDTH, _AROUND + _ROW * len(_rows(graph)))
    write_chart(lambda figure: draw_layer_on(figure, graph, title), size, path, "--draw")


def draw_layer_on(figure: Any, graph: LayerGraph, title: str) -> None:
    """Fill a matplotlib figure."""
    rows = _rows(graph)
    figure.set_layout_engine("constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    panels = figure.subplots(1, 2, sharey=True)
    longest = max((max(_times(op)) for op in graph.operators), default=0.0) or 1.0
    for side, axes in enumerate(panels):
        _draw_pass(axes, graph, rows, side, longest)
    panels[0].set_yticks(
        range(len(rows)), [row.operator.name if row.operator else "" for row in rows]
    )
    panels[0].tick_params(labelsize=8)
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    _write_parts(panels[1], rows)
    _label(figure, graph)


def _rows(graph: LayerGraph) -> list[_Row]:
    return [row for step in steps(graph) for row in _step_rows(step)]


def _step_rows(step: Step) -> Iterator[_Row]:
    part = step.operator.part.value.replace("_", " ")
    yield from _between(part, step.above)
    yield _Row(part, operator=step.operator)
    yield from _between(part, step.below)


def _between(part: str, collectives: Sequence[LayerCollective]) -> Iterator[_Row]:
    """Collectives in as few rows as they need; backward ones run upwards."""
    forward = [each for each in collectives if not each.backward]
    backward = [each for each in collectives if each.backward][::-1]
    for at in range(max(len(forward), len(backward))):
        ahead, back = (each[at] if at < len(each) else None for each in (forward, backward))
        yield _Row(part, forward=ahead, backward=back)


def work_time(flops: float, num_bytes: float) -> float:
    """How long work takes, in bytes that could be moved meanwhile."""
    return max(flops / FLOPS_PER_BYTE, num_bytes)


def limit_colour(flops: float, num_bytes: float) -> str:
    """Colour of what limits some work."""
    return ARITHMETIC if flops / FLOPS_PER_BYTE > num_bytes else TRAFFIC


def _work(operator: Operator, side: int) -> tuple[float, float]:
    """FLOPs and bytes of the forward (0) or backward pass (1)."""
    if side == 0:
        return operator.flops, operator.bytes_moved
    return operator.backward_flops, operator.backward_bytes_moved


def _times(operator: Operator) -> tuple[float, float]:
    return work_time(*_work(operator, 0)), work_time(*_work(operator, 1))


def _draw_pass(
    axes: Any, graph: LayerGraph, rows: Sequence[_Row], side: int, longest: float
) -> None:
    """One pass: bars of operators to scale, collectives across the whole width."""
    total = sum(_times(op)[side] for op in graph.operators) or 1.0
    for at, row in enumerate(rows):
        collective = row.backward if side else row.forward
        if row.operator is not None and any(_work(row.operator, side)):
            _draw_operator(axes, at, _work(row.operator, side), longest, total)
        elif collective is not None:
            _draw_collective(axes, at, collective)
    work = [_work(op, side) for op in graph.operators]
    sums = _figures(sum(flops for flops, _ in work), sum(num_bytes for _, num_bytes in work))
    name = "backward pass, upwards" if side else "forward pass, downwards"
    axes.set_title(f"{name}: {sums} in all", fontsize=9, color=SOFT)
    axes.set_xlim(0, _END)
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    band = 0
    for number, (_, members) in enumerate(groupby(rows, key=lambda row: row.part)):
        size = len(list(members))
        if number % 2 == 0:
            axes.axhspan(band - 0.5, band + size - 0.5, color=_BAND, zorder=0)
        band += size


def _draw_operator(
    axes: Any, at: int, work: tuple[float, float], longest: float, total: float
) -> None:
    time = work_time(*work)
    length = max(0.004, time / longest)
    axes.barh(at, length, 0.72, color=limit_colour(*work))
    share = 100 * time / total
    words = f"{_figures(*work)}  {f'{share:.0f} %' if share >= 0.5 else '<1 %'}"
    axes.text(length + 0.01, at, words, va="center", fontsize=7.5, color=SOFT)


def _draw_collective(axes: Any, at: int, collective: LayerCollective) -> None:
    """One that may hide under an operator is an outline."""
    colour, hidden = GROUP_COLOURS[collective.group], bool(collective.hidden_under)
    look = {"facecolor": PAPER if hidden else colour, "edgecolor": colour}
    axes.barh(at, _END, 0.66, linestyle="--" if hidden else "-", **look)
    ink = INK if hidden else ink_on(colour)
    place = {"ha": "center", "va": "center", "fontsize": 7.5, "color": ink}
    axes.text(_END / 2, at, _collective_words(collective), **place)


def _collective_words(collective: LayerCollective) -> str:
    words = [
        collective.kind.replace("_", "-"),
        f"over {collective.group.value}:",
        scaled(collective.message_bytes, "B"),
    ]
    if collective.num_calls > 1:
        words.append(f"x {collective.num_calls}")
    if collective.hidden_under:
        words.append(f"(under {collective.hidden_under})")
    return " ".join(words)


def _write_parts(axes: Any, rows: Sequence[_Row]) -> None:
    """The name of each part at the right end of its rows."""
    first = 0
    for part, members in groupby(rows, key=lambda row: row.part):
        size = len(list(members))
        middle = first + (size - 1) / 2
        axes.text(_END + 0.02, middle, part, va="center", fontsize=8, fontweight="bold")
        first += size


def _label(figure: Any, graph: LayerGraph) -> None:
    from matplotlib.patches import Patch

    groups = [group for group in Group if any(c.group is group for c in graph.collectives)]
    entries = [(ARITHMETIC, "limited by arithmetic"), (TRAFFIC, "limited by memory traffic")]
    entries += [(GROUP_COLOURS[group], _GROUP_WORDS[group]) for group in groups]
    figure.legend(
        handles=[Patch(color=colour, label=words) for colour, words in entries],
        title=f"Saved for the backward pass: {scaled(graph.total_saved_bytes(), 'B')}. "
        f"Length: time at {FLOPS_PER_BYTE:g} FLOPs a byte, one scale for both passes; "
        "% of the pass. Dashed: may hide under an operator.",
        title_fontsize=8,
        loc="outside lower left",
        ncols=len(entries),
        fontsize=8,
        frameon=False,
    )


def _figures(flops: float, num_bytes: float) -> str:
    return "  ".join([*([scaled(flops, "FLOP")] if flops else []), scaled(num_bytes, "B")])


def scaled(value: float, unit: str) -> str:
    """A figure with three digits and an SI prefix.

    >>> scaled(33_554_432, "B"), scaled(12.0, "B")
    ('33.6 MB', '12 B')
    """
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            size = value / 10**power
            return f"{size:.{2 if size < 10 else 1 if size < 100 else 0}f} {prefix}{unit}"
    return f"{value:.0f} {unit}"
