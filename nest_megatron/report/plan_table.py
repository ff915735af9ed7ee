"""A plan table for people: one row for each number of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner.plan_table import PlanTable
from nest_megatron.report.sweep import plan_cells

if TYPE_CHECKING:
    from rich.console import RenderableType


def plan_table_report(table: PlanTable) -> Iterator[RenderableType]:
    """The table, and what it says of single rows."""
    from nest_megatron.report.tables import FittingTable, figure_columns, word_columns
    from nest_megatron.report.terminal import notes_report

    shown = FittingTable(
        *figure_columns("Nodes", "GPUs"),
        *word_columns("Layout"),
        *figure_columns("Step", "Tokens/s", "MFU", "Memory"),
    )
    for entry in table.entries:
        plan = table.plan_of(entry)
        cells = {"Layout": "no plan"} if plan is None else _cells(plan)
        cells |= {"Nodes": str(entry.num_nodes), "GPUs": str(entry.num_gpus)}
        shown.add_row(*(cells.get(str(column.header), "-") for column in shown.columns))
    yield shown
    told = [
        f"{each.num_nodes} node{'s' * (each.num_nodes > 1)}: {each.told}"
        for each in table.entries
        if each.told
    ]
    yield notes_report((*told, *table.notes))


def _cells(plan: ParallelPlan) -> dict[str, str]:
    tokens = plan.predicted.tokens_per_s_per_gpu * plan.layout.num_gpus
    return {**plan_cells(plan), "Tokens/s": f"{tokens:,.0f}"}
