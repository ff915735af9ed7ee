"""What the first rank of an application prints of its plan."""

from __future__ import annotations

from rich.console import RenderableType

from nest_megatron.integrations.hydra.planning import AppPlan
from nest_megatron.integrations.hydra.view import AppView
from nest_megatron.integrations.launched import values_report
from nest_megatron.parallel.diff import plan_values, reason
from nest_megatron.parallel.knobs import KNOBS


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
    return values_report(plan, rows, found.notes)


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
