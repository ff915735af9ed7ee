"""A drawing of a model's chain: its blocks from top to bottom, and what they pass on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nest_megatron.model.chain import ChainBlock, ChainGraph, ChainOperator
from nest_megatron.report.canvas import (
    INK,
    PAPER,
    SOFT,
    Box,
    Canvas,
    Line,
    Words,
    shortened,
    shortened_path,
    width_of,
    write_picture,
)
from nest_megatron.report.operator_drawing import (
    ARITHMETIC,
    FLOPS_PER_BYTE,
    TRAFFIC,
    draw_legend,
    scaled,
)
from nest_megatron.report.palette import ink_on

WIDTH = 1240.0
_LEFT, _CHAIN = 14.0, 560.0
_PARTS_AT, _BARS_AT, _BAR = 640.0, 900.0, 200.0
_TOP, _BLOCK, _GAP, _FOOT = 74.0, 46.0, 30.0, 84.0
_PART = 22.0
#: Parts of a block that are listed beside it.
_MOST_PARTS = 12


def draw_chain(graph: ChainGraph, path: Path) -> tuple[int, int]:
    """Draw a chain.

    Args:
        path: an ``.svg`` or ``.png`` file.

    Returns:
        Width and height: pixels of a .png, units of an .svg.

    Raises:
        UserInputError: for another suffix, a file that cannot be written, or a .png without
            matplotlib.
    """
    return write_picture(chain_canvas(graph), path)


def chain_canvas(graph: ChainGraph) -> Canvas:
    """The drawing of a chain, not yet in any format."""
    runs = graph.runs()
    parts = [_parts(graph, run[0]) for run in runs]
    heights = [max(_BLOCK, _PART * len(each)) + _GAP for each in parts]
    canvas = Canvas(WIDTH, _TOP + sum(heights) + _FOOT, graph.name)
    _draw_heads(canvas, graph)
    whole = max((_run_time(graph, run) for run in runs), default=0.0) or 1.0
    y = _TOP
    for at, (run, own, height) in enumerate(zip(runs, parts, heights, strict=True)):
        _draw_run(canvas, graph, run, y, whole)
        _draw_parts(canvas, own, y, height - _GAP)
        last = at == len(runs) - 1
        words = "" if last else f"{scaled(run[-1].cut_bytes, 'B')} passed on"
        _draw_arrow(canvas, words, y + _BLOCK, y + height)
        y += height
    _draw_foot(canvas, graph, y)
    return canvas


def _draw_heads(canvas: Canvas, graph: ChainGraph) -> None:
    shapes = ", ".join(f"{list(each.sizes)} {each.dtype}" for each in graph.inputs)
    title = shortened(f"{graph.name} on {shapes}", WIDTH - 28, size=15, bold=True)
    canvas.add(Words(text=title, x=_LEFT, y=22, size=15, bold=True))
    columns = ((_LEFT, "blocks, one forward pass"), (_PARTS_AT, "parts of one block"))
    for x, words in columns:
        canvas.add(Words(text=words, x=x, y=50, size=12, colour=SOFT))


def _time(flops: float, num_bytes: float) -> float:
    """How long work takes, in bytes that could be moved meanwhile."""
    return max(flops / FLOPS_PER_BYTE, num_bytes)


def _run_time(graph: ChainGraph, run: Sequence[ChainBlock]) -> float:
    """Operators are priced one by one, as they run."""
    each = sum(_time(op.flops, op.bytes_moved) for op in graph.within(run[0]))
    return len(run) * each


def _draw_run(
    canvas: Canvas, graph: ChainGraph, run: Sequence[ChainBlock], y: float, whole: float
) -> None:
    """Neighbours of one kind as one box, a stack of cards where there are several."""
    for card in range(min(len(run), 3) - 1, 0, -1):
        x, top = _LEFT + 4 * card, y + 4 * card
        canvas.add(Box(x=x, y=top, width=_CHAIN, height=_BLOCK, fill=PAPER, edge=SOFT))
    canvas.add(Box(x=_LEFT, y=y, width=_CHAIN, height=_BLOCK, fill="#f5f6f8", edge=SOFT))
    arithmetic = sum(_time(op.flops, 0.0) for op in graph.within(run[0]) if _is_limited(op))
    every = _run_time(graph, run) / len(run) or 1.0
    width = _CHAIN * every * len(run) / whole
    split = width * arithmetic / every
    for x, wide, colour in ((0.0, split, ARITHMETIC), (split, width - split, TRAFFIC)):
        canvas.add(Box(x=_LEFT + x, y=y + _BLOCK - 7, width=wide, height=7.0, fill=colour))
    name, figures = _run_words(run)
    x, room = _LEFT + 10, _CHAIN - 20
    name, figures = shortened(name, room, size=12, bold=True), shortened(figures, room, size=10)
    canvas.add(Words(text=name, x=x, y=y + 12, size=12, bold=True))
    canvas.add(Words(text=figures, x=x, y=y + 29, size=10, colour=SOFT))


def _is_limited(op: ChainOperator) -> bool:
    """Whether arithmetic limits an operator."""
    return op.flops / FLOPS_PER_BYTE > op.bytes_moved


def _run_words(run: Sequence[ChainBlock]) -> tuple[str, str]:
    first = run[0]
    name = f"{first.name}  {first.kind}"
    if len(run) > 1:
        name = f"{len(run)} x {first.kind}  {first.name} to {run[-1].name}"
    figures = [
        *([scaled(first.flops, "FLOP")] if first.flops else []),
        scaled(first.bytes_moved, "B"),
        *([f"{scaled(first.parameters, '').strip()} parameters"] if first.parameters else []),
        f"keeps {scaled(run[-1].saved_bytes, 'B')}",
    ]
    return name, "  ".join(figures) + (", each" if len(run) > 1 else "")


def _draw_arrow(canvas: Canvas, words: str, begin: float, end: float) -> None:
    if not words:
        return
    x = _LEFT + _CHAIN / 2
    canvas.add(Line(x1=x, y1=begin, x2=x, y2=end, arrow=True))
    canvas.add(Words(text=words, x=x + 12, y=end - _GAP / 2 + 2, size=10, colour=SOFT))


def _parts(graph: ChainGraph, block: ChainBlock) -> list[tuple[str, float, float]]:
    """FLOPs and bytes of a block's parts; one without parts has none. The largest of many."""
    inside = block.name.partition("#")[0]
    sums: dict[str, tuple[float, float]] = {}
    for op in graph.within(block):
        name = op.module.removeprefix(inside).removeprefix(".") or "(itself)"
        flops, num_bytes = sums.get(name, (0.0, 0.0))
        sums[name] = (flops + op.flops, num_bytes + op.bytes_moved)
    rows = [(name, *figures) for name, figures in sums.items()]
    if len(rows) < 2:
        return []
    if len(rows) <= _MOST_PARTS:
        return rows
    largest = sorted(rows, key=lambda row: -_time(*row[1:]))[: _MOST_PARTS - 1]
    rest = [row for row in rows if row not in largest]
    others = (f"({len(rest)} more)", sum(r[1] for r in rest), sum(r[2] for r in rest))
    return [*(row for row in rows if row in largest), others]


