"""A plan beside another layout of its job: what differs, and why the other was not taken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from nest_megatron.config.compose import Composed
from nest_megatron.config.layout_words import read_layout
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.planned_job import SEARCH_S, PlannedJob
from nest_megatron.parallel.before_after import Difference
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.parallel.stage_layout import spread_partition
from nest_megatron.planner import EndedEarly, NoPlan
from nest_megatron.planner import plan as find_plan
from nest_megatron.planner.layouts import Variant
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.versus import peak_stage
from nest_megatron.solver.space import SearchSpace
from nest_megatron.units import Bytes, Seconds, format_seconds

#: Sizes of the user's that are changed to find a legal layout.
_MOST_CHANGED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """A plan and another layout of its job, both priced now.

    Args:
        terms: by how much each term of the step is longer; together ``difference.seconds``.
        memory: by how much each part of the highest peak is larger; together that of the peaks.
        notes: what was assumed, one sentence each.
    """

    plan: ParallelPlan
    other: ParallelPlan
    difference: Difference
    terms: Mapping[str, Seconds]
    memory: Mapping[str, Bytes]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """Why a plan is not another layout.

    Args:
        asked: the sizes that were asked for, by Megatron's names.
        rule: that refuses every layout with them; empty where one is legal.
        versus: the best layout with them beside the plan, or where none fits, one that does not.
        needed_bytes: the least peak of any layout with them; ``None`` where one fits.
        nearest: the fastest legal layout that fits, with the fewest of the sizes changed.
        changed: those sizes.
        bounded: time ended a search: what is said of other layouts is what was found until then.
    """

    asked: Mapping[str, Any]
    rule: str = ""
    versus: Versus | None = None
    needed_bytes: Bytes | None = None
    nearest: ParallelPlan | None = None
    changed: tuple[str, ...] = ()
    bounded: bool = False


def versus(plan: ParallelPlan, text: str, times: LayerTimes | None = None) -> Versus:
    """A plan beside a layout that differs in what ``text`` says (``read_layout``).

    What is not named stays the plan's; the GPUs that are left replicate, and where the number of
    stages changes they are even.

    Args:
        times: the measured layer times that the plan was made with.

    Raises:
        UserInputError: for a layout that cannot be read, or that Megatron refuses, with its rule.
    """
    job = PlannedJob(plan, times)
    variant = job.variant(read_layout(text, "--versus"))
    if rule := job.refusal(variant):
        limit, fix = f"Megatron refuses it: {rule}", "Name other sizes, or more of them."
        raise UserInputError("--versus", value=text, limit=limit, fix=fix)
    return _versus(job, plan, variant)


def why_not(plan: ParallelPlan, text: str, times: LayerTimes | None = None) -> WhyNot:
    """Why a plan is no layout with the sizes that ``text`` names (``read_layout``).

    What is not named is searched, but for the sharding and how layers are carried out.

    Args:
        times: the measured layer times that the plan was made with.

    Raises:
        UserInputError: for a layout that cannot be read.
    """
    job, composed = PlannedJob(plan, times), read_layout(text, "--why-not")
    space = job.space(composed)
    asked = _asked(composed)
    try:
        found = find_plan(job.request(space))
    except UserInputError as error:
        rule = job.rule(composed) or f"{error.what} = {error.value}: {error.limit}"
        return dataclasses.replace(_nearest(job, space, asked), rule=rule)
    if isinstance(found, EndedEarly):
        limit = f"a search of {SEARCH_S:g} s found no layout with these sizes, and proved nothing"
        raise UserInputError("--why-not", value=text, limit=limit, fix="Name more sizes.")
    if isinstance(found, NoPlan):
        grid = found.shortage.grid
        variant = job.variant_of(grid, spread_partition(plan.model, grid.dims))
        nearest = _nearest(job, space, asked)
        return dataclasses.replace(
            nearest,
            versus=_versus(job, plan, variant),
            needed_bytes=found.shortage.needed_bytes,
            bounded=nearest.bounded or _is_bounded(found),
        )
    if lost := _not_kept(found, space):  # a model without experts has no sizes of experts
        rule = job.rule(composed) or f"{lost[0]} = {asked[lost[0]]}: this model has it not"
        return dataclasses.replace(_nearest(job, space, asked), rule=rule)
    variant = job.variant_of(found.layout.without_stages(), found.layout.partition)
    beside = _versus(job, plan, variant)
    return WhyNot(asked=asked, versus=beside, bounded=_is_bounded(found))


def _asked(composed: Composed) -> dict[str, Any]:
    """What was named, in the order in which layouts are said."""
    sections = (composed.config.parallel, composed.config.train)
    values = {k: v for each in sections for k, v in dataclasses.asdict(each).items()}
    names = {key.partition(".")[2] for key in composed.given}
    return {name: value for name, value in values.items() if name in names}


def _nearest(job: PlannedJob, space: SearchSpace, asked: Mapping[str, Any]) -> WhyNot:
    """The fastest plan with the fewest of the asked sizes changed, and of those by the least."""
    names, bounded = [name for name in asked if name in space.fixed], False
    for number in range(1, _MOST_CHANGED + 1):
        plans = []
        for changed in combinations(names, number):
            fixed = {k: v for k, v in space.fixed.items() if k not in changed}
            asked_for = dataclasses.replace(space, fixed=fixed)
            try:
                found = find_plan(job.request(asked_for))
            except UserInputError:
                continue
            bounded |= _is_bounded(found)
            if isinstance(found, ParallelPlan) and not _not_kept(found, asked_for):
                far = sum(abs(math.log2(size_of(found, n) / asked[n])) for n in changed)
                plans.append((far, found.predicted.iteration_time_s, changed, found))
        if plans:
            _, _, changed, found = min(plans, key=lambda each: each[:3])
            return WhyNot(asked=asked, nearest=found, changed=changed, bounded=bounded)
    return WhyNot(asked=asked, bounded=bounded)


def _is_bounded(found: ParallelPlan | NoPlan | EndedEarly) -> bool:
    """Whether time ended a search, or its analysis of what lacks least."""
    if isinstance(found, ParallelPlan):
        return found.search.certificate == "gap"
    return isinstance(found, EndedEarly) or not found.complete


def _not_kept(plan: ParallelPlan, space: SearchSpace) -> list[str]:
    """Sizes that a search was told and its plan has not."""
    return [name for name, size in space.fixed.items() if size_of(plan, name) != size]


def size_of(plan: ParallelPlan, name: str) -> int:
    """A size of a plan's layout by its name in ``WhyNot.asked``."""
    if name == "micro_batch_size":
        return plan.layout.micro_batch_size
    return int(getattr(plan.layout.dims, name))


