"""Pictures of ``accuracy.md``: predicted against measured, in small panels."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nest_megatron.report.charts import check_matplotlib, render
from nest_megatron.units import GIB
from nest_megatron.validation.outcome import Judged, RowOutcome
from nest_megatron.validation.rows import RowKind
from nest_megatron.validation.scores import error_scores

#: Panels in a row of a large picture.
_ACROSS = (6, 5, 4)
_STYLE = {"font.size": 8, "axes.linewidth": 0.6}
#: Shares around the line of agreement that are shaded, light and dark.
_BANDS = ((0.2, "#eceef1"), (0.1, "#d7dbe2"))
_DEVICES = {
    "V100": "#858b95",
    "A100": "#c98a00",
    "H100": "#2f6fb7",
    "GB200": "#1f8a70",
    "GB300": "#b3364b",
    "B200": "#7d57b2",
    "B300": "#e68fa2",
}
_KINDS = {
    "all_reduce": "#2f6fb7",
    "all_gather": "#c98a00",
    "reduce_scatter": "#1f8a70",
    "alltoall": "#b3364b",
    "sendrecv": "#7d57b2",
}
_OTHER, _OTHER_NAME = "#454b55", "other"
#: What each picture shows.
CAPTIONS = {
    "time": "Step time, one panel a source; the bands are 10 and 20 % around agreement.",
    "memory": "Peak memory of one GPU, predicted against measured.",
    "collectives": "Collectives, predicted against measured, all sizes.",
}


class Point(NamedTuple):
    """One row: what was measured, what is predicted, what its colour stands for."""

    measured: float
    predicted: float
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Panels that share a unit and a set of colours.

    Args:
        panels: points by the panel's title.
        colours: by group; every other group is drawn alike.
    """

    unit: str
    panels: Mapping[str, Sequence[Point]]
    colours: Mapping[str, str]


def pictures(judged: Sequence[Judged]) -> dict[str, bytes]:
    """Every picture that there are rows for, as planned, as PNG files by name.

    Raises:
        UserInputError: without matplotlib.
    """
    check_matplotlib("--docs")
    found = {
        "time": _picture(judged, (RowKind.THROUGHPUT,), "s", 1.0, lambda each: each.time),
        "memory": _picture(
            judged,
            (RowKind.MEMORY_GOLDEN, RowKind.MEMORY_PEAK),
            "GiB",
            float(GIB),
            lambda each: each.memory,
        ),
        "collectives": _picture(judged, (RowKind.COLLECTIVES,), "ms", 1e-3, lambda each: each.time),
    }
    return {name: _drawn(each) for name, each in found.items() if each.panels}


def _picture(
    judged: Sequence[Judged],
    kinds: tuple[RowKind, ...],
    unit: str,
    scale: float,
    pair: Callable[[RowOutcome], tuple[float, float] | None],
) -> Picture:
    panels: dict[str, list[Point]] = defaultdict(list)
    for file in judged:
        for each in file.as_planned if file.file.kind in kinds else ():
            known = pair(each)
            if known:
                predicted, measured = known[0] / scale, known[1] / scale
                panels[each.source].append(Point(measured, predicted, _group(each)))
    colours = _KINDS if RowKind.COLLECTIVES in kinds else _DEVICES
    largest = dict(sorted(panels.items(), key=lambda item: -len(item[1])))
    return Picture(unit=unit, panels=largest, colours=colours)


def _group(each: RowOutcome) -> str:
    if "collective" in each.row:
        return each.row["collective"].lower().replace("all_to_all", "alltoall")
    words = each.row.get("gpu", "").upper()
    return next((name for name in _DEVICES if words.startswith(name)), _OTHER_NAME)


