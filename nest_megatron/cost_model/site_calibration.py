"""The runs of a site that its predictions learn from: what a calibration's file holds.

A calibration holds observations of the errors of predictions, and not what follows from them, so
that it says what it rests on, and a plan of a job that ran before knows of its own runs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field

from nest_megatron.cluster.records import Cluster, Precision
from nest_megatron.cost_model.device_memory import peak_error
from nest_megatron.cost_model.distributions import quantile
from nest_megatron.cost_model.features import Feature, coordinates
from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.cost_model.peak_posterior import MOST_RUNS, PeakRun, PredictedPeak
from nest_megatron.cost_model.posterior import Observation, job_hash
from nest_megatron.cost_model.uncertainty import Predictive, shipped_scales
from nest_megatron.history.records import (
    Outcome,
    Predicted,
    RunRecord,
    link_hashes,
    same_links,
)
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.plain import added, frozen
from nest_megatron.units import Bytes, Seconds

#: Version of the files.
FORMAT = 1
#: Plans of a calibration, the last ones: more of them take time in every plan and teach little.
MOST_PLANS = 120
#: A run that is off by more than the prior says of 99 in 100 was misread, or something was broken.
_USUAL = 0.99


@frozen
class SiteRun:
    """The runs of one plan under the same versions.

    Args:
        job: hash of what all plans of its job have in common.
        last: when the last of them started, ISO 8601 in UTC.
        predicted_s: by the catalogue's constants.
        step_s: geometric mean of their median steps.
        point: the layout (``features.coordinates``).
        trials: ids of those runs among them that ``nest-megatron tune`` started.
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
    trials: tuple[str, ...] = added(())

    def observation(self, names: Iterable[str]) -> Observation:
        """For a posterior in which some versions count."""
        return Observation(
            predictive=Predictive(
                median_s=self.predicted_s,
                shares={Mechanism(name): share for name, share in self.shares.items()},
                features=frozenset(map(Feature, self.features)),
                point=self.point,
                scales=shipped_scales(),
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


@frozen
class SitePeak:
    """The peak of a plan's runs under the same versions, or that it ran out of memory.

    Args:
        job, last, trials: as of ``SiteRun``.
        bytes: of the tensors of the highest rank; what they needed more than, if it ran out.
        terms: the predicted peak.
        point, zero: the layout.
    """

    job: str
    last: str
    bytes: Bytes
    ran_out: bool
    terms: Mapping[str, Bytes]
    point: tuple[float, ...]
    zero: ZeroStage
    versions: Mapping[str, str]
    trials: tuple[str, ...] = added(())

    def observation(self, names: Iterable[str]) -> PeakRun:
        """For a posterior in which some versions count."""
        return PeakRun(
            predicted=PredictedPeak(
                terms=self.terms, point=self.point, error=peak_error(self.zero)
            ),
            bytes=self.bytes,
            ran_out=self.ran_out,
            job=self.job,
            versions={name: self.versions[name] for name in names if name in self.versions},
        )


@frozen
class SiteCalibration:
    """What a site has learnt on one kind of cluster; equal names and devices are the same kind.

    Args:
        created: date.
        unusual: runs of the history that are off by more than 99 of 100 are, left out.
        runs, peaks: what they say of steps, and of memory.
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
    peaks: tuple[SitePeak, ...] = added(())
    links: tuple[str, ...] = added(())
    other_links: int = added(0)

    @property
    def by_date(self) -> tuple[SiteRun | SitePeak, ...]:
        """All that it holds, the last at the end."""
        return tuple(sorted((*self.runs, *self.peaks), key=lambda run: run.last))

    @property
    def num_runs(self) -> int:
        """Runs that it rests on."""
        return sum(run.runs for run in self.runs)

    @property
    def num_jobs(self) -> int:
        """Jobs that these are of."""
        return len({run.job for run in self.by_date})

    def without(self, trials: Collection[str]) -> SiteCalibration:
        """The same but for plans among whose runs are some trials."""
        own = set(trials)
        return dataclasses.replace(
            self,
            runs=tuple(run for run in self.runs if own.isdisjoint(run.trials)),
            peaks=tuple(peak for peak in self.peaks if own.isdisjoint(peak.trials)),
        )

    @property
    def unknown_names(self) -> tuple[str, ...]:
        """Features and mechanisms of runs that only a later version knows."""
        return tuple(sorted({name for run in self.runs for name in unknown_names(run)}))

    def differences(self, cluster: Cluster) -> tuple[str, ...]:
        """In what a cluster is not the one that it was fitted on."""
        pairs = (
            ("cluster", self.cluster, cluster.name),
            ("accelerator", self.accelerator, cluster.accelerator.name),
            ("GPUs in a node", self.gpus_per_node, cluster.gpus_per_node),
        )
        found = [f"{n} {has} instead of {now}" for n, has, now in pairs if has != now]
        if not same_links(self.links, link_hashes(cluster)):
            found.append("links with other figures")
        return tuple(found)

    def has_links_of(self, cluster: Cluster) -> bool:
        """Whether its links are known, and those of a cluster."""
        return set(self.links) == set(link_hashes(cluster))


def unknown_names(run: SiteRun | Predicted) -> frozenset[str]:
    """Features and mechanisms of a run that only a later version knows."""
    return (frozenset(run.features) - {*Feature}) | (frozenset(run.shares) - {*Mechanism})


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
        if _teaches_time(record) or _teaches_memory(record):
            at = record.cluster
            plans = kinds[at.name, at.accelerator, at.gpus_per_node]
            plans.setdefault((record.plan, *sorted(record.versions.items())), []).append(record)
    return tuple(
        _calibration(kind, plans.values(), created) for kind, plans in sorted(kinds.items())
    )


def _teaches_time(record: RunRecord) -> bool:
    is_whole = record.outcome is Outcome.FINISHED and bool(record.predicted.shares)
    return is_whole and record.measured is not None and not unknown_names(record.predicted)


def _teaches_memory(record: RunRecord) -> bool:
    return bool(record.predicted.peak_terms) and peak_bytes(record) is not None


def peak_bytes(record: RunRecord) -> Bytes | None:
    """The highest peak of a run's tensors, or, where it ran out of memory, what they exceeded."""
    if record.outcome is Outcome.OUT_OF_MEMORY:
        return record.predicted.allocatable_bytes or None
    if record.outcome is Outcome.FINISHED and record.measured is not None:
        return record.measured.highest_allocated_bytes
    return None


def _calibration(
    kind: tuple[str, str, int], plans: Collection[list[RunRecord]], created: str
) -> SiteCalibration:
    latest = sorted((records[-1] for records in plans), key=lambda record: record.start)
    links = next((each.cluster.links for each in reversed(latest) if each.cluster.links), ())
    same = [records for records in plans if same_links(records[-1].cluster.links, links)]
    timed = ([each for each in plan if _teaches_time(each)] for plan in same)
    runs = sorted((_site_run(plan) for plan in timed if plan), key=lambda run: run.last)
    usual = [run for run in runs if run.is_usual]
    return SiteCalibration(
        cluster=kind[0],
        accelerator=kind[1],
        gpus_per_node=kind[2],
        created=created,
        unusual=len(runs) - len(usual),
        runs=tuple(usual[-MOST_PLANS:]),
        peaks=tuple(sorted(_site_peaks(same), key=lambda peak: peak.last)[-MOST_RUNS:]),
        links=links,
        other_links=len(plans) - len(same),
    )


def _site_peaks(plans: Iterable[list[RunRecord]]) -> Iterator[SitePeak]:
    """The highest peak of each plan, and where one of its runs ran out of memory, that it did."""
    for plan in plans:
        runs = [each for each in plan if _teaches_memory(each)]
        for ran_out in (False, True):
            own = [each for each in runs if (each.outcome is Outcome.OUT_OF_MEMORY) == ran_out]
            if own:
                last = own[-1]
                yield SitePeak(
                    job=_job_of(last),
                    last=last.start,
                    bytes=max(filter(None, map(peak_bytes, own))),
                    ran_out=ran_out,
                    terms=last.predicted.peak_terms,
                    point=coordinates(last.grid),
                    zero=last.grid.zero,
                    versions=last.versions,
                    trials=_trials(own),
                )


def _site_run(records: list[RunRecord]) -> SiteRun:
    last = records[-1]
    steps = [each.measured.step_s for each in records if each.measured]
    return SiteRun(
        job=_job_of(last),
        last=last.start,
        runs=len(steps),
        predicted_s=last.predicted.step_s,
        step_s=statistics.geometric_mean(steps),
        precision=last.job.precision,
        shares=last.predicted.shares,
        features=last.predicted.features,
        point=coordinates(last.grid),
        versions=last.versions,
        trials=_trials(records),
    )


def _trials(records: Iterable[RunRecord]) -> tuple[str, ...]:
    return tuple(each.id for each in records if each.trial)


def _job_of(record: RunRecord) -> str:
    job, cluster_hash = record.job, record.cluster.cluster_hash
    return job_hash(
        job.model_hash, job.global_batch_size, job.seq_length, job.precision, cluster_hash
    )
