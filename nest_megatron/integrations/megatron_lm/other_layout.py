"""A plan next to another layout of its job: what differs, and why the other was not taken."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from nest_megatron.config.compose import Settings
from nest_megatron.config.job import fields_of
from nest_megatron.config.keywords import read_layout
from nest_megatron.config.policy import read_policy, settings_within, space_within
from nest_megatron.config.request import site_calibration
from nest_megatron.config.schema import stated_values
from nest_megatron.config.space import (
    buildable_degrees,
    fixed_degrees,
    read_rank_order,
    read_recompute,
    read_zero,
)
from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.cost_model.target_defaults import DEFAULT_TARGET, target_named
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, STATED_ELSEWHERE
from nest_megatron.integrations.megatron_lm.parser import read_argv
from nest_megatron.integrations.megatron_lm.present_layout import refusal_text
from nest_megatron.integrations.plan_job import rates_of, reliability_of
from nest_megatron.layout.dims import DEGREES as LAYOUT_DEGREES
from nest_megatron.layout.dims import REPLICA_DEGREES, SHORT_DEGREES, ParallelDims, RankOrder
from nest_megatron.layout.estimate import Alternative, Difference
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.knobs import KnobConditions, always_on
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.policy import PolicyError
from nest_megatron.layout.rulebook.facts import RELEASES
from nest_megatron.layout.stage_layout import StagePartition, parse_layout, spread_partition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import ContextTraffic, Execution
from nest_megatron.plain import to_plain
from nest_megatron.planner import EndedEarly, NoPlan, Request
from nest_megatron.planner import plan as find_plan
from nest_megatron.planner.layouts import Variant, difference, estimate_for, pricing
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.console import Shown
from nest_megatron.report.layout_tables import layout_words, peak_stage, stages_table, versus_report
from nest_megatron.report.memory_words import plan_verdict
from nest_megatron.report.tables import heading, indented
from nest_megatron.report.terminal import notes_report
from nest_megatron.report.words import term_words
from nest_megatron.solver.space import SearchSpace
from nest_megatron.units import Bytes, Seconds, format_gib, format_seconds

#: Longest time of all searches for layouts of one job, from when it is read.
SEARCH_S = 20.0
_BOUNDED = (
    f"Time ended the search after {SEARCH_S:g} s: what is said of other layouts is what was found "
    "until then."
)
_PP, _VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
#: What a plan was chosen by.
_RULE = ("max_oom_chance", "tie_percent")
#: How context ranks may exchange where the plan's exchange does not go with their number.
_EXCHANGES = (ContextTraffic.P2P, ContextTraffic.A2A, ContextTraffic.ALL_GATHER)
#: Sizes of the user's that are changed to find a legal layout.
_MOST_CHANGED = 2


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Versus(Shown):
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

    def to_dict(self) -> dict[str, Any]:
        """What ``explain --versus --json`` prints."""
        return {
            "plan": to_plain(self.plan.priced()),
            "other": to_plain(self.other.priced()),
            "difference": to_plain(self.difference),
            "term_differences_s": dict(self.terms),
            "memory_differences_bytes": dict(self.memory),
            "notes": list(self.notes),
        }

    def report(self) -> Iterator[RenderableType]:
        """The tables that ``explain --versus`` prints."""
        yield versus_report(self.plan, self.other, self.difference)
        yield notes_report(self.notes)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WhyNot(Shown):
    """Why a plan is not another layout.

    Args:
        asked: the sizes that were asked for, by Megatron's names.
        rule: that refuses every layout with them; empty where one is legal.
        versus: the best layout with them next to the plan, or where none fits, one that does not.
        needed_bytes: the peak of the layout with them that lacks least; ``None`` where one fits.
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

    @property
    def verdict(self) -> str:
        """``illegal``, ``does not fit``, or where it is neither ``slower``, ``faster`` or ``tie``.

        A tie is what predictions do not tell apart with a chance of 90 %.
        """
        if self.rule:
            return "illegal"
        if self.needed_bytes or not self.versus:
            return "does not fit"
        if not self.versus.difference.is_sure:
            return "tie"
        return "faster" if self.versus.difference.chance_faster >= 0.5 else "slower"

    def to_dict(self) -> dict[str, Any]:
        """What ``explain --why-not --json`` prints."""
        return {
            "asked": dict(self.asked),
            "verdict": self.verdict,
            "rule": self.rule,
            "needed_bytes": self.needed_bytes,
            "versus": self.versus and self.versus.to_dict(),
            "nearest": self.nearest and to_plain(self.nearest.priced()),
            "changed": list(self.changed),
            "bounded": self.bounded,
        }

    def report(self) -> Iterator[RenderableType]:
        """What ``explain --why-not`` prints."""
        asked = ", ".join(
            f"{SHORT_DEGREES.get(name, name)} {value}" for name, value in self.asked.items()
        )
        yield Text(f"{asked}: {self._words()}")
        if self._is_plan:
            return
        if self.versus and self.needed_bytes:
            yield heading("What each pipeline rank needs, with even stages")
            yield indented(f"The layout that lacks least: {layout_words(self.versus.other)}")
            yield stages_table(self.versus.other)
        elif self.versus:
            yield Text(
                "What is not named is searched; layers run as in the plan, or in a runner-up."
            )
            yield from self.versus.report()
        if self.verdict in ("illegal", "does not fit"):
            yield heading("The nearest layout that is legal and fits")
            said = "was found that makes" if self.bounded else "makes"
            words = f"No change of one or two of the sizes {said} it legal and fit."
            if nearest := self.nearest:
                names = ", ".join(
                    f"{SHORT_DEGREES.get(n, n)} {self.asked[n]} -> {nearest.layout.sizes[n]}"
                    for n in self.changed
                )
                step = format_seconds(nearest.predicted.iteration_time_s)
                words = f"{names}: {step} a step. {layout_words(nearest)}"
            yield indented(words)
        if self.bounded:
            yield notes_report((_BOUNDED,))

    @property
    def _is_plan(self) -> bool:
        return self.versus is not None and self.versus.other.layout == self.versus.plan.layout

    def _words(self) -> str:
        if self.rule:
            return f"{self.rule}."
        assert self.versus, "a layout that is legal is priced"
        if self.needed_bytes:
            limit = self.versus.other.predicted.capacity_bytes
            needed, missing = map(format_gib, (self.needed_bytes, self.needed_bytes - limit))
            until = " that was found" if self.bounded else ""
            return (
                f"no layout with these sizes is predicted to fit: the least peak{until} is "
                f"{needed}, the limit {format_gib(limit)}, {missing} are missing."
            )
        if self._is_plan:
            return "the plan has these sizes."
        found, verdict = self.versus.difference, plan_verdict(self.versus.other)
        fits = f"legal, {verdict}," if verdict else "legal and fits,"
        percent = f"{abs(found.percent):.1f} %"
        said = f"{fits} but {percent} slower"
        if found.percent <= 0:
            said = f"{fits} and is predicted to be {percent} faster"
        if not found.is_sure:
            said += ", which predictions do not tell apart"
        return f"{said}, because of {term_words(self.versus.terms)}."


