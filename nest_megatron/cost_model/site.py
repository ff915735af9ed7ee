"""What a site's own runs say of its predictions.

The catalogue's constants and scales are the prior; runs of the site's history are observations of
the errors (``posterior``). A calibration holds these observations, so that it says what it rests
on, and a plan of a job that ran before knows of its own runs.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from nest_megatron.cluster.records import Cluster, Precision
from nest_megatron.cost_model.features import Feature, confidence_of, coordinates
from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.posterior import Observation, Posterior, changed
from nest_megatron.cost_model.student_t import deviation, quantile
from nest_megatron.cost_model.uncertainty import Predictive, predictive, shipped_calibration
from nest_megatron.history.records import Outcome, RunRecord, link_hashes, same_links
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.objective import MechanismChange, SiteChange
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.plan_file import digest
from nest_megatron.plain import added
from nest_megatron.units import Seconds
from nest_megatron.version import __version__

#: Version of the files.
FORMAT = 1
#: Plans of a calibration, the last ones: more of them take time in every plan and teach little.
MOST_PLANS = 120
#: A run that is off by more than the prior says of 99 in 100 was misread, or something was broken.
_USUAL = 0.99
#: Our own version among those of a run: other constants may have predicted it.
_OWN = "nest_megatron"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRun:
    """The runs of one plan under the same versions.

    Args:
        job: hash of what all plans of its job have in common.
        last: when the last of them started, ISO 8601 in UTC.
        predicted_s: by the catalogue's constants.
        step_s: geometric mean of their median steps.
        point: the layout (``features.coordinates``).
    """

    job: str
    last: str
    runs: int
    predicted_s: Seconds
    step_s: Seconds
    precision: Precision
    shares: Mapping[str, float]
    features: tuple[str, ...]
    point: tuple[float, ...]
    versions: Mapping[str, str]

    def observation(self, names: Iterable[str]) -> Observation:
        """For a posterior in which some versions count."""
        fitted, features = shipped_calibration(), frozenset(map(Feature, self.features))
        return Observation(
            predictive=Predictive(
                median_s=self.predicted_s,
                shares={Mechanism(name): share for name, share in self.shares.items()},
                features=features,
                point=self.point,
                scales=fitted.scales,
                confidence=confidence_of(fitted.evidence, features, self.precision),
            ),
            step_s=self.step_s,
            job=self.job,
            runs=self.runs,
            versions={name: self.versions[name] for name in names if name in self.versions},
        )

    @property
    def is_usual(self) -> bool:
        """Whether it is off by no more than nearly all such runs are."""
        known = self.observation(())
        most = known.predictive.scale * quantile(0.5 + _USUAL / 2)
        return abs(known.error) <= most


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCalibration:
    """What a site has learnt on one kind of cluster; equal names and devices are the same kind.

    Args:
        created: date.
        unusual: runs of the history that are off by more than 99 of 100 are, left out.
        links: of the network (``link_hashes``); empty where older versions wrote the history.
        other_links: plans that were predicted with other figures of links, left out.
    """

    format: int = FORMAT
    cluster: str
    accelerator: str
    gpus_per_node: int
    created: str
    unusual: int
    runs: tuple[SiteRun, ...] = field(default=())
    links: tuple[str, ...] = added(())
    other_links: int = added(0)

    @property
    def num_runs(self) -> int:
        """Runs that it rests on."""
        return sum(run.runs for run in self.runs)

    @property
    def num_jobs(self) -> int:
        """Jobs that these are of."""
        return len({run.job for run in self.runs})

    def differences(self, cluster: Cluster) -> tuple[str, ...]:
        """In what a cluster is not the one that it was fitted on."""
        pairs = (
            ("cluster", self.cluster, cluster.name),
            ("accelerator", self.accelerator, cluster.accelerator.name),
            ("GPUs in a node", self.gpus_per_node, cluster.gpus_per_node),
        )
        found = [f"{n} {has} instead of {asked}" for n, has, asked in pairs if has != asked]
        if not same_links(self.links, link_hashes(cluster)):
            found.append("links with other figures")
        return tuple(found)


def calibrations(records: Iterable[RunRecord], created: str) -> tuple[SiteCalibration, ...]:
    """One calibration for each kind of cluster of a history, of what its runs can teach.

    Args:
        records: by when they started.
        created: date of the calibrations.
    """
    kinds: dict[tuple[str, str, int], dict[object, list[RunRecord]]] = defaultdict(dict)
    for record in records:
        if record.device is None:  # a CPU in the place of the GPUs that it was planned for
            continue
        if record.outcome is Outcome.FINISHED and record.measured and record.predicted.shares:
            at = record.cluster
            plans = kinds[at.name, at.accelerator, at.gpus_per_node]
            plans.setdefault((record.plan, *sorted(record.versions.items())), []).append(record)
    return tuple(
        _calibration(kind, plans.values(), created) for kind, plans in sorted(kinds.items())
    )


def _calibration(
    kind: tuple[str, str, int], plans: Collection[list[RunRecord]], created: str
) -> SiteCalibration:
    latest = sorted((records[-1] for records in plans), key=lambda record: record.start)
    links = next((each.cluster.links for each in reversed(latest) if each.cluster.links), ())
    same = [records for records in plans if same_links(records[-1].cluster.links, links)]
    runs = sorted(map(_site_run, same), key=lambda run: run.last)
    usual = [run for run in runs if run.is_usual]
    return SiteCalibration(
        cluster=kind[0],
        accelerator=kind[1],
        gpus_per_node=kind[2],
        created=created,
        unusual=len(runs) - len(usual),
        runs=tuple(usual[-MOST_PLANS:]),
        links=links,
        other_links=len(plans) - len(same),
    )


def _site_run(records: list[RunRecord]) -> SiteRun:
    last = records[-1]
    steps = [each.measured.step_s for each in records if each.measured]
    job = last.job
    return SiteRun(
        job=_job(
            job.model_hash,
            job.global_batch_size,
            job.seq_length,
            job.precision,
            last.cluster.cluster_hash,
        ),
        last=last.start,
        runs=len(steps),
        predicted_s=last.predicted.step_s,
        step_s=statistics.geometric_mean(steps),
        precision=job.precision,
        shares=last.predicted.shares,
        features=last.predicted.features,
        point=coordinates(last.grid),
        versions=last.versions,
    )


def _job(
    model_hash: str, batch: int, seq_length: int, precision: Precision, cluster_hash: str
) -> str:
    return digest([model_hash, batch, seq_length, precision.value, cluster_hash])


class Site:
    """A calibration at work.

    Args:
        name: of its file.
        versions: of drivers and packages of the running job; ``None`` where they are not known, and
            are taken to be those of the last run.
    """

    def __init__(
        self, calibration: SiteCalibration, name: str, versions: Mapping[str, str] | None = None
    ) -> None:
        self.calibration, self.name = calibration, name
        last = calibration.runs[-1].versions
        known = dict(last if versions is None else versions)
        if _OWN in last:
            known[_OWN] = __version__
        ran = {each: last[each] for each in known if each in last}
        self.changed_versions = changed(known, ran)
        self.posterior = Posterior([run.observation(known) for run in calibration.runs], known)

    def predictive(
        self, model: CostModel, grid: Grid, partition: StagePartition, step_s: Seconds
    ) -> Predictive:
        """What is known of a plan's predicted step at this site."""
        return self.posterior.of(predictive(model, grid, partition, step_s), job_of(model, grid))

    def least_factor(self, known: Predictive) -> float:
        """No plan of a job has a median step below this times its predicted step.

        Shares add up to one, so that no plan gains more than by the cheapest mechanism. Of a job
        that has runs of its own nothing is known: 0.
        """
        if known.learned is None or known.degrees != known.prior.degrees:
            return 0.0
        return math.exp(min(self.posterior.mechanism(each)[0] for each in Mechanism))

    def change(self, known: Predictive) -> SiteChange:
        """What it changes of a plan's prediction, for plan files."""
        before, runs = known.prior, self.calibration.runs
        low_s, high_s = before.interval()
        return SiteChange(
            name=self.name,
            digest=digest(self.calibration),
            runs=self.calibration.num_runs,
            jobs=self.calibration.num_jobs,
            own_runs=known.degrees - before.degrees,
            first=runs[0].last[:10],
            last=runs[-1].last[:10],
            without_s=before.median_s,
            without_low_s=low_s,
            without_high_s=high_s,
            changed_versions=self.changed_versions,
            mechanisms=tuple(self._changes(known)),
        )

    def mechanisms(self) -> list[LearnedMechanism]:
        """What runs say of each mechanism that they spend time on, the surest first."""
        found = []
        for mechanism in Mechanism:
            mean, left = self.posterior.mechanism(mechanism)
            if mean:
                scale = shipped_calibration().scales.mechanisms[mechanism]
                found.append(
                    LearnedMechanism(
                        mechanism=mechanism,
                        mean=mean,
                        price_percent=100.0 * math.expm1(mean),
                        deviation_percent=100.0 * left,
                        prior_percent=100.0 * deviation() * scale,
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


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    site: Site | None, model: CostModel, grid: Grid, partition: StagePartition, step_s: Seconds
) -> Predictive:
    """The predictive distribution of a plan's predicted step, at a site where one is calibrated."""
    if site is None:
        return predictive(model, grid, partition, step_s)
    return site.predictive(model, grid, partition, step_s)


def job_of(model: CostModel, grid: Grid) -> str:
    """Hash of what all plans of a job have in common, as that of its runs."""
    nameless = dataclasses.replace(model.spec, name="", source="")
    return _job(
        digest(nameless),
        grid.global_batch_size,
        model.spec.seq_length,
        model.settings.precision,
        digest(model.cluster),
    )
