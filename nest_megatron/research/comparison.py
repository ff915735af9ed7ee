"""One job through several planners, all priced by the same cost model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nest_megatron.cost_model.estimate import mean_terms
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.uncertainty import predictive, probability_faster
from nest_megatron.parallel.objective import SURE, Objective
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner import EndedEarly, NoPlan, PlanRequest, plan
from nest_megatron.planner.assemble import assemble, nothing_searched
from nest_megatron.research.baselines.job import BaselineChoice, ComparisonJob
from nest_megatron.research.baselines.registry import NAMES, Baseline, baselines_named
from nest_megatron.solver.backend import choose, solver_of
from nest_megatron.units import Seconds, format_gib, format_seconds

#: Our own search, which every comparison is relative to.
NEST = "nest"
PLANNERS = (NEST, *NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What one planner made of the job.

    Args:
        plan: its plan with the full prediction; ``None`` if it found nothing.
        reason: how it came to this plan, or why it found none; part of a sentence.
        candidates: layouts that it weighed or ruled out.
        search_s: time that it took.
        relative_throughput: its throughput over that of ``nest``; ``None`` without both plans.
        terms: seconds of its step by what they go into, the mean of all pipeline ranks.
        differences: seconds that each of them takes more than in the plan of ``nest``.
        chance_slower: that its plan is slower than that of ``nest``; ``None`` without both plans.
        ended_early: whether time ended its search before it had a plan.
    """

    name: str
    title: str
    plan: ParallelPlan | None
    reason: str
    candidates: int
    search_s: Seconds
    relative_throughput: float | None = None
    terms: dict[str, Seconds] = dataclasses.field(default_factory=dict)
    differences: dict[str, Seconds] = dataclasses.field(default_factory=dict)
    chance_slower: float | None = None
    ended_early: bool = False

    @property
    def is_tie(self) -> bool:
        """Whether predictions are too far off to tell which of both plans is faster."""
        chance = self.chance_slower
        return chance is not None and 1 - SURE < chance < SURE

    @property
    def lost_s(self) -> Seconds:
        """How much longer its step takes than that of ``nest``."""
        return sum(self.differences.values())

    @property
    def worst_term(self) -> str | None:
        """The term in which it loses most against ``nest``, if it loses anything."""
        if not self.differences or self.relative_throughput is None or self.name == NEST:
            return None
        worst = max(self.differences, key=lambda term: self.differences[term])
        return worst if self.differences[worst] > 0 and self.relative_throughput < 1 else None


def compare(
    request: PlanRequest,
    names: Iterable[str] = PLANNERS,
    on_planner: Callable[[str], None] | None = None,
) -> tuple[Compared, ...]:
    """Plan one job with several planners, each with a fresh cost model.

    Args:
        request: the job; ``max_seconds`` holds for every planner by itself.
        names: planners besides ``nest``, which always takes part and comes first.
        on_planner: called with the name of each planner before it starts.

    Raises:
        UserInputError: for an unknown planner, or a job that no layout is legal for.
    """
    baselines = baselines_named(name for name in dict.fromkeys(names) if name != NEST)
    told = on_planner or (lambda name: None)
    told(NEST)
    ours = _ours(request)
    others = []
    for baseline in baselines:
        told(baseline.name)
        others.append(_against(request, ours, _theirs(request, baseline)))
    return (ours, *others)


def _ours(request: PlanRequest) -> Compared:
    """Our own answer, chosen as the others choose: by the predicted step, without runners-up."""
    found = plan(dataclasses.replace(request, num_alternatives=0, objective=Objective.NOMINAL))
    title = "this project: exact, aware of network and memory"
    search_s, candidates = found.search.seconds, found.search.candidates
    if not isinstance(found, ParallelPlan):
        return Compared(
            name=NEST,
            title=title,
            plan=None,
            reason=_without_plan(found),
            candidates=candidates,
            search_s=search_s,
            ended_early=isinstance(found, EndedEarly),
        )
    proof = "proven optimal in its space"
    if found.search.certificate != "optimal":
        proof = f"at most {found.search.gap_percent:.2f} % slower than the best in its space"
    return Compared(
        name=NEST,
        title=title,
        plan=found,
        reason=proof,
        candidates=candidates,
        search_s=search_s,
        relative_throughput=1.0,
        terms=(terms := _terms(_model(request), found)),
        differences=dict.fromkeys(terms, 0.0),
    )


def _without_plan(found: NoPlan | EndedEarly) -> str:
    if isinstance(found, EndedEarly):
        least = format_seconds(found.lower_bound_s)
        return f"time ended the search before it found a plan; none has a step below {least}"
    nearest = "the nearest plan" if found.complete else "the nearest plan found in the time"
    return f"nothing fits in memory; {nearest} lacks {format_gib(found.missing_bytes)}"


def _model(request: PlanRequest) -> CostModel:
    return CostModel(request.spec, request.cluster, request.settings, request.times)


def _terms(model: CostModel, found: ParallelPlan) -> dict[str, Seconds]:
    return mean_terms(model, found.grid(), found.partition())


def _theirs(request: PlanRequest, baseline: Baseline) -> Compared:
    """A baseline's answer, its plan assembled as ours is."""
    model, started = _model(request), time.perf_counter()
    deadline = request.deadline()
    choice = baseline.find(
        ComparisonJob(
            model=model,
            global_batch_size=request.global_batch_size,
            space=request.space,
            solve_stages=solver_of(choose(request.backend), deadline.passed),
            out_of_time=deadline.passed,
        )
    )
    search_s = time.perf_counter() - started
    found = _assembled(request, model, choice)
    ended = choice.plan is None and deadline.passed()
    return Compared(
        name=baseline.name,
        title=baseline.title,
        search_s=search_s,
        plan=found,
        reason="time ended its search before it found a plan" if ended else choice.reason,
        ended_early=ended,
        candidates=choice.candidates,
        terms={} if found is None else _terms(model, found),
    )


def _assembled(
    request: PlanRequest, model: CostModel, choice: BaselineChoice
) -> ParallelPlan | None:
    if choice.plan is None:
        return None
    return assemble(model, request.settings, choice.plan, (), nothing_searched())


def _against(request: PlanRequest, ours: Compared, theirs: Compared) -> Compared:
    """A baseline's answer with what it loses."""
    if ours.plan is None or theirs.plan is None:
        return theirs
    best, other = ours.plan.predicted, theirs.plan.predicted
    return dataclasses.replace(
        theirs,
        relative_throughput=best.iteration_time_s / other.iteration_time_s,
        differences={name: theirs.terms[name] - ours.terms[name] for name in ours.terms},
        chance_slower=_chance_slower(_model(request), ours.plan, theirs.plan),
    )


def _chance_slower(model: CostModel, ours: ParallelPlan, theirs: ParallelPlan) -> float:
    """Chance that their step takes longer than ours."""
    a, b = (
        predictive(model, plan.grid(), plan.partition(), plan.predicted.iteration_time_s)
        for plan in (ours, theirs)
    )
    return probability_faster(a, b)
