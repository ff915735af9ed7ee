"""What a site's own runs say of its predictions.

The catalogue's constants and scales are the prior; runs of the site's history are observations of
the errors (``site_calibration``, ``posterior``, ``peak_posterior``).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping
from statistics import NormalDist
from typing import TYPE_CHECKING

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model.device_memory import PeakErrors
from nest_megatron.cost_model.distributions import deviation
from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_posterior import PeakPosterior, PredictedPeak, predicted_peak
from nest_megatron.cost_model.posterior import Posterior, differing_versions, job_hash
from nest_megatron.cost_model.uncertainty import Predictive, predictive, shipped_scales
from nest_megatron.layout.estimate import (
    MechanismChange,
    MemoryChange,
    MemoryPart,
    SiteChange,
)
from nest_megatron.layout.layout import Layout, PartialLayout
from nest_megatron.layout.plan_file import digest
from nest_megatron.plain import frozen
from nest_megatron.units import Seconds
from nest_megatron.version import __version__

if TYPE_CHECKING:
    from nest_megatron.cost_model.site_calibration import SiteCalibration

#: Our own version among those of a run: other constants may have predicted it.
_OWN = "nest_megatron"


class Site(Caching):
    """A calibration at work.

    Args:
        name: of its file.
        versions: of drivers and packages of the running job; ``None`` where they are not known, and
            are taken to be those of the last run.
    """

    def __init__(
        self, calibration: SiteCalibration, name: str, versions: Mapping[str, str] | None = None
    ) -> None:
        self.calibration, self.name, self._versions = calibration, name, versions
        last = calibration.by_date[-1].versions
        known = dict(last if versions is None else versions)
        if _OWN in last:
            known[_OWN] = __version__
        self.changed_versions = differing_versions(
            known, {each: last[each] for each in known if each in last}
        )
        self.posterior = Posterior([run.observation(known) for run in calibration.runs], known)
        self.peaks = PeakPosterior([run.observation(known) for run in calibration.peaks], known)

    def without(self, trials: Collection[str]) -> Site | None:
        """What is known without plans that some trials ran; ``None`` where nothing is then."""
        left = self.calibration.without(trials)
        return Site(left, self.name, self._versions) if left.by_date else None

    def predictive(self, model: CostModel, layout: Layout, step_s: Seconds) -> Predictive:
        """What is known of a plan's predicted step at this site."""
        return self.posterior.of(predictive(model, layout, step_s), job_of(model, layout))

    def peak_error(self, model: CostModel, layout: Layout) -> PeakErrors | None:
        """What is known of a plan's predicted peak at this site; ``None`` without a run's peak."""
        if not self.peaks.runs:
            return None
        return self.peaks.of(self._peak(model, layout), job_of(model, layout))

    @cached_by(lambda _, model, layout: (model, layout))
    def _peak(self, model: CostModel, layout: Layout) -> PredictedPeak:
        """Computed once for each plan: a choice reads it several times."""
        return predicted_peak(model, layout)

    def memory_change(
        self, model: CostModel, layout: Layout, without: float
    ) -> MemoryChange | None:
        """What it changes of a plan's predicted peak; ``None`` without a run's peak.

        Args:
            without: chance to run out of memory by the catalogue's calibration alone.
        """
        known = self.peak_error(model, layout)
        if known is None:
            return None
        peak_bytes, job = self._peak(model, layout).peak_bytes, job_of(model, layout)
        low, median, high = (
            round(peak_bytes * math.exp(known.quantile(share))) for share in (0.05, 0.5, 0.95)
        )
        runs = self.peaks.runs
        return MemoryChange(
            peaks=sum(not run.ran_out for run in runs),
            ran_out=sum(run.ran_out for run in runs),
            own=sum(run.job == job for run in runs),
            peak_bytes=median,
            low_bytes=low,
            high_bytes=high,
            without_out_of_memory=without,
            parts=tuple(self._parts(self._peak(model, layout), job)),
        )

    def _parts(self, peak: PredictedPeak, job: str) -> list[MemoryPart]:
        """What each part of the error adds to a plan's peak by itself."""
        median = peak.error.quantile(0.5)
        found = [
            MemoryPart(
                part=part,
                peak_percent=100.0
                * math.expm1(peak.error.quantile(NormalDist().cdf(score)) - median),
            )
            for part, score in self.peaks.parts(peak, job).items()
        ]
        return sorted(found, key=lambda each: -abs(each.peak_percent))

    def change(self, known: Predictive, memory: MemoryChange | None = None) -> SiteChange:
        """What it changes of a plan's prediction, for plan files."""
        before, runs = known.prior, self.calibration.by_date
        low_s, high_s = before.interval()
        return SiteChange(
            name=self.name,
            digest=digest(self.calibration),
            runs=self.calibration.num_runs,
            jobs=self.calibration.num_jobs,
            own_runs=known.own_runs,
            first=runs[0].last[:10],
            last=runs[-1].last[:10],
            without_s=before.median_s,
            without_low_s=low_s,
            without_high_s=high_s,
            changed_versions=self.changed_versions,
            mechanisms=tuple(self._changes(known)),
            memory=memory,
        )

    def mechanisms(self) -> list[LearnedMechanism]:
        """What runs say of each mechanism that they spend time on, the surest first."""
        if not self.posterior.observations:
            return []
        found = []
        for mechanism in Mechanism:
            mean, left = self.posterior.mechanism(mechanism)
            if mean:
                found.append(
                    LearnedMechanism(
                        mechanism=mechanism,
                        mean=mean,
                        price_percent=100.0 * math.expm1(mean),
                        deviation_percent=100.0 * left,
                        prior_percent=100.0 * deviation() * shipped_scales().mechanisms[mechanism],
                    )
                )
        return sorted(found, key=lambda each: each.deviation_percent / each.prior_percent)

    def _changes(self, known: Predictive) -> list[MechanismChange]:
        """What that adds to a plan's step."""
        found = [
            MechanismChange(
                mechanism=each.mechanism.value,
                price_percent=each.price_percent,
                deviation_percent=each.deviation_percent,
                step_percent=100.0 * math.expm1(known.shares[each.mechanism] * each.mean),
            )
            for each in self.mechanisms()
            if each.mechanism in known.shares
        ]
        return sorted(found, key=lambda each: -abs(each.step_percent))


