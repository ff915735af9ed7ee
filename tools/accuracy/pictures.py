"""Pictures of ``accuracy.md``: predicted against measured, in small panels."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nest_megatron.report.charts import render
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


#: By picture: kinds of files, unit and its size, colours of groups.
_PICTURES: Mapping[str, tuple[tuple[RowKind, ...], str, float, Mapping[str, str]]] = {
    "time": ((RowKind.THROUGHPUT,), "s", 1.0, _DEVICES),
    "memory": ((RowKind.MEMORY_GOLDEN, RowKind.MEMORY_PEAK), "GiB", float(GIB), _DEVICES),
    "collectives": ((RowKind.COLLECTIVES,), "ms", 1e-3, _KINDS),
}

#: Predicted and measured figures of the rows of a source, by what their colour stands for.
Panel = Mapping[str, Sequence[tuple[float, float]]]


def pictures(judged: Sequence[Judged]) -> dict[str, bytes]:
    """Every picture that there are rows for, as planned, as PNG files by name."""
    found = {}
    for name, (kinds, unit, scale, colours) in _PICTURES.items():
        panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for each in (o for f in judged if f.file.kind in kinds for o in f.as_planned):
            pair = each.memory if name == "memory" else each.time
            if pair:
                panels[each.source][_group(each)].append((pair[0] / scale, pair[1] / scale))
        if panels:
            found[name] = _drawn(panels, unit, colours)
    return found


def _group(each: RowOutcome) -> str:
    if "collective" in each.row:
        return each.row["collective"].lower().replace("all_to_all", "alltoall")
    words = each.row.get("gpu", "").upper()
    return next((name for name in _DEVICES if words.startswith(name)), _OTHER_NAME)


def _drawn(panels: Mapping[str, Panel], unit: str, colours: Mapping[str, str]) -> bytes:
    """One panel a source, the one with the most rows first."""
    largest = sorted(panels.items(), key=lambda item: -_count(item[1]))
    across = panels_across(len(largest))
    down = -(-len(largest) // across)

    def draw(figure: Any) -> None:
        figure.set_layout_engine("constrained")
        places = figure.subplots(down, across, squeeze=False).flatten()
        for axes, (title, groups) in zip(places, largest, strict=False):
            _draw_panel(axes, title, groups, colours)
        for axes in places[len(largest) :]:
            axes.set_axis_off()
        figure.supxlabel(f"measured, {unit}", fontsize=9)
        figure.supylabel(f"predicted, {unit}", fontsize=9)
        _legend(figure, {group for groups in panels.values() for group in groups}, colours)

    return render(draw, (2.3 * across + 0.5, 2.45 * down + 0.7), ".png", settings=_STYLE)


def _count(groups: Panel) -> int:
    return sum(map(len, groups.values()))


def panels_across(count: int) -> int:
    """Panels in a row, so that the last row has the fewest gaps.

    >>> panels_across(3), panels_across(8), panels_across(9), panels_across(20)
    (3, 4, 5, 5)
    """
    return min(count, min(_ACROSS, key=lambda across: -count % across))


def _draw_panel(axes: Any, title: str, groups: Panel, colours: Mapping[str, str]) -> None:
    pairs, count = [pair for mine in groups.values() for pair in mine], _count(groups)
    ends = low, high = limits(value for pair in pairs for value in pair)
    for share, colour in _BANDS:
        below, above = ([end * (1 + sign * share) for end in ends] for sign in (-1, 1))
        axes.fill_between(ends, below, above, color=colour, lw=0)
    axes.plot(ends, ends, color="#454b55", lw=0.7)
    for group, mine in groups.items():
        predicted, measured = zip(*mine, strict=True)
        axes.scatter(
            measured,
            predicted,
            s=9 if count > 100 else 14,
            color=colours.get(group, _OTHER),
            alpha=0.55 if count > 100 else 0.8,
            lw=0,
        )
    _scale(axes, low, high)
    name = title if len(title) <= 30 else f"{title[:29]}…"
    mape_pct = error_scores(pairs).mape_pct
    axes.set_title(f"{name}\n{count} rows, MAPE {mape_pct:.1f} %", fontsize=7)


def _scale(axes: Any, low: float, high: float) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_box_aspect(1)
    places = list(ticks(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
        axis.set_ticks(places, [f"{place:g}" for place in places])
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
        places = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        inside = [float(f"{place:.4g}") for place in places if low <= place <= high]
        if len(inside) > most and len(known) >= 2:
            break
        known = inside
    stride = -(-len(known) // most)
    yield from known[:: max(1, stride)]


def _legend(figure: Any, used: Collection[str], colours: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D

    shown = {name: colour for name, colour in colours.items() if name in used}
    if len(used) > len(shown):
        shown[_OTHER_NAME] = _OTHER
    handles = [
        Line2D([], [], marker="o", ls="", color=colour, markersize=5, label=name)
        for name, colour in shown.items()
    ]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8
    )
