"""How sure the prediction of a solved plan is: of its step, and of its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nest_megatron.cost_model.device_memory import (
    PeakErrors,
    allocatable_bytes,
    headroom_for,
    out_of_memory_probability,
    outside_bytes,
    peak_error,
)
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.shortlist import Measurement, measurements, shortlist
from nest_megatron.cost_model.site import Site
from nest_megatron.cost_model.uncertainty import Predictive
from nest_megatron.layout.layout import Layout, PartialLayout
from nest_megatron.layout.objective import SURE, Objective, Shortlist, Uncertainty
from nest_megatron.planner.request import Request
from nest_megatron.planner.to_measure import Profile, minutes, profiles
from nest_megatron.profile.choose import MEASURE_COMMAND
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.units import Bytes, Seconds

#: Chance with which a plan as fast as the fastest is on a shortlist.
LEVEL = SURE
#: Chance to run out of memory above which plans that need less are looked for.
_COMFORTABLE = 0.02


def described(known: Predictive, out_of_memory: float) -> Uncertainty:
    """A predictive distribution in few numbers, for plan files."""
    low_s, high_s = known.interval(0.9)
    return Uncertainty(
        mean_s=known.expected_s,
        low_s=low_s,
        high_s=high_s,
        percentile_90_s=known.quantile_s(0.9),
        confidence=known.confidence.level,
        kind=known.confidence.kind,
        runs=known.confidence.runs,
        error_percent=known.confidence.error_pct,
        out_of_memory=out_of_memory,
        median_s=None if known.learned is None else known.median_s,
    )


def out_of_memory(
    model: CostModel,
    layout: Layout,
    peak_bytes: Bytes,
    site: Site | None = None,
) -> float:
    """Chance that a plan runs out of memory, at a site where one is calibrated."""
    error = _peak_error(model, layout, site)
    return out_of_memory_probability(peak_bytes, allocatable(model, layout), error)


def comfortable_bytes(
    model: CostModel, plan: SolvedLayout, site: Site | None, chance: float = _COMFORTABLE
) -> Bytes:
    """The predicted peak with which a plan would run out of memory with such a chance."""
    error = _peak_error(model, plan.layout, site)
    return max(0, int(allocatable(model, plan.layout) * (1.0 - headroom_for(chance, error))))


def _peak_error(model: CostModel, layout: Layout, site: Site | None) -> PeakErrors:
    known = None if site is None else site.peak_error(model, layout)
    return known or peak_error(layout.zero)


def allocatable(model: CostModel, grid: PartialLayout) -> Bytes:
    """What the tensors of a plan may take of a device."""
    outside = outside_bytes(model.spec, grid, model.cluster)
    return allocatable_bytes(model.cluster.accelerator, model.settings, outside)


def least_s(request: Request, bound_s: Seconds, known: Predictive) -> Seconds:
    """No plan of a job is worth less under the objective, where none has a shorter predicted step.

    Args:
        known: any plan of the job; what widens the errors of all of them alike is the least that
            widens the error of one.
    """
    moved = 1.0 if request.site is None else request.site.least_factor(known)
    return moved * bound_s * _least_ratio(known, request.objective)


def _least_ratio(known: Predictive, objective: Objective) -> float:
    """No plan of a job has less under an objective than this times its median step."""
    known = known.prior
    least = dataclasses.replace(known, shares={}, features=known.features & {*known.scales.job})
    value_s = least.expected_s if objective is Objective.EXPECTED else least.quantile_s(0.9)
    return value_s / least.median_s


def shortlisted(
    model: CostModel, plans: Sequence[Predictive], grids: Sequence[PartialLayout]
) -> Shortlist:
    """Few plans of which one is as fast as the fastest, and what to measure to know more."""
    found = shortlist(plans, LEVEL)
    can_be_made = [*profiles(model, grids, [grids[number] for number in found.plans])]
    measured = measurements(plans, LEVEL, [each.mechanisms for each in can_be_made])
    return Shortlist(
        numbers=found.plans,
        chance=found.chance,
        chances=tuple(found.chances[number] for number in found.plans),
        measurements=tuple(
            _words(each, None if each.profile is None else can_be_made[each.profile])
            for each in measured
        ),
    )


def _words(found: Measurement, profile: Profile | None) -> str:
    """A measurement, what it costs and what it is worth, for people."""
    faster = f"to make the choice {found.gain_percent:.1f} % faster"
    if profile is not None and profile.num_nodes:
        # how far a prediction can be off does not follow from a network that was measured
        return f"{_time(profile)} on {_NODES[profile.num_nodes]} (the network): expected {faster}"
    if profile is None:
        what = "a run of " + ("the plan" if found.plan == 0 else f"runner-up {found.plan}")
    else:
        what = f"{_time(profile)} on one GPU ({profile.num_shapes} shapes of layers)"
    return f"{what}: expected to leave {found.shortlist_size:.1f} plans and {faster}"


_NODES = {1: "one node", 2: "two nodes"}


def _time(profile: Profile) -> str:
    return f"{minutes(profile.seconds)} of `{MEASURE_COMMAND} --for PLAN.YAML`"
