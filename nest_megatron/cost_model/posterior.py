"""What measured runs say of other predictions: the model of errors, conditioned on them.

Of a run, the logarithm of measured over predicted time is (``uncertainty``)

    sum over mechanisms of (share * error of its price)  +  job  +  layout  +  noise

where the error of a mechanism's price is one at a site, the job's is one for its plans, the
layout's is alike for layouts near each other, and the noise is each run's own. Plans and runs are
points of one Gaussian process with that covariance: means and covariances follow in closed form
(Rasmussen and Williams 2006, equations 2.23 and 2.24). Each job's own runs also tell how far such
predictions of it are off: they widen or narrow its variances by the factor of a Student process
(Shah, Wilson and Ghahramani 2014, lemma 3). Its degrees of freedom would grow with each run; they
stay at two here, as layouts do not share one draw of the tails, and growing ones made intervals too
narrow (docs/uncertainty.md). Without a run nothing changes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import field

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.distributions import (
    DEGREES_OF_FREEDOM,
    Matrix,
    cholesky,
    deviation,
    dot,
    solve_lower,
)
from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.cost_model.uncertainty import (
    RUN_NOISE,
    Learned,
    Predictive,
    layout_error,
    shared_error,
)
from nest_megatron.layout.plan_file import digest
from nest_megatron.plain import frozen
from nest_megatron.units import Seconds

#: Correlation of the error of a mechanism's price before and after one of the versions changed: of
#: the variance that runs explain, one half is left. No public runs of one job before and after are
#: enough to fit it; those of Megatron-Bridge's releases moved by 5 % at most.
KEPT = math.sqrt(0.5)


@frozen
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
        return math.log(self.step_s / self.predictive.prior.median_s)


class Posterior(Caching):
    """The errors of predictions, given some runs.

    Args:
        observations: runs of any job at one site.
        versions: of drivers and packages under which plans will run; those of the last run where
            they are not known.

    If two runs whose plans differ in how much of the step is tensor-parallel traffic are both slow
    by what that traffic takes, a third plan of another job is as well.
    """

    def __init__(
        self, observations: Sequence[Observation] = (), versions: Mapping[str, str] | None = None
    ) -> None:
        self.observations = tuple(observations)
        last = self.observations[-1].versions if self.observations else {}
        self._versions = last if versions is None else versions
        self._root, self._errors = _conditioned(self.observations)

    def with_runs(self, observations: Sequence[Observation]) -> Posterior:
        """What is known after more runs, under the versions that plans will run with."""
        now = [dataclasses.replace(run, versions=self._versions) for run in observations]
        return Posterior([*self.observations, *now], self._versions)

    def of(self, plan: Predictive, job: object) -> Predictive:
        """What is known of a plan of a job then; the plan itself where nothing was measured.

        Args:
            plan: what is predicted of it; what another posterior says of it is left out.
        """
        plan = plan.prior
        if not self.observations:
            return plan
        explained = self._explained(
            [
                self._kept(run) * shared_error(plan, run.predictive)
                + (_job_error(plan, run.predictive) if run.job == job else 0.0)
                for run in self.observations
            ]
        )
        return dataclasses.replace(
            plan,
            median_s=plan.median_s * math.exp(dot(explained, self._errors)),
            learned=Learned(
                predicted_s=plan.median_s,
                explained=explained,
                factor=self._factor(job),
                own_runs=sum(run.job == job for run in self.observations),
                mechanisms=self._by_mechanism,
            ),
        )

    def mechanism(self, mechanism: Mechanism) -> tuple[float, float]:
        """Error of a mechanism's price: its mean and standard deviation, of the logarithm."""
        scale = self.observations[0].predictive.scales.mechanisms[mechanism]
        known = self._by_mechanism[mechanism]
        left = max(0.0, scale**2 - dot(known, known))
        return dot(known, self._errors), deviation() * math.sqrt(left)

    @cached_by(lambda _, job: job)
    def _factor(self, job: object) -> float:
        """By what a job's own runs widen the variances of its plans, or narrow them."""
        own = [run for run in self.observations if run.job == job]
        others = [run for run in self.observations if run.job != job]
        errors = _conditioned([*others, *own])[1][len(others) :]
        square = dot(errors, errors)
        return (DEGREES_OF_FREEDOM + square) / (DEGREES_OF_FREEDOM + len(own))

    @functools.cached_property
    def _by_mechanism(self) -> Mapping[Mechanism, tuple[float, ...]]:
        scales = self.observations[0].predictive.scales.mechanisms
        return {
            each: self._explained(
                [
                    self._kept(run) * run.predictive.shares.get(each, 0.0) * scales[each] ** 2
                    for run in self.observations
                ]
            )
            for each in Mechanism
        }

    def _kept(self, run: Observation) -> float:
        return KEPT ** len(differing_versions(self._versions, run.versions))

    def _explained(self, covariances: Sequence[float]) -> tuple[float, ...]:
        return solve_lower(self._root, covariances)


def differing_versions(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """Names of versions in which two sets differ; one that only one of them has counts."""
    return tuple(sorted(n for n in {**one, **other} if one.get(n) != other.get(n)))


def _job_error(a: Predictive, b: Predictive) -> float:
    """Product of the scales of what two plans of one job have in common, apart from mechanisms."""
    return a.job_scale * b.job_scale + layout_error(a, b)


def _conditioned(observations: Sequence[Observation]) -> tuple[Matrix, tuple[float, ...]]:
    """The root of the runs' covariance, and their errors over it."""
    root = cholesky([[_covariance(a, b) for b in observations] for a in observations])
    return root, solve_lower(root, [each.error for each in observations])


def _covariance(a: Observation, b: Observation) -> float:
    """Product of the scales of what two runs have in common."""
    common = KEPT ** len(differing_versions(a.versions, b.versions)) * shared_error(
        a.predictive, b.predictive
    )
    if a.job == b.job:
        common += _job_error(a.predictive, b.predictive)
    return common + (RUN_NOISE**2 / a.runs if a is b else 0.0)


def job_hash(
    model_hash: str, batch: int, seq_length: int, precision: Precision, cluster_hash: str
) -> str:
    """Hash of what all plans of a job have in common."""
    return digest([model_hash, batch, seq_length, precision.value, cluster_hash])
