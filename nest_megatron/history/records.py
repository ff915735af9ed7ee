"""What a run of a planned job was, what was predicted of it, and what it did."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import field

from nest_megatron.cluster.records import Cluster, Precision
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.plan_file import digest
from nest_megatron.plain import Name, added, frozen
from nest_megatron.units import Bytes, Seconds

#: Version of the records; a reader passes over newer ones, and says so.
SCHEMA = 1
#: The outcome of what did not begin.
REFUSED = "refused"


class Outcome(Name):
    """How a run ended, as far as is known.

    ``started``: neither its watched steps have ended, nor has it failed or said that it was killed.
    ``finished``: the watched steps ended, and training may have gone on; or training ended before.
    """

    STARTED = "started"
    FINISHED = "finished"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    KILLED = "killed"

    @property
    def is_failure(self) -> bool:
        """Whether the run ended before its time."""
        return self in (Outcome.OUT_OF_MEMORY, Outcome.FAILED, Outcome.KILLED)


@frozen
class JobKey:
    """What all layouts of one job have in common; equal keys are the same job.

    Args:
        model_hash: of the shape, without its name and source.
        global_batch_size, seq_length: in sequences, and in tokens.
        framework: what it runs on (``Megatron-LM``), where the plan says so.
    """

    model: str
    model_hash: str
    global_batch_size: int
    seq_length: int
    precision: Precision
    framework: str | None


@frozen
class ClusterKey:
    """What a run's machines were taken for; equal keys are the same cluster.

    Args:
        links: of its network levels (``link_hashes``); empty in records of older versions.
    """

    name: str
    cluster_hash: str
    accelerator: str
    num_gpus: int
    gpus_per_node: int
    links: tuple[str, ...] = added(())


@frozen
class Predicted:
    """What was predicted before the run.

    Args:
        low_s, high_s: 9 of 10 runs lie between them; ``None`` where the plan does not say.
        shares: of the step by mechanism (``cost_model.mechanisms``); empty where they cannot be
            found again: the plan was made with measured layer times that are not on this machine.
        features: what makes the step harder to predict (``cost_model.features``).
        busy_s: work of each pipeline rank in one step, forward and backward.
        peak_memory_bytes: of each pipeline rank.
        peak_terms: bytes of the highest of these, by term.
        allocatable_bytes: what the job's tensors may take of a device; ``None`` in older records.
        expert_imbalance: as measured ones are, that was planned for; ``None`` in older records.
        own_runs: plans of the job whose runs the prediction rests on; 0 in older records.
    """

    step_s: Seconds
    low_s: Seconds | None
    high_s: Seconds | None
    shares: Mapping[str, float]
    features: tuple[str, ...]
    busy_s: tuple[Seconds, ...]
    peak_memory_bytes: tuple[Bytes, ...]
    peak_terms: Mapping[str, Bytes] = field(default_factory=dict)
    allocatable_bytes: Bytes | None = None
    expert_imbalance: float | None = None
    own_runs: int = added(0)

    def __post_init__(self) -> None:
        if self.step_s <= 0 or not self.peak_memory_bytes:
            raise ValueError("a prediction has a step and a peak")


@frozen
class WatchedSteps:
    """Times of watched steps.

    Args:
        step_times_s: of every watched step, in their order, from beginning to beginning.
        warm_up: how many of them come first and do not count.
    """

    step_times_s: tuple[Seconds, ...]
    warm_up: int

    @property
    def counted_s(self) -> tuple[Seconds, ...]:
        """The step times that count."""
        return self.step_times_s[self.warm_up :]

    @property
    def step_s(self) -> Seconds:
        """The median step of those that count."""
        return statistics.median(self.counted_s)


@frozen
class Measured(WatchedSteps):
    """What the watched steps took; a tuple by rank has one entry for each global rank.

    Args:
        busy_s: median time of a step that each rank spends in its forward and backward passes,
            without waiting for other pipeline ranks; ``None`` for a rank that does not say.
        peak_memory_bytes: on each rank's device; ``None`` where there is none, or no word of it.
        peak_allocated_bytes: of each rank's tensors alone; empty in older records.
        expert_imbalance: tokens of the busiest expert-parallel rank over the mean, of the whole
            batch, in the mean of layers and steps; ``None`` where Megatron counts none.
    """

    busy_s: tuple[Seconds | None, ...]
    peak_memory_bytes: tuple[Bytes | None, ...]
    peak_allocated_bytes: tuple[Bytes | None, ...] = ()
    expert_imbalance: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.warm_up < len(self.step_times_s) or min(self.step_times_s) <= 0:
            raise ValueError("of the measured steps one counts")

    @property
    def highest_allocated_bytes(self) -> Bytes | None:
        """The highest peak of tensors on any rank, as far as ranks say."""
        return max((each for each in self.peak_allocated_bytes if each), default=None)

    @property
    def spread(self) -> float:
        """Inter-quartile range of the steps over their median; 0 for fewer than two."""
        if len(self.counted_s) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.counted_s, n=4, method="inclusive")
        return (high - low) / self.step_s


@frozen
class RankMeasured(WatchedSteps):
    """What one rank measured, which it leaves for rank 0.

    Args:
        rank: its global rank.
        busy_s: of each of these steps, as in ``Measured``; empty where passes were not timed.
        expert_imbalance: as in ``Measured``, of the rank's layers.
    """

    rank: int
    host: str
    busy_s: tuple[Seconds, ...]
    peak_memory_bytes: Bytes | None
    peak_allocated_bytes: Bytes | None = None
    expert_imbalance: float | None = None

    @property
    def counted_busy_s(self) -> tuple[Seconds, ...]:
        """Work of the steps that count."""
        return self.busy_s[self.warm_up :]


def measured_by_ranks(parts: Mapping[int, RankMeasured], num_ranks: int) -> Measured:
    """What the ranks that said something measured together; steps are those of the first."""
    by_rank = [parts.get(rank) for rank in range(num_ranks)]
    uneven = [part.expert_imbalance for part in parts.values() if part.expert_imbalance is not None]
    first = parts[min(parts)]
    return Measured(
        step_times_s=first.step_times_s,
        warm_up=first.warm_up,
        busy_s=tuple(
            statistics.median(part.counted_busy_s) if part and part.counted_busy_s else None
            for part in by_rank
        ),
        peak_memory_bytes=tuple(part.peak_memory_bytes if part else None for part in by_rank),
        peak_allocated_bytes=tuple(part.peak_allocated_bytes if part else None for part in by_rank),
        expert_imbalance=statistics.fmean(uneven) if uneven else None,
    )


@frozen
class FlagChange:
    """A flag, or a field, that a launch rewrote; ``None`` is one that is left out."""

    name: str
    before: str | None
    after: str | None


@frozen
class Launch:
    """How a run was launched.

    Args:
        mode: of ``+nest=``.
        signer: id of the trusted key that signed the plan; ``None`` where no policy asks for one.
        changes: what the plan changed of the job's flags or fields.
    """

    mode: str
    signer: str | None
    changes: tuple[FlagChange, ...]


@frozen
class RunRecord:
    """A run of a planned job.

    Args:
        id: of the run; every line of the file with it is of the same run.
        start, end: ISO 8601 in UTC; ``end`` is that of the last watched step, or of the failure.
        batch_job: the scheduler's number of the job (Slurm's), where there is one.
        hosts: of each global rank.
        device: GPU of the first rank's host in the driver's words; ``None`` where there is none.
        plan: checksum of the plan that ran.
        versions: of packages and the driver, by name.
        grid: the layout that ran.
        error: first line of what ended the run, and which rank said it.
        warnings: what was unlike the prediction, or unlike on ranks that do the same.
        trial: whether it was a short run of ``nest-megatron tune``.
    """

    schema: int = SCHEMA
    id: str
    outcome: Outcome
    start: str
    end: str | None = None
    user: str
    batch_job: str | None
    hosts: tuple[str, ...]
    plan: str
    job: JobKey
    cluster: ClusterKey
    versions: Mapping[str, str]
    grid: PartialLayout
    pipeline_model_parallel_layout: str | None
    predicted: Predicted
    measured: Measured | None = None
    error: str | None = None
    device: str | None = None
    warnings: tuple[str, ...] = ()
    launch: Launch | None = None
    trial: bool = False

    @property
    def error_percent(self) -> float | None:
        """The measured step over the predicted one, in per cent; ``None`` where nothing ran."""
        if self.measured is None:
            return None
        return 100.0 * (self.measured.step_s / self.predicted.step_s - 1.0)

    def followed_by(self, later: RunRecord) -> RunRecord:
        """What two lines of one run say together: the first, and how it ended by the later.

        The first failure counts: once a rank has failed, the others fail because of it; none runs
        out of memory for that.
        """
        if later.outcome is Outcome.STARTED and self.outcome is not Outcome.STARTED:
            return later.followed_by(self)  # their files were read in another order
        end = later
        if self.outcome.is_failure and later.outcome is not Outcome.OUT_OF_MEMORY:
            end = self
        known = later if later.measured is not None else self
        return dataclasses.replace(
            self,
            outcome=end.outcome,
            end=end.end,
            error=end.error,
            measured=known.measured,
            warnings=known.warnings,
        )


@frozen
class RefusedLaunch:
    """A launch that a rule did not allow, so that no run of it began.

    Args:
        start: when it was refused, ISO 8601 in UTC.
        host: of the rank that planned.
        num_ranks: that were launched.
        mode: of ``+nest=``.
        plan_file: the pinned file that was named, if one was.
        rule: a policy's (``launch.pinned_only``), or the setting that a plan does not meet.
        reason: the error, with the rule's file and line.
        exit_code: of the processes.
    """

    schema: int = SCHEMA
    id: str
    outcome: str = REFUSED
    start: str
    user: str
    batch_job: str | None
    host: str
    num_ranks: int
    mode: str
    plan_file: str | None
    rule: str
    reason: str
    exit_code: int


def job_key(plan: ParallelPlan) -> JobKey:
    """The job that a plan is one layout of."""
    nameless = dataclasses.replace(plan.model, name="", source="")
    return JobKey(
        model=plan.model.name,
        model_hash=digest(nameless),
        global_batch_size=plan.layout.global_batch_size,
        seq_length=plan.train.seq_length,
        precision=plan.train.precision,
        framework=plan.provenance.framework,
    )


def cluster_key(plan: ParallelPlan) -> ClusterKey:
    """The cluster that a plan is for."""
    cluster = plan.cluster
    return ClusterKey(
        name=cluster.name,
        cluster_hash=plan.provenance.cluster_hash,
        accelerator=cluster.accelerator.name,
        num_gpus=cluster.num_gpus,
        gpus_per_node=cluster.gpus_per_node,
        links=link_hashes(cluster),
    )


def link_hashes(cluster: Cluster) -> tuple[str, ...]:
    """A short hash of each unlike level's figures.

    How many devices a level joins is no figure of a link: it changes with each allocation.
    """
    figures = (
        dataclasses.replace(level, name="", num_devices=None, source="") for level in cluster.levels
    )
    return tuple(dict.fromkeys(map(digest, figures)))


def same_links(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two clusters may be one: all links of one are among the other's, or none is known.

    A job that lies in one group of a level has no link of the levels outside.
    """
    return not one or not other or set(one) <= set(other) or set(other) <= set(one)
