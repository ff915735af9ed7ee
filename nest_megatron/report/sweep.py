"""The jobs of a sweep, a row each: for the terminal, as CSV, as Parquet and as a chart."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from nest_megatron.documents import csv_text
from nest_megatron.layout.dims import DEGREES
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.report.charts import render
from nest_megatron.report.words import degrees
from nest_megatron.units import Bytes, format_gib, format_seconds, without_suffix

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Certificates of searches that ended by themselves.
_PROVEN = ("optimal", "chosen")
_COLOURS = ("#2f6fb7", "#c98a00", "#1f8a70", "#b3364b", "#7d57b2", "#858b95")
_MARKERS = "osD^vP"
_BAD = "#b3261e"
_UNIT = "tokens/s per GPU"
#: Axes that double rather than grow.
_DOUBLES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One job of a sweep.

    Args:
        settings: what varies, as typed, by key.
        status: ``ok``, ``does not fit``, ``bad input`` or ``ended early`` (without a plan).
        told: what is wrong with the input, or known of a search that ended early; of missing bytes,
            ``at most`` where time ended their analysis.
    """

    number: int
    settings: Mapping[str, str]
    status: str
    plan: ParallelPlan | None = None
    missing_bytes: Bytes | None = None
    told: str = ""

    def shown(self) -> dict[str, str]:
        """The row's cells for the terminal."""
        job = "\n".join(_words(self.settings))
        cells = {"#": str(self.number), "Job": job, "Step": "-"}
        if self.plan is not None:
            return cells | plan_cells(self.plan)
        if self.missing_bytes is None:
            return cells | {"Step": self.status, "Layout": self.told}
        missing = f"{self.told} {format_gib(self.missing_bytes)}".lstrip()
        return cells | {"Layout": f"{self.status}: {missing} missing"}

    def fields(self, keys: Iterable[str] = ()) -> dict[str, Any]:
        """The row's cells for a program: SI units, and empty where there is no plan.

        Args:
            keys: of settings that vary in other rows.
        """
        row: dict[str, Any] = {"number": self.number, **dict.fromkeys(keys)}
        row |= {key: _number_or_text(value) for key, value in self.settings.items()}
        row |= {"status": self.status, "told": self.told, "missing_bytes": self.missing_bytes}
        plan = self.plan
        return row | {name: plan and read(plan) for name, read in _COLUMNS.items()}

    def throughput(self) -> float | None:
        """Tokens per second and GPU; ``None`` without a plan."""
        return None if self.plan is None else self.plan.predicted.tokens_per_s_per_gpu


def short_key(key: str) -> str:
    """A setting's name in a table: its last part, that of a network level beside the level's.

    >>> short_key("cluster.num_gpus"), short_key("cluster.levels.leaf.bandwidth_bytes_per_s")
    ('num_gpus', 'leaf.bandwidth')
    """
    name = key.rpartition(".")[2]
    if key.startswith("cluster.levels."):
        return without_suffix(key.removeprefix("cluster.levels."))
    return without_suffix(name) if key.startswith("cluster.accelerator.") else name


def _words(settings: Mapping[str, str], but: str | None = None) -> list[str]:
    return [f"{short_key(key)}={value}" for key, value in settings.items() if key != but]


def tokens_per_s(plan: ParallelPlan) -> float:
    """Throughput of all GPUs that a plan uses."""
    return plan.predicted.tokens_per_s_per_gpu * plan.layout.num_gpus


def plan_cells(plan: ParallelPlan) -> dict[str, str]:
    """Cells of a plan, by the heads of their columns."""
    predicted, virtual = plan.predicted, plan.layout.dims.virtual_pipeline_model_parallel_size
    sizes: dict[str, object] = {**degrees(plan.layout)}
    sizes["PP"] = f"{sizes['PP']}x{virtual}" if virtual > 1 else sizes["PP"]
    names = ("TP", "PP", "CP", "DP", *(["EP"] if plan.model.is_moe else []))
    return {
        "Step": format_seconds(predicted.iteration_time_s),
        "MFU": f"{100 * predicted.mfu:.1f} %",
        "Memory": format_gib(predicted.peak_memory_bytes),
        "Layout": " ".join(f"{name} {sizes[name]}" for name in names),
        "Proof": plan.search.certificate if plan.search.certificate in _PROVEN else "gap",
    }