class PlannedJob:
    """The job of a plan file, as far as the file says it, with the layer times it was made with."""

    def __init__(self, plan: ParallelPlan, times: LayerTimes | None) -> None:
        self._plan = plan
        self._settings = restored_settings(plan.provenance.settings)
        self._target = target_named(self._settings.target or DEFAULT_TARGET.name)
        release = plan.provenance.framework_version
        self._version = release if release in RELEASES else self._target.megatron_core
        self._values: Mapping[str, Any] = {}
        if launch := plan.launch.get(LAUNCHER):
            self._values = read_argv(launch.script, launch.argv, self._version).values
        cluster = plan.cluster.resized(plan.layout.num_gpus)
        chosen = {name: getattr(plan.choice, name) for name in _RULE if plan.choice}
        self._job = Request(
            spec=plan.model,
            cluster=cluster,
            global_batch_size=plan.layout.global_batch_size,
            settings=self._settings,
            times=times,
            batch_schedule=plan.train.batch_schedule,
            sequence_lengths=plan.train.sequence_lengths,
            not_modelled=plan.search.not_modelled,
            num_alternatives=0,
            remedies=False,
            reliability=reliability_of(plan),
            rates=rates_of(plan),
            site=None if plan.provenance.site is None else site_calibration(cluster)[0],
            space=SearchSpace(version=self._version),
            max_seconds=SEARCH_S,
            begun_s=time.monotonic(),
            **chosen,
        )

    def request(self, space: SearchSpace) -> Request:
        """The search of a space within the policy that holds here.

        Raises:
            PolicyError: if it forbids a size that was named.
        """
        policy = read_policy()
        within = space_within(space, policy, self._job.cluster)
        settings = settings_within(self._settings, policy)
        return replace(self._job, space=replace(space, **within), policy=policy, settings=settings)

    def space(self, composed: Settings) -> SearchSpace:
        """All layouts with the sizes that were named, sharded as the plan's search could."""
        schedule = self._plan.train.batch_schedule
        if composed.parallel.sequence_parallel is False:
            raise UserInputError(
                "sequence_parallel",
                False,
                "plans have it wherever tensor parallelism is on",
                "Give it to --versus.",
            )
        own, zero = self._plan.layout, read_zero(composed.parallel)
        order, fixed = read_rank_order(composed.parallel), fixed_degrees(composed)
        searched = self._plan.search.space.get("zero_stage", f"{own.zero:d}")
        levels = (searched if zero is None else f"{zero:d}").split(", ")
        return SearchSpace(
            fixed=buildable_degrees(self._plan.model, self._target, fixed),
            partition=self._stages(composed, fixed),
            zero_stages=tuple(ZeroStage(int(each)) for each in levels),
            sharding=own.sharding if levels == [f"{own.zero:d}"] else None,
            recompute=read_recompute(composed.parallel),
            execution=self._execution,
            executions={"cp_comm_type": _EXCHANGES, "hierarchical_context_parallel_sizes": ((),)},
            version=self._version,
            batch_unit=schedule.batch_unit if schedule else None,
            rank_orders=tuple(RankOrder) if order is None else (order,),
        )

    @property
    def _execution(self) -> Execution:
        """As the plan's; what its own layout has no room for is on where it never costs time."""
        own, settings = self._plan.layout.execution, self._settings
        recipe = settings.traits.fp8_recipe.value if settings.precision.is_quantized else None
        conditions = KnobConditions(
            spec=self._plan.model,
            accelerator=self._plan.cluster.accelerator.name,
            fp8_recipe=recipe,
            precision=settings.precision,
            can_state=fields_of(self._target),
        )
        every = always_on(own, conditions)
        return every if allowed_execution(every, self._plan.layout) == own else own

    def variant(self, composed: Settings) -> Variant:
        """The plan's layout with what was named instead."""
        config, own = composed.parallel, self._plan.layout.without_stages()
        given = fixed_degrees(composed)
        micro = given.pop("micro_batch_size", own.micro_batch_size)
        if stages := self._stages(composed, given):
            given[_VPP] = stages.num_chunks // stages.pipeline_model_parallel_size
        dims = self._dims(given, read_rank_order(config))
        splits_sequence = config.sequence_parallel
        if splits_sequence is None:
            splits_sequence = dims.tensor_model_parallel_size > 1
        zero, recompute = read_zero(config), read_recompute(config)
        grid = replace(
            own,
            dims=dims,
            micro_batch_size=micro,
            sequence_parallel=splits_sequence,
            recompute=recompute or own.recompute,
            zero=own.zero if zero is None else zero,
        )
        if not stages:
            stages = self._plan.layout.partition
            sizes = stages.pipeline_model_parallel_size, stages.num_chunks
            if sizes != (dims.pipeline_model_parallel_size, dims.num_chunks):
                stages = spread_partition(self._plan.model, dims)
        sharding = self._plan.layout.sharding if zero is None else None
        others = (
            replace(self._execution, cp_comm_type=each, hierarchical_context_parallel_sizes=())
            for each in _EXCHANGES
        )
        executed = (
            replace(grid, execution=allowed_execution(each, grid))
            for each in (self._execution, *others)
        )
        variants = [replace(self.own, layout=e.with_stages(stages, sharding)) for e in executed]
        return next((each for each in variants if not self.refusal(each)), variants[0])

    def _stages(self, composed: Settings, given: Mapping[str, int]) -> StagePartition | None:
        """The stages that were named, for the pipeline's own size where no other is."""
        text = composed.parallel.pipeline_model_parallel_layout
        pp = given.get(_PP, self._plan.layout.dims.pipeline_model_parallel_size)
        return None if text is None else parse_layout(text, self._plan.model, pp)

    def _dims(self, given: Mapping[str, int], rank_order: RankOrder | None) -> ParallelDims:
        """The plan's degrees with those given; the GPUs that are left replicate."""
        own = self._plan.layout.dims
        kept = {name: getattr(own, name) for name in LAYOUT_DEGREES if name != "data_parallel_size"}
        if given.get(_PP, own.pipeline_model_parallel_size) != own.pipeline_model_parallel_size:
            kept[_VPP] = 1
        degrees = {**kept, **given}
        if "data_parallel_size" not in degrees:
            gpus = self._plan.layout.num_gpus
            replica = math.prod(degrees[name] for name in REPLICA_DEGREES)
            if gpus % replica:
                raise UserInputError(
                    "tp * cp * pp",
                    replica,
                    f"it must divide the plan's {gpus} GPUs",
                    "Change one of the sizes.",
                )
            degrees["data_parallel_size"] = gpus // replica
        return ParallelDims(**degrees, rank_order=rank_order or own.rank_order)

    def refusal(self, variant: Variant) -> str:
        """The first rule of Megatron that a layout breaks, with its source; empty for none."""
        gpus, placed = variant.layout.num_gpus, self._plan.layout.num_gpus
        if gpus != placed:
            return f"tp * pp * cp * dp = {gpus}: the plan is for {placed} GPUs"
        return refusal_text(self._job, variant, self._values, self._version, but=STATED_ELSEWHERE)

    def rule(self, composed: Settings) -> str:
        """The same for the plan's layout with what was named."""
        try:
            return self.refusal(self.variant(composed))
        except UserInputError as error:
            return f"{error.what} = {error.value}: {error.limit}"

    @property
    def own(self) -> Variant:
        """The plan's layout."""
        return Variant(settings=self._settings, layout=self._plan.layout)

    def versus(self, variant: Variant) -> Versus:
        """The plan next to a layout."""
        job, price = self._job, pricing(self._job)
        own, other = (
            estimate_for(job, each.layout, settings=each.settings) for each in (self.own, variant)
        )
        before, after = own.predicted, other.predicted
        peak, theirs = peak_stage(own), peak_stage(other)
        return Versus(
            plan=own,
            other=other,
            difference=difference(price(self.own), price(variant)),
            terms={name: s - before.terms.get(name, 0.0) for name, s in after.terms.items()},
            memory={name: theirs.get(name, 0) - peak.get(name, 0) for name in {**peak, **theirs}},
            notes=tuple(_notes(self._plan, own)),
        )