def _drawn(picture: Picture) -> bytes:
    across = panels_across(len(picture.panels))
    down = -(-len(picture.panels) // across)
    size = (2.3 * across + 0.5, 2.45 * down + 0.7)
    return render(
        lambda figure: _draw(figure, picture, down, across), size, ".png", settings=_STYLE
    )


def _draw(figure: Any, picture: Picture, down: int, across: int) -> None:
    figure.set_layout_engine("constrained")
    places = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (title, points) in zip(places, picture.panels.items(), strict=False):
        _draw_panel(axes, title, points, picture.colours)
    for axes in places[len(picture.panels) :]:
        axes.set_axis_off()
    figure.supxlabel(f"measured, {picture.unit}", fontsize=9)
    figure.supylabel(f"predicted, {picture.unit}", fontsize=9)
    _legend(figure, picture)


def panels_across(count: int) -> int:
    """Panels in a row, so that the last row has the fewest gaps.

    >>> panels_across(3), panels_across(8), panels_across(9), panels_across(20)
    (3, 4, 5, 5)
    """
    return min(count, min(_ACROSS, key=lambda across: -count % across))


def _draw_panel(axes: Any, title: str, points: Sequence[Point], colours: Mapping[str, str]) -> None:
    low, high = limits(value for point in points for value in point[:2])
    for share, colour in _BANDS:
        below, above = (
            [end * (1 - share) for end in (low, high)],
            [end * (1 + share) for end in (low, high)],
        )
        axes.fill_between((low, high), below, above, color=colour, lw=0)
    axes.plot((low, high), (low, high), color="#454b55", lw=0.7)
    for group, mine in _by_group(points).items():
        axes.scatter(
            [point.measured for point in mine],
            [point.predicted for point in mine],
            s=9 if len(points) > 100 else 14,
            color=colours.get(group, _OTHER),
            alpha=0.55 if len(points) > 100 else 0.8,
            lw=0,
        )
    _scale(axes, low, high)
    errors = error_scores([(point.predicted, point.measured) for point in points])
    assert errors
    axes.set_title(f"{_short(title)}\n{len(points)} rows, MAPE {errors.mape_pct:.1f} %", fontsize=7)


def _by_group(points: Iterable[Point]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        found[point.group].append(point)
    return found


def _scale(axes: Any, low: float, high: float) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_box_aspect(1)
    marks = list(ticks(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
        axis.set_ticks(marks, [f"{mark:g}" for mark in marks])
    axes.tick_params(labelsize=7, length=2, width=0.6)


def limits(values: Iterable[float]) -> tuple[float, float]:
    """Ends of an axis: a little beyond the values, and never less than a factor of two apart.

    >>> limits([1.0, 1.1])[0] < 0.8 < 1.4 < limits([1.0, 1.1])[1]
    True
    """
    known = list(values)
    low, high = min(known), max(known)
    spare = max(0.06 * math.log(high / low), 0.5 * (math.log(2.0) - math.log(high / low)), 0.05)
    return low * math.exp(-spare), high * math.exp(spare)


def ticks(low: float, high: float, most: int = 4) -> Iterator[float]:
    """Round figures between two ends, evenly spread on a logarithmic axis.

    >>> list(ticks(0.8, 30.0))
    [1.0, 3.0, 10.0, 30.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    known: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        marks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        inside = [float(f"{mark:.4g}") for mark in marks if low <= mark <= high]
        if len(inside) > most and len(known) >= 2:
            break
        known = inside
    stride = -(-len(known) // most)
    yield from known[:: max(1, stride)]


def _short(name: str) -> str:
    return name if len(name) <= 30 else f"{name[:29]}…"


def _legend(drawing: Any, picture: Picture) -> None:
    from matplotlib.lines import Line2D

    used = {point.group for points in picture.panels.values() for point in points}
    shown = [(name, colour) for name, colour in picture.colours.items() if name in used]
    if used - picture.colours.keys():
        shown.append((_OTHER_NAME, _OTHER))
    handles = [
        Line2D([], [], marker="o", ls="", color=colour, markersize=5, label=name)
        for name, colour in shown
    ]
    drawing.legend(
        handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8
    )
