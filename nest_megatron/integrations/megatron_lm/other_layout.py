"""A plan beside another layout of its job: what differs, and why the other was not taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from nest_megatron.config.keywords import read_layout
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.plan_job import SEARCH_S, PlannedJob
from nest_megatron.layout.dims import SHORT_DEGREES
from nest_megatron.layout.estimate import Difference
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.stage_layout import spread_partition
from nest_megatron.plain import to_plain
from nest_megatron.planner import EndedEarly, NoPlan
from nest_megatron.planner import plan as find_plan
from nest_megatron.planner.layouts import Variant
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.before_after import peak_stage
from nest_megatron.report.console import Shown
from nest_megatron.report.memory_words import plan_verdict
from nest_megatron.report.words import term_words
from nest_megatron.solver.space import SearchSpace
from nest_megatron.units import Bytes, Seconds, format_gib, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

_BOUNDED = (
    f"Time ended the search after {SEARCH_S:g} s: what is said of other layouts is what was found "
    "until then."
)
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
        from nest_megatron.report.before_after import versus_report
        from nest_megatron.report.terminal import notes_report

        yield versus_report(self.plan, self.other, self.difference, self.terms, self.memory)
        yield notes_report(self.notes)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WhyNot(Shown):
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

    @property
    def verdict(self) -> str:
        """``illegal``, ``does not fit``, or where it is neither ``slower``, ``faster`` or ``tie``.

        A tie is what predictions do not tell apart with a chance of 90 %.
        """
        if self.rule:
            return "illegal"
        if self.needed_bytes is not None or self.versus is None:
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
        from rich.text import Text

        from nest_megatron.report.before_after import layout_words, stages_table
        from nest_megatron.report.tables import heading, indented
        from nest_megatron.report.terminal import notes_report

        asked = ", ".join(
            f"{SHORT_DEGREES.get(name, name)} {value}" for name, value in self.asked.items()
        )
        yield Text(f"{asked}: {self._words()}")
        if self.versus is not None and self.needed_bytes is not None:
            yield heading("What each pipeline rank needs, with even stages")
            yield indented(f"The layout that needs least: {layout_words(self.versus.other)}")
            yield stages_table(self.versus.other)
        elif self.versus is not None:
            yield Text("What is not named is searched; sharding and execution are the plan's.")
            yield from self.versus.report()
        if self.verdict in ("illegal", "does not fit"):
            yield heading("The nearest layout that is legal and fits")
            yield indented(_nearest_words(self))
        if self.bounded:
            yield notes_report((_BOUNDED,))

    def _words(self) -> str:
        if self.rule:
            return f"Megatron refuses it. {self.rule}."
        assert self.versus is not None, "a layout that is legal is priced"
        if self.needed_bytes is not None:
            limit = self.versus.other.predicted.capacity_bytes
            needed, missing = map(format_gib, (self.needed_bytes, self.needed_bytes - limit))
            until = " that was found" if self.bounded else ""
            return (
                f"no layout with these sizes is predicted to fit: the least peak{until} is "
                f"{needed}, the limit {format_gib(limit)}, {missing} are missing."
            )
        found, verdict = self.versus.difference, plan_verdict(self.versus.other)
        fits = f"legal, {verdict}," if verdict else "legal and fits,"
        percent = f"{abs(found.percent):.1f} %"
        said = f"{fits} but {percent} slower"
        if found.percent <= 0:
            said = f"{fits} and is predicted to be {percent} faster"
        if not found.is_sure:
            said += ", which predictions do not tell apart"
        return f"{said}, because of {term_words(self.versus.terms)}."


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
        raise UserInputError(
            "--versus", text, f"Megatron refuses it: {rule}", "Name other sizes, or more of them."
        )
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
    # what was named, in the order in which layouts are said
    sections = (composed.parallel, composed.train)
    values = {name: each.stated().get(name) for each in sections for name in vars(each)}
    names = {key.partition(".")[2] for key in composed.given}
    asked = {name: value for name, value in values.items() if name in names}
    try:
        found = find_plan(job.request(space))
    except UserInputError as error:
        rule = job.rule(composed) or f"{error.what} = {error.value}: {error.limit}"
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
        variant = job.variant_of(grid, spread_partition(plan.model, grid.dims))
        nearest = _nearest(job, space, asked)
        return replace(
            nearest,
            versus=_versus(job, plan, variant),
            needed_bytes=found.shortage.needed_bytes,
            bounded=nearest.bounded or _is_bounded(found),
        )
    if lost := _not_kept(found, space):  # a model without experts has no sizes of experts
        rule = job.rule(composed) or f"{lost[0]} = {asked[lost[0]]}: this model has it not"
        return replace(_nearest(job, space, asked), rule=rule)
    variant = job.variant_of(found.layout.without_stages(), found.layout.partition)
    return WhyNot(asked=asked, versus=_versus(job, plan, variant), bounded=_is_bounded(found))


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


def _not_kept(plan: ParallelPlan, space: SearchSpace) -> list[str]:
    """Sizes that a search was told and its plan has not."""
    return [name for name, size in space.fixed.items() if plan.layout.sizes[name] != size]


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


def _nearest_words(found: WhyNot) -> str:
    from nest_megatron.report.before_after import layout_words

    if (nearest := found.nearest) is None:
        said = "was found that makes" if found.bounded else "makes"
        return f"No change of one or two of the sizes {said} it legal and fit."
    sizes = {name: nearest.layout.sizes[name] for name in found.changed}
    names = ", ".join(
        f"{SHORT_DEGREES.get(n, n)} {found.asked[n]} -> {size}" for n, size in sizes.items()
    )
    step = format_seconds(nearest.predicted.iteration_time_s)
    return f"{names}: {step} a step. {layout_words(nearest)}"
