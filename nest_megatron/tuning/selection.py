"""Which plan to run next, when to stop, and which plan to take.

A run's expected gain is by how much the choice after it is expected to be faster than the choice
without (the knowledge gradient of Frazier, Powell and Dayanik, 2009); it is weighed by the chance
that the plan starts at all, and compared per predicted minute of the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import field
from typing import NamedTuple

from nest_megatron.cost_model.device_memory import out_of_memory_probability
from nest_megatron.cost_model.peak_limit import allocatable
from nest_megatron.cost_model.peak_posterior import PeakPosterior, PeakRun
from nest_megatron.cost_model.posterior import Observation, Posterior
from nest_megatron.cost_model.shortlist import run_gains, shortlist
from nest_megatron.cost_model.site import job_of
from nest_megatron.cost_model.uncertainty import Predictive
from nest_megatron.layout.estimate import SURE
from nest_megatron.plain import frozen
from nest_megatron.planner import Ranked, describe_grid
from nest_megatron.planner.choice import Candidate, allowed, ties
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.units import Bytes, Seconds

#: Start of a run, until one has been timed: processes, libraries, groups of ranks, data.
START_S: Seconds = 90.0


def candidate_words(candidate: Candidate) -> str:
    """A plan in one line."""
    layout = candidate.solved.layout
    words, virtual = describe_grid(layout), layout.dims.virtual_pipeline_model_parallel_size
    return words if virtual == 1 else f"VPP {virtual}, {words}"


class NextRun(NamedTuple):
    """A plan to run, and what is expected of it; a gain is a share of the step."""

    candidate: Candidate
    gain: float
    seconds: Seconds


@frozen
class Known:
    """What is thought of a job's plans after some runs.

    Args:
        steps_s: of the plans that were measured.
        peaks_bytes: highest measured peaks of plans' tensors, as far as runs say.
        failed: plans that failed, and whether for want of memory.
        starts_s: how long each run took besides its steps.
        num_steps: of the whole job, which a faster plan shortens; ``None`` where it does not say.
    """

    ranked: Ranked
    iterations: int
    num_steps: int | None
    steps_s: Mapping[SolvedLayout, Seconds] = field(default_factory=dict)
    peaks_bytes: Mapping[SolvedLayout, Bytes] = field(default_factory=dict)
    failed: Mapping[SolvedLayout, bool] = field(default_factory=dict)
    starts_s: tuple[Seconds, ...] = ()

    def measured(
        self,
        plan: SolvedLayout,
        step_s: Seconds,
        seconds: Seconds | None,
        peak_bytes: Bytes | None = None,
    ) -> Known:
        """With one more plan measured, in a run of so long."""
        start = [] if seconds is None else [max(0.0, seconds - (self.iterations + 1) * step_s)]
        peak = {} if peak_bytes is None else {plan: peak_bytes}
        return dataclasses.replace(
            self,
            steps_s={**self.steps_s, plan: step_s},
            peaks_bytes={**self.peaks_bytes, **peak},
            starts_s=(*self.starts_s, *start),
        )

    def without(self, plan: SolvedLayout, *, out_of_memory: bool) -> Known:
        """With one more plan that failed."""
        return dataclasses.replace(self, failed={**self.failed, plan: out_of_memory})

    @property
    def start_s(self) -> Seconds:
        """Expected start of a run: the mean of those timed."""
        return sum(self.starts_s) / len(self.starts_s) if self.starts_s else START_S

    @property
    def predicted(self) -> Mapping[SolvedLayout, Predictive]:
        """The steps of all plans as they were predicted without these runs."""
        return {each.solved: each.step for each in self.ranked.candidates}

    @property
    def posterior(self) -> Posterior:
        """The errors of predictions, with these runs and those of the site's calibration."""
        steps = self.predicted
        site = self.ranked.request.site
        before = Posterior() if site is None else site.posterior
        return before.with_runs(
            [
                Observation(predictive=steps[plan], step_s=step_s, job=self.job)
                for plan, step_s in self.steps_s.items()
            ]
        )

    @property
    def peak_posterior(self) -> PeakPosterior:
        """The errors of predicted peaks, with the same runs, and those that ran out of memory."""
        peaks, model, site = self.ranked.peaks, self.ranked.model, self.ranked.request.site
        bounds = [(plan, peak, False) for plan, peak in self.peaks_bytes.items()]
        short = (plan for plan, out_of_memory in self.failed.items() if out_of_memory)
        bounds += [(plan, allocatable(model, plan.layout), True) for plan in short]
        before = PeakPosterior() if site is None else site.peaks
        return before.with_runs(
            [
                PeakRun(predicted=peaks[plan], bytes=peak, ran_out=ran_out, job=self.job)
                for plan, peak, ran_out in bounds
                if peak
            ]
        )

    @property
    def job(self) -> str:
        """What all plans of the job have in common, with each other and with runs of the site."""
        return job_of(self.ranked.model, self.ranked.candidates[0].solved.layout)

    def candidates(self) -> list[Candidate]:
        """Plans that may be taken, with what is expected of them now, the plan without runs first.

        A plan that is predicted to need at least as much memory as one that ran out is none.
        """
        posterior, peaks, plans = self.posterior, self.peak_posterior, self.ranked.candidates
        short = [each for each in plans if self.failed.get(each.solved)]
        least = min((each.peak_memory_bytes for each in short), default=math.inf)
        return [
            self._now(each, posterior, peaks)
            for each in plans
            if each.solved in self.steps_s
            or (each.solved not in self.failed and each.peak_memory_bytes < least)
        ]

    def _now(self, candidate: Candidate, posterior: Posterior, peaks: PeakPosterior) -> Candidate:
        plan = candidate.solved
        chance = 0.0 if plan in self.steps_s else candidate.out_of_memory
        if plan not in self.steps_s and (self.peaks_bytes or any(self.failed.values())):
            chance = out_of_memory_probability(
                candidate.peak_memory_bytes,
                allocatable(self.ranked.model, plan.layout),
                peaks.of(self.ranked.peaks[plan], self.job),
            )
        return dataclasses.replace(
            candidate, step=posterior.of(candidate.step.prior, self.job), out_of_memory=chance
        )

    def run_s(self, candidate: Candidate) -> Seconds:
        """Predicted time of a run."""
        return self.start_s + (self.iterations + 1) * candidate.step.median_s


