"""The rule of choice: the fastest plan within the allowed risk, and on a tie the simplest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import MOST_OOM_CHANCE, out_of_memory
from nest_megatron.cost_model.peak_posterior import predicted_peak
from nest_megatron.cost_model.site import expected
from nest_megatron.cost_model.uncertainty import Predictive
from nest_megatron.errors import UserInputError, typed_setting
from nest_megatron.layout.estimate import Choice, Shortlist
from nest_megatron.layout.layout import layout_arguments
from nest_megatron.layout.stage_layout import is_uniform
from nest_megatron.plain import to_plain
from nest_megatron.planner.request import Request
from nest_megatron.solver.ranking import SearchResult, SolvedLayout, layout_of
from nest_megatron.units import Bytes, Seconds, to_seconds


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The plan to take, its runners-up from the fastest on, and how it was chosen.

    Args:
        known: what is expected of the plan and its runners-up.
    """

    plan: SolvedLayout
    others: tuple[SolvedLayout, ...]
    choice: Choice
    known: Mapping[SolvedLayout, Candidate]

    def shortlist(self, model: CostModel) -> Shortlist:
        """Which of the plan and its runners-up could be the fastest."""
        from nest_megatron.planner.to_measure import shortlisted

        plans = (self.plan, *self.others)
        steps = [self.known[plan].step for plan in plans]
        return shortlisted(model, steps, [plan.layout for plan in plans])


def candidates(
    request: Request,
    model: CostModel,
    plans: Sequence[SolvedLayout],
    present: SolvedLayout | None = None,
) -> dict[SolvedLayout, Candidate]:
    """Plans with what is expected of them.

    Args:
        present: the one that runs today, if any does.
    """
    return {plan: _candidate(request, model, plan, present) for plan in plans}


def _candidate(
    request: Request, model: CostModel, plan: SolvedLayout, present: SolvedLayout | None
) -> Candidate:
    layout, peak = plan.layout, predicted_peak(model, plan.layout).peak_bytes
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


def choose_plan(request: Request, model: CostModel, result: SearchResult) -> Chosen:
    """The simplest of the plans that tie with the fastest that a search found.

    Args:
        result: of at least one plan.
    """
    known = candidates(request, model, result.known, result.present)
    fitting = allowed([*known.values()], request.max_oom_chance)
    tied = ties(fitting, request.tie_percent)
    taken = min(tied, key=lambda each: each.complexity).solved
    fastest = min(fitting, key=lambda each: (each.step_s, each.solved.rank)).solved
    others = [
        plan
        for plan in (fastest, *result.plans)
        if plan != taken and (plan == fastest or layout_of(plan.layout) != layout_of(taken.layout))
    ]
    most = max(request.num_alternatives, int(fastest != taken))
    choice = Choice(
        max_oom_chance=request.max_oom_chance,
        tie_percent=request.tie_percent,
        num_tied=len({layout_of(each.solved.layout) for each in tied}),
        fastest_s=known[fastest].step_s,
    )
    return Chosen(
        plan=taken, others=tuple(dict.fromkeys(others))[:most], choice=choice, known=known
    )


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
    return dataclasses.replace(chosen, plan=taken, others=tuple(others))


def _changes(request: Request, plan: SolvedLayout) -> int:
    """How many settings of the user a plan changes."""
    if not request.own:
        return 0
    chosen = to_plain(layout_arguments(request.spec, plan.layout))
    values = {**chosen, "micro_batch_size": plan.layout.micro_batch_size}
    return sum(
        to_plain(value) != values[name] for name, value in request.own.items() if name in values
    )