def _draw_parts(
    canvas: Canvas, parts: Sequence[tuple[str, float, float]], y: float, height: float
) -> None:
    if not parts:
        return
    edge = _PARTS_AT - 16
    canvas.add(Line(x1=edge, y1=y, x2=edge, y2=y + height))
    canvas.add(Line(x1=_LEFT + _CHAIN + 8, y1=y + _BLOCK / 2, x2=edge, y2=y + _BLOCK / 2))
    whole = max(_time(flops, num_bytes) for _, flops, num_bytes in parts) or 1.0
    for at, (name, flops, num_bytes) in enumerate(parts):
        middle = y + (at + 0.5) * _PART
        figures = "  ".join([*([scaled(flops, "FLOP")] if flops else []), scaled(num_bytes, "B")])
        colour = ARITHMETIC if flops / FLOPS_PER_BYTE > num_bytes else TRAFFIC
        width = max(2.0, _BAR * _time(flops, num_bytes) / whole)
        canvas.add(Box(x=_BARS_AT, y=middle - 8, width=width, height=16, fill=colour))
        room = _BARS_AT - _PARTS_AT - 8
        words = shortened_path(name, room, size=10)
        canvas.add(Words(text=words, x=_PARTS_AT, y=middle, size=10, colour=INK))
        inside = width > width_of(figures, size=9) + 8
        x = _BARS_AT + (4 if inside else width + 4)
        ink = ink_on(colour) if inside else SOFT
        canvas.add(Words(text=figures, x=x, y=middle, size=9, colour=ink))


def _draw_foot(canvas: Canvas, graph: ChainGraph, y: float) -> None:
    parameters = scaled(graph.parameters(), "").strip()
    words = (
        f"in all {scaled(graph.flops(), 'FLOP')}, {parameters} parameters, "
        f"keeps {scaled(graph.saved_bytes(), 'B')} for the backward pass"
    )
    canvas.add(Words(text=words, x=_LEFT, y=y + 8, bold=True))
    entries = [(ARITHMETIC, "limited by arithmetic"), (TRAFFIC, "limited by memory traffic")]
    draw_legend(canvas, entries, y + 36)
    note = (
        f"Width of a bar: time at {FLOPS_PER_BYTE:g} FLOPs a byte; parts have a scale of their own."
    )
    canvas.add(Words(text=note, x=_LEFT, y=y + 60, size=10, colour=SOFT))
