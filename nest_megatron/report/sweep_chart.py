"""The chart of a sweep: throughput over the values that vary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from nest_megatron.report.charts import render
from nest_megatron.report.sweep_table import SweepRow, number_of

_COLOURS = ("#2f6fb7", "#c98a00", "#1f8a70", "#b3364b", "#7d57b2", "#858b95")
_MARKS = "osD^vP"
_BAD = "#b3261e"
_UNIT = "tokens/s per GPU"
#: Axes that double rather than grow.
_DOUBLES = 4.0


def sweep_chart(rows: Sequence[SweepRow]) -> bytes:
    """An SVG: lines over the first setting that is a number in every job, else bars.

    A job that does not fit, or has bad input, is a cross at the foot.

    Raises:
        UserInputError: without matplotlib.
    """
    axis = _axis(rows)
    height = 4.2 if axis else 1.2 + 0.42 * len(rows)
    return render(lambda figure: _draw(figure, rows, axis), (7.5, height), ".svg", what="sweep.svg")


def _draw(figure: Any, rows: Sequence[SweepRow], axis: str | None) -> None:
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    if axis is None:
        _bars(axes, rows)
    else:
        _lines(axes, rows, axis)
    axes.spines[["top", "right"]].set_visible(False)


def _axis(rows: Sequence[SweepRow]) -> str | None:
    """The first setting that varies and is a number in each job."""
    for key in rows[0].settings:
        numbers = [number_of(row.settings[key]) for row in rows]
        if None not in numbers and len(set(numbers)) > 1:
            return key
    return None


def _lines(axes: Any, rows: Sequence[SweepRow], axis: str) -> None:
    series: defaultdict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for row in rows:
        x = number_of(row.settings[axis])
        assert x is not None
        series[_others(row.settings, axis)].append((x, _throughput(row)))
    for number, (name, points) in enumerate(series.items()):
        colour, mark = _COLOURS[number % len(_COLOURS)], _MARKS[number % len(_MARKS)]
        points.sort(key=lambda point: point[0])
        done = [(x, y) for x, y in points if y is not None]
        failed = [x for x, y in points if y is None]
        xs, ys = [x for x, _ in done], [y for _, y in done]
        axes.plot(xs, ys, color=colour, marker=mark, label=name or None)
        axes.plot(failed, [0.0] * len(failed), linestyle="", marker="x", color=colour)
    xs = sorted({x for points in series.values() for x, _ in points})
    if xs[0] > 0 and xs[-1] >= _DOUBLES * xs[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(axis)
    axes.set_ylabel(_UNIT)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", linewidth=0.4)
    if any(series):
        axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def _bars(axes: Any, rows: Sequence[SweepRow]) -> None:
    names = [_others(row.settings, "") or "plan" for row in rows]
    heights = [_throughput(row) for row in rows]
    places = range(len(rows))
    axes.barh(places, [height or 0.0 for height in heights], color=_COLOURS[0])
    for place, row, height in zip(places, rows, heights, strict=True):
        told = row.status if height is None else f" {height:,.0f}"
        axes.text(height or 0.0, place, told, va="center", color=_BAD if height is None else None)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel(_UNIT)


def _others(settings: Mapping[str, str], axis: str) -> str:
    return ", ".join(
        f"{key.rpartition('.')[2]}={value}" for key, value in settings.items() if key != axis
    )


def _throughput(row: SweepRow) -> float | None:
    return None if row.plan is None else row.plan.predicted.tokens_per_s_per_gpu
