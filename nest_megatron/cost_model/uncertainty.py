"""How far off a predicted step may be: a distribution in closed form, for one plan and for pairs.

The logarithm of measured over predicted time is a sum of independent errors:

* of each mechanism, times the share of the step that it takes (``mechanisms``); all plans of a job
  have them in common, so that in a comparison only the difference of shares counts;
* of the job: what its features (``features``) make harder to predict, the same for all its plans;
* of the layout: alike for layouts that lie near each other, with correlation
  ``exp(-steps / layout_range)``.

Scales are fitted to runs whose source was left out (``tools/calibration``,
``hydra_configs/calibration/uncertainty.yaml``). A step's error follows Student's t distribution
with two degrees of freedom, also where runs of the job are known: they tell how far its plans are
off, but not that another layout is no exception. What two layouts of one job differ by is taken as
normally distributed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from nest_megatron.catalogue_files import catalogue_entry
from nest_megatron.cost_model.distributions import cholesky, deviation, dot, quantile, solve_lower
from nest_megatron.cost_model.features import (
    Feature,
    Runs,
    coordinates,
    distance,
    features_of,
)
from nest_megatron.cost_model.mechanisms import Mechanism, Shares, shares
from nest_megatron.cost_model.model import CostModel
from nest_megatron.layout.layout import Layout
from nest_megatron.plain import frozen
from nest_megatron.units import Seconds

#: Key of the scale that every job, and every layout, has.
ANY = "any"
#: Standard deviation between two runs of the same job (``validation.scores.NOISE`` apart at most).
RUN_NOISE = 0.01
#: What a standard deviation is in scales, of a plan of which nothing was measured.
DEVIATION = deviation()


@frozen
class Scales:
    """Fitted scales of errors, in logarithms: 0.05 is 5 %.

    By mechanism, of its price; by feature and ``any``, of a job and of one layout, where ``a+b`` is
    of layouts with both features. ``layout_range`` is the distance after which the errors of two
    layouts are correlated by 1 / e.
    """

    mechanisms: Mapping[str, float]
    job: Mapping[str, float]
    layout: Mapping[str, float]
    layout_range: float


@functools.cache
def _calibration() -> Mapping[str, Any]:
    return catalogue_entry("calibration", "uncertainty")


@functools.cache
def shipped_scales() -> Scales:
    """The catalogue's (``calibration/uncertainty.yaml``)."""
    return Scales(**_calibration()["scales"])


@functools.cache
def measured_runs() -> tuple[Runs, ...]:
    """The runs that they rest on."""
    return tuple(map(Runs.from_plain, _calibration()["runs"]))


@functools.cache
def fitted_devices() -> frozenset[str]:
    """Names of those runs' accelerators."""
    return frozenset(_calibration()["devices"])


@frozen
class Learned:
    """What measured runs say of a plan's error (``posterior.Posterior.of``).

    Args:
        predicted_s: the step as predicted without them.
        explained: what they explain of the error, along axes that all plans under one posterior
            share: the product of two plans' is what is explained of their covariance.
        factor: of what is left of the variance, by how far the job's runs are off; 1 without any.
        own_runs: plans of the job that ran.
        mechanisms: what is explained of the error of each mechanism's price, along the same axes.
    """

    predicted_s: Seconds
    explained: tuple[float, ...]
    factor: float
    own_runs: int
    mechanisms: Mapping[Mechanism, tuple[float, ...]]


@frozen
class Predictive:
    """What is known of a plan's step before it runs; ``point`` is its layout (``coordinates``)."""

    median_s: Seconds
    shares: Shares
    features: frozenset[Feature]
    point: tuple[float, ...]
    scales: Scales
    learned: Learned | None = None

    @property
    def job_scale(self) -> float:
        """Scale of the error that all plans of the job have."""
        return _together(self.scales.job, self.features)

    @property
    def layout_scale(self) -> float:
        """Scale of the error that belongs to the layout alone."""
        return _together(self.scales.layout, self.features)

    @property
    def scale(self) -> float:
        """Scale of the whole error, of one run's noise as well."""
        by_mechanism = [
            share * self.scales.mechanisms[mechanism] for mechanism, share in self.shares.items()
        ]
        known = self.learned
        if known is None:
            return math.hypot(*by_mechanism, self.job_scale, self.layout_scale, RUN_NOISE)
        error = math.hypot(*by_mechanism, self.job_scale, self.layout_scale) ** 2
        left = max(0.0, error - dot(known.explained, known.explained))
        return math.sqrt(known.factor * (left + RUN_NOISE**2))

    @property
    def prior(self) -> Predictive:
        """What is known without measured runs."""
        if self.learned is None:
            return self
        return dataclasses.replace(self, median_s=self.learned.predicted_s, learned=None)

    @property
    def own_runs(self) -> int:
        """Plans of the job whose runs are known."""
        return 0 if self.learned is None else self.learned.own_runs

    def quantile_s(self, share: float) -> Seconds:
        """The step that a share of outcomes stays under."""
        return self.median_s * math.exp(self.scale * quantile(share))

    def interval(self, level: float = 0.9) -> tuple[Seconds, Seconds]:
        """Between which steps a run lies with a chance of ``level``, half of the rest each side."""
        tail = (1.0 - level) / 2.0
        return self.quantile_s(tail), self.quantile_s(1.0 - tail)

    @property
    def expected_s(self) -> Seconds:
        """Mean step, to second order in what serves as the standard deviation.

        The distribution itself has no mean, because of its tails.
        """
        return self.median_s * (1.0 + (DEVIATION * self.scale) ** 2 / 2.0)


