"""What the first rank of an application prints of its plan."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nest_megatron.integrations.hydra.planning import AppPlan
from nest_megatron.integrations.hydra.view import AppView
from nest_megatron.parallel.diff import plan_values, reason
from nest_megatron.parallel.knobs import KNOBS
from nest_megatron.report.terminal import notes_report, summary
from nest_megatron.report.words import proof


def app_report(found: AppPlan, view: AppView) -> RenderableType:
    """The plan in a few lines, each planned field with its value and the reason."""
    plan = found.plan
    reasons = {item: reason(plan, item) for item in plan_values(plan)}
    reasons |= {knob.name: knob.reason for knob in KNOBS}
    rows = [
        (path, _shown(found.values[item]), why)
        for item, why in reasons.items()
        if view.is_planned(item) and (path := view.place(item)) is not None
    ]
    parts: list[RenderableType] = [Text("nest: this job runs as"), Padding(summary(plan), (0, 2))]
    parts.append(Padding(Text(proof(plan)), (0, 2)))
    parts += [Text("nest: values of its fields"), _values_table(rows)]
    if found.notes:
        parts.append(notes_report(found.notes))
    return Group(*parts)


def _values_table(rows: Iterable[tuple[str, str, str]]) -> RenderableType:
    """Fields and values, the reason under each."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for path, value, why in rows:
        table.add_row(path, Text.assemble((value, "green"), (f"\n{why}", "dim")))
    return Padding(table, (0, 2))


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