@frozen
class LearnedMechanism:
    """What runs say of the price of a mechanism.

    Args:
        mean: of its error, in logarithms.
        price_percent: by how much it takes longer than predicted.
        deviation_percent, prior_percent: standard deviation of that, with and without the runs.
    """

    mechanism: Mechanism
    mean: float
    price_percent: float
    deviation_percent: float
    prior_percent: float


@frozen
class UnseenErrors:
    """Mean absolute error of the plans of jobs that were left out in turn."""

    before_percent: float
    after_percent: float


def unseen_errors(calibration: SiteCalibration) -> UnseenErrors | None:
    """How well the runs of a site predict jobs that they are not of; ``None`` of a single job."""
    if calibration.num_jobs < 2:
        return None
    names = calibration.runs[-1].versions
    runs = [run.observation(names) for run in calibration.runs]
    before, after = [], []
    for job in {run.job: None for run in runs}:
        others = Posterior([run for run in runs if run.job != job])
        for run in runs:
            if run.job == job:
                predicted_s = others.of(run.predictive, job).median_s
                before.append(abs(run.predictive.median_s / run.step_s - 1.0))
                after.append(abs(predicted_s / run.step_s - 1.0))
    return UnseenErrors(
        before_percent=100.0 * statistics.fmean(before),
        after_percent=100.0 * statistics.fmean(after),
    )


def expected(
    site: Site | None,
    model: CostModel,
    layout: Layout,
    step_s: Seconds,
) -> Predictive:
    """The predictive distribution of a plan's predicted step, at a site where one is calibrated."""
    if site is None:
        return predictive(model, layout, step_s)
    return site.predictive(model, layout, step_s)


def job_of(model: CostModel, layout: PartialLayout) -> str:
    """Hash of what all plans of a job have in common, as that of its runs."""
    return job_hash(
        digest(dataclasses.replace(model.spec, name="", source="")),
        layout.global_batch_size,
        model.spec.seq_length,
        model.settings.precision,
        digest(model.cluster),
    )
