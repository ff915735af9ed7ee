"""``compare``: one job through several planners, all priced by the same cost model."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from nest_megatron.cost_model.estimate import mean_terms
from nest_megatron.cost_model.peak_limit import PeakLimit
from nest_megatron.cost_model.uncertainty import predictive, probability_faster
from nest_megatron.errors import UserInputError, require_known
from nest_megatron.layout.estimate import SURE
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.plain import frozen
from nest_megatron.planner import EndedEarly, NoPlan, Request, plan
from nest_megatron.planner.layouts import assemble, predict, record_without_search
from nest_megatron.research.baselines import (
    aceso,
    alpa_e,
    autoconfigurator,
    manual,
    mcmc,
    network_blind,
)
from nest_megatron.research.baselines.job import BaselineChoice, ComparisonJob
from nest_megatron.solver.backend import backend_to_run, solver_of
from nest_megatron.units import Seconds, format_gib, format_seconds


class Baseline(NamedTuple):
    """A planner: its name, what it is in a few words, and the plan that it chooses for a job."""

    name: str
    title: str
    find: Callable[[ComparisonJob], BaselineChoice]


BASELINES = (
    Baseline("manual", "NVIDIA's recipe or Megatron's rule of thumb", manual.find),
    Baseline("mcmc", "random walk (FlexFlow, TopoOpt)", mcmc.find),
    Baseline("phaze", "exact, blind to the network (Phaze)", network_blind.find_phaze),
    Baseline("alpa_e", "sharding, then stages, then memory (Alpa)", alpa_e.find),
    Baseline("mist", "memory-aware, blind to the network (Mist)", network_blind.find_mist),
    Baseline("aceso", "relieves the bottleneck (Aceso)", aceso.find),
    Baseline("autoconfigurator", "table of degrees, all measured (NeMo)", autoconfigurator.find),
)
#: Our search, which every comparison is relative to.
NEST = "nest"
PLANNERS = (NEST, *(baseline.name for baseline in BASELINES))


@frozen
class Compared:
    """What one planner made of the job.

    Args:
        reason: how it came to this plan, or why it found none; part of a sentence.
        candidates: layouts that it weighed or ruled out.
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
        if self.relative_throughput is None or self.relative_throughput >= 1:
            return None
        worst = max(self.differences, key=lambda term: self.differences[term])
        return worst if self.differences[worst] > 0 else None


def compare(
    request: Request,
    names: Iterable[str] = PLANNERS,
    on_planner: Callable[[str], None] = lambda name: None,
) -> tuple[Compared, ...]:
    """Plan one job with several planners, each with a fresh cost model.

    Args:
        request: the job; ``max_seconds`` holds for every planner by itself.
        names: planners besides ``nest``, which always takes part and comes first.
        on_planner: called with the name of each planner before it starts.

    Raises:
        UserInputError: for an unknown planner, or a job that no layout is legal for.
    """
    by_name = {baseline.name: baseline for baseline in BASELINES}
    others = [name for name in dict.fromkeys(names) if name != NEST]
    for name in others:
        require_known("planners", name, PLANNERS, f"the planners are {', '.join(PLANNERS)}")
    on_planner(NEST)
    rows = [_ours(request)]
    for name in others:
        on_planner(name)
        rows.append(_theirs(request, rows[0], by_name[name]))
    return tuple(rows)


def _ours(request: Request) -> Compared:
    """Our answer: what ``plan`` answers."""
    found = plan(replace(request, remedies=False))
    ours = found if isinstance(found, ParallelPlan) else None
    terms = {} if ours is None else mean_terms(request.cost_model(), ours.layout)
    return Compared(
        name=NEST,
        title="this project: exact, aware of network and memory",
        plan=ours,
        reason=_our_reason(found),
        candidates=found.search.candidates,
        search_s=found.search.seconds,
        relative_throughput=None if ours is None else 1.0,
        terms=terms,
        differences=dict.fromkeys(terms, 0.0),
        ended_early=isinstance(found, EndedEarly),
    )


def _our_reason(found: ParallelPlan | NoPlan | EndedEarly) -> str:
    if isinstance(found, EndedEarly):
        least = format_seconds(found.lower_bound_s)
        return f"time ended the search before it found a plan; none has a step below {least}"
    if isinstance(found, NoPlan):
        nearest = "the nearest plan" if found.complete else "the nearest plan found in the time"
        return f"nothing fits in memory; {nearest} lacks {format_gib(found.missing_bytes)}"
    percent = f"{found.search.gap_percent:.2f} %"
    if found.search.certificate == "optimal":
        return "proven optimal in its space"
    if found.search.certificate == "chosen":
        return f"the simplest that ties with the fastest of its space, {percent} slower than that"
    return f"at most {percent} slower than the best in its space"


def _theirs(request: Request, ours: Compared, baseline: Baseline) -> Compared:
    """A baseline's answer, its plan assembled as ours is, with what it loses."""
    model, started = request.cost_model(), time.perf_counter()
    deadline = request.deadline()
    choice = baseline.find(
        ComparisonJob(
            model=model,
            global_batch_size=request.global_batch_size,
            space=request.space,
            solve_stages=solver_of(backend_to_run(request.backend), deadline.passed),
            peaks=PeakLimit(model, request.max_oom_chance),
            out_of_time=deadline.passed,
        )
    )
    ended = choice.plan is None and deadline.passed()
    theirs = Compared(
        name=baseline.name,
        title=baseline.title,
        plan=None,
        reason="time ended its search before it found a plan" if ended else choice.reason,
        candidates=choice.candidates,
        search_s=time.perf_counter() - started,
        ended_early=ended,
    )
    if choice.plan is None:
        return theirs
    chosen = choice.plan.layout
    if request.space.sharding is not None:
        chosen = replace(chosen, sharding=request.space.sharding)
    bare = Request(
        spec=request.spec,
        cluster=request.cluster,
        global_batch_size=request.global_batch_size,
        rates=request.rates,
    )
    found = assemble(bare, model, predict(bare, model, chosen), record_without_search())
    terms = mean_terms(model, chosen)
    theirs = replace(theirs, plan=found, terms=terms)
    if ours.plan is None:
        return theirs
    before, after = (
        predictive(model, plan.layout, plan.predicted.iteration_time_s)
        for plan in (ours.plan, found)
    )
    return replace(
        theirs,
        relative_throughput=ours.plan.predicted.iteration_time_s / found.predicted.iteration_time_s,
        differences={name: terms[name] - ours.terms[name] for name in ours.terms},
        chance_slower=probability_faster(before, after),
    )


def split_planners(overrides: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Names of ``planners=[...]``, and the other settings.

    >>> split_planners(["model=llama3_8b", "planners=[nest, mist]"])
    (('nest', 'mist'), ['model=llama3_8b'])
    """
    rest = [text for text in overrides if text.partition("=")[0] != "planners"]
    listed = [text.partition("=")[2] for text in overrides if text not in rest]
    if not listed:
        return PLANNERS, rest
    words = re.split(r"[\s,'\"\[\]()]+", listed[-1])
    if not (names := tuple(filter(None, words))):
        fix = f"Name some of {', '.join(PLANNERS)}, or leave it out for all."
        raise UserInputError("planners", listed[-1], "it names no planner", fix)
    return names, rest
