"""The report's pictures, drawn straight in SVG so that the page needs no library and no script."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.report.markup import Markup, element, joined
from nest_megatron.report.palette import MEMORY_COLOURS, OTHER_COLOUR, ink_on
from nest_megatron.report.schedule_view import ScheduleView, Span, Window
from nest_megatron.report.timeline import span_colour
from nest_megatron.report.words import TERM_WORDS
from nest_megatron.units import GIB, Seconds, format_seconds

WIDTH = 1100.0
_LEFT = 34.0
_GAP = 26.0
_LARGEST_CHARACTER = 6.6
_MAX_NUMBERS = 1_500


def stacked_bar(parts: Mapping[str, float], colours: Mapping[str, str], title: str) -> Markup:
    """One bar of a whole, cut into named parts; wide ones carry their share."""
    total = sum(parts.values()) or 1.0
    height, x, shapes = 34.0, 0.0, []
    for name, value in parts.items():
        width = WIDTH * max(0.0, value) / total
        colour = colours.get(name, OTHER_COLOUR)
        tip = element("title", f"{TERM_WORDS.get(name, name)}: {100 * value / total:.1f} %")
        shapes.append(_rectangle(x, 0.0, width, height, colour, tip))
        text = f"{100 * value / total:.0f} %"
        named = f"{TERM_WORDS.get(name, name)} {text}"
        for words in (named, text):
            if width > _LARGEST_CHARACTER * len(words) + 8:
                shapes.append(_text(words, x + width / 2, 21.0, style=f"fill:{ink_on(colour)}"))
                break
        x += width
    return _picture(height, title, shapes)


def memory_chart(plan: ParallelPlan) -> Markup:
    """Memory of every pipeline rank by term, against what a GPU may hold."""
    stages, capacity = plan.predicted.stages, plan.predicted.capacity_bytes
    peaks = [sum(stage.memory_bytes.values()) for stage in stages]
    top = 1.08 * max(capacity, *peaks)
    height, room = 240.0, 200.0
    pitch = (WIDTH - _LEFT) / len(stages)
    wide = min(0.8 * pitch, 90.0)
    shapes = [*_memory_axis(top, room)]
    for rank, stage in enumerate(stages):
        x, y = _LEFT + (rank + 0.5) * pitch - wide / 2, room
        for name, value in stage.memory_bytes.items():
            size = room * max(0, value) / top
            y -= size
            tip = element(
                "title", f"rank {rank}, {TERM_WORDS.get(name, name)}: {value / GIB:.2f} GiB"
            )
            colour = MEMORY_COLOURS.get(name, OTHER_COLOUR)
            shapes.append(_rectangle(x, y, wide, size, colour, tip))
        if rank % _every(len(stages), pitch) == 0:
            shapes.append(_text(str(rank), x + wide / 2, room + 14, class_="soft"))
    line = room * (1 - capacity / top)
    shapes.append(_line(_LEFT, line, WIDTH, line, "limit"))
    words = f"a GPU may hold {capacity / GIB:.1f} GiB"
    shapes.append(_text(words, WIDTH, 9, anchor="end"))  # above every bar, wherever the line is
    sample = WIDTH - 6.1 * len(words)
    shapes.append(_line(sample - 30, 5, sample - 8, 5, "limit"))
    shapes.append(_text("pipeline rank", (_LEFT + WIDTH) / 2, room + 32, class_="soft"))
    return _picture(height, "Memory of each pipeline rank by term, against the capacity", shapes)


def timeline_chart(view: ScheduleView, shown: Sequence[Window], title: str) -> Markup:
    """The schedule: pipeline ranks from top to bottom, time from left to right."""
    row = max(7.0, min(30.0, 420.0 / len(view.ranks)))
    top, bottom = 20.0, 20.0 + row * len(view.ranks)
    room = WIDTH - _LEFT - _GAP * (len(shown) - 1)
    scale = room / sum(window.length for window in shown)
    shapes = [
        _text(str(rank), _LEFT - 6, top + (rank + 0.5) * row + 4, anchor="end", class_="soft")
        for rank in range(0, len(view.ranks), _every(len(view.ranks), row * 1.6))
    ]
    x = _LEFT
    for at, window in enumerate(shown):
        shapes += _window(view, window, x, scale, (top, bottom))
        x += window.length * scale
        if at + 1 < len(shown):
            middle = (top + bottom) / 2
            left_out = format_seconds(shown[at + 1].start - window.end)
            turned = f"rotate(-90 {x + _GAP / 2:.1f} {middle:.1f})"
            words = f"… {left_out}" if bottom - top > 90 else "…"
            shapes.append(_text(words, x + _GAP / 2, middle + 4, class_="soft", transform=turned))
        x += _GAP
    return _picture(bottom + 22, title, shapes)


def funnel(steps: Sequence[tuple[str, int]]) -> Markup:
    """Counts that shrink from step to step, on a logarithmic scale."""
    largest = max(count for _, count in steps)
    digits = max(1, len(str(largest)))  # the width grows with the logarithm
    room, row, middle = 460.0, 34.0, 780.0
    shapes = []
    for at, (name, count) in enumerate(steps):
        width = room * min(1.0, (len(str(count)) - 1 + count / 10 ** len(str(count))) / digits)
        width = max(3.0, width) if count else 0.0
        y = at * row
        shapes.append(_text(name, 500.0, y + 19, anchor="end"))
        shapes.append(_rectangle(middle - width / 2, y + 3, width, row - 6, "#2f6fb7"))
        inside = width > _LARGEST_CHARACTER * len(f"{count:,}") + 8
        place = (middle, "middle") if inside else (middle + width / 2 + 6, "start")
        white = "fill:#ffffff" if inside else None
        shapes.append(_text(f"{count:,}", place[0], y + 21, anchor=place[1], style=white))
    return _picture(len(steps) * row, "How the search narrowed down the candidates", shapes)


def _window(
    view: ScheduleView, window: Window, x: float, scale: float, sides: tuple[float, float]
) -> list[Markup]:
    """One window at ``x``: background, spans, numbers where they fit, and its axis."""
    top, bottom = sides
    row, width = (bottom - top) / len(view.ranks), window.length * scale
    shapes = [_rectangle(x, top, width, bottom - top, None, class_="idle")]
    paths: dict[str, list[str]] = defaultdict(list)
    numbers: list[Markup] = []
    for rank, spans in enumerate(view.ranks):
        y = top + rank * row
        for span in spans:
            a, b = max(span.start, window.start), min(span.end, window.end)
            if b <= a:
                continue
            left, wide = x + (a - window.start) * scale, (b - a) * scale
            gap = 0.6 if wide > 2.5 else 0.0
            start, across, down = f"M{left:.1f} {y + row * 0.07:.1f}", wide - gap, row * 0.86
            cut = f"{start}h{across:.1f}v{down:.1f}h{-across:.1f}z"
            paths[span_colour(span, view.num_virtual)].append(cut)
            numbers += _number(span, view.num_virtual, left, wide, y + row / 2, row)
    shapes += [element("path", fill=colour, d="".join(cuts)) for colour, cuts in paths.items()]
    if len(numbers) <= _MAX_NUMBERS:
        shapes += numbers
    return shapes + _time_axis(window, x, scale, sides)


def _number(
    span: Span, num_virtual: int, left: float, wide: float, middle: float, row: float
) -> list[Markup]:
    """A pass's micro batch, where there is room for it."""
    words = str(span.microbatch + 1)
    if span.microbatch < 0 or row < 12 or wide < _LARGEST_CHARACTER * len(words) + 3:
        return []
    ink = ink_on(span_colour(span, num_virtual))
    return [_text(words, left + wide / 2, middle + 4, style=f"fill:{ink}")]


