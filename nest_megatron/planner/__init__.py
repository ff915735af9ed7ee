"""From a request to a plan: price, search, explain. The only package that knows all those below."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_posterior import PredictedPeak, predicted_peak
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.deadline import Deadline
from nest_megatron.layout.batch_schedule import PredictedBatch
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.objective import Objective
from nest_megatron.layout.plan import ParallelPlan, PresentLayout, SearchRecord
from nest_megatron.layout.policy import require_allowed
from nest_megatron.planner.assemble import (
    ENDED_EARLY,
    alternative,
    assemble,
    predicted_batches,
    search_record,
)
from nest_megatron.planner.choice import (
    Candidate,
    Chosen,
    Comparison,
    Peaks,
    choose_plan,
    runner_up,
    worth_comparing,
)
from nest_megatron.planner.headroom import (
    PredictedLayout,
    headroom_of,
    settings_to_start,
    with_larger_margin,
)
from nest_megatron.planner.layouts import check_launchable, estimate_for
from nest_megatron.planner.offers import offers
from nest_megatron.planner.request import Request
from nest_megatron.planner.shortage import (
    EndedEarly,
    NoPlan,
    describe_grid,
    no_plan,
    refuse_if_nothing_is_legal,
)
from nest_megatron.planner.uncertain import comfortable_bytes, out_of_memory
from nest_megatron.solver.backend import choose, solver_of
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.neighbours import peak_of
from nest_megatron.solver.one_partition import as_built
from nest_megatron.solver.outcome import NO_THRESHOLD
from nest_megatron.solver.ranking import SearchResult, SolvedLayout
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace
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
#: Layouts that leave more memory free and are compared with the fastest of all.
_ROOMY_LAYOUTS = 4
#: Micro batches that are compared before some plans run.
_MICRO_BATCHES = (1, 2, 4, 8)
#: Called with (candidates solved, best time so far in seconds or None, proven bound in seconds).
Progress = Callable[[int, float | None, float], None]


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
    searched = _search(request, deadline, on_progress)
    if searched.result.plans:
        chosen, model = _chosen(request, searched, choose), searched.model
        best, find = _predicted(model, chosen), partial(_best, deadline=deadline)
        batches = tuple(predicted_batches(model, best.layout, request.batch_schedule))
        if larger := _too_large(best, batches):
            return plan(dataclasses.replace(request, global_batch_size=larger), choose=choose)
        found = assemble(
            *(request, model, best.layout, best.predicted),
            search_record(request, searched.result, searched.seconds, chosen.plan, choose),
            alternatives=tuple(alternative(chosen.plan, each, chosen) for each in chosen.others),
            choice=chosen.choice,
            shortlist=chosen.shortlist(model) if request.shortlist else None,
            present=_present_layout(request, searched, chosen.plan),
            headroom=headroom_of(best.predicted, request, model, searched.compared, find),
            offers=offers(best, request, find, partial(_faster, request, deadline)),
            batches=batches,
        )
        require_allowed(found, request.policy)
        return found
    record = search_record(request, searched.result, searched.seconds)
    if record.certificate == ENDED_EARLY:
        return EndedEarly(
            lower_bound_s=to_seconds(searched.result.certificate.lower_bound),
            max_seconds=request.max_seconds,
            search=record,
        )
    refuse_if_nothing_is_legal(request, searched.result, deadline)
    return no_plan(request, searched.model, record, _before_report(deadline), _best)


def _too_large(found: PredictedLayout, batches: Sequence[PredictedBatch]) -> int | None:
    """The largest batch of a schedule, which keeps most micro batches, if one of them is too large.

    A plan that fits with it fits with all.
    """
    capacity = found.predicted.capacity_bytes
    if all(batch.peak_memory_bytes <= capacity for batch in batches):
        return None
    largest = max(batch.global_batch_size for batch in batches)
    return largest if largest > found.layout.global_batch_size else None


class _Searched(NamedTuple):
    """What was searched.

    Args:
        compared: plans to choose among, those that the search kept first; empty where only the
            predicted step counts.
        ended_early: time ended the search for some of them.
    """

    model: CostModel
    grids: GridSpace
    result: SearchResult
    seconds: Seconds
    compared: Peaks
    ended_early: bool = False


def _search(request: Request, deadline: Deadline, on_progress: Progress | None = None) -> _Searched:
    """Search a request's space, and again where a plan may be worth more than the fastest ones.

    These searches look no further than what may be taken instead of the plans that are known: among
    plans that leave more memory free, unless the best known ties with what is proven; among those
    that are unlikely enough to run out of memory, if none known is; and among plans with even
    stages, if none of them ties with the best.
    """
    searched = _search_within(request, deadline, on_progress)
    is_nominal = request.objective is Objective.NOMINAL and not request.shortlist
    if is_nominal or not searched.result.plans:
        return searched
    # Without the deadline, so that ranks that search each for itself choose alike.
    solve = as_built(solver_of(choose(request.backend)), request.spec)
    peaks = worth_comparing(request, searched.grids, searched.result.known, solve)
    known, finished = Comparison(request, searched.model, peaks), []

    def add(settings: CostSettings | None, num_layouts: int, space: SearchSpace) -> Comparison:
        """Compare plans of a narrower space too, which may be taken instead of those known."""
        slowest = known.slowest
        if _before_report(deadline).passed():
            finished.append(False)
            return known
        more = _search_within(
            request,
            deadline,
            model=searched.model,
            settings=settings,
            space=space,
            num_layouts=num_layouts,
            slowest=slowest,
        )
        peaks.update(worth_comparing(request, more.grids, more.result.plans, solve, slowest))
        finished.append(more.result.certificate.finished)
        return Comparison(request, searched.model, peaks)

    fastest = searched.result.plans[0]
    roomy = with_larger_margin(request, comfortable_bytes(searched.model, fastest, request.site))
    tied = searched.result.certificate.lower_bound * (1 + request.tie_percent / 100)
    if roomy is not None and known.least > tied:
        known = add(roomy, _ROOMY_LAYOUTS, request.space)
    if not known.allowed:
        allowed = settings_to_start(request, searched.model, fastest)
        known = add(allowed, _ROOMY_LAYOUTS, request.space)
    if known.needs_even_stages():
        add(roomy, 1, dataclasses.replace(request.space, even_stages=True))
    return searched._replace(compared=peaks, ended_early=not all(finished))


def _search_within(
    request: Request,
    deadline: Deadline,
    on_progress: Progress | None = None,
    model: CostModel | None = None,
    settings: CostSettings | None = None,
    space: SearchSpace | None = None,
    num_layouts: int | None = None,
    slowest: Ticks = NO_THRESHOLD,
) -> _Searched:
    """Search a request's space until some time before a deadline.

    Args:
        model: of the same job, that knows prices already; of ``settings`` only the margin counts.
        settings, space: others than the request's.
        num_layouts: to rank; ``None`` for as many as are compared and listed.
        slowest: plans that take longer are of no interest; some plan is if this is not said.
    """

    def report(solved: int, best: Ticks | None, bound: Ticks) -> None:
        assert on_progress is not None
        on_progress(solved, None if best is None else to_seconds(best), to_seconds(bound))

    if model is None:
        model = request.cost_model(settings)
    else:
        model = model.with_memory_margin((settings or request.settings).memory_margin)
    ends = _before_report(deadline)
    started = time.perf_counter()
    compared = 0 if request.objective is Objective.NOMINAL else request.num_compared
    search = Search(
        model,
        request.global_batch_size,
        space or request.space,
        solver_of(choose(request.backend), ends.passed),
        num_layouts=num_layouts or max(request.num_alternatives + 1, compared),
        slowest=slowest,
        out_of_time=ends.passed,
        present=_present_of(request) if slowest == NO_THRESHOLD else None,
        on_progress=report if on_progress else None,
    )
    result = search.run()
    seconds = time.perf_counter() - started
    return _Searched(model, search.grids, result, seconds, {})


def _before_report(deadline: Deadline) -> Deadline:
    """The time of a search, which leaves some to price and tell its answer."""
    return deadline.without(min(_REPORT_S, _REPORT_SHARE * deadline.seconds))


def _present_of(request: Request) -> Layout | None:
    """What the job runs today, with the batch that is planned for."""
    present, batch = request.present, request.global_batch_size
    if present is None or present.global_batch_size == batch:
        return present
    return dataclasses.replace(present, global_batch_size=batch)


def _chosen(request: Request, searched: _Searched, number: int = 0) -> Chosen:
    """What is taken for a request, or the runner-up that the user asks for.

    Raises:
        UserInputError: if there is no such runner-up.
    """
    chosen = choose_plan(request, searched.model, searched.result, searched.compared)
    if searched.ended_early and chosen.choice is not None:
        choice = dataclasses.replace(chosen.choice, ended_early=True)
        chosen = dataclasses.replace(chosen, choice=choice)
    return runner_up(chosen, number) if number else chosen


def _present_layout(
    request: Request, searched: _Searched, best: SolvedLayout
) -> PresentLayout | None:
    """What the job runs today beside the plan that is taken."""
    own = _present_of(request)
    if own is None:
        return None
    model, kept = searched.model, best == searched.result.present
    found = estimate(model, own)
    others = {*searched.result.plans, *searched.compared} - {best}
    least = min((other.iteration for other in others), default=None) if kept else None
    return PresentLayout(
        iteration_time_s=found.iteration_time_s,
        peak_memory_bytes=found.peak_memory_bytes,
        capacity_bytes=found.capacity_bytes,
        out_of_memory=out_of_memory(model, own, found.peak_memory_bytes, request.site),
        is_kept=kept,
        next_percent=None if least is None else 100.0 * (least / best.iteration - 1.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
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
        unpriced = dataclasses.replace(request, reliability=None, rates=None)
        return assemble(
            *(unpriced, model, layout, estimate(model, layout), self.record),
            alternatives=(),
            batches=tuple(predicted_batches(model, layout, request.batch_schedule)),
        )


def ranked(request: Request, on_progress: Progress | None = None) -> Ranked | NoPlan | EndedEarly:
    """What ``plan`` chooses among: the plan, and all that were compared with it."""
    request = dataclasses.replace(request, shortlist=True)
    searched = _search(request, request.deadline(), on_progress)
    if not searched.result.plans:
        found = plan(request)  # why there is none
        assert not isinstance(found, ParallelPlan)
        return found
    model, peaks = searched.model, {**searched.compared, **_other_micro_batches(request, searched)}
    chosen = choose_plan(request, model, searched.result, searched.compared).plan
    fastest = sorted(peaks, key=lambda plan: plan.rank)[: request.num_alternatives]
    known = sorted(
        Comparison(request, model, peaks).candidates([*fastest, chosen]),
        key=lambda each: (each.solved != chosen, each.solved.rank),
    )[: request.num_alternatives + 1]
    return Ranked(
        request=request,
        model=model,
        candidates=tuple(known),
        peaks={e.solved: predicted_peak(model, e.solved.layout) for e in known},
        record=search_record(request, searched.result, searched.seconds, chosen),
    )


def _other_micro_batches(request: Request, searched: _Searched) -> Peaks:
    """The best plan of each layout with each small micro batch; a search keeps one of a layout."""
    name, space, found = "micro_batch_size", request.space, {}
    most = 0 if name in space.fixed else space.limits.get(name, max(_MICRO_BATCHES))
    for size in (size for size in _MICRO_BATCHES if size <= most):
        narrow = dataclasses.replace(space, fixed={**space.fixed, name: size})
        more = _search_within(
            dataclasses.replace(request, space=narrow, present=None),
            request.deadline(),
            model=searched.model,
            num_layouts=request.num_alternatives + 1,
        )
        found.update({plan: peak_of(more.grids, plan) for plan in more.result.plans})
    return found


def _best(request: Request, deadline: Deadline) -> PredictedLayout | None:
    """The best layout, if time allows to find one; why there is none is not asked."""
    searched = _search(request, deadline)
    if not searched.result.plans:
        return None
    return _predicted(searched.model, _chosen(request, searched))


def _predicted(model: CostModel, chosen: Chosen) -> PredictedLayout:
    predicted = estimate(model, chosen.plan.layout)
    others = (to_seconds(each.iteration) for each in chosen.others)
    return PredictedLayout(
        chosen.plan.layout, predicted, min([predicted.iteration_time_s, *others])
    )


def _faster(
    request: Request,
    deadline: Deadline,
    settings: CostSettings,
    space: SearchSpace,
    step_s: Seconds,
) -> SolvedLayout | None:
    """The fastest plan with a shorter step than some, as far as time allows."""
    slowest = to_ticks(step_s)
    found = _search_within(
        request, deadline, settings=settings, space=space, num_layouts=1, slowest=slowest
    )
    return next(iter(found.result.plans), None)
