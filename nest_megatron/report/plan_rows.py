"""Plans of several jobs, a row each: of a sweep, with its chart, for numbers of GPUs, of nodes."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nest_megatron.documents import csv_text
from nest_megatron.layout.dims import DEGREES
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.plain import frozen
from nest_megatron.planner.plan_table import PlanTable
from nest_megatron.report.charts import render
from nest_megatron.report.memory_words import price_cells
from nest_megatron.report.words import TERM_WORDS, degree_words
from nest_megatron.units import Bytes, counted, format_gib, format_seconds, without_suffix

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Column

#: Columns of settings, a line each; of names, which keep their line; of words, which wrap. All
#: others hold figures.
_SETTINGS, _NAMES = ("Job", "Change"), ("#", "Proof")
_WORDS = ("Layout", "Pareto", "Best layout", "Chosen layout")
#: Columns of what plans cost.
_PRICES = ("Tokens/$", "Run $", "MWh")


@frozen
class PlanRow:
    """One job of several.

    Args:
        settings: what varies, as typed, by key.
        status: ``ok``, ``does not fit``, ``bad input`` or ``ended early`` (without a plan).
        reason: what is wrong with the input, or known of a search that ended early; of missing
            bytes, ``at most`` where time ended their analysis.
    """

    number: int
    settings: Mapping[str, str]
    status: str
    plan: ParallelPlan | None = None
    missing_bytes: Bytes | None = None
    reason: str = ""

    def words(self, between: str = ", ", *, but: str | None = None) -> str:
        """The settings; ``but`` is the key of one that is left out."""
        named = ((key, value) for key, value in self.settings.items() if key != but)
        return between.join(f"{short_key(key)}={value}" for key, value in named)

    def value(self, key: str) -> float | None:
        """A setting that is a number; ``None`` for others."""
        try:
            return float(self.settings[key])
        except ValueError:
            return None

    def cells(self) -> dict[str, str]:
        """The row's cells for people, by the heads of their columns."""
        if self.plan:
            return plan_cells(self.plan)
        if self.missing_bytes is None:
            return {"Step": self.status, "Layout": self.reason}
        missing = f"{self.reason} {format_gib(self.missing_bytes)}".lstrip()
        return {"Step": "-", "Layout": f"{self.status}: {missing} missing"}

    def fields(self, keys: Iterable[str] = ()) -> dict[str, Any]:
        """The row's cells for a program: SI units, and empty where there is no plan.

        Args:
            keys: of settings that vary in other rows.
        """
        row: dict[str, Any] = {"number": self.number, **dict.fromkeys(keys)}
        for key, text in self.settings.items():
            value = self.value(key)
            whole = value is not None and value.is_integer() and "." not in text
            row[key] = text if value is None else int(value) if whole else value
        row |= {"status": self.status, "told": self.reason, "missing_bytes": self.missing_bytes}
        plan = self.plan
        return row | {name: plan and value_at(plan, path) for name, path in _COLUMNS.items()}

    def throughput(self) -> float | None:
        """Tokens per second and GPU; ``None`` without a plan."""
        return self.plan.predicted.tokens_per_s_per_gpu if self.plan else None


def short_key(key: str) -> str:
    """A setting's name in a table: its last part, that of a network level beside the level's.

    >>> short_key("cluster.num_gpus"), short_key("cluster.levels.leaf.bandwidth_bytes_per_s")
    ('num_gpus', 'leaf.bandwidth')
    """
    name = key.rpartition(".")[2]
    if key.startswith("cluster.levels."):
        return without_suffix(key.removeprefix("cluster.levels."))
    return without_suffix(name) if key.startswith("cluster.accelerator.") else name


def tokens_per_s(plan: ParallelPlan) -> float:
    """Tokens that all GPUs of a plan work through in a second."""
    tokens = plan.layout.global_batch_size * plan.train.seq_length
    return tokens / plan.predicted.iteration_time_s


def plan_cells(plan: ParallelPlan) -> dict[str, str]:
    """Cells of a plan, by the heads of their columns."""
    predicted, search = plan.predicted, plan.search
    names = ("TP", "PP", "CP", "DP", *(["EP"] if plan.model.is_moe else []))
    early = f", within {search.gap_percent:.1f} % of the best" if search.ended_early else ""
    return {
        "Step": format_seconds(predicted.iteration_time_s),
        "Tokens/s": f"{tokens_per_s(plan):,.0f}",
        "Tok/s/GPU": f"{predicted.tokens_per_s_per_gpu:,.0f}",
        "MFU": f"{100 * predicted.mfu:.1f} %",
        "Memory": format_gib(predicted.peak_memory_bytes),
        "Layout": " ".join(degree_words(plan.layout, names, least=1)) + early,
        "Proof": search.certificate,
        **price_cells(plan),
    }


def value_at(plan: ParallelPlan, path: str) -> Any:
    """What lies at a path: of fields, of keys of a mapping, of calls without arguments."""
    found: Any = plan
    for name in path.split("."):
        if found is None:
            return None
        found = found.get(name, 0.0) if isinstance(found, Mapping) else getattr(found, name)
    return found() if callable(found) else found


