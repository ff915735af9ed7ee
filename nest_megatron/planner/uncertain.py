"""How sure the prediction of a solved plan is: of its step, and of its memory."""

from __future__ import annotations

from collections.abc import Sequence

from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.shortlist import Measurement, measurements, shortlist
from nest_megatron.cost_model.uncertainty import Predictive
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.objective import SURE, Shortlist, Uncertainty
from nest_megatron.planner.to_measure import Profile, minutes, profiles
from nest_megatron.profile.choose import MEASURE_COMMAND

#: Chance with which a plan as fast as the fastest is on a shortlist.
LEVEL = SURE


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
