"""One job on several numbers of GPUs: how it scales, what it costs, which sizes are worth it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.report.price import price_cells
from nest_megatron.report.sweep import SweepRow, rows_page, tokens_per_s

if TYPE_CHECKING:
    from rich.console import RenderableType


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
    kept = 1.0 if plan.goodput is None else plan.goodput.share
    return step_s, num_gpus, step_s * num_gpus / kept if kept else float("inf")


def _figures(rows: Sequence[SweepRow]) -> list[tuple[SweepRow, float | None, bool]]:
    """Rows with their efficiency against the fewest GPUs that have a plan, and their verdict."""
    plans = [row.plan for row in rows if row.plan is not None]
    front = iter(pareto_front([costs(plan) for plan in plans]))
    least = min(plans, key=lambda plan: plan.layout.num_gpus, default=None)
    found: list[tuple[SweepRow, float | None, bool]] = []
    for row in rows:
        if row.plan is None or least is None:
            found.append((row, None, False))
            continue
        per_gpu = row.plan.predicted.tokens_per_s_per_gpu
        share = per_gpu / least.predicted.tokens_per_s_per_gpu
        found.append((row, share, next(front)))
    return found


def scaling_report(rows: Sequence[SweepRow]) -> Iterator[RenderableType]:
    """The table of ``plan --for-gpus``."""
    from nest_megatron.report.tables import FittingTable, figure_columns, word_columns
    from nest_megatron.report.terminal import notes_report

    head, table = _table(rows)
    shown = FittingTable(
        *figure_columns(head[0]),
        *word_columns(head[1]),
        *figure_columns(*head[2:-1]),
        *word_columns(head[-1]),
    )
    for cells in table:
        shown.add_row(*(cells.get(str(column.header), "-") for column in shown.columns))
    yield shown
    yield notes_report((_NOTE,))


_NOTE = (
    "Scaling is the throughput of a GPU against that of the fewest GPUs that have a plan; "
    "the batch stays. Yes, on the Pareto front: no other number of GPUs takes as little "
    "time, GPUs and GPU hours of a step, and less of one of them."
)


def scaling_page(job: str, rows: Sequence[SweepRow]) -> str:
    """The same as one page; ``job`` is what all rows have in common."""
    return rows_page("One job on several numbers of GPUs", job, rows, *_table(rows), [_NOTE])


def _table(rows: Sequence[SweepRow]) -> tuple[list[str], list[dict[str, str]]]:
    """Heads of columns, and the cells of each row by them."""
    table = [_cells(row, share, best) for row, share, best in _figures(rows)]
    prices = [name for name in ("Tokens/$", "Run $", "MWh") if any(name in c for c in table)]
    return ["GPUs", "Layout", "Step", "Tokens/s", "Scaling", *prices, "Pareto"], table


def _cells(row: SweepRow, share: float | None, best: bool) -> dict[str, str]:
    shown = row.shown()
    size = next(iter(row.settings.values()))
    cells = {"GPUs": size, "Layout": shown.get("Layout", ""), "Step": shown["Step"]}
    if row.plan is None or share is None:
        return cells
    cells |= {"Tokens/s": f"{tokens_per_s(row.plan):,.0f}", "Scaling": f"{100 * share:.1f} %"}
    return cells | price_cells(row.plan) | {"Pareto": "yes" if best else "no"}


def scaling_document(rows: Sequence[SweepRow]) -> dict[str, Any]:
    """What ``plan --for-gpus --json`` prints."""
    found = _figures(rows)
    return {
        "rows": [
            {**row.fields(), "scaling_efficiency": share, "is_pareto_optimal": best}
            for row, share, best in found
        ]
    }
