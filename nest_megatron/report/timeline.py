"""The schedule of a plan drawn: as a picture, and on the HTML report, where a reader may zoom."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.charts import (
    IDLE,
    OTHER_COLOUR,
    SOFT,
    blended,
    check_picture,
    ink_on,
    style_panel,
    write_chart,
    write_legend,
)
from nest_megatron.report.layout_tables import same_price
from nest_megatron.report.schedule_view import (
    ScheduleView,
    Span,
    SpanKind,
    Window,
    schedule_view,
    windows,
)
from nest_megatron.units import Seconds, format_seconds, to_seconds, to_ticks

#: How much wider than its place the picture can be made; ``style.css`` shows what fits then.
ZOOMS = (1, 4, 16)
#: Width of the picture before, in pixels, and units of its coordinates.
_PIXELS, _UNITS = 1000, 10_000
#: Between windows, as a share of the width.
_GAP = 0.015
#: Height of a pipeline rank, in pixels: of few, and of many, which share a height.
_ROW_PIXELS, _LEAST_ROW, _HEIGHT = 22, 5, 480
_TICKS = 7


class _Axis(NamedTuple):
    """Where the times of the windows lie, as shares of the width."""

    shown: tuple[Window, ...]
    starts: tuple[float, ...]
    scale: float

    @classmethod
    def of(cls, shown: tuple[Window, ...]) -> _Axis:
        scale = (1 - _GAP * (len(shown) - 1)) / sum(window.length for window in shown)
        starts = accumulate((each.length * scale + _GAP for each in shown[:-1]), initial=0.0)
        return cls(shown, tuple(starts), scale)

    def place(self, number: int, time: Seconds) -> float:
        return self.starts[number] + (time - self.shown[number].start) * self.scale


def schedule(plan: ParallelPlan, view: ScheduleView) -> Mapping[str, Any]:
    """What the page draws and says of the schedule."""
    axis, ranks = _Axis.of(windows(view)), len(view.ranks)
    drawn = [(k, bar) for k, window in enumerate(axis.shown) for bar in bars(view, window)]
    numbers = _numbers(axis, drawn) if ranks <= MOST_RANKS else []
    row = max(_LEAST_ROW, min(_ROW_PIXELS, _HEIGHT // ranks))
    every = -(-14 // row)
    bubble_s = plan.predicted.terms.get("pipeline_bubble", 0.0)
    return {
        "title": f"Predicted schedule of {ranks} pipeline ranks",
        "zooms": ZOOMS,
        "row": row,
        "height": row * ranks,
        "units": (_UNITS, 10 * ranks),
        "labels": [rank if rank % every == 0 else "" for rank in range(ranks)],
        "windows": [
            (window.name, _percent(start), _percent(window.length * axis.scale))
            for window, start in zip(axis.shown, axis.starts, strict=True)
        ],
        "paths": _paths(axis, drawn),
        "numbers": numbers,
        "ticks": _ticks(axis),
        "legend": [(name, "var(--idle)" if c == IDLE else c) for name, c in legend(view)],
        "num_drawn": len({bar.span.microbatch for _, bar in drawn if bar.span.microbatch >= 0}),
        "num_microbatches": view.num_microbatches,
        "is_exposed": any(sum(each.values()) for passes in view.exposed for each in passes),
        "iteration_time_s": view.iteration_time_s,
        "is_predicted": same_price(view.iteration_time_s, plan.predicted.iteration_time_s),
        "bubble_s": bubble_s if to_ticks(bubble_s) > 0 else 0.0,
        "rows": [_sums(view, rank) for rank in range(ranks)],
    }


def _percent(share: float) -> str:
    return f"{100 * share:.3f}".rstrip("0").rstrip(".")


def _paths(axis: _Axis, drawn: Sequence[tuple[int, Bar]]) -> list[tuple[str, str]]:
    """For each colour the outline of its bars, in ``_UNITS`` by ten a rank."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for number, bar in drawn:
        start, end = (_UNITS * axis.place(number, time) for time in (bar.start, bar.end))
        width = f"{end - start:.1f}"
        found[bar.colour].append(f"M{start:.1f} {10 * bar.rank + 1}h{width}v8h-{width}z")
    return [(colour, "".join(outlines)) for colour, outlines in found.items()]


