"""What measured runs say of other predictions: the model of errors, conditioned on them.

Of a run, the logarithm of measured over predicted time is (``uncertainty``)

    sum over mechanisms of (share * error of its price)  +  job  +  layout  +  noise

where the error of a mechanism's price is one at a site, the job's is one for its plans, the
layout's is alike for layouts near each other, and the noise is each run's own. All are normal, but
what belongs to a job (job, layout, noise) has a variance of its own, by an inverse gamma factor:
Student's t. So a job that was misread says little of the site, and much of its own plans.

Plans and runs are points of one Gaussian process with that covariance. Given the factors, means and
covariances of all plans follow in closed form (Rasmussen and Williams 2006, equation 2.19); the
factors are found by expectation maximization (Lange, Little and Taylor 1989). Without a run of its
own job a plan keeps two degrees of freedom, and without any run its distribution is the prior's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from statistics import NormalDist

from nest_megatron.cost_model.cholesky import Matrix, cholesky, solve_lower
from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.cost_model.student_t import DEGREES_OF_FREEDOM, deviation
from nest_megatron.cost_model.uncertainty import (
    RUN_NOISE,
    Learned,
    Predictive,
    layout_error,
    shared_error,
)
from nest_megatron.units import Seconds

#: Correlation of the error of a mechanism's price before and after one of the versions changed: of
#: the variance that runs explain, one half is left. No public runs of one job before and after are
#: enough to fit it; those of Megatron-Bridge's releases moved by 5 % at most.
KEPT = math.sqrt(0.5)
#: The factors of jobs are found to within a share, or after so many rounds.
_CLOSE, _ROUNDS = 1e-3, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A plan that ran.

    Args:
        predictive: what was predicted of it, by the catalogue's calibration alone.
        step_s: measured.
        job: equal for plans of one job.
        runs: that were measured alike; ``step_s`` is their geometric mean.
        versions: of drivers and packages, by name.
    """

    predictive: Predictive
    step_s: Seconds
    job: object
    runs: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """Logarithm of measured over predicted time."""
        return math.log(self.step_s / self.predictive.median_s)


class Posterior:
    """The errors of predictions, given some runs.

    Args:
        observations: runs of any job at one site.
        versions: of drivers and packages under which plans will run; those of the last run where
            they are not known.

    Two runs of one job, whose plans differ in how much of the step is tensor-parallel traffic, both
    slow by what that traffic takes, say so of a third plan of another job.
    """

    def __init__(
        self, observations: Sequence[Observation] = (), versions: Mapping[str, str] | None = None
    ) -> None:
        self.observations = tuple(observations)
        last = self.observations[-1].versions if self.observations else {}
        self._versions = last if versions is None else versions
        self._factors, self._root = _conditioned(self.observations)
        self._errors = solve_lower(self._root, [each.error for each in self.observations])
        self._mechanisms: Mapping[Mechanism, tuple[float, ...]] | None = None

    def of(self, plan: Predictive, job: object) -> Predictive:
        """What is known of a plan of a job then; the plan itself where nothing was measured.

        Args:
            plan: what is predicted of it; what it was told by another posterior is left out.
        """
        if plan.learned is not None:
            plan = dataclasses.replace(plan, median_s=plan.learned.predicted_s, learned=None)
        if not self.observations:
            return plan
        explained = self._explained(plan, job)
        return dataclasses.replace(
            plan,
            median_s=plan.median_s * math.exp(math.fsum(map(mul, explained, self._errors))),
            learned=Learned(
                predicted_s=plan.median_s,
                explained=explained,
                own=self.factor(job),
                degrees=DEGREES_OF_FREEDOM + sum(each.job == job for each in self.observations),
                mechanisms=self._by_mechanism(),
            ),
        )

    def factor(self, job: object) -> float:
        """Factor of the variance of what belongs to a job; 1 where none of its plans ran."""
        return self._factors.get(job, 1.0)

    def mechanism(self, mechanism: Mechanism) -> tuple[float, float]:
        """Error of a mechanism's price: its mean and standard deviation, of the logarithm."""
        scale = self.observations[0].predictive.scales.mechanisms[mechanism]
        known = self._by_mechanism()[mechanism]
        left = max(0.0, scale**2 - math.fsum(part * part for part in known))
        return math.fsum(map(mul, known, self._errors)), deviation() * math.sqrt(left)

    def _explained(self, plan: Predictive, job: object) -> tuple[float, ...]:
        own = self.factor(job)
        return solve_lower(
            self._root,
            [
                self._kept(each) * shared_error(plan, each.predictive)
                + (own * _job_error(plan, each.predictive) if each.job == job else 0.0)
                for each in self.observations
            ],
        )

    def _by_mechanism(self) -> Mapping[Mechanism, tuple[float, ...]]:
        if self._mechanisms is None:
            scales = self.observations[0].predictive.scales.mechanisms
            self._mechanisms = {
                each: solve_lower(
                    self._root,
                    [
                        self._kept(run) * run.predictive.shares.get(each, 0.0) * scales[each] ** 2
                        for run in self.observations
                    ],
                )
                for each in Mechanism
            }
        return self._mechanisms

    def _kept(self, run: Observation) -> float:
        return KEPT ** len(changed(self._versions, run.versions))