def versus(plan: ParallelPlan, text: str, times: LayerTimes | None = None) -> Versus:
    """A plan next to a layout that differs in what ``text`` says (``read_layout``).

    What is not named stays the plan's; the GPUs that are left replicate, and where the number of
    stages changes they are even.

    Raises:
        UserInputError: for a layout that cannot be read, or that Megatron refuses, with its rule.
    """
    job = PlannedJob(plan, times)
    variant = job.variant(read_layout(text, "--versus"))
    if rule := job.refusal(variant):
        raise UserInputError("--versus", text, rule, "Name other sizes, or more of them.")
    return job.versus(variant)


def why_not(plan: ParallelPlan, text: str, times: LayerTimes | None = None) -> WhyNot:
    """Why a plan is no layout with the sizes that ``text`` names (``read_layout``).

    What is not named is searched, but for how layers run: as in the plan or in a runner-up.

    Raises:
        UserInputError: for a layout that cannot be read.
    """
    job, composed = PlannedJob(plan, times), read_layout(text, "--why-not")
    space = job.space(composed)
    # what was named, in the order in which layouts are said
    names = {key.partition(".")[2] for key in composed.given}
    asked = {
        name: value
        for section in (composed.parallel, composed.train)
        for name, value in stated_values(section).items()
        if name in names
    }
    try:
        request = job.request(space)
        found = find_plan(request)
    except UserInputError as error:
        broken = f"{error.what} = {error.value}: {error.limit}"
        rule = f"a policy forbids it: {broken}"
        if not isinstance(error, PolicyError):
            rule = job.rule(composed) or f"Megatron refuses it: {broken}"
        return replace(_nearest(job, space, asked), rule=rule)
    if isinstance(found, EndedEarly):
        raise UserInputError(
            "--why-not",
            text,
            f"a search of {SEARCH_S:g} s found no layout with these sizes, and proved nothing",
            "Name more sizes.",
        )
    if isinstance(found, NoPlan):
        grid = found.shortage.grid
        layout = grid.with_stages(spread_partition(plan.model, grid.dims), space.sharding)
        nearest = _nearest(job, space, asked)
        return replace(
            nearest,
            versus=job.versus(replace(job.own, layout=layout)),
            needed_bytes=found.shortage.needed_bytes,
            bounded=nearest.bounded or _is_bounded(found),
        )
    if lost := _not_kept(found, space):  # a model without experts has no sizes of experts
        rule = job.rule(composed) or f"{lost[0]} = {asked[lost[0]]}: this model has it not"
        return replace(_nearest(job, space, asked), rule=rule)
    # layers of a runner-up may run otherwise, and save more than a tie
    below = found.predicted.iteration_time_s / (1 + request.tie_percent / 100)
    known = (
        each
        for each in plan.alternatives
        if asked.keys() <= space.fixed.keys()
        and each.iteration_time_s < below
        and not _not_kept(each, space)
    )
    versus = job.versus(replace(job.own, layout=next(known, found).layout))
    return WhyNot(asked=asked, versus=versus, bounded=_is_bounded(found))