def _versus(job: PlannedJob, plan: ParallelPlan, variant: Variant) -> Versus:
    own, other = job.priced(job.own), job.priced(variant)
    before, after = own.predicted, other.predicted
    mine, theirs = peak_stage(own), peak_stage(other)
    return Versus(
        plan=own,
        other=other,
        difference=job.difference(variant),
        terms={name: s - before.terms.get(name, 0.0) for name, s in after.terms.items()},
        memory={name: theirs.get(name, 0) - mine.get(name, 0) for name in {**mine, **theirs}},
        notes=tuple(_notes(plan, own)),
    )


def _notes(plan: ParallelPlan, own: ParallelPlan) -> Iterator[str]:
    """In what these prices are not those of the plan's file."""
    said, now = plan.predicted.iteration_time_s, own.predicted.iteration_time_s
    if abs(said - now) > 1e-6 * said:
        yield (
            f"The plan's file says {format_seconds(said)}; priced here and now it is "
            f"{format_seconds(now)} (another version, or a profile that is not here)."
        )
    site, here = plan.provenance.site, own.provenance.site
    if site is not None and here is None:
        yield (
            f"The calibration of the site ({site.name}) that the plan was made with is not here: "
            "intervals are those of the catalogue."
        )
    elif site is not None and here is not None and site.digest != here.digest:
        yield f"The calibration of the site ({here.name}) has changed since the plan was made."
