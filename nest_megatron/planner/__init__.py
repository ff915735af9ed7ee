"""From a request to a plan: price, search, explain. The only package that knows all those below."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from nest_megatron.caching import rare_garbage_collection
from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import MOST_OOM_CHANCE, PeakLimit, out_of_memory
from nest_megatron.cost_model.peak_posterior import PredictedPeak, highest_rank, predicted_peak
from nest_megatron.layout.estimate import Choice, RiskierLayout
from nest_megatron.layout.plan import ParallelPlan, PresentLayout, SearchRecord
from nest_megatron.layout.policy import require_allowed
from nest_megatron.plain import frozen
from nest_megatron.planner.choice import Candidate, candidate, choose_plan, with_runner_up_first
from nest_megatron.planner.layouts import (
    ENDED_EARLY,
    PredictedLayout,
    alternative,
    assemble,
    check_launchable,
    describe_grid,
    estimate_for,
    predict,
    predicted_batches,
    search_record,
)
from nest_megatron.planner.offers import offers
from nest_megatron.planner.request import Deadline, EndedEarly, NoPlan, Request
from nest_megatron.solver.backend import backend_to_run, solver_of
from nest_megatron.solver.outcome import NO_THRESHOLD
from nest_megatron.solver.ranking import SearchResult, SolvedLayout
from nest_megatron.solver.search import Search
from nest_megatron.units import Seconds, Ticks, to_seconds, to_ticks

__all__ = [
    "EndedEarly",
    "NoPlan",
    "Request",
    "check_launchable",
    "describe_grid",
    "estimate_for",
    "plan",
]

#: Time that is kept for what follows a search: pricing its answer and telling it.
_REPORT_SHARE, _REPORT_S = 0.1, 0.5
#: Micro batches that are compared before some plans run.
_MICRO_BATCHES = (1, 2, 4, 8)
#: Called with (candidates solved, best time so far in seconds or None, proven bound in seconds).
Progress = Callable[[int, float | None, float], None]


@rare_garbage_collection()
def plan(
    request: Request, on_progress: Progress | None = None, *, choose: int = 0
) -> ParallelPlan | NoPlan | EndedEarly:
    """Find the fastest plan that fits.

    Args:
        choose: take this runner-up instead of the best (0).

    Returns:
        The plan with its certificate, what is missing if nothing fits, or, if time ended the search
        before it had a plan, what it has proven.

    Raises:
        UserInputError: if no combination of degrees is legal, naming the rules that refuse them, or
            there is no such runner-up.
    """
    deadline = request.deadline()
    request, searched, taken = _choose(request, deadline, on_progress, choose)
    if taken is not None:
        model, find = searched.model, partial(_best, deadline=deadline)
        plans, chosen, best = taken
        first, *others = plans
        shortlist = None
        if request.shortlist:
            from nest_megatron.planner.to_measure import shortlisted

            shortlist = shortlisted(model, plans)
        found = assemble(
            request,
            model,
            best,
            search_record(request, searched.result, searched.seconds, first.solved, choose),
            alternatives=tuple(alternative(model, first, each) for each in others),
            choice=None if choose else _with_riskier(request, deadline, searched, chosen),
            shortlist=shortlist,
            present=_present_layout(request, searched, first.solved),
            offers=offers(best, request, find, partial(_faster, deadline))
            if request.num_alternatives
            else (),
        )
        require_allowed(found, request.policy)
        return found
    record = search_record(request, searched.result, searched.seconds)
    if record.certificate == ENDED_EARLY:
        return EndedEarly(
            lower_bound_s=to_seconds(searched.result.lower_bound),
            max_seconds=request.max_seconds,
            search=record,
        )
    from nest_megatron.planner.shortage import no_plan, refuse_if_nothing_is_legal

    refuse_if_nothing_is_legal(request, searched.result, deadline)
    return no_plan(request, searched.model, record, _before_report(deadline), _best)


class _Searched(NamedTuple):
    """What was searched."""

    search: Search
    result: SearchResult
    seconds: Seconds

    @property
    def model(self) -> CostModel:
        """What its plans are priced by."""
        return self.search.model


#: A plan with its runners-up, the rule that chose it, and its prediction.
_Taken = tuple[Sequence[Candidate], Choice, PredictedLayout]


def _choose(
    request: Request,
    deadline: Deadline,
    on_progress: Progress | None = None,
    number: int = 0,
) -> tuple[Request, _Searched, _Taken | None]:
    """Search a request and take a plan, if something fits.

    The request comes back with the batch that was searched: where the plan does not fit with
    another of a schedule that keeps more micro batches, the largest.
    """
    searched = _search(request, deadline, on_progress)
    if not searched.result.plans:
        return request, searched, None
    model = searched.model
    plans, choice = choose_plan(request, model, searched.result)
    plans = with_runner_up_first(plans, number) if number else plans
    best = predict(request, model, plans[0].solved.layout)
    if larger := _batch_that_does_not_fit(request, model, best):
        return _choose(replace(request, global_batch_size=larger), deadline, on_progress, number)
    return request, searched, (plans, choice, best)


def _batch_that_does_not_fit(
    request: Request, model: CostModel, found: PredictedLayout
) -> int | None:
    """The largest batch of a schedule, if a plan does not fit with one of its batches.

    It keeps most micro batches: a plan that fits with it fits with all.
    """
    batches = predicted_batches(model, found.layout, request.batch_schedule)
    limit = PeakLimit(model, request.max_oom_chance, request.site).of(found.layout)
    most = max(limit, found.predicted.peak_memory_bytes)
    if all(batch.peak_memory_bytes <= most for batch in batches):
        return None
    largest = max(batch.global_batch_size for batch in batches)
    return largest if largest > found.layout.global_batch_size else None


def _search(
    request: Request,
    deadline: Deadline,
    on_progress: Progress | None = None,
    *,
    model: CostModel | None = None,
    like: Search | None = None,
    slowest: Ticks = NO_THRESHOLD,
) -> _Searched:
    """Search a request's space until some time before a deadline.

    Args:
        model: of the request's job, with what it has worked out.
        like: a search of the same job and space, which shares what it has worked out.
        slowest: plans that take longer are of no interest, nor are ties; some plan is, and what
            runs today, if this is not said.
    """

    def report(solved: int, best: Ticks | None, bound: Ticks) -> None:
        assert on_progress is not None
        on_progress(solved, None if best is None else to_seconds(best), to_seconds(bound))

    model = model or request.cost_model()
    ends, is_first = _before_report(deadline), slowest == NO_THRESHOLD
    present = request.present if is_first else None
    if present is not None:
        peak = highest_rank(model, present).total
        if out_of_memory(model, present, peak, request.site) > MOST_OOM_CHANCE:
            present = None
    started = time.perf_counter()
    search = Search(
        model,
        request.global_batch_size,
        request.space,
        solver_of(backend_to_run(request.backend), ends.passed),
        limit=PeakLimit(model, request.max_oom_chance, request.site),
        num_layouts=request.num_alternatives + 1,
        tie_percent=request.tie_percent if is_first else 0.0,
        slowest=slowest,
        like=like,
        out_of_time=ends.passed,
        present=present,
        on_progress=report if on_progress else None,
    )
    result = search.run()
    return _Searched(search, result, time.perf_counter() - started)


def _with_riskier(
    request: Request, deadline: Deadline, searched: _Searched, choice: Choice
) -> Choice:
    """What the limit on the risk costs, if more than a tie: the fastest that rather starts."""
    if request.max_oom_chance >= MOST_OOM_CHANCE or not request.num_alternatives:
        return choice
    model, fastest = searched.model, searched.result.fastest.iteration
    found = _search(
        replace(request, max_oom_chance=MOST_OOM_CHANCE, num_alternatives=0),
        deadline,
        model=model,
        like=searched.search,
        slowest=math.ceil(fastest / (1 + request.tie_percent / 100)) - 1,
    ).result
    if not found.plans:
        return choice
    layout, predicted, _ = predict(request, model, found.plans[0].layout)
    riskier = RiskierLayout(
        layout=layout,
        iteration_time_s=predicted.iteration_time_s,
        out_of_memory=out_of_memory(model, layout, predicted.peak_memory_bytes, request.site),
    )
    return replace(choice, riskier=riskier)


def _before_report(deadline: Deadline) -> Deadline:
    """The time of a search, which leaves some to price and tell its answer."""
    return deadline.without(min(_REPORT_S, _REPORT_SHARE * deadline.seconds))


def _present_layout(
    request: Request, searched: _Searched, best: SolvedLayout
) -> PresentLayout | None:
    """What the job runs today, compared with the plan that is taken."""
    present = request.present
    if present is None:
        return None
    model, kept = searched.model, best == searched.result.present
    if request.present_settings is not None:
        model, kept = request.cost_model(request.present_settings), False
    found = estimate(model, present)
    others = {*searched.result.plans} - {best}
    least = min((other.iteration for other in others), default=None) if kept else None
    return PresentLayout(
        iteration_time_s=found.iteration_time_s,
        peak_memory_bytes=found.peak_memory_bytes,
        capacity_bytes=found.capacity_bytes,
        out_of_memory=out_of_memory(model, present, found.peak_memory_bytes, request.site),
        is_kept=kept,
        next_percent=None if least is None else 100.0 * (least / best.iteration - 1.0),
    )


@frozen
class Ranked:
    """The plan of a request, and others that could be faster, the fastest predicted first."""

    request: Request
    model: CostModel
    candidates: tuple[Candidate, ...]
    peaks: Mapping[SolvedLayout, PredictedPeak]
    record: SearchRecord

    def plan(self, candidate: Candidate) -> ParallelPlan:
        """The plan file of one of the candidates, without runners-up."""
        request, model, layout = self.request, self.model, candidate.solved.layout
        unpriced = replace(request, reliability=None, rates=None)
        return assemble(unpriced, model, predict(request, model, layout), self.record)


@rare_garbage_collection()
def ranked(request: Request, on_progress: Progress | None) -> Ranked | NoPlan | EndedEarly:
    """What ``plan`` chooses among: the plan, and all that were compared with it."""
    request, searched, taken = _choose(request, request.deadline(), on_progress)
    if taken is None:
        found = plan(request)  # why there is none
        assert not isinstance(found, ParallelPlan)
        return found
    model, result, chosen = searched.model, searched.result, taken[0][0].solved
    plans = sorted(
        {*result.known, *_other_micro_batches(request, searched)},
        key=lambda plan: (plan != chosen, plan.rank),
    )[: request.num_alternatives + 1]
    return Ranked(
        request=request,
        model=model,
        candidates=tuple(candidate(request, model, plan, result.present) for plan in plans),
        peaks={plan: predicted_peak(model, plan.layout) for plan in plans},
        record=search_record(request, result, searched.seconds, chosen),
    )


def _other_micro_batches(request: Request, searched: _Searched) -> set[SolvedLayout]:
    """The best plan of each layout with each small micro batch; a search keeps one of a layout."""
    name, space = "micro_batch_size", request.space
    found: set[SolvedLayout] = set()
    most = 0 if name in space.fixed else space.limits.get(name, max(_MICRO_BATCHES))
    for size in (size for size in _MICRO_BATCHES if size <= most):
        narrow = replace(space, fixed={**space.fixed, name: size})
        narrowed = replace(request, space=narrow, present=None)
        found.update(_search(narrowed, request.deadline(), model=searched.model).result.plans)
    return found


def _best(request: Request, deadline: Deadline) -> PredictedLayout | None:
    """The layout that is taken for a request, if something fits."""
    _, _, taken = _choose(request, deadline)
    return None if taken is None else taken[2]


def _faster(deadline: Deadline, request: Request, step_s: Seconds) -> SolvedLayout | None:
    """The fastest plan of a request with a shorter step than some, as far as time allows."""
    request = replace(request, num_alternatives=0)
    found = _search(request, deadline, slowest=to_ticks(step_s)).result
    return next(iter(found.plans), None)