def _time_axis(window: Window, x: float, scale: float, sides: tuple[float, float]) -> list[Markup]:
    top, bottom = sides
    width = window.length * scale
    shapes = [_text(window.name, x + width / 2, top - 7, class_="soft")]
    unit = _round_step(80 / scale)
    tick = -(-window.start // unit) * unit
    while tick <= window.end:
        at = x + (tick - window.start) * scale
        shapes.append(_line(at, bottom, at, bottom + 4, "rule"))
        edge = "end" if at > WIDTH - 20 else "middle"
        shapes.append(_text(_tick_text(tick, unit), at, bottom + 16, anchor=edge, class_="soft"))
        tick += unit
    return shapes


def _tick_text(tick: Seconds, unit: Seconds) -> str:
    """A time on an axis: as many digits as its step asks for.

    >>> _tick_text(12.4, 0.2), _tick_text(0.15, 0.05)
    ('12.4 s', '150 ms')
    """
    if tick >= 1.0 or unit >= 1.0:
        digits = 0 if unit >= 1 else 1 if unit >= 0.1 else 2 if unit >= 0.01 else 3
        return f"{tick:.{digits}f} s"
    return f"{1e3 * tick:.{0 if unit >= 1e-3 else 2}f} ms" if tick else "0"


def _round_step(length: float) -> float:
    """The next larger 1, 2 or 5 times a power of ten.

    >>> _round_step(0.03), _round_step(7.0)
    (0.05, 10.0)
    """
    power = 1e-12
    while power * 10 <= length:
        power *= 10
    return float(f"{next(k for k in (1, 2, 5, 10) if k * power >= length * 0.999999) * power:.6g}")


def _memory_axis(top: float, room: float) -> list[Markup]:
    step = _round_step(top / GIB / 5)
    shapes: list[Markup] = []
    for mark in range(int(top / GIB / step) + 1):
        y = room * (1 - mark * step * GIB / top)
        shapes.append(_line(_LEFT, y, WIDTH, y, "rule"))
        shapes.append(_text(f"{mark * step:g}", _LEFT - 6, y + 4, anchor="end", class_="soft"))
    return [*shapes, _text("GiB", _LEFT - 6, 8, anchor="end", class_="soft")]


def _every(count: int, pitch: float) -> int:
    """Label every how many of ``count`` things that lie ``pitch`` apart."""
    needed = 20.0
    return next((k for k in (1, 2, 4, 8, 16) if k * pitch >= needed), max(1, count // 8))


def _picture(height: float, title: str, shapes: Sequence[Markup]) -> Markup:
    box = f"0 0 {WIDTH:g} {height:g}"
    svg = element("svg", joined(shapes), viewBox=box, role="img", aria_label=title)
    return element("div", svg, class_="picture")


def _rectangle(
    x: float, y: float, width: float, height: float, fill: str | None, *inside: Markup, **more: str
) -> Markup:
    size = {"width": f"{width:.2f}", "height": f"{height:.2f}"}
    return element("rect", *inside, x=f"{x:.2f}", y=f"{y:.2f}", **size, fill=fill, **more)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    places = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    return element("line", **places, class_=kind)


def _text(words: str, x: float, y: float, *, anchor: str = "middle", **more: str | None) -> Markup:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text_anchor": anchor}
    return element("text", words, **place, **more)
