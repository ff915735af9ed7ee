"""A drawing of a layer: its operators from top to bottom, what they cost, and who talks to whom.

The left column is the forward pass, read downwards; the right one the backward pass, read upwards.
A box is as wide as its operator takes long on an accelerator that is limited by its arithmetic or
by its memory, whichever takes longer; its colour says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from nest_megatron.model.graph import Group, LayerCollective, LayerGraph, Operator
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
from nest_megatron.report.operator_flow import Step, steps
from nest_megatron.report.palette import TERM_COLOURS, ink_on

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
WIDTH = 1240.0
_PART, _COLUMN, _GAP = 150.0, 520.0, 16.0
_LEFT = (_PART + _GAP, _PART + _COLUMN + 2 * _GAP)
_TOP, _ROW, _BAR, _FOOT = 74.0, 40.0, 22.0, 96.0
_BOX = 32.0
_BAND = ("#f5f6f8", PAPER)


@dataclass(frozen=True, slots=True)
class _Row:
    """An operator, or collectives that lie between two operators."""

    part: str
    operator: Operator | None = None
    forward: LayerCollective | None = None
    backward: LayerCollective | None = None

    @property
    def height(self) -> float:
        return _BAR if self.operator is None else _ROW


def draw_layer(graph: LayerGraph, path: Path, title: str) -> tuple[int, int]:
    """Draw a layer.

    Args:
        path: an ``.svg`` or ``.png`` file.

    Returns:
        Width and height: pixels of a .png, units of an .svg.

    Raises:
        UserInputError: for another suffix, a file that cannot be written, or a .png without
            matplotlib.
    """
    return write_picture(layer_canvas(graph, title), path)


def layer_canvas(graph: LayerGraph, title: str) -> Canvas:
    """The drawing of a layer, not yet in any format."""
    rows = [row for step in steps(graph) for row in _rows(step)]
    height = _TOP + sum(row.height for row in rows) + _FOOT
    canvas = Canvas(WIDTH, height, title)
    bottom = height - _FOOT
    _draw_bands(canvas, rows)
    _draw_heads(canvas, title, bottom)
    whole = max((max(_times(op)) for op in graph.operators), default=0.0)
    total = [sum(_times(op)[side] for op in graph.operators) or 1.0 for side in (0, 1)]
    y = _TOP
    for row in rows:
        if row.operator is not None:
            _draw_operator(canvas, row.operator, y, whole, total)
        for side, collective in enumerate((row.forward, row.backward)):
            if collective is not None:
                _draw_collective(canvas, collective, _LEFT[side], y)
        y += row.height
    _draw_foot(canvas, graph, bottom)
    return canvas


def _rows(step: Step) -> list[_Row]:
    part = step.operator.part.value
    own = _Row(part, operator=step.operator)
    return [*_between(part, step.above), own, *_between(part, step.below)]


def _between(part: str, collectives: Sequence[LayerCollective]) -> list[_Row]:
    """Collectives in as few rows as they need; backward ones run upwards."""
    forward = [each for each in collectives if not each.backward]
    backward = [each for each in collectives if each.backward][::-1]
    length = max(len(forward), len(backward))
    forward_cells = [*forward, *[None] * (length - len(forward))]
    backward_cells = [*backward, *[None] * (length - len(backward))]
    return [
        _Row(part, forward=ahead, backward=back)
        for ahead, back in zip(forward_cells, backward_cells, strict=True)
    ]


def _times(operator: Operator) -> tuple[float, float]:
    """How long an operator takes forward and backward, in bytes that could be moved meanwhile."""
    return (
        max(operator.flops / FLOPS_PER_BYTE, operator.bytes_moved),
        max(operator.backward_flops / FLOPS_PER_BYTE, operator.backward_bytes_moved),
    )


def _draw_bands(canvas: Canvas, rows: Sequence[_Row]) -> None:
    """A band for each part, with its name."""
    y = _TOP
    for at, (part, members) in enumerate(groupby(rows, key=lambda row: row.part)):
        height = sum(row.height for row in members)
        canvas.add(Box(x=0, y=y, width=WIDTH, height=height, fill=_BAND[at % 2]))
        name = shortened(part.replace("_", " "), _PART - 14, bold=True)
        canvas.add(Words(text=name, x=14, y=y + height / 2, bold=True))
        y += height


def _draw_heads(canvas: Canvas, title: str, bottom: float) -> None:
    canvas.add(Words(text=title, x=14, y=22, size=15, bold=True))
    heads = ("forward, downwards", "backward, upwards")
    for side, head in enumerate(heads):
        middle = _LEFT[side] + _COLUMN / 2
        canvas.add(Words(text=head, x=middle, y=50, anchor="middle", size=12, colour=SOFT))
        ends = (_TOP - 12, bottom + 10)
        begin, end = ends if side == 0 else ends[::-1]
        canvas.add(Line(x1=middle, y1=begin, x2=middle, y2=end, arrow=True))


def _draw_operator(
    canvas: Canvas, operator: Operator, y: float, whole: float, total: Sequence[float]
) -> None:
    works = (
        (operator.flops, operator.bytes_moved),
        (operator.backward_flops, operator.backward_bytes_moved),
    )
    for side, (flops, num_bytes) in enumerate(works):
        if not flops and not num_bytes:
            continue
        time = _times(operator)[side]
        width = max(3.0, _COLUMN * time / whole) if whole else 3.0
        middle = _LEFT[side] + _COLUMN / 2
        colour = ARITHMETIC if flops / FLOPS_PER_BYTE > num_bytes else TRAFFIC
        top = y + (_ROW - _BOX) / 2
        canvas.add(Box(x=middle - width / 2, y=top, width=width, height=_BOX, fill=colour))
        share = 100 * time / total[side]
        words = f"{share:.0f} %" if share >= 0.5 else "<1 %"
        figures = "  ".join(filter(None, [_flops(flops), _bytes(num_bytes), words]))
        _label(canvas, (operator.name, figures), (middle, y + _ROW / 2), width, colour)


def _label(
    canvas: Canvas, texts: tuple[str, str], place: tuple[float, float], width: float, fill: str
) -> None:
    """Name and figures on a box, or beside one that is too narrow."""
    (name, figures), (middle, y) = texts, place
    needed = max(width_of(name, bold=True), width_of(figures, size=10)) + 8
    beside = _COLUMN / 2 - width / 2 - 6
    inside = width >= needed or width > beside + 8
    room = width - 8 if inside else beside
    x = middle if inside else middle + width / 2 + 6
    anchor, ink = ("middle", ink_on(fill)) if inside else ("start", INK)
    soft = ink if inside else SOFT
    name = shortened_path(name, room, bold=True)
    figures = shortened(figures, room, size=10)
    canvas.add(Words(text=name, x=x, y=y - 6.5, anchor=anchor, bold=True, colour=ink))
    canvas.add(Words(text=figures, x=x, y=y + 6.5, anchor=anchor, size=10, colour=soft))


def _draw_collective(canvas: Canvas, collective: LayerCollective, left: float, y: float) -> None:
    """A bar across the column; one that may hide under an operator is an outline."""
    colour = GROUP_COLOURS[collective.group]
    hidden = bool(collective.hidden_under)
    bar = Box(
        x=left,
        y=y + 2,
        width=_COLUMN,
        height=_BAR - 4,
        fill=PAPER if hidden else colour,
        edge=colour,
        dashed=hidden,
    )
    canvas.add(bar)
    words = _collective_words(collective)
    ink = INK if hidden else ink_on(colour)
    text = shortened(words, _COLUMN - 16, size=10.5)
    x, middle = left + _COLUMN / 2, y + _BAR / 2
    canvas.add(Words(text=text, x=x, y=middle, anchor="middle", size=10.5, colour=ink))


def _collective_words(collective: LayerCollective) -> str:
    words = [
        collective.kind.replace("_", "-"),
        f"over {collective.group.value}:",
        _bytes(collective.message_bytes),
    ]
    if collective.num_calls > 1:
        words.append(f"x {collective.num_calls}")
    if collective.hidden_under:
        words.append(f"(under {collective.hidden_under})")
    return " ".join(words)


def _draw_foot(canvas: Canvas, graph: LayerGraph, bottom: float) -> None:
    """Totals and legend."""
    totals = (
        (sum(op.flops for op in graph.operators), sum(op.bytes_moved for op in graph.operators)),
        (
            sum(op.backward_flops for op in graph.operators),
            sum(op.backward_bytes_moved for op in graph.operators),
        ),
    )
    for side, (flops, num_bytes) in enumerate(totals):
        words = "  ".join(filter(None, ["in all", _flops(flops), _bytes(num_bytes)]))
        middle = _LEFT[side] + _COLUMN / 2
        canvas.add(Words(text=words, x=middle, y=bottom + 24, anchor="middle", bold=True))
    kept = f"keeps {_bytes(graph.total_saved_bytes())} for the backward pass"
    canvas.add(Words(text=kept, x=WIDTH - 14, y=22, anchor="end", size=12, colour=SOFT))
    groups = [group for group in Group if any(c.group is group for c in graph.collectives)]
    entries = [(ARITHMETIC, "limited by arithmetic"), (TRAFFIC, "limited by memory traffic")]
    entries += [(GROUP_COLOURS[group], _GROUP_WORDS[group]) for group in groups]
    draw_legend(canvas, entries, bottom + 50)
    note = (
        f"Width: time at {FLOPS_PER_BYTE:g} FLOPs a byte, one scale for both columns; % of the "
        "column's. Dashed: may hide under an operator."
    )
    canvas.add(Words(text=note, x=14, y=bottom + 76, size=10, colour=SOFT))


def draw_legend(canvas: Canvas, entries: Sequence[tuple[str, str]], y: float) -> None:
    """Colours and what they mean, in one line."""
    x = 14.0
    for colour, words in entries:
        canvas.add(Box(x=x, y=y - 6, width=12, height=12, fill=colour))
        canvas.add(Words(text=words, x=x + 18, y=y))
        x += 18 + width_of(words) + 18


def _flops(value: float) -> str:
    """FLOPs for people; nothing for none.

    >>> _flops(1.2e12), _flops(3.4e9), _flops(0.0)
    ('1.20 TFLOP', '3.40 GFLOP', '')
    """
    return scaled(value, "FLOP") if value else ""


def _bytes(value: float) -> str:
    return scaled(value, "B")


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