def _below(section: str, *names: str) -> dict[str, Callable[[ParallelPlan], Any]]:
    return {name: attrgetter(f"{section}.{name}") for name in names}


def _term(name: str) -> Callable[[ParallelPlan], float]:
    return lambda plan: plan.predicted.terms.get(name, 0.0)


def _price(name: str) -> Callable[[ParallelPlan], float | None]:
    return lambda plan: getattr(plan.price, name, None)


def _argument(name: str) -> Callable[[ParallelPlan], Any]:
    return lambda plan: plan.arguments[name]


_STAGES = ("sequence_parallel", "pipeline_model_parallel_layout")
_TERMS = (
    *("compute", "recompute", "tp_communication", "cp_communication", "ep_communication"),
    *("pp_communication", "dp_communication", "pipeline_bubble", "optimizer"),
    *("embedding_sync", "stragglers", "host"),
)
#: Columns of a plan, in their order.
_COLUMNS: Mapping[str, Callable[[ParallelPlan], Any]] = {
    "model_name": attrgetter("model.name"),
    "cluster_name": attrgetter("cluster.name"),
    **_below("layout", "num_gpus", "global_batch_size"),
    **_below("train", "seq_length"),
    **_below("predicted", "iteration_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu"),
    **_below("predicted", "mfu", "peak_memory_bytes", "capacity_bytes"),
    **{name: _price(name) for name in ("tokens_per_dollar", "run_s", "run_dollars", "run_mwh")},
    **_below("uncertainty", "low_s", "high_s", "out_of_memory"),
    **{name: _argument(name) for name in (*DEGREES, *_STAGES)},
    **_below("layout", "micro_batch_size"),
    "rank_order": attrgetter("layout.dims.rank_order.value"),
    "recompute": lambda plan: plan.layout.recompute.label(),
    "zero_stage": lambda plan: int(plan.layout.zero),
    **{f"{name}_s": _term(name) for name in _TERMS},
    **_below("search", "certificate", "gap_percent"),
    "search_seconds": attrgetter("search.seconds"),
}
#: Columns that may hold nothing in every row, and their types.
_OFTEN_EMPTY = {
    "missing_bytes": "int64",
    **dict.fromkeys(("tokens_per_dollar", "run_s", "run_dollars", "run_mwh"), "float64"),
    "virtual_pipeline_model_parallel_size": "int64",
    "pipeline_model_parallel_layout": "string",
}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _number_or_text(value: str) -> float | str:
    number = _number(value)
    if number is None:
        return value
    return int(number) if number.is_integer() and "." not in value else number


_HEAD = ("#", "Job", "Step", "MFU", "Memory", "Layout", "Proof")


def sweep_page(job: str, rows: Sequence[SweepRow]) -> str:
    """The same as one page; ``job`` is what all rows have in common."""
    notes = [
        f"{key} changes nothing: each of its values gives the same step."
        for key in without_effect(rows)
    ]
    return rows_page("A sweep", job, rows, _HEAD, [row.shown() for row in rows], notes)


def rows_page(
    title: str,
    job: str,
    rows: Sequence[SweepRow],
    head: Sequence[str],
    cells: Sequence[Mapping[str, str]],
    notes: Sequence[str],
) -> str:
    """Jobs as one self-contained page: a bar for the throughput of a GPU, and a table.

    Args:
        head: the columns.
        cells: of each row, by column.
    """
    from nest_megatron.report.page import render_page

    most = max((row.throughput() or 0.0 for row in rows), default=0.0)
    shown = [
        {
            "share": (row.throughput() or 0.0) / (most or 1.0),
            "throughput": "-" if (found := row.throughput()) is None else f"{found:,.0f}",
            "cells": [own.get(name, "-").replace("\n", ", ") for name in head],
        }
        for row, own in zip(rows, cells, strict=True)
    ]
    return render_page("rows.html", title, job=job, head=list(head), rows=shown, notes=list(notes))


