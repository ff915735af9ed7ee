"""The rule of choice: the fastest plan within the allowed risk, and on a tie the simplest."""

from __future__ import annotations

from collections.abc import Sequence

from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import MOST_OOM_CHANCE, out_of_memory
from nest_megatron.cost_model.peak_posterior import highest_rank
from nest_megatron.cost_model.site import expected
from nest_megatron.cost_model.uncertainty import Predictive
from nest_megatron.errors import UserInputError, typed_setting
from nest_megatron.layout.estimate import Choice
from nest_megatron.layout.layout import layout_arguments
from nest_megatron.layout.stage_layout import is_uniform
from nest_megatron.plain import frozen, to_plain
from nest_megatron.planner.request import Request
from nest_megatron.solver.ranking import SearchResult, SolvedLayout, layout_of
from nest_megatron.units import Bytes, Seconds, to_seconds


@frozen
class Candidate:
    """A solved plan with what is expected of it.

    Args:
        is_custom: its stages need a layout, because Megatron cuts others by itself.
        changes: settings of the user that it changes.
        is_present: it is what the job runs today.
    """

    solved: SolvedLayout
    peak_memory_bytes: Bytes
    step: Predictive
    out_of_memory: float
    is_custom: bool
    changes: int
    is_present: bool = False

    @property
    def step_s(self) -> Seconds:
        """The predicted step; at a calibrated site, that which half of the runs stay below."""
        return self.step.median_s

    @property
    def complexity(self) -> tuple[object, ...]:
        """The tie rule: what runs already comes first, then what is simpler to run."""
        dims = self.solved.layout.dims
        return (
            not self.is_present,
            self.is_custom,
            dims.pipeline_model_parallel_size,
            dims.virtual_pipeline_model_parallel_size,
            self.changes,
            self.out_of_memory,
            self.step_s,
            self.solved.rank,
        )


def candidate(
    request: Request, model: CostModel, plan: SolvedLayout, present: SolvedLayout | None = None
) -> Candidate:
    """A solved plan with what is expected of it.

    Args:
        present: the one that runs today, if any does.
    """
    layout, peak = plan.layout, highest_rank(model, plan.layout).total
    return Candidate(
        solved=plan,
        peak_memory_bytes=peak,
        step=expected(request.site, model, layout, to_seconds(plan.iteration)),
        out_of_memory=out_of_memory(model, layout, peak, request.site),
        is_custom=not is_uniform(model.spec, layout.partition),
        changes=_changes(request, plan),
        is_present=plan == present,
    )


def allowed(candidates: Sequence[Candidate], max_oom_chance: float) -> list[Candidate]:
    """Those that run out of memory with at most a chance; the least likely if none does.

    What runs today shows by that that it fits: it is allowed while it is likely to.
    """
    found = [
        each
        for each in candidates
        if each.out_of_memory <= (MOST_OOM_CHANCE if each.is_present else max_oom_chance)
    ]
    return found or [min(candidates, key=lambda each: each.out_of_memory)]


def ties(candidates: Sequence[Candidate], tie_percent: float) -> list[Candidate]:
    """Those that take hardly longer than the fastest."""
    longest_s = min(each.step_s for each in candidates) * (1 + tie_percent / 100)
    return [each for each in candidates if each.step_s <= longest_s]


def choose_plan(
    request: Request, model: CostModel, result: SearchResult
) -> tuple[tuple[Candidate, ...], Choice]:
    """The simplest of the plans that tie with the fastest that a search found.

    Args:
        result: of at least one plan.

    Returns:
        The plan and its runners-up, those from the fastest on, and how it was chosen.
    """
    known = {plan: candidate(request, model, plan, result.present) for plan in result.known}
    fitting = allowed([*known.values()], request.max_oom_chance)
    tied = ties(fitting, request.tie_percent)
    taken = min(tied, key=lambda each: each.complexity)
    fastest = min(fitting, key=lambda each: (each.step_s, each.solved.rank))
    others = [
        known[plan]
        for plan in dict.fromkeys((fastest.solved, *result.plans))
        if plan != taken.solved
        and (plan == fastest.solved or layout_of(plan.layout) != layout_of(taken.solved.layout))
    ]
    choice = Choice(
        max_oom_chance=request.max_oom_chance,
        tie_percent=request.tie_percent,
        num_tied=len({layout_of(each.solved.layout) for each in tied}),
        fastest_s=fastest.step_s,
    )
    return (taken, *others[: max(request.num_alternatives, int(fastest != taken))]), choice


def with_runner_up_first(ranked: Sequence[Candidate], number: int) -> tuple[Candidate, ...]:
    """A plan and its runners-up, with the runner-up of a number in the plan's place.

    Raises:
        UserInputError: if there are fewer.
    """
    plan, *others = ranked
    if number > len(others):
        raise UserInputError(
            "nest.alternative",
            number,
            f"the search ranked {len(others)} runners-up",
            "Give a smaller number, or raise "
            f"{typed_setting('search.num_alternatives')} or {typed_setting('search.max_seconds')}.",
        )
    taken = others.pop(number - 1)
    return (taken, *sorted((plan, *others), key=lambda each: each.solved.rank))


def _changes(request: Request, plan: SolvedLayout) -> int:
    """How many settings of the user a plan changes."""
    if not request.own:
        return 0
    chosen = to_plain(layout_arguments(request.spec, plan.layout))
    values = {**chosen, "micro_batch_size": plan.layout.micro_batch_size}
    return sum(
        to_plain(value) != values[name] for name, value in request.own.items() if name in values
    )