def chosen(known: Known) -> Candidate | None:
    """The plan to take: of those that tie with the fastest allowed one, one that was measured.

    The chance to run out of memory that is allowed, and the tie, are the planner's
    (``planner.choice``).
    """
    candidates, request = known.candidates(), known.ranked.request
    if not candidates:
        return None
    tied = ties(allowed(candidates, request.max_oom_chance), request.tie_percent)
    return min(tied, key=lambda each: (each.solved not in known.steps_s, each.step_s))


def next_run(known: Known, budget: int) -> NextRun | str:
    """The run that promises most per minute, or why none does.

    The first is of the plan that would be launched without runs, so that what they change is known
    from a measurement.

    Args:
        budget: runs that are left.
    """
    plans = known.candidates()
    ran = {*known.steps_s, *known.failed}
    if budget < 1:
        return "the budget is spent"
    if not plans:
        return "no plan is left that could run"
    if not ran:
        return NextRun(plans[0], 0.0, known.run_s(plans[0]))
    if known.steps_s and len(shortlist([each.step for each in plans], SURE).plans) == 1:
        return f"one plan is as fast as the fastest with a chance of {100 * SURE:.0f} %"
    runs = [
        NextRun(each, (1 - each.out_of_memory) * gain, known.run_s(each))
        for each, gain in zip(plans, run_gains([each.step for each in plans]), strict=True)
        if each.solved not in ran
    ]
    if not runs:
        return "every plan that could be the fastest has run"
    best = max(runs, key=lambda run: run.gain / run.seconds)
    if known.steps_s and not _saves_time(known, best):
        return "no run is expected to save the job more time than it takes"
    return best


def _saves_time(known: Known, run: NextRun) -> bool:
    """Whether a run is expected to save the whole job at least the time that it takes."""
    if known.num_steps is None:
        return run.gain > 0.0
    step_s = min(known.steps_s.values())
    return run.gain * known.num_steps * step_s > run.seconds


def expected_runs(known: Known, budget: int) -> tuple[list[NextRun], str]:
    """The runs that follow if each measures what is predicted of it, and what ends them."""
    runs: list[NextRun] = []
    while not isinstance(found := next_run(known, budget - len(runs)), str):
        runs.append(found)
        known = known.measured(found.candidate.solved, found.candidate.step.median_s, None)
    return runs, found
