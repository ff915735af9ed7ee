"""A picture of a comparison: each planner's step as a bar, cut into what its time goes into."""

from __future__ import annotations

from collections.abc import Sequence

from nest_megatron.report.canvas import SOFT, Box, Canvas, Words, shortened, width_of
from nest_megatron.report.palette import OTHER_COLOUR, TERM_COLOURS, ink_on
from nest_megatron.report.words import TERM_WORDS
from nest_megatron.research.comparison import Compared
from nest_megatron.research.report.comparison import fastest_first, layout_words, tokens_per_s
from nest_megatron.units import format_seconds

WIDTH = 1100.0
_NAMES, _FIGURES, _EDGE = 150.0, 210.0, 20.0
_BARS = WIDTH - _NAMES - _FIGURES - 2 * _EDGE
_TOP, _ROW, _BAR, _LEGEND_ROW = 64.0, 50.0, 22.0, 22.0
#: Terms that are at least this share of some step are drawn in the legend.
_SEEN = 0.002


def comparison_canvas(rows: Sequence[Compared], title: str) -> Canvas:
    """The drawing, not yet in any format: planners from the fastest to the slowest."""
    ordered = fastest_first(rows)
    names = _seen_terms(ordered)
    places = _legend_places(names)
    lines = 1 + max((line for _, line in places), default=0)
    height = _TOP + _ROW * len(ordered) + _LEGEND_ROW * lines + 24
    canvas = Canvas(WIDTH, height, title)
    canvas.add(Words(text=title, x=_EDGE, y=22, size=15, bold=True))
    under = "A step of each plan by what all GPUs do in it; its throughput as a share of nest's"
    canvas.add(Words(text=under, x=_EDGE, y=44, colour=SOFT))
    longest = max((sum(row.terms.values()) for row in ordered), default=0.0) or 1.0
    for at, row in enumerate(ordered):
        _draw_row(canvas, row, _TOP + at * _ROW, _BARS / longest)
    _draw_legend(canvas, names, places, _TOP + _ROW * len(ordered) + 18)
    return canvas


def _seen_terms(rows: Sequence[Compared]) -> list[str]:
    """Terms that a bar of some planner shows, in the palette's order."""
    seen = {
        name
        for row in rows
        for name, seconds in row.terms.items()
        if seconds > _SEEN * sum(row.terms.values())
    }
    return [name for name in TERM_COLOURS if name in seen]


def _draw_row(canvas: Canvas, row: Compared, y: float, scale: float) -> None:
    left, middle = _EDGE + _NAMES, y + _BAR / 2
    canvas.add(Words(text=row.name, x=_EDGE, y=middle, bold=True, size=12))
    if row.plan is None:
        text = shortened(f"no plan: {row.reason}", _BARS + _FIGURES)
        canvas.add(Words(text=text, x=left, y=middle, colour=SOFT))
        return
    x = left
    for name in TERM_COLOURS:
        width = scale * row.terms.get(name, 0.0)
        if width <= 0:
            continue
        colour = TERM_COLOURS.get(name, OTHER_COLOUR)
        canvas.add(Box(x=x, y=y, width=width, height=_BAR, fill=colour))
        words = format_seconds(row.terms[name])
        if width > width_of(words, size=10) + 8:
            ink = ink_on(colour)
            canvas.add(
                Words(text=words, x=x + width / 2, y=middle, anchor="middle", size=10, colour=ink)
            )
        x += width
    _draw_figures(canvas, row, x + 10, y)


def _draw_figures(canvas: Canvas, row: Compared, x: float, y: float) -> None:
    """Behind the bar its length and the throughput; under it the layout."""
    assert row.plan is not None
    share = row.relative_throughput
    step = format_seconds(row.plan.predicted.iteration_time_s)
    told = step if share is None else f"{step}   {100 * share:.1f} %"
    canvas.add(Words(text=told, x=x, y=y + _BAR / 2, bold=True))
    searched = f"found in {row.search_s:.2f} s"
    parts = (f"{tokens_per_s(row.plan):,.0f} tokens/s", *layout_words(row.plan), searched)
    under = shortened(", ".join(parts), _BARS + _FIGURES, size=10)
    canvas.add(Words(text=under, x=_EDGE + _NAMES, y=y + _BAR + 10, size=10, colour=SOFT))


def _legend_places(names: Sequence[str]) -> list[tuple[float, int]]:
    """Where each name stands: its left end, and its line."""
    places, x, line = [], _EDGE, 0
    for name in names:
        width = 18 + width_of(TERM_WORDS[name]) + 14
        if x + width > WIDTH - _EDGE:
            x, line = _EDGE, line + 1
        places.append((x, line))
        x += width
    return places


def _draw_legend(
    canvas: Canvas, names: Sequence[str], places: Sequence[tuple[float, int]], y: float
) -> None:
    for name, (x, line) in zip(names, places, strict=True):
        middle = y + line * _LEGEND_ROW
        canvas.add(Box(x=x, y=middle - 6, width=12, height=12, fill=TERM_COLOURS[name]))
        canvas.add(Words(text=TERM_WORDS[name], x=x + 18, y=middle))
