"""A chart of a model's chain: blocks from top to bottom, their parts, what they pass on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nest_megatron.model.chain import ChainBlock, ChainGraph, ChainOperator
from nest_megatron.report.charts import SOFT, write_chart
from nest_megatron.report.layer_chart import (
    ARITHMETIC,
    FLOPS_PER_BYTE,
    TRAFFIC,
    limit_colour,
    scaled,
    work_time,
)

#: Inches: the whole width, a row, and what is above and below the rows.
_WIDTH, _ROW, _AROUND = 13.0, 0.26, 1.9
#: Rows of a block at least: its name, its figures, its bar, what it passes on.
_LEAST = 4
#: Parts of a block that are listed beside it.
_MOST_PARTS = 12


def draw_chain(graph: ChainGraph, path: Path) -> None:
    """Draw a chain into a ``.png`` or ``.svg`` file.

    Raises:
        UserInputError: for another suffix, a file that cannot be written, or without matplotlib.
    """
    size = (_WIDTH, _AROUND + _ROW * sum(_heights(graph)))
    write_chart(lambda figure: draw_chain_on(figure, graph), size, path, "--draw")


def draw_chain_on(figure: Any, graph: ChainGraph) -> None:
    """Fill a matplotlib figure: neighbours of one kind on the left, parts of one of them beside."""
    from matplotlib.patches import Patch

    shapes = ", ".join(f"{list(each.sizes)} {each.dtype}" for each in graph.inputs)
    figure.set_layout_engine("constrained")
    figure.suptitle(f"{graph.name} on {shapes}", x=0.01, ha="left", fontweight="bold", fontsize=11)
    blocks, parts = figure.subplots(1, 2, sharey=True)
    _draw_blocks(blocks, graph)
    _draw_parts(parts, graph)
    for axes, title in ((blocks, "blocks, one forward pass"), (parts, "parts of one block")):
        axes.set_title(title, fontsize=9, color=SOFT)
        axes.spines[:].set_visible(False)
        axes.tick_params(left=False, bottom=False, labelbottom=False, labelsize=8)
    blocks.set_ylim(sum(_heights(graph)), -0.5)
    limits = {"limited by arithmetic": ARITHMETIC, "limited by memory traffic": TRAFFIC}
    figure.legend(
        handles=[Patch(color=colour, label=words) for words, colour in limits.items()],
        title=f"In all {scaled(graph.flops(), 'FLOP')}, "
        f"{scaled(graph.parameters(), '').strip()} parameters, "
        f"{scaled(graph.saved_bytes(), 'B')} saved for the backward pass. Length: time at "
        f"{FLOPS_PER_BYTE:g} FLOPs a byte, each half with a scale of its own.",
        title_fontsize=8,
        loc="outside lower left",
        ncols=2,
        fontsize=8,
        frameon=False,
    )


def _heights(graph: ChainGraph) -> list[int]:
    """Rows of each run of equal blocks."""
    return [max(_LEAST, 1 + len(_parts(graph, run[0]))) for run in graph.runs()]


def _draw_blocks(axes: Any, graph: ChainGraph) -> None:
    runs, top = graph.runs(), 0.0
    times = [[len(run) * time for time in _limits(graph, run[0])] for run in runs]
    longest = max(map(sum, times), default=0.0) or 1.0
    for run, (arithmetic, traffic), height in zip(runs, times, _heights(graph), strict=True):
        name, figures = _run_words(run)
        axes.text(0, top, name, va="center", fontsize=9, fontweight="bold")
        axes.text(0, top + 0.9, figures, va="center", fontsize=8, color=SOFT)
        axes.barh(top + 1.8, arithmetic / longest, 0.6, color=ARITHMETIC)
        axes.barh(top + 1.8, traffic / longest, 0.6, left=arithmetic / longest, color=TRAFFIC)
        if run is not runs[-1]:
            words = f"↓ {scaled(run[-1].cut_bytes, 'B')} passed on"
            axes.text(0.5, top + height - 1.2, words, va="center", fontsize=8, color=SOFT)
        top += height
    axes.set_xlim(0, 1)
    axes.set_yticks([])


def _limits(graph: ChainGraph, block: ChainBlock) -> tuple[float, float]:
    """Time of a block's operators that arithmetic limits, and of those that memory limits."""
    arithmetic = traffic = 0.0
    for op in graph.within(block):
        time = work_time(op.flops, op.bytes_moved)
        if limit_colour(op.flops, op.bytes_moved) == ARITHMETIC:
            arithmetic += time
        else:
            traffic += time
    return arithmetic, traffic


def _run_words(run: Sequence[ChainBlock]) -> tuple[str, str]:
    first = run[0]
    name = f"{first.name}  {first.kind}"
    if len(run) > 1:
        name = f"{len(run)} x {first.kind}  {first.name} to {run[-1].name}"
    figures = [
        *([scaled(first.flops, "FLOP")] if first.flops else []),
        scaled(first.bytes_moved, "B"),
        *([f"{scaled(first.parameters, '').strip()} parameters"] if first.parameters else []),
        f"saves {scaled(run[-1].saved_bytes, 'B')}",
    ]
    return name, "  ".join(figures) + (", each" if len(run) > 1 else "")


def _draw_parts(axes: Any, graph: ChainGraph) -> None:
    top = 0
    for run, height in zip(graph.runs(), _heights(graph), strict=True):
        parts = _parts(graph, run[0])
        longest = max((work_time(*work) for _, *work in parts), default=0.0) or 1.0
        for at, (name, flops, num_bytes) in enumerate(parts, start=top):
            length = max(0.006, work_time(flops, num_bytes) / longest)
            axes.barh(at, length, 0.7, color=limit_colour(flops, num_bytes))
            words = [*([scaled(flops, "FLOP")] if flops else []), scaled(num_bytes, "B")]
            axes.text(length + 0.01, at, "  ".join(words), va="center", fontsize=7.5, color=SOFT)
            axes.text(-0.02, at, name, va="center", ha="right", fontsize=8)
        top += height
    axes.set_xlim(-0.1, 1.4)


def _parts(graph: ChainGraph, block: ChainBlock) -> list[tuple[str, float, float]]:
    """FLOPs and bytes of a block's parts; one without parts has none. The largest of many."""
    inside = block.name.partition("#")[0]
    sums: dict[str, tuple[float, float]] = {}
    for op in graph.within(block):
        name = _part_name(op, inside)
        flops, num_bytes = sums.get(name, (0.0, 0.0))
        sums[name] = (flops + op.flops, num_bytes + op.bytes_moved)
    rows = [(name, *figures) for name, figures in sums.items()]
    if len(rows) < 2:
        return []
    if len(rows) <= _MOST_PARTS:
        return rows
    largest = sorted(rows, key=lambda row: -work_time(*row[1:]))[: _MOST_PARTS - 1]
    rest = [row for row in rows if row not in largest]
    others = (f"({len(rest)} more)", sum(r[1] for r in rest), sum(r[2] for r in rest))
    return [*(row for row in rows if row in largest), others]


def _part_name(op: ChainOperator, inside: str) -> str:
    return op.module.removeprefix(inside).removeprefix(".") or "(itself)"
