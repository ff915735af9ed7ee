"""What measured peaks, and runs that ran out of memory, say of the peaks of other plans.

The error of a predicted peak follows the public distribution (``device_memory.PeakError``). Each
error is taken as its normal score: the value of a standard normal distribution with as much below
it. Scores of plans and runs are one Gaussian process (a warped one: Snelson, Rasmussen and
Ghahramani 2004), so that without a run nothing changes, and with runs the skew and the tails stay.

A measured peak is a score. A run that ran out says that its score is above that of what the device
could give out: a censored observation, for which the normal distribution with the moments of the
truncated one stands (expectation propagation: Minka 2001; Rasmussen and Williams 2006, 3.6).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from statistics import NormalDist

from nest_megatron.cost_model.device_memory import PeakError, PeakErrors, peak_error
from nest_megatron.cost_model.distributions import Matrix, cholesky, dot, solve_lower
from nest_megatron.cost_model.features import coordinates, distance
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import RankMemory, memory_of_ranks
from nest_megatron.cost_model.posterior import KEPT, differing_versions
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.cost_model.uncertainty import shipped_scales
from nest_megatron.layout.layout import Layout
from nest_megatron.plain import frozen
from nest_megatron.units import Bytes

#: Share of the variance of a score that belongs to each of: the site (its allocator and libraries),
#: the terms of the peak, the job, the layout; the rest is a run's own. Equal by convention: public
#: tables are too few to tell them apart (docs/tuning_published.md has how well they do).
PART = 0.24
OWN = 1.0 - 4 * PART
#: Runs that count, the last ones.
MOST_RUNS = 40
#: Ends of expectation propagation: a mean that moves by less, or so many rounds.
_STILL, _ROUNDS = 1e-6, 100
_FLAT = 1e6  # variance of an observation that says nearly nothing
_NORMAL = NormalDist()
#: Terms of a peak whose errors are apart; weights, gradients and optimizer states are the third.
_TERMS = ("activations", "working")
#: Whose errors a score is the sum of, apart from a run's own.
PARTS = ("site", *_TERMS, "static", "job", "layout")


@frozen
class PredictedPeak:
    """The highest predicted peak of a plan.

    Args:
        terms: bytes on the pipeline rank that has it.
        point: the layout (``features.coordinates``).
        error: what is known of it without runs.
    """

    terms: Mapping[str, Bytes]
    point: tuple[float, ...]
    error: PeakError

    @property
    def peak_bytes(self) -> Bytes:
        """All terms together."""
        return sum(self.terms.values())

    def score(self, peak_bytes: Bytes) -> float:
        """Normal score of a peak."""
        return _score(self.error, math.log(peak_bytes / self.peak_bytes))

    @property
    def direction(self) -> tuple[float, ...]:
        """The terms as a vector of length one."""
        named = [self.terms.get(name, 0) for name in _TERMS]
        whole = (*named, self.peak_bytes - sum(named))
        length = math.hypot(*whole)
        return tuple(each / length for each in whole)


@frozen
class PeakRun:
    """A plan that ran, or ran out of memory.

    Args:
        bytes: the highest measured peak of its ranks; where it ran out, what it needed more than.
        ran_out: whether it did.
        job: equal for plans of one job.
        versions: of drivers and packages, by name.
    """

    predicted: PredictedPeak
    bytes: Bytes
    ran_out: bool
    job: object
    versions: Mapping[str, str] = field(default_factory=dict)


@frozen
class LearnedPeakError:
    """The error of a predicted peak, given runs.

    Args:
        prior: without them.
        mean, deviation: of its normal score.
    """

    prior: PeakError
    mean: float
    deviation: float

    def at_most(self, error: float) -> float:
        """Chance of an error of at most this."""
        return _NORMAL.cdf((_score(self.prior, error) - self.mean) / self.deviation)

    def quantile(self, share: float) -> float:
        """The error that a share of all errors is at most."""
        return self.prior.quantile(
            _within(_NORMAL.cdf(self.mean + self.deviation * _NORMAL.inv_cdf(share)))
        )


class PeakPosterior:
    """The errors of predicted peaks, given some runs.

    Args:
        runs: of any job at one site, in their order.
        versions: of drivers and packages under which plans will run; those of the last run where
            they are not known.
    """

    def __init__(
        self, runs: Sequence[PeakRun] = (), versions: Mapping[str, str] | None = None
    ) -> None:
        self.runs = tuple(runs)[-MOST_RUNS:]
        last = self.runs[-1].versions if self.runs else {}
        self._versions = last if versions is None else versions
        self._root, self._values = _conditioned(self.runs)

    def with_runs(self, runs: Sequence[PeakRun]) -> PeakPosterior:
        """What is known after more runs, under the versions that plans will run with."""
        now = [dataclasses.replace(run, versions=self._versions) for run in runs]
        return PeakPosterior([*self.runs, *now], self._versions)

    def of(self, plan: PredictedPeak, job: object) -> PeakErrors:
        """What is known of the error of a plan of a job."""
        if not self.runs:
            return plan.error
        common = [sum(_shared(plan, job, self._versions, run)) for run in self.runs]
        explained = solve_lower(self._root, common)
        return LearnedPeakError(
            prior=plan.error,
            mean=dot(explained, self._values),
            deviation=math.sqrt(max(OWN, 1.0 - dot(explained, explained))),
        )

    def parts(self, plan: PredictedPeak, job: object) -> dict[str, float]:
        """The mean score of a plan of a job, in what each of its parts (``PARTS``) adds to it."""
        shared = [_shared(plan, job, self._versions, run) for run in self.runs]
        return {
            name: dot(solve_lower(self._root, covariances), self._values)
            for name, covariances in zip(PARTS, zip(*shared, strict=True), strict=True)
        }


def highest_rank(model: CostModel, layout: Layout) -> RankMemory:
    """The memory of the pipeline rank of a plan that has the highest predicted peak."""
    ranks = memory_of_ranks(stage_problem(model, layout), layout.partition.boundaries)
    return max(ranks, key=lambda rank: rank.total)


def predicted_peak(model: CostModel, layout: Layout) -> PredictedPeak:
    """The highest predicted peak of a plan, by its terms."""
    highest = highest_rank(model, layout)
    return PredictedPeak(
        terms={
            "static": highest.static,
            "activations": highest.activation,
            "working": highest.working,
        },
        point=coordinates(layout),
        error=peak_error(layout.zero),
    )


def _score(error: PeakError, at: float) -> float:
    return _NORMAL.inv_cdf(_within(error.at_most(at)))


def _within(share: float) -> float:
    """A chance that is neither 0 nor 1, of which a normal distribution knows no value."""
    return min(max(share, 1e-12), 1.0 - 1e-12)


def _shared(
    plan: PredictedPeak, job: object, versions: Mapping[str, str], run: PeakRun
) -> tuple[float, ...]:
    """Covariance of the scores of a plan and a run, by part (``PARTS``)."""
    other = run.predicted
    kept = KEPT ** len(differing_versions(versions, run.versions)) * PART
    terms = (kept * own * its for own, its in zip(plan.direction, other.direction, strict=True))
    if job != run.job:
        return (kept, *terms, 0.0, 0.0)
    near = math.exp(-distance(plan.point, other.point) / shipped_scales().layout_range)
    return (kept, *terms, PART, PART * near)


def _conditioned(runs: Sequence[PeakRun]) -> tuple[Matrix, tuple[float, ...]]:
    """The root of the covariance of what was observed, and the observations over it."""
    joint = [
        [sum(_shared(run.predicted, run.job, run.versions, each)) for each in runs] for run in runs
    ]
    for number, row in enumerate(joint):
        row[number] += OWN
    values = [run.predicted.score(run.bytes) for run in runs]
    censored = [number for number, run in enumerate(runs) if run.ran_out]
    if censored:
        mean, covariance = _above_bounds(joint, values, censored)
        found = _censored(mean, covariance, [values[each] for each in censored])
        for number, (value, noise) in zip(censored, found, strict=True):
            values[number] = value
            joint[number][number] += noise
    root = cholesky(joint)
    return root, solve_lower(root, values)


def _above_bounds(
    joint: Matrix, values: Sequence[float], censored: Sequence[int]
) -> tuple[list[float], list[list[float]]]:
    """Mean and covariance of the scores that are above bounds, given those that were measured."""
    measured = [number for number in range(len(values)) if number not in set(censored)]
    root = cholesky([[joint[i][j] for j in measured] for i in measured])
    solved = solve_lower(root, [values[each] for each in measured])
    known = [solve_lower(root, [joint[each][j] for j in measured]) for each in censored]
    return (
        [dot(parts, solved) for parts in known],
        [
            [joint[a][b] - dot(of_a, of_b) for b, of_b in zip(censored, known, strict=True)]
            for a, of_a in zip(censored, known, strict=True)
        ],
    )


def _censored(
    mean: list[float], covariance: list[list[float]], bounds: Sequence[float]
) -> list[tuple[float, float]]:
    """The observations that stand for scores above bounds, each a value and the variance of noise.

    Each in turn is updated from the others, and the joint distribution from it, by a step of rank
    one (Rasmussen and Williams 2006, algorithm 3.5).
    """
    sites = [(0.0, math.inf)] * len(bounds)
    for _ in range(_ROUNDS):
        moved = 0.0
        for number, bound in enumerate(bounds):
            (before, noise_before), column = sites[number], covariance[number]
            value, noise, more = _truncated(
                mean[number], column[number], before, noise_before, bound
            )
            sites[number], moved = (value, noise), max(moved, more)
            precision = 1.0 / noise - 1.0 / noise_before
            pull = value / noise - before / noise_before - precision * mean[number]
            gain = 1.0 + precision * column[number]
            mean = [each + pull / gain * part for each, part in zip(mean, column, strict=True)]
            parts = [precision / gain * part for part in column]
            covariance = [
                [each - own * part for each, part in zip(row, parts, strict=True)]
                for row, own in zip(covariance, column, strict=True)
            ]
        if moved < _STILL:
            break
    return sites


def _truncated(
    mean: float, variance: float, value: float, noise: float, bound: float
) -> tuple[float, float, float]:
    """The observation that stands for a score above a bound, and by how much its mean moves.

    Args:
        mean, variance: of the score now.
        value, noise: the observation that stands for it now.
    """
    precision = max(1e-9, 1.0 / variance - 1.0 / noise)
    others = (mean / variance - value / noise) / precision
    scale = 1.0 / math.sqrt(precision)
    least = min(30.0, (bound - others) / scale)
    ratio = _NORMAL.pdf(least) / (0.5 * math.erfc(least / math.sqrt(2.0)))
    new_mean = others + scale * ratio
    new_variance = max(1e-9, scale**2 * (1.0 - ratio * (ratio - least)))
    added = max(1.0 / _FLAT, 1.0 / new_variance - precision)
    return (
        (new_mean / new_variance - others * precision) / added,
        1.0 / added,
        abs(new_mean - mean),
    )