def _nearest(job: PlannedJob, space: SearchSpace, asked: Mapping[str, Any]) -> WhyNot:
    """The fastest plan with the fewest of the asked sizes changed, and of those by the least."""
    names, bounded = [name for name in asked if name in space.fixed], False
    for number in range(1, _MOST_CHANGED + 1):
        plans = []
        for changed in combinations(names, number):
            fixed = {k: v for k, v in space.fixed.items() if k not in changed}
            asked_for = replace(space, fixed=fixed)
            try:
                found = find_plan(job.request(asked_for))
            except UserInputError:
                continue
            bounded |= _is_bounded(found)
            if isinstance(found, ParallelPlan) and not _not_kept(found, asked_for):
                far = sum(abs(math.log2(found.layout.sizes[n] / asked[n])) for n in changed)
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


def _not_kept(plan: ParallelPlan | Alternative, space: SearchSpace) -> list[str]:
    """Sizes that were fixed for a search and that its plan lacks."""
    return [name for name, size in space.fixed.items() if plan.layout.sizes[name] != size]


def _notes(plan: ParallelPlan, own: ParallelPlan) -> Iterator[str]:
    """In what these prices are not those of the plan's file."""
    said, now = plan.predicted.iteration_time_s, own.predicted.iteration_time_s
    if abs(said - now) > 1e-6 * said:
        yield (
            f"The plan's file says {format_seconds(said)}; priced here and now it is "
            f"{format_seconds(now)} (another version, or a profile that is not here)."
        )
    site, here = plan.provenance.site, own.provenance.site
    if site and not here:
        yield (
            f"The calibration of the site ({site.name}) that the plan was made with is not here: "
            "intervals are those of the catalogue."
        )
    elif site and here and site.digest != here.digest:
        yield f"The calibration of the site ({here.name}) has changed since the plan was made."
