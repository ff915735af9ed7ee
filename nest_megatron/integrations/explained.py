"""What ``explain`` says of a plan: tables, launch commands, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.cost_model.target_defaults import MEGATRON_LM, target_named
from nest_megatron.integrations.megatron_lm.attach import launch_words
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner.pins import Pin, pinned_for
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.profile.records import ANALYTIC_NAME
from nest_megatron.report.console import command_lines
from nest_megatron.report.terminal import explain_report, notes_report
from nest_megatron.units import Seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


def explanation(
    plan: ParallelPlan,
    times: LayerTimes | None,
    differences: Sequence[Mapping[str, Seconds] | None],
    pin: Pin | None = None,
) -> Iterator[RenderableType]:
    """The parts of the report; a text is to be shown as it stands.

    Args:
        times: the measured layer times that the plan was made with.
        differences: as for ``explain_report``.
        pin: who froze the plan.
    """
    yield explain_report(plan, differences)
    for name, launch in plan.launch.items():
        kept = [(k, v) for k, v in launch.environment.items() if v is not None]
        unset = [k for k, v in launch.environment.items() if v is None]
        yield f"\nLaunch with {name}\n"
        yield command_lines(launch_words(plan, launch.script, launch.argv), kept)
        yield ""
        yield notes_report([*launch.notes, *(f"{each} must not be set." for each in unset)])
    yield from _advice(plan, times)
    if pin is not None:
        said = f" ({pin.note})" if pin.note else ""
        yield f"\nPinned {pin.created} by {pin.by}{said}, for {pinned_for(plan, pin.megatron_lm)}."


def _advice(plan: ParallelPlan, times: LayerTimes | None) -> Iterator[str]:
    profile = plan.provenance.profile
    if times is None and profile != ANALYTIC_NAME:
        yield (
            f"\nIts layer times ({profile}) are not in the profile store of this machine; what is "
            "priced again here is priced from data sheets. Import the profile to see its own."
        )
    if plan.launch:
        return
    target = restored_settings(plan.provenance.settings).target
    if target is None or target_named(target) in MEGATRON_LM:
        yield "\nThis plan holds no launch command; plan again with this version to get one."
    else:
        framework = target_named(target).framework
        yield f"\nThe plan is for {framework}; docs/nemo.md says how recipes take it."