_OF_PRICE = ("tokens_per_dollar", "run_s", "run_dollars", "run_mwh")
#: Where the values of a plan's columns lie, in their order; the last name is the column's.
_PATHS = (
    *("layout.num_gpus", "layout.global_batch_size", "train.seq_length"),
    *("predicted.iteration_time_s", "predicted.tokens_per_s_per_gpu"),
    *("predicted.model_tflops_per_gpu", "predicted.mfu", "predicted.peak_memory_bytes"),
    *("predicted.capacity_bytes", *(f"price.{name}" for name in _OF_PRICE)),
    *("uncertainty.low_s", "uncertainty.high_s", "uncertainty.out_of_memory"),
    *(f"arguments.{name}" for name in DEGREES),
    *("arguments.sequence_parallel", "arguments.pipeline_model_parallel_layout"),
    "layout.micro_batch_size",
)
_COLUMNS: Mapping[str, str] = {
    "model_name": "model.name",
    "cluster_name": "cluster.name",
    **{path.rpartition(".")[2]: path for path in _PATHS},
    "rank_order": "layout.dims.rank_order.value",
    "recompute": "layout.recompute.label",
    "zero_stage": "layout.zero.value",
    **{f"{name}_s": f"predicted.terms.{name}" for name in TERM_WORDS},
    "certificate": "search.certificate",
    "gap_percent": "search.gap_percent",
    "search_seconds": "search.seconds",
}
#: Columns that may hold nothing in every row, and their types.
_OFTEN_EMPTY = {
    "missing_bytes": "int64",
    **dict.fromkeys(_OF_PRICE, "float64"),
    "virtual_pipeline_model_parallel_size": "int64",
    "pipeline_model_parallel_layout": "string",
}