def _numbers(axis: _Axis, drawn: Sequence[tuple[int, Bar]]) -> list[Mapping[str, Any]]:
    """The numbers of micro batches, each from the zoom on at which it fits into its pass."""
    found: list[Mapping[str, Any]] = []
    for number, bar in drawn:
        text, wide = bar.number, _PIXELS * axis.scale * (bar.end - bar.start)
        zoom = next((zoom for zoom in ZOOMS if zoom * wide > 5 * len(text) + 2), None)
        if text and zoom:
            x = _percent(axis.place(number, (bar.start + bar.end) / 2))
            ink = ink_on(bar.colour)
            found.append({"zoom": zoom, "x": x, "rank": bar.rank, "ink": ink, "text": text})
    return sorted(found, key=lambda each: each["zoom"])[:MOST_NUMBERS]


def _ticks(axis: _Axis) -> list[tuple[int, str, str, str]]:
    """Marks of the axis: the zoom that shows each, its place, how it lies there, milliseconds."""
    found: dict[tuple[int, float], int] = {}
    for number, window in enumerate(axis.shown):
        for zoom in ZOOMS:
            for time in _round_times(window, 1 / (axis.scale * _TICKS * zoom)):
                found.setdefault((number, time), zoom)
    ticks = []
    for (number, time), zoom in sorted(found.items()):
        place = axis.place(number, time)
        anchor = "start" if place < 0.01 else "end" if place > 0.99 else "middle"
        ticks.append((zoom, _percent(place), anchor, f"{1e3 * time:,.6g}"))
    return ticks


def _round_times(window: Window, least: Seconds) -> Iterator[Seconds]:
    """Round times inside a window, at least so far apart."""
    power = 10.0 ** math.floor(math.log10(least))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= least)
    first, last = math.ceil(window.start / step), math.floor(window.end / step)
    return (round(k * step, 12) for k in range(first, last + 1))


def _sums(view: ScheduleView, rank: int) -> tuple[str, ...]:
    """What a rank's step goes into: passes, communication, idle time, the rest."""
    work = dict.fromkeys(SpanKind, 0.0)
    exposed = 0.0
    for span in view.ranks[rank]:
        sent = sum(view.communication(span).values())
        work[span.kind] += span.end - span.start - sent
        exposed += sent
    idle = to_ticks(max(0.0, view.iteration_time_s - exposed - sum(work.values())))
    forward, backward = work.pop(SpanKind.FORWARD), work.pop(SpanKind.BACKWARD)
    times = (forward, backward, exposed, to_seconds(idle), sum(work.values()))
    return (str(rank), *(format_seconds(max(0.0, each)) for each in times))


#: Colours of what is no pass, and of what a pass or a rank spends on communication.
_EDGE_COLOURS = {SpanKind.OPTIMIZER: "#c98a00", SpanKind.OTHER: OTHER_COLOUR}
_COMMUNICATION = "#c23b50"
#: Ends of the shades of a pass: the later the chunk, the darker.
_SHADES = {
    SpanKind.FORWARD: ("#9cc3ec", "#1d4f8c"),
    SpanKind.BACKWARD: ("#93d3c0", "#0f5f4b"),
}
#: Most pipeline ranks whose passes are numbered, and most numbers of one picture.
MOST_RANKS, MOST_NUMBERS = 16, 1_500
_WIDTH = 13.0


class Bar(NamedTuple):
    """A stretch of a pipeline rank's time in one colour."""

    rank: int
    start: Seconds
    end: Seconds
    colour: str
    span: Span

    @property
    def number(self) -> str:
        """That of its micro batch, where it is the work of a pass."""
        is_pass = self.span.microbatch >= 0 and self.colour != _COMMUNICATION
        return str(self.span.microbatch + 1) if is_pass else ""


def bars(view: ScheduleView, window: Window) -> Iterator[Bar]:
    """What is drawn of a window: of each span its work, then its exposed communication.

    Inside a pass the two alternate, layer by layer; the lengths are right.
    """
    for rank, spans in enumerate(view.ranks):
        for span in spans:
            cut = span.end - sum(view.communication(span).values())
            colour = _colour(span.kind, span.virtual, view.num_virtual)
            for first, last, shade in ((span.start, cut, colour), (cut, span.end, _COMMUNICATION)):
                start, end = max(first, window.start), min(last, window.end)
                if end > start:
                    yield Bar(rank, start, end, shade, span)


@functools.cache
def _colour(kind: SpanKind, virtual: int, num_virtual: int) -> str:
    """Colour of the work of a span; a pass has a shade for each virtual stage."""
    if kind not in _SHADES:
        return _EDGE_COLOURS.get(kind, _COMMUNICATION)
    share = virtual / (num_virtual - 1) if num_virtual > 1 else 0.5
    return blended(*_SHADES[kind], share)