def applies(name: str, features: frozenset[Feature]) -> bool:
    """Whether a scale is of plans with these features: it names one of them, several, or ``any``.

    >>> applies("experts+fsdp", frozenset({Feature.EXPERTS}))
    False
    """
    return name == ANY or features.issuperset(name.split("+"))


def _together(scales: Mapping[str, float], features: frozenset[Feature]) -> float:
    return math.hypot(*(scale for name, scale in scales.items() if applies(name, features)))


def predictive(
    model: CostModel,
    layout: Layout,
    step_s: Seconds,
) -> Predictive:
    """The predictive distribution of a plan's predicted step; by the catalogue's calibration."""
    return Predictive(
        median_s=step_s,
        shares=shares(model, layout),
        features=features_of(model, layout, step_s, fitted_devices()),
        point=coordinates(layout),
        scales=shipped_scales(),
    )


def covariance(a: Predictive, b: Predictive) -> float:
    """Covariance of the logarithms of two plans of one job under one posterior.

    The job's own error is left out where nothing was measured: it moves no choice.
    """
    error, own = shared_error(a, b), layout_error(a, b)
    if a.learned is None or b.learned is None:
        return DEVIATION**2 * (error + own)
    explained = dot(a.learned.explained, b.learned.explained)
    left = error + own + a.job_scale * b.job_scale - explained
    return DEVIATION**2 * a.learned.factor * left


def price_effects(
    plan: Predictive, mechanisms: Sequence[Mechanism], noise: float
) -> tuple[float, ...]:
    """By how much what is measured of mechanisms' prices moves a plan's log step.

    One number for each axis of the outcomes, of a standard deviation along it.

    Args:
        noise: scale of the error that a measurement leaves of each price.
    """
    scales, learned = plan.scales.mechanisms, plan.learned
    known = [learned.mechanisms[each] if learned else () for each in mechanisms]
    outcomes = [[-dot(a, b) for b in known] for a in known]
    common = [
        plan.shares.get(each, 0.0) * scales[each] ** 2
        - dot(learned.explained if learned else (), axes)
        for each, axes in zip(mechanisms, known, strict=True)
    ]
    for number, each in enumerate(mechanisms):
        outcomes[number][number] += scales[each] ** 2 + noise**2
    spread = DEVIATION * math.sqrt(learned.factor if learned else 1.0)
    return tuple(spread * part for part in solve_lower(cholesky(outcomes), common))


def shared_error(a: Predictive, b: Predictive) -> float:
    """Product of the scales of what two plans have in common of the mechanisms' errors."""
    return math.fsum(
        share * b.shares.get(mechanism, 0.0) * a.scales.mechanisms[mechanism] ** 2
        for mechanism, share in a.shares.items()
    )


def layout_error(a: Predictive, b: Predictive) -> float:
    """Product of the scales of what two layouts of one job have in common of their own errors."""
    near = math.exp(-distance(a.point, b.point) / a.scales.layout_range)
    return near * a.layout_scale * b.layout_scale


def difference_deviation(a: Predictive, b: Predictive) -> float:
    """Standard deviation of the logarithm of one plan's step over another's."""
    return math.sqrt(max(0.0, covariance(a, a) + covariance(b, b) - 2.0 * covariance(a, b)))


def probability_faster(a: Predictive, b: Predictive, by: float = 0.0) -> float:
    """Chance that a plan's step is shorter than another's of one job, by a share of the latter."""
    lead = math.log(b.median_s / a.median_s) + math.log1p(-by)
    deviation = difference_deviation(a, b)
    if deviation < 1e-9:
        return 0.5 if not lead else float(lead > 0)
    return NormalDist().cdf(lead / deviation)
