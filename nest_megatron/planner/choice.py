"""The choice among the plans that the search kept: by objective, and on a tie the simpler one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from nest_megatron.cost_model.memory import PEAK_ERROR
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.site import expected
from nest_megatron.cost_model.uncertainty import Predictive
from nest_megatron.errors import UserInputError, typed_setting
from nest_megatron.layout.layout import layout_arguments
from nest_megatron.layout.objective import SURE, Choice, Objective, Shortlist
from nest_megatron.layout.stage_layout import is_uniform
from nest_megatron.plain import to_plain
from nest_megatron.planner.request import Request
from nest_megatron.planner.uncertain import comfortable_bytes, least_s, out_of_memory, shortlisted
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.neighbours import neighbours, peak_of
from nest_megatron.solver.outcome import NO_THRESHOLD, StageSolver
from nest_megatron.solver.ranking import SearchResult, SolvedLayout, layout_of
from nest_megatron.units import Bytes, Seconds, Ticks, format_chance, format_gib, to_seconds

#: Plans to choose among, each with the highest peak of memory over its ranks.
Peaks = Mapping[SolvedLayout, Bytes]

#: Neighbours are looked for of the kept plans, then of those that tie with the best of them all.
_ROUNDS = 2
#: Share of the memory of a GPU of which more is no advantage: nothing runs out of memory there.
_ENOUGH_FREE = 0.25
#: What takes longer than the best is worth by more than this share is not looked at any closer: no
#: tie is as wide, nor do intervals differ as much.
_CLOSE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A solved plan with what is expected of it.

    Args:
        is_custom: its stages need a layout, because Megatron cuts others by itself.
        changes: settings of the user that it changes.
        is_present: it is what the job runs today.
    """

    solved: SolvedLayout
    peak_memory_bytes: Bytes
    capacity_bytes: Bytes
    step: Predictive
    out_of_memory: float
    is_custom: bool
    changes: int
    is_present: bool = False

    @property
    def virtual(self) -> int:
        """Virtual stages of a pipeline rank."""
        return self.solved.layout.dims.virtual_pipeline_model_parallel_size

    @property
    def free_bytes(self) -> Bytes:
        """Memory that is left at the highest peak."""
        return self.capacity_bytes - self.peak_memory_bytes

    def step_s(self, objective: Objective) -> Seconds:
        """The step that an objective counts, if the plan starts; less is better."""
        return {
            Objective.NOMINAL: self.step.median_s,
            Objective.EXPECTED: self.step.expected_s,
            Objective.CAUTIOUS: self.step.quantile_s(0.9),
        }[objective]

    @property
    def steps_free(self) -> int:
        """Free memory in steps of the error of its prediction, as far as it is of use."""
        free = min(self.free_bytes / self.capacity_bytes, _ENOUGH_FREE)
        return math.floor(free / PEAK_ERROR)

    @property
    def complexity(self) -> tuple[object, ...]:
        """The tie rule: what runs already comes first, then what is simpler to run."""
        return (
            not self.is_present,
            self.is_custom,
            self.virtual,
            -self.steps_free,
            self.changes,
            self.solved.layout.zero.is_fsdp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The plan to take, its runners-up from the fastest on, and how it was chosen.

    Args:
        choice: ``None`` where only the predicted step counts.
        known: what is expected of the plan and its runners-up, as far as it was worked out.
    """

    plan: SolvedLayout
    others: tuple[SolvedLayout, ...]
    choice: Choice | None = None
    known: Mapping[SolvedLayout, Candidate] = dataclasses.field(default_factory=dict)

    def shortlist(self, model: CostModel) -> Shortlist | None:
        """Which of the plan and its runners-up could be the fastest, if that can be told."""
        plans = (self.plan, *self.others)
        if not all(plan in self.known for plan in plans):
            return None
        steps = [self.known[plan].step for plan in plans]
        return shortlisted(model, steps, [plan.layout for plan in plans])


class Comparison:
    """Solved plans by their predicted steps, in ticks, with the price of running out of memory.

    Args:
        present: the one that runs today, if any does.
    """

    def __init__(
        self,
        request: Request,
        model: CostModel,
        peaks: Peaks,
        present: SolvedLayout | None = None,
    ) -> None:
        self.request, self.model, self.peaks, self.present = request, model, peaks, present
        self.chances = {
            plan: out_of_memory(model, plan.layout, peak, request.site)
            for plan, peak in peaks.items()
        }
        most = request.most_out_of_memory
        self.allowed = [plan for plan, chance in self.chances.items() if chance <= most]
        self.values = with_retries(
            [float(plan.iteration) for plan in self.allowed],
            [self.chances[plan] for plan in self.allowed],
            request.failed_start_percent,
        )
        self.least = min(self.values, default=math.inf)

    @property
    def slowest(self) -> Ticks:
        """The longest predicted step with which another plan may be taken instead of these.

        No plan has less than its step under any objective. Where none of these is allowed, any is.
        """
        longest_tie = self.least * (1 + self.request.tie_percent / 100)
        return math.floor(min(longest_tie, NO_THRESHOLD - 1))

    def ties(self) -> list[SolvedLayout]:
        """Those that tie with the best; the least likely to run out where none is allowed."""
        if not self.allowed:
            return [min(self.chances, key=self.chances.__getitem__)]
        chances = [self.chances[plan] for plan in self.allowed]
        return [self.allowed[n] for n in _ties(self.values, chances, self.request.tie_percent)]

    def needs_even_stages(self) -> bool:
        """Whether none with stages that Megatron cuts by itself ties with the best."""
        space, spec = self.request.space, self.model.spec
        if space.even_stages or space.partition is not None:
            return False
        return not any(is_uniform(spec, plan.layout.partition) for plan in self.ties())

    def candidates(self, listed: Sequence[SolvedLayout]) -> Iterator[Candidate]:
        """Those that may be chosen or are listed: the rest is not looked at any closer.

        A site's calibration may move any of them to the front.
        """
        most, model = self.least * (1 + _CLOSE), self.model
        most = most if self.request.site is None else math.inf
        for plan, peak in self.peaks.items():
            if plan.iteration <= most or plan in listed:
                step_s = to_seconds(plan.iteration)
                yield Candidate(
                    solved=plan,
                    peak_memory_bytes=peak,
                    capacity_bytes=model.capacity_bytes,
                    step=expected(self.request.site, model, plan.layout, step_s),
                    out_of_memory=self.chances[plan],
                    is_custom=not is_uniform(model.spec, plan.layout.partition),
                    changes=_changes(self.request, plan),
                    is_present=plan == self.present,
                )


def worth_comparing(
    request: Request,
    grids: GridSpace,
    plans: Sequence[SolvedLayout],
    solve: StageSolver,
    slowest: Ticks = NO_THRESHOLD - 1,
) -> dict[SolvedLayout, Bytes]:
    """The plans that a search kept, and neighbours that may be worth more than all of them.

    Args:
        grids: the space that was searched.
        solve: the stage solver.
        slowest: what takes longer is worth less than what is already known.
    """
    found = {plan: peak_of(grids, plan) for plan in plans}
    if not found:
        return found
    slowest = min(slowest, Comparison(request, grids.model, found).slowest)
    asked = list(plans)
    for _ in range(_ROUNDS):
        for own in asked:
            enough = comfortable_bytes(grids.model, own, request.site)
            for plan, peak in neighbours(grids, own, solve, slowest, enough):
                found.setdefault(plan, peak)
        ties = Comparison(request, grids.model, found).ties()
        asked = [plan for plan in ties if plan not in asked]
    return found


def choose_plan(request: Request, model: CostModel, result: SearchResult, peaks: Peaks) -> Chosen:
    """The plan that the request's objective prefers.

    Args:
        result: of the search of the whole space.
        peaks: plans to choose among, those that this search kept first (``worth_comparing``);
            empty where only the predicted step counts.
    """
    plans, objective = result.plans, request.objective
    candidates = [*Comparison(request, model, peaks, result.present).candidates(result.known)]
    known = {each.solved: each for each in candidates}
    if objective is Objective.NOMINAL or not peaks:
        best = result.fastest
        rest = tuple(plan for plan in plans if plan != best)
        return Chosen(plan=best, others=rest, known=known)
    fastest = known[plans[0]]
    allowed = allowed_of(candidates, request.most_out_of_memory)
    values = values_of(allowed, objective, request.failed_start_percent)
    number = simplest_of_best(allowed, values, request.tie_percent)
    taken = allowed[number]
    others = {*_best_of_layouts(request, candidates), plans[0]} - {taken.solved}
    num_others = max(request.num_alternatives, int(taken.solved != plans[0]))
    num_layouts = len({layout_of(plan.layout) for plan in peaks})
    choice = Choice(
        objective=objective,
        tie_percent=request.tie_percent,
        num_layouts=num_layouts,
        num_neighbours=len(peaks) - num_layouts,
        value_s=values[number],
        bound_s=least_s(request, to_seconds(result.certificate.lower_bound), taken.step),
        slower_percent=100.0 * (taken.solved.iteration / fastest.solved.iteration - 1.0),
        separates=tuple(_separates(request, taken, fastest)),
        max_out_of_memory_percent=100 * request.most_out_of_memory,
    )
    listed = tuple(sorted(others, key=lambda plan: plan.rank)[:num_others])
    return Chosen(plan=taken.solved, others=listed, choice=choice, known=known)


def with_retries(
    steps: Sequence[Seconds], chances: Sequence[float], failed_start_percent: float
) -> list[Seconds]:
    """The mean step of each plan, where one that runs out of memory is followed by another.

    Peaks of a job's plans are predicted with one error. So a plan that runs out tells of the
    others: one with half its chance runs out then in one of two cases, one with a greater chance
    in all. After each failure the plan with the least mean step from there on is started. Where the
    plan least likely to run out has failed, it takes its step over the chance to start.

    Args:
        steps: of each plan if it starts.
        chances: of each plan to run out of memory.
        failed_start_percent: of the shortest step, for each start that fails.

    A tenth of a chance to run out costs 0.1 * (4 % + 2 %) where the next plan is 2 % slower:

    >>> [round(each, 3) for each in with_retries([1.0, 1.02], [0.1, 0.0], 4.0)]
    [1.006, 1.02]
    """
    failed_s = failed_start_percent / 100 * min(steps, default=0.0)
    order = sorted(range(len(steps)), key=chances.__getitem__)
    safer: list[tuple[float, Seconds, Seconds]] = []
    after: dict[float, Seconds] = {}
    for chance, plans in groupby(order, key=chances.__getitem__):
        step_s = min(steps[plan] for plan in plans)
        alone = step_s / (1 - chance) if chance < 1 else math.inf
        after[chance] = min(
            (
                less_s + less / chance * (failed_s + then_s - less_s)
                for less, less_s, then_s in safer
            ),
            default=alone,
        )
        safer.append((chance, step_s, after[chance]))
    return [
        step_s + chance * (failed_s + after[chance] - step_s)
        for step_s, chance in zip(steps, chances, strict=True)
    ]


def allowed_of(candidates: Sequence[Candidate], most: float) -> list[Candidate]:
    """Those that run out of memory with a chance of at most this; the least likely if none does."""
    allowed = [each for each in candidates if each.out_of_memory <= most]
    return allowed or [min(candidates, key=lambda each: each.out_of_memory)]


def values_of(
    candidates: Sequence[Candidate], objective: Objective, failed_start_percent: float
) -> list[Seconds]:
    """What an objective makes of each of a job's plans; less is better."""
    steps = [each.step_s(objective) for each in candidates]
    if objective is Objective.NOMINAL:
        return steps
    chances = [each.out_of_memory for each in candidates]
    return with_retries(steps, chances, failed_start_percent)


def simplest_of_best(
    candidates: Sequence[Candidate], values: Sequence[Seconds], tie_percent: float
) -> int:
    """Index of the simplest of the plans that tie with the best."""
    chances = [each.out_of_memory for each in candidates]
    return min(
        _ties(values, chances, tie_percent),
        key=lambda number: (
            *candidates[number].complexity,
            values[number],
            candidates[number].solved.rank,
        ),
    )


def _ties(values: Sequence[float], chances: Sequence[float], tie_percent: float) -> list[int]:
    """Indices of the plans that tie with the best.

    What is simpler is taken for time, not for a risk: a tie runs out of memory no more often than
    the best does, if not in less than one of ten starts.
    """
    least = min(values)
    risk = max(1 - SURE, chances[values.index(least)])
    return [
        number
        for number, (value, chance) in enumerate(zip(values, chances, strict=True))
        if value <= least * (1 + tie_percent / 100) and chance <= risk
    ]


def _best_of_layouts(request: Request, candidates: Sequence[Candidate]) -> set[SolvedLayout]:
    """The best plan of each layout under the request's objective."""
    values = values_of(candidates, request.objective, request.failed_start_percent)
    most, pairs = request.most_out_of_memory, zip(values, candidates, strict=True)
    worst_first = sorted(
        pairs, key=lambda pair: (pair[1].out_of_memory > most, pair[0], pair[1].solved.rank)
    )[::-1]
    return set({layout_of(each.solved.layout): each.solved for _, each in worst_first}.values())


def runner_up(chosen: Chosen, number: int) -> Chosen:
    """The runner-up of a number, as the user asks for it.

    Raises:
        UserInputError: if there are fewer.
    """
    if number > len(chosen.others):
        raise UserInputError(
            "nest.alternative",
            number,
            limit=f"the search ranked {len(chosen.others)} runners-up",
            fix="Give a smaller number, or raise "
            f"{typed_setting('search.num_alternatives')} or {typed_setting('search.max_seconds')}.",
        )
    others = list(chosen.others)
    taken = others.pop(number - 1)
    others = sorted((chosen.plan, *others), key=lambda plan: plan.rank)
    return dataclasses.replace(chosen, plan=taken, others=tuple(others), choice=None)


def _changes(request: Request, plan: SolvedLayout) -> int:
    """How many settings of the user a plan changes."""
    if not request.own:
        return 0
    chosen = to_plain(layout_arguments(request.spec, plan.layout))
    values = {**chosen, "micro_batch_size": plan.layout.micro_batch_size}
    return sum(
        to_plain(value) != values[name] for name, value in request.own.items() if name in values
    )


def _separates(request: Request, taken: Candidate, fastest: Candidate) -> Iterator[str]:
    """What a plan has that the fastest one has not, in plain words."""
    if taken.solved == fastest.solved:
        return
    if fastest.is_custom and not taken.is_custom:
        yield "stages that need no layout"
    if taken.virtual < fastest.virtual:
        stages = "virtual stage" if taken.virtual == 1 else "virtual stages"
        yield f"{taken.virtual} {stages} on each rank instead of {fastest.virtual}"
    if taken.steps_free > fastest.steps_free:
        yield f"{format_gib(taken.free_bytes - fastest.free_bytes)} more memory free"
    if fastest.out_of_memory - taken.out_of_memory >= 0.005:
        less, more = (format_chance(each.out_of_memory) for each in (taken, fastest))
        yield f"a chance of {less} instead of {more} to run out of memory"
    if taken.changes < fastest.changes:
        yield f"{fastest.changes - taken.changes} more of your own settings"
    if fastest.solved.layout.zero.is_fsdp and not taken.solved.layout.zero.is_fsdp:
        yield "the usual checkpoint format"
    objective = request.objective
    gain = 100.0 * (1 - taken.step_s(objective) / fastest.step_s(objective))
    if gain >= 0.05 and taken.out_of_memory >= fastest.out_of_memory:
        yield f"a {objective} step that is {gain:.1f} % shorter"