def draw_timeline(plan: ParallelPlan, path: Path, times: LayerTimes | None = None) -> None:
    """Draw the schedule, a long one as beginning, middle and end, as ``.png`` or ``.svg``."""
    check_picture(path, "--timeline", ".json")
    view = schedule_view(plan, times)
    ranks = len(view.ranks)
    size = (_WIDTH, 1.75 + max(0.5, min(0.34 * ranks, 5.0 + 0.05 * ranks)))  # inches
    write_chart(lambda figure: _draw(figure, view, plan), size, path, "--timeline")


def legend(view: ScheduleView) -> list[tuple[str, str]]:
    """Names and colours of what a picture shows."""
    spans = [span for spans in view.ranks for span in spans]
    kinds, last = {span.kind for span in spans}, view.num_virtual - 1
    named: list[tuple[str, str]] = []
    for kind in _SHADES:
        for virtual in sorted({0, last}):
            chunk = f", chunk {virtual + 1} of {last + 1}" if last else ""
            named.append((f"{kind.value}{chunk}", _colour(kind, virtual, view.num_virtual)))
    if any(sum(view.communication(span).values()) for span in spans):
        named.append(("exposed communication", _COMMUNICATION))
    named += [(kind.value, colour) for kind, colour in _EDGE_COLOURS.items() if kind in kinds]
    return [*named, ("idle", IDLE)]


def _draw(figure: Any, view: ScheduleView, plan: ParallelPlan) -> None:
    """Draw the windows side by side, with a title and a legend."""
    figure.set_layout_engine("constrained")
    shown = windows(view)
    lengths = [window.length for window in shown]
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False, width_ratios=lengths)[0]
    for axes, window in zip(panels, shown, strict=True):
        _draw_window(axes, view, window, share=window.length / sum(lengths))
    every = max(1, len(view.ranks) // 16)
    panels[0].set_ylim(len(view.ranks) - 0.5, -0.5)
    panels[0].set_yticks(range(0, len(view.ranks), every))
    panels[0].set_ylabel("pipeline rank", fontsize=9, color=SOFT)
    about = "milliseconds from the start of the step"
    panels[len(panels) // 2].set_xlabel(about, fontsize=9, color=SOFT)
    virtual = f", {view.num_virtual} chunks a rank" if view.num_virtual > 1 else ""
    figure.suptitle(
        f"{plan.model.name} on {plan.cluster.describe()}: "
        f"{format_seconds(view.iteration_time_s)} a step, "
        f"{view.num_microbatches} micro batches{virtual}",
        fontsize=11,
    )
    entries = legend(view)
    columns = len(entries) if len(entries) <= 7 else -(-len(entries) // 2)
    write_legend(figure, entries, "center", columns)


def _draw_window(axes: Any, view: ScheduleView, window: Window, share: float) -> None:
    """One window, in milliseconds."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    many = len(view.ranks) > MOST_RANKS
    corners: defaultdict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    numbered: list[Bar] = []
    for bar in bars(view, window):
        start, end, top, foot = 1e3 * bar.start, 1e3 * bar.end, bar.rank - 0.42, bar.rank + 0.42
        corners[bar.colour].append([(start, top), (start, foot), (end, foot), (end, top)])
        inches = 0.92 * _WIDTH * share * (bar.end - bar.start) / window.length
        if bar.number and inches > 0.07 * len(bar.number) + 0.03:
            numbered.append(bar)
    for colour, drawn in corners.items():
        points = [point for each in drawn for point in (*each, each[0])]
        codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * len(drawn)
        look = {"facecolor": colour, "edgecolor": IDLE, "linewidth": 0.15 if many else 0.4}
        axes.add_artist(PathPatch(Outline(points, codes), **look))
    if not many and len(numbered) <= MOST_NUMBERS:
        for bar in numbered:
            look = {"ha": "center", "va": "center_baseline", "fontsize": 6.5}
            middle, ink = 500 * (bar.start + bar.end), ink_on(bar.colour)
            number = axes.text(middle, bar.rank, bar.number, color=ink, **look)
            number.set_in_layout(False)
    axes.set_xlim(1e3 * window.start, 1e3 * window.end)
    style_panel(axes, window.name, labelsize=8, labelcolor=SOFT)
    axes.set_facecolor(IDLE)
    axes.locator_params(axis="x", nbins=3 if share < 0.2 else 8)
