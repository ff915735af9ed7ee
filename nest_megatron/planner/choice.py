"""The choice among the plans that the search kept: by objective, and on a tie the simpler one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nest_megatron.cost_model.memory import PEAK_ERROR
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.uncertainty import Predictive, predictive
from nest_megatron.errors import UserInputError, typed_setting
from nest_megatron.parallel.layout import is_uniform
from nest_megatron.parallel.objective import Choice, Objective, Shortlist
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.plan import parallel_choice
from nest_megatron.plain import to_plain
from nest_megatron.planner.request import PlanRequest
from nest_megatron.planner.uncertain import (
    bytes_with_risk,
    least_ratio,
    out_of_memory,
    shortlisted,
)
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.outcome import NO_THRESHOLD, StageSolver
from nest_megatron.solver.ranking import SearchResult, SolvedGrid
from nest_megatron.solver.relatives import Relative, relatives, with_memory
from nest_megatron.units import Bytes, Seconds, format_chance, format_gib, to_seconds

#: Chance to run out of memory above which plans that need less are looked for.
_COMFORTABLE = 0.02
#: Share of the memory of a GPU of which more is no advantage: nothing runs out of memory there.
_ENOUGH_FREE = 0.25
#: What is worse than the best by more than this share, by its predicted step over the chance to
#: start, is not looked at any closer: no tie is as wide, nor do intervals differ as much.
_CLOSE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A solved plan with what is expected of it.

    Args:
        is_custom: its stages need a layout, because Megatron cuts others by itself.
        changes: settings of the user that it changes.
    """

    solved: SolvedGrid
    peak_memory_bytes: Bytes
    capacity_bytes: Bytes
    step: Predictive
    out_of_memory: float
    is_custom: bool
    changes: int

    @property
    def virtual(self) -> int:
        """Virtual stages of a pipeline rank."""
        return self.solved.grid.dims.virtual_pipeline_model_parallel_size

    @property
    def free_bytes(self) -> Bytes:
        """Memory that is left on the fullest GPU."""
        return self.capacity_bytes - self.peak_memory_bytes

    def value(self, objective: Objective) -> Seconds:
        """What an objective makes of it; less is better."""
        step_s = {
            Objective.NOMINAL: self.step.median_s,
            Objective.EXPECTED: self.step.expected_s,
            Objective.CAUTIOUS: self.step.quantile_s(0.9),
        }[objective]
        starts = 1.0 if objective is Objective.NOMINAL else 1.0 - self.out_of_memory
        return step_s / starts if starts > 0 else math.inf

    @property
    def complexity(self) -> tuple[object, ...]:
        """The tie rule: what is simpler to run comes first.

        Free memory counts in steps of the error of its prediction, as far as it is of use.
        """
        free = min(self.free_bytes / self.capacity_bytes, _ENOUGH_FREE)
        return (
            self.is_custom,
            self.virtual,
            -math.floor(free / PEAK_ERROR),
            self.changes,
            self.solved.grid.zero.is_fsdp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The plan to take, its runners-up from the fastest on, and how it was chosen.

    Args:
        choice: ``None`` where only the predicted step counts.
        known: what is expected of the plan and its runners-up, as far as it was worked out.
    """

    plan: SolvedGrid
    others: tuple[SolvedGrid, ...]
    choice: Choice | None = None
    known: Mapping[SolvedGrid, Candidate] = dataclasses.field(default_factory=dict)

    def shortlist(self) -> Shortlist | None:
        """Which of the plan and its runners-up could be the fastest, if that can be told."""
        plans = (self.plan, *self.others)
        if not all(plan in self.known for plan in plans):
            return None
        return shortlisted([self.known[plan].step for plan in plans])


def choose_plan(
    request: PlanRequest, grids: GridSpace, result: SearchResult, solve: StageSolver
) -> Chosen:
    """The plan that the request's objective prefers, of those that the search kept.

    Args:
        grids: the space that was searched.
        solve: the stage solver, for relatives of those plans.
    """
    plans, model, objective = result.plans, grids.model, request.objective
    if objective is Objective.NOMINAL and not request.shortlist:
        return Chosen(plan=plans[0], others=plans[1:])
    found = _near(grids, plans, solve, request.tie_percent)
    known = {each.plan: _candidate(request, model, each) for each in _worth(model, found, plans)}
    taken = known[plans[0]]
    if objective is not Objective.NOMINAL:
        allowed = _allowed(request, list(known.values()))
        taken = simplest_of_best(allowed, objective, request.tie_percent)
    others = tuple(plan for plan in plans if plan != taken.solved)
    others = others[: max(request.num_alternatives, int(taken.solved != plans[0]))]
    lower_s = to_seconds(result.certificate.lower_bound)
    choice = Choice(
        objective=objective,
        tie_percent=request.tie_percent,
        num_layouts=len(plans),
        num_relatives=len(found) - len(plans),
        value_s=taken.value(objective),
        bound_s=lower_s * least_ratio(taken.step, objective),
        slower_percent=100.0 * (taken.solved.iteration / plans[0].iteration - 1.0),
        separates=tuple(_separates(taken, known[plans[0]], objective)),
        max_out_of_memory_percent=_missed_limit(request, taken),
    )
    return Chosen(
        plan=taken.solved,
        others=others,
        choice=None if objective is Objective.NOMINAL else choice,
        known=known,
    )


def simplest_of_best(
    candidates: Sequence[Candidate], objective: Objective, tie_percent: float
) -> Candidate:
    """Of the plans that tie with the best the simplest."""
    most = min(each.value(objective) for each in candidates) * (1 + tie_percent / 100)
    ties = [each for each in candidates if each.value(objective) <= most]
    return min(ties, key=lambda each: (*each.complexity, each.value(objective), each.solved.rank))


def runner_up(chosen: Chosen, number: int) -> Chosen:
    """The runner-up of a number, as the user asks for it.

    Raises:
        UserInputError: if there are fewer.
    """
    if number > len(chosen.others):
        raise UserInputError(
            "nest.alternative",
            value=number,
            limit=f"the search ranked {len(chosen.others)} runners-up",
            fix="Give a smaller number, or raise "
            f"{typed_setting('search.num_alternatives')} or {typed_setting('search.max_seconds')}.",
        )
    others = list(chosen.others)
    taken = others.pop(number - 1)
    others = sorted((chosen.plan, *others), key=lambda plan: plan.rank)
    return dataclasses.replace(chosen, plan=taken, others=tuple(others), choice=None)


def _near(
    grids: GridSpace, plans: Sequence[SolvedGrid], solve: StageSolver, tie_percent: float
) -> list[Relative]:
    """The plans that the search kept, and relatives that may be worth more than all of them.

    No plan has less than its predicted step under any objective: relatives that are slower than the
    least of the kept plans' steps over the chance to start, a tie added, are left out.
    """
    kept = [with_memory(grids, plan) for plan in plans]
    least = min(_cost(grids.model, each) for each in kept) * (1 + tie_percent / 100)
    slowest = min(math.floor(min(least, NO_THRESHOLD)), NO_THRESHOLD - 1)
    found = {each.plan: each for each in kept}
    for own in kept:
        enough = bytes_with_risk(grids.model, own.plan.grid, _COMFORTABLE)
        for each in relatives(grids, own, solve, slowest, enough):
            found.setdefault(each.plan, each)
    return list(found.values())


def _cost(model: CostModel, found: Relative) -> float:
    """The predicted step over the chance to start, in ticks."""
    starts = 1.0 - out_of_memory(model, found.plan.grid, found.peak_bytes)
    return found.plan.iteration / starts if starts > 0 else math.inf


def _worth(
    model: CostModel, found: Sequence[Relative], plans: Sequence[SolvedGrid]
) -> Iterator[Relative]:
    """Those that may be chosen or are listed: the rest is not looked at any closer."""
    costs = [_cost(model, each) for each in found]
    most = min(costs) * (1 + _CLOSE)
    kept = set(plans)
    for each, cost in zip(found, costs, strict=True):
        if cost <= most or each.plan in kept:
            yield each


def _candidate(request: PlanRequest, model: CostModel, found: Relative) -> Candidate:
    solved, grid = found.plan, found.plan.grid
    partition = StagePartition(
        boundaries=solved.boundaries,
        pipeline_model_parallel_size=grid.dims.pipeline_model_parallel_size,
    )
    return Candidate(
        solved=solved,
        peak_memory_bytes=found.peak_bytes,
        capacity_bytes=model.capacity_bytes,
        step=predictive(model, grid, partition, to_seconds(solved.iteration)),
        out_of_memory=out_of_memory(model, grid, found.peak_bytes),
        is_custom=not is_uniform(model.spec, partition),
        changes=_changes(request, solved, partition),
    )


def _changes(request: PlanRequest, solved: SolvedGrid, partition: StagePartition) -> int:
    """How many settings of the user a plan changes."""
    if not request.own:
        return 0
    grid = solved.grid
    chosen = parallel_choice(request.spec, grid, partition, request.space.sharding)
    values = {**to_plain(chosen), "micro_batch_size": grid.micro_batch_size}
    return sum(
        to_plain(value) != values[name] for name, value in request.own.items() if name in values
    )


def _allowed(request: PlanRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those whose chance to run out of memory the objective takes; the least where none is."""
    if request.objective is not Objective.CAUTIOUS:
        return list(candidates)
    most = request.max_out_of_memory_percent / 100
    allowed = [each for each in candidates if each.out_of_memory <= most]
    return allowed or [min(candidates, key=lambda each: each.out_of_memory)]


def _missed_limit(request: PlanRequest, taken: Candidate) -> float | None:
    """The limit on the chance to run out of memory, where the plan taken has more."""
    most = request.max_out_of_memory_percent
    missed = request.objective is Objective.CAUTIOUS and 100 * taken.out_of_memory > most
    return most if missed else None


def _separates(taken: Candidate, fastest: Candidate, objective: Objective) -> Iterator[str]:
    """What a plan has that the fastest one has not, in plain words."""
    if taken.solved == fastest.solved:
        return
    if fastest.is_custom and not taken.is_custom:
        yield "stages that need no layout"
    if taken.virtual < fastest.virtual:
        stages = "virtual stage" if taken.virtual == 1 else "virtual stages"
        yield f"{taken.virtual} {stages} on each rank instead of {fastest.virtual}"
    if taken.free_bytes - fastest.free_bytes > PEAK_ERROR * taken.capacity_bytes:
        yield f"{format_gib(taken.free_bytes - fastest.free_bytes)} more memory free"
    if fastest.out_of_memory - taken.out_of_memory >= 0.005:
        less, more = (format_chance(each.out_of_memory) for each in (taken, fastest))
        yield f"a chance of {less} instead of {more} to run out of memory"
    if taken.changes < fastest.changes:
        yield f"{fastest.changes - taken.changes} more of your own settings"
    if fastest.solved.grid.zero.is_fsdp and not taken.solved.grid.zero.is_fsdp:
        yield "the usual checkpoint format"
    gain = 100.0 * (1 - taken.value(objective) / fastest.value(objective))
    if gain >= 0.05 and taken.out_of_memory >= fastest.out_of_memory:
        yield f"a {objective} step that is {gain:.1f} % shorter"
