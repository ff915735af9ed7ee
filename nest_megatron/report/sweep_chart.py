"""The chart of a sweep: throughput of its jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from nest_megatron.report.charts import render
from nest_megatron.report.plan_rows import PlanRow

#: Colour and marker of each line of a sweep.
_LINES = (
    *(("#2f6fb7", "o"), ("#c98a00", "s"), ("#1f8a70", "D")),
    *(("#b3364b", "^"), ("#7d57b2", "v"), ("#858b95", "P")),
)
_BAD = "#b3261e"
_THROUGHPUT = "tokens/s per GPU"
#: Axes that double rather than grow.
_DOUBLES = 4.0


def sweep_chart(rows: Sequence[PlanRow]) -> bytes:
    """An SVG: throughput in lines over the first setting that is a number in every job, else bars.

    A job that does not fit, or has bad input, is a cross at the foot.

    Raises:
        UserInputError: without matplotlib.
    """
    axis = None  # the first setting that varies and is a number in each job
    for key in rows[0].settings:
        numbers = [row.value(key) for row in rows]
        if None not in numbers and len(set(numbers)) > 1:
            axis = key
            break

    def draw(figure: Any) -> None:
        figure.set_layout_engine("constrained")
        axes = figure.subplots()
        if axis is None:
            _draw_bars(axes, rows)
        else:
            _draw_lines(axes, rows, axis)
        axes.spines[["top", "right"]].set_visible(False)

    height = 4.2 if axis else 1.2 + 0.42 * len(rows)
    return render(draw, (7.5, height), ".svg", what="sweep.svg")


def _draw_lines(axes: Any, rows: Sequence[PlanRow], axis: str) -> None:
    series: defaultdict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for row in rows:
        place = float(row.settings[axis]), row.throughput()
        series[row.words(but=axis)].append(place)
    for number, (name, points) in enumerate(series.items()):
        colour, marker = _LINES[number % len(_LINES)]
        points.sort(key=lambda point: point[0])
        done = [(x, y) for x, y in points if y is not None]
        failed = [x for x, y in points if y is None]
        xs, ys = [x for x, _ in done], [y for _, y in done]
        axes.plot(xs, ys, color=colour, marker=marker, label=name or None)
        axes.plot(failed, [0.0] * len(failed), linestyle="", marker="x", color=colour)
    xs = sorted({x for points in series.values() for x, _ in points})
    if xs[0] > 0 and xs[-1] >= _DOUBLES * xs[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(axis)
    axes.set_ylabel(_THROUGHPUT)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", linewidth=0.4)
    if any(series):
        axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def _draw_bars(axes: Any, rows: Sequence[PlanRow]) -> None:
    heights, places = [row.throughput() for row in rows], range(len(rows))
    axes.barh(places, [height or 0.0 for height in heights], color=_LINES[0][0])
    for place, row, height in zip(places, rows, heights, strict=True):
        text = row.status if height is None else f" {height:,.0f}"
        axes.text(height or 0.0, place, text, va="center", color=_BAD if height is None else None)
    axes.set_yticks(places, [row.words() or "plan" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(_THROUGHPUT)