def expected_improvement(plan: Predictive, best_s: Seconds) -> float:
    """By what share a plan is expected to run faster than the best step that was measured.

    Its error is taken as normal. Source: Jones, Schonlau and Welch 1998, equation 15.
    """
    spread = deviation(plan.degrees) * plan.scale
    lead = math.log(best_s / plan.median_s) / spread
    normal = NormalDist()
    return spread * (lead * normal.cdf(lead) + normal.pdf(lead))


def changed(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """Names of versions in which two sets differ; one that only one of them has counts."""
    return tuple(sorted(n for n in {**one, **other} if one.get(n) != other.get(n)))


def _job_error(a: Predictive, b: Predictive) -> float:
    """Product of the scales of what two plans of one job have in common beside mechanisms."""
    return a.job_scale * b.job_scale + layout_error(a, b)


def _shared(a: Observation, b: Observation) -> float:
    """What two runs have in common because mechanisms are wrong."""
    kept = KEPT ** len(changed(a.versions, b.versions))
    return kept * shared_error(a.predictive, b.predictive)


def _conditioned(
    observations: Sequence[Observation],
) -> tuple[Mapping[object, float], list[list[float]]]:
    """Of each job, the factor of the variance of its own errors; the root of the runs' covariance.

    A factor is the inverse of the mean precision, given the expected square of the job's own errors
    over their scales, which follows from the factors: both are found in turns.
    """
    errors = [each.error for each in observations]
    shared = [[_shared(a, b) for b in observations] for a in observations]
    own = [[_own(a, b) for b in observations] for a in observations]
    jobs: dict[object, list[int]] = {}
    for number, each in enumerate(observations):
        jobs.setdefault(each.job, []).append(number)
    factors = dict.fromkeys(jobs, 1.0)
    for _ in range(_ROUNDS):
        root = cholesky(
            [
                [common + factors[run.job] * alone for common, alone in zip(*rows, strict=True)]
                for run, *rows in zip(observations, shared, own, strict=True)
            ]
        )
        before = factors
        squares = _squares(root, errors, own, jobs, factors)
        factors = {
            job: (DEGREES_OF_FREEDOM + squares[job]) / (DEGREES_OF_FREEDOM + len(runs))
            for job, runs in jobs.items()
        }
        if all(math.isclose(factors[job], before[job], rel_tol=_CLOSE) for job in jobs):
            break
    return before, root


def _own(a: Observation, b: Observation) -> float:
    """What two runs have in common beside that: of one job, and of one run."""
    if a.job != b.job:
        return 0.0
    return _job_error(a.predictive, b.predictive) + (RUN_NOISE**2 / a.runs if a is b else 0.0)


def _squares(
    root: Matrix,
    errors: Sequence[float],
    own: Matrix,
    jobs: Mapping[object, Sequence[int]],
    factors: Mapping[object, float],
) -> Mapping[object, float]:
    """Of each job, the expected square of its own errors over their scales."""
    size = len(errors)
    columns = [solve_lower(root, [float(i == j) for j in range(size)]) for i in range(size)]
    whitened = solve_lower(root, errors)
    solved = [math.fsum(map(mul, column, whitened)) for column in columns]
    return {
        job: factors[job] * len(runs)
        + factors[job] ** 2
        * math.fsum(
            own[i][j] * (solved[i] * solved[j] - math.fsum(map(mul, columns[i], columns[j])))
            for i in runs
            for j in runs
        )
        for job, runs in jobs.items()
    }