def sweep_table(rows: Sequence[SweepRow]) -> RenderableType:
    """One row a job: its number, what varies, and the plan."""
    from nest_megatron.report.tables import FittingTable, figure_columns, name_columns, word_columns

    cells = [row.shown() for row in rows]
    for each in cells:
        each["Job"] = broken_lines(each["Job"])
    table = FittingTable(
        *name_columns("#", "Job"),
        *figure_columns("Step", min_width=9),
        *figure_columns("MFU", min_width=7),
        *figure_columns("Memory", min_width=9),
        *word_columns("Layout"),
        *name_columns("Proof", min_width=7),
    )
    for each in cells:
        table.add_row(*(each.get(str(column.header), "") for column in table.columns))
    return table


#: Widest line of a setting on a terminal; behind the name of a longer one its value begins anew.
SETTING_WIDTH = 18


def broken_lines(settings: str) -> str:
    """Settings, one a line, those that are too wide behind the equals sign.

    >>> broken_lines("global_batch_size=128").splitlines()
    ['global_batch_size=', '128']
    """
    return "\n".join(
        each if len(each) <= SETTING_WIDTH else each.replace("=", "=\n", 1)
        for each in settings.splitlines()
    )


def without_effect(rows: Sequence[SweepRow]) -> list[str]:
    """Settings whose values all give the same step, whatever the other settings are."""
    if any(row.plan is None for row in rows):
        return []
    return [key for key in (rows[0].settings if rows else ()) if not _matters(key, rows)]


def _matters(key: str, rows: Sequence[SweepRow]) -> bool:
    found: defaultdict[tuple[str, ...], set[float]] = defaultdict(set)
    for row in rows:
        assert row.plan is not None
        others = tuple(value for name, value in row.settings.items() if name != key)
        found[others].add(row.plan.predicted.iteration_time_s)
    return any(len(steps) > 1 for steps in found.values())


def _records(rows: Sequence[SweepRow]) -> list[dict[str, Any]]:
    """The rows with the same columns in all of them."""
    keys = dict.fromkeys(key for row in rows for key in row.settings)
    return [row.fields(keys) for row in rows]


def to_csv(rows: Sequence[SweepRow]) -> str:
    """The rows as CSV with a head; what there is none of is empty."""
    return csv_text(_records(rows))


def to_parquet(rows: Sequence[SweepRow]) -> bytes:
    """The rows as a Parquet file.

    A setting that is a number in some rows and text in others is text in all.
    """
    import pyarrow
    from pyarrow import parquet

    table = _records(rows)
    columns = {name: _one_type([row[name] for row in table]) for name in table[0]}
    kinds = {name: getattr(pyarrow, kind)() for name, kind in _OFTEN_EMPTY.items()}
    arrays = {name: pyarrow.array(c, type=kinds.get(name)) for name, c in columns.items()}
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays), stream)
    return stream.getvalue()


def _one_type(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    return [None if v is None else str(v) for v in values] if len(kinds) > 1 else values


def sweep_chart(rows: Sequence[SweepRow]) -> bytes:
    """An SVG: throughput in lines over the first setting that is a number in every job, else bars.

    A job that does not fit, or has bad input, is a cross at the foot.

    Raises:
        UserInputError: without matplotlib.
    """
    axis = _axis(rows)

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


def _axis(rows: Sequence[SweepRow]) -> str | None:
    """The first setting that varies and is a number in each job."""
    for key in rows[0].settings:
        numbers = [_number(row.settings[key]) for row in rows]
        if None not in numbers and len(set(numbers)) > 1:
            return key
    return None


def _draw_lines(axes: Any, rows: Sequence[SweepRow], axis: str) -> None:
    series: defaultdict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for row in rows:
        place = float(row.settings[axis]), row.throughput()
        series[", ".join(_words(row.settings, axis))].append(place)
    for number, (name, points) in enumerate(series.items()):
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
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
    axes.set_ylabel(_UNIT)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", linewidth=0.4)
    if any(series):
        axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def _draw_bars(axes: Any, rows: Sequence[SweepRow]) -> None:
    heights, places = [row.throughput() for row in rows], range(len(rows))
    axes.barh(places, [height or 0.0 for height in heights], color=_COLOURS[0])
    for place, row, height in zip(places, rows, heights, strict=True):
        told = row.status if height is None else f" {height:,.0f}"
        axes.text(height or 0.0, place, told, va="center", color=_BAD if height is None else None)
    axes.set_yticks(places, [", ".join(_words(row.settings)) or "plan" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(_UNIT)