def price_heads(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Columns of what plans cost, as far as that is known."""
    return [head for head in _PRICES if any(head in row for row in rows)]


@frozen
class RowsTable:
    """Plans of several jobs for people: a table for a terminal, and the same as a page.

    Args:
        heads: of the columns.
        cells: of each row, by the heads of their columns.
        notes: what is to be said of rows.
    """

    heads: Sequence[str]
    cells: Sequence[Mapping[str, str]]
    notes: Sequence[str]

    def report(self) -> Iterator[RenderableType]:
        """The table for a terminal, and the notes."""
        from nest_megatron.report.tables import FittingTable, figure_columns, word_columns
        from nest_megatron.report.terminal import notes_report

        columns: list[Column | str] = []
        rows = [[row.get(head, "-") for head in self.heads] for row in self.cells]
        for place, head in enumerate(self.heads):
            if head in _SETTINGS:
                for row in rows:
                    row[place] = _broken_lines(row[place])
                lines = (len(line) for row in rows for line in row[place].splitlines())
                width = min(_SETTING_WIDTH, max(lines, default=0))
                columns += word_columns(head, min_width=width)
            elif head in _NAMES:
                columns.append(head)
            else:
                columns += (word_columns if head in _WORDS else figure_columns)(head)
        yield FittingTable(*columns, rows=rows)
        yield notes_report(self.notes)

    def page(self, title: str, job: str, rows: Sequence[PlanRow]) -> str:
        """One self-contained page: a bar for the throughput of a GPU, and the table.

        Args:
            job: what all rows have in common.
        """
        from nest_megatron.report.page import render_page

        rates = [row.throughput() or 0.0 for row in rows]
        most = max(rates, default=0.0) or 1.0
        shares = [rate / most for rate in rates]
        return render_page("rows.html", title, job=job, table=self, shares=shares)


def sweep_table(rows: Sequence[PlanRow]) -> RowsTable:
    """The table of a sweep, and which of its settings change nothing."""
    cells = [{"#": str(row.number), "Job": row.words("\n"), **row.cells()} for row in rows]
    notes = [
        f"{key} changes nothing: the step takes as long with each of its values."
        for key in without_effect(rows)
    ]
    heads = ("#", "Job", "Step", "MFU", "Memory", "Layout", "Proof")
    return RowsTable(heads=heads, cells=cells, notes=notes)


#: Widest line of a setting on a terminal; the value of a longer one has its own line.
_SETTING_WIDTH = 18


def _broken_lines(settings: str) -> str:
    """Settings, one a line, those that are too wide behind the equals sign.

    >>> _broken_lines("global_batch_size=128").splitlines()
    ['global_batch_size=', '128']
    """
    return "\n".join(
        each if len(each) <= _SETTING_WIDTH else each.replace("=", "=\n", 1)
        for each in settings.splitlines()
    )


def without_effect(rows: Sequence[PlanRow]) -> list[str]:
    """Settings whose values all give the same step, whatever the other settings are."""
    plans = [(row, row.plan) for row in rows if row.plan]
    found: list[str] = []
    for key in rows[0].settings if rows and len(plans) == len(rows) else ():
        steps: defaultdict[str, set[tuple[float, float]]] = defaultdict(set)
        for row, plan in plans:
            steps[row.words(but=key)].add(steps_of(plan))
        found += [key] if all(len(each) == 1 for each in steps.values()) else []
    return found


def steps_of(plan: ParallelPlan) -> tuple[float, float]:
    """The step of a plan, and that of the fastest layout, with which it may tie."""
    step_s = plan.predicted.iteration_time_s
    return step_s, plan.choice.fastest_s if plan.choice else step_s


def _records(rows: Sequence[PlanRow]) -> list[dict[str, Any]]:
    """The rows with the same columns in all of them."""
    keys = dict.fromkeys(key for row in rows for key in row.settings)
    return [row.fields(keys) for row in rows]


def to_csv(rows: Sequence[PlanRow]) -> str:
    """The rows as CSV with a head; what there is none of is empty."""
    return csv_text(_records(rows))


def to_parquet(rows: Sequence[PlanRow]) -> bytes:
    """The rows as a Parquet file.

    A setting that is a number in some rows and text in others is text in all.
    """
    import pyarrow
    from pyarrow import parquet

    table = _records(rows)
    arrays = {}
    for name in table[0]:
        values, kind = [row[name] for row in table], _OFTEN_EMPTY.get(name)
        if len({type(value) for value in values if value is not None}) > 1:
            values = [None if value is None else str(value) for value in values]
        arrays[name] = pyarrow.array(values, type=kind and getattr(pyarrow, kind)())
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays), stream)
    return stream.getvalue()


def pareto_front(points: Sequence[tuple[float, ...]]) -> list[bool]:
    """Which points no other one dominates: as little of everything, and less of something.

    >>> pareto_front([(1, 8), (2, 4), (2, 8), (2, 4)])
    [True, True, False, True]
    """

    def dominates(other: tuple[float, ...], point: tuple[float, ...]) -> bool:
        return other != point and all(a <= b for a, b in zip(other, point, strict=True))

    return [not any(dominates(other, point) for other in points) for point in points]


def costs(plan: ParallelPlan) -> tuple[float, float, float]:
    """What a plan has the less of the better: step, GPUs, GPU seconds of a step that is kept."""
    step_s, num_gpus = plan.predicted.iteration_time_s, plan.layout.num_gpus
    kept = plan.goodput.share if plan.goodput else 1.0
    return step_s, num_gpus, step_s * num_gpus / kept if kept else float("inf")


def _scaled(rows: Sequence[PlanRow]) -> list[tuple[PlanRow, float | None, bool]]:
    """Rows with their efficiency against the fewest GPUs that have a plan, and their verdict."""
    plans = [row.plan for row in rows if row.plan]
    front = iter(pareto_front([costs(plan) for plan in plans]))
    least = min(plans, key=lambda plan: plan.layout.num_gpus, default=None)
    most = least.predicted.tokens_per_s_per_gpu if least else 1.0
    return [
        (row, rate / most, next(front)) if (rate := row.throughput()) else (row, None, False)
        for row in rows
    ]


_NOTE = (
    "Scaling is the throughput of a GPU against that of the fewest GPUs that have a plan; "
    "the batch stays. Yes, on the Pareto front: no other number of GPUs takes as little "
    "time, GPUs and GPU hours of a step, and less of one of them."
)


def scaling_table(rows: Sequence[PlanRow]) -> RowsTable:
    """The table of ``plan --for-gpus``."""
    table = []
    for row, share, best in _scaled(rows):
        cells = {"GPUs": next(iter(row.settings.values())), **row.cells()}
        if share is not None:
            cells |= {"Scaling": f"{100 * share:.1f} %", "Pareto": "yes" if best else "no"}
        table.append(cells)
    heads = ["GPUs", "Layout", "Step", "Tokens/s", "Scaling", *price_heads(table), "Pareto"]
    return RowsTable(heads=heads, cells=table, notes=[_NOTE])


def scaling_document(rows: Sequence[PlanRow]) -> dict[str, Any]:
    """What ``plan --for-gpus --json`` prints."""
    return {
        "rows": [
            {**row.fields(), "scaling_efficiency": share, "is_pareto_optimal": best}
            for row, share, best in _scaled(rows)
        ]
    }


def nodes_table(table: PlanTable) -> RowsTable:
    """A row for each number of nodes, and what the table says of single rows."""
    rows, notes = [], []
    for entry in table.entries:
        plan, nodes = table.plan_of(entry), entry.num_nodes
        cells = plan_cells(plan) if plan else {"Layout": "no plan"}
        rows.append({**cells, "Nodes": str(nodes), "GPUs": str(entry.num_gpus)})
        if entry.told:
            notes.append(f"{counted(nodes, 'node')}: {entry.told}")
    heads = ("Nodes", "GPUs", "Layout", "Step", "Tokens/s", "MFU", "Memory")
    return RowsTable(heads=heads, cells=rows, notes=(*notes, *table.notes))


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
        failed = [x for x, y in points if y is None]
        xs = [x for x, y in points if y is not None]
        ys = [y for _, y in points if y is not None]
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
