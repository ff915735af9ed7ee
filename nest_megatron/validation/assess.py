"""Predict every row of a file by the cost model, or say why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model.device_memory import (
    allocatable_bytes,
    out_of_memory_probability,
    outside_bytes,
    peak_error,
)
from nest_megatron.cost_model.estimate import attention_flops_per_sequence, model_flops_per_sequence
from nest_megatron.cost_model.features import SCANNED
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import out_of_memory
from nest_megatron.cost_model.pipeline import PipelineProblem, memory_of_ranks
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.cost_model.uncertainty import predictive
from nest_megatron.errors import UserInputError
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.layout.stage_layout import StagePartition, is_uniform, uniform_partition
from nest_megatron.packages import import_from_checkout
from nest_megatron.plain import frozen
from nest_megatron.planner.choice import Candidate
from nest_megatron.solver.backend import backend_to_run, solver_of
from nest_megatron.solver.one_partition import join_chunks
from nest_megatron.solver.outcome import DEFAULT_NODE_LIMIT, NO_THRESHOLD
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.units import Bytes, Seconds, Ticks, to_seconds, to_ticks
from nest_megatron.validation.job import RowJob, job_of
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.outcome import Basis, Judged, RowOutcome
from nest_megatron.validation.rows import (
    RefusedRowError,
    Row,
    RowFile,
    RowKind,
    StepWork,
    measured_memory,
    measured_time,
    ran_out_of_memory,
    refuse_misprints,
    require_consistent,
    require_fixed_sequences,
    require_measurement,
    states_time,
)

#: More memory than any device has.
_NO_LIMIT = 1 << 55


@frozen
class RowPrediction:
    """What the cost model says of a job.

    Args:
        stage_memory: bytes of each pipeline rank at its peak, reserve and margin not counted.
        model_flops: of one step, recomputation not counted.
        attention_flops: the part of them that is the causal half of attention.
        layout: what the job was taken to be.
    """

    iteration_time_s: Seconds
    stage_memory: tuple[Bytes, ...]
    capacity_bytes: Bytes
    model_flops: float
    attention_flops: float
    layout: Layout

    @property
    def fits(self) -> bool:
        """Whether every rank stays within the capacity that a plan may fill."""
        return max(self.stage_memory) <= self.capacity_bytes


class Predictor(Caching):
    """Predicts jobs; what jobs share (a model on a cluster) is priced once, and a job as well."""

    @cached_by(lambda _, job: (*_key(job), job.grids, job.partition, job.pipeline_runs))
    def predict(self, job: RowJob) -> RowPrediction:
        """Time and memory of a job.

        Raises:
            RefusedRowError: if its layers cannot be divided over the pipeline.
        """
        return self._predict(job, self.model(job))

    @cached_by(lambda _, job: _key(job))
    def model(self, job: RowJob) -> CostModel:
        """The cost model of a job, shared with jobs that differ in their layout alone."""
        return CostModel(job.spec, job.cluster, job.settings)

    @staticmethod
    def _predict(job: RowJob, model: CostModel) -> RowPrediction:
        problems = []
        for grid in job.grids:
            problem = stage_problem(model, grid)
            # between a pipeline's filling and its draining
            between = max(1, problem.num_microbatches // job.pipeline_runs)
            problems.append((grid, problem._replace(num_microbatches=between)))
        partition = measured_partition(job, problems[0][1])
        memory = [stage_memory(problem, partition) for _, problem in problems]
        needs = [max(stages) for stages in memory]
        fitting = [i for i, need in enumerate(needs) if need <= problems[i][1].capacity_bytes]
        if not fitting:
            fitting = [needs.index(min(needs))]
        # Recomputing something is never faster than recomputing nothing, where that fits.
        plain = [replace(grid, recompute=NO_RECOMPUTE) for grid in job.grids]
        whole = {plain[i] for i in fitting if job.grids[i] == plain[i]}
        fitting = [i for i in fitting if job.grids[i] == plain[i] or plain[i] not in whole]
        ticks, best = min((iteration_ticks(problems[i][1], partition), i) for i in fitting)
        grid, problem = problems[best]
        return RowPrediction(
            iteration_time_s=to_seconds(
                job.pipeline_runs * (ticks - problem.constant) + problem.constant
            ),
            stage_memory=memory[best],
            capacity_bytes=problem.capacity_bytes,
            model_flops=grid.global_batch_size * model_flops_per_sequence(model),
            attention_flops=grid.global_batch_size * attention_flops_per_sequence(model),
            layout=grid.with_stages(partition),
        )


def _key(job: RowJob) -> tuple[object, ...]:
    return job.spec, id(job.cluster), job.settings  # the model keeps the cluster alive


def measured_partition(job: RowJob, problem: PipelineProblem) -> StagePartition:
    """The stages of a job: as named, or even, or else the fastest that there are.

    Megatron divides layers evenly; where they do not divide, embedding and loss count as layers
    (``--account-for-embedding-in-pipeline-split``), and where that fails too, a layout places them,
    which whoever published the run will have balanced.

    Args:
        problem: the job with its costs.
    """
    if job.partition is not None:
        return job.partition
    p, v = problem.num_stages, problem.num_virtual
    for embedding, loss in ((False, False), (True, True), (True, False), (False, True)):
        try:
            return uniform_partition(job.spec, p, v, account_embedding=embedding, account_loss=loss)
        except UserInputError:
            continue
    return _balanced(problem)


#: Micro batches, in rounds of ``p``, that are enough to see which stages hold the others up, and
#: partial partitions after which the best one so far is good enough.
_ROUNDS, _MOST_NODES = 3, 20_000


def _balanced(problem: PipelineProblem) -> StagePartition:
    if problem.num_chunks > problem.num_units:
        detail = f"{problem.num_chunks} stages for {problem.num_units} units"
        raise RefusedRowError("more pipeline stages than layers", detail)
    few = min(problem.num_microbatches, _ROUNDS * problem.num_stages)
    question = problem._replace(capacity_bytes=_NO_LIMIT, num_microbatches=few, block_num_layers=0)
    try:
        boundaries = solver_of(backend_to_run())(question, NO_THRESHOLD, _MOST_NODES).boundaries
    except UserInputError as error:
        raise RefusedRowError("schedule is impossible", str(error)) from error
    if not boundaries:
        units, chunks = problem.num_units, problem.num_chunks
        boundaries = tuple(-(-units * k // chunks) for k in range(chunks + 1))
    return StagePartition(boundaries=boundaries, pipeline_model_parallel_size=problem.num_stages)


def iteration_ticks(problem: PipelineProblem, partition: StagePartition) -> Ticks:
    """Iteration time of a partition, whether it fits in memory or not.

    The stage solver judges it: of one partition it simulates the one schedule.
    """
    unbounded = problem._replace(capacity_bytes=_NO_LIMIT)
    try:
        only = join_chunks(unbounded, partition.boundaries)
        return solver_of(backend_to_run())(only, NO_THRESHOLD, DEFAULT_NODE_LIMIT).iteration
    except UserInputError as error:
        raise RefusedRowError("schedule is impossible", str(error)) from error


def stage_memory(problem: PipelineProblem, partition: StagePartition) -> tuple[Bytes, ...]:
    """Peak bytes of each pipeline rank."""
    return tuple(rank.total for rank in memory_of_ranks(problem, partition.boundaries))


def candidate_of(model: CostModel, prediction: RowPrediction) -> Candidate:
    """A measured run as a plan that a search may choose; no settings of a user speak for it."""
    layout = prediction.layout
    seconds, peak = prediction.iteration_time_s, max(prediction.stage_memory)
    return Candidate(
        solved=SolvedLayout(layout=layout, iteration=to_ticks(seconds)),
        peak_memory_bytes=peak,
        step=predictive(model, layout, seconds),
        out_of_memory=out_of_memory(model, layout, peak),
        is_custom=not is_uniform(model.spec, layout.partition),
        changes=0,
    )


#: By kind of table the module that predicts its rows, of tools/.
_TOOLS = {
    RowKind.MEMORY_GOLDEN: "tools.golden",
    RowKind.COLLECTIVES: "tools.calibration.collectives",
}


@dataclass(frozen=True)
class Assessor(Caching):
    """Predicts rows.

    Args:
        left_out: from a source and its job to the job by constants fitted without the source.
    """

    book: ModelBook
    predictor: Predictor = field(default_factory=Predictor)
    left_out: Callable[[str, RowJob], RowJob] | None = None

    def judge(self, file: RowFile) -> Judged:
        """Every row of a file, on both bases."""
        stated, planned = (tuple(self.outcomes(file, basis)) for basis in Basis)
        return Judged(file=file, as_stated=stated, as_planned=planned)

    def outcomes(self, file: RowFile, basis: Basis) -> Iterator[RowOutcome]:
        """Every row of a file, in order, predicted or refused."""
        judges = {
            RowKind.THROUGHPUT: self._throughput,
            RowKind.MEMORY_PEAK: self._memory_peak,
        }
        judge = judges.get(file.kind) or self._by_tool(file.kind)
        for row in file.rows:
            try:
                refuse_misprints(row)
                yield judge(row, basis)
            except RefusedRowError as error:
                yield RowOutcome(row=row, refused=error.reason, detail=error.detail)
            except UserInputError as error:
                yield RowOutcome(row=row, refused="the job is impossible", detail=str(error))

    def _throughput(self, row: Row, basis: Basis) -> RowOutcome:
        job = self._job(row, basis)
        prediction = self.predictor.predict(job)
        require_measurement(row)
        memory, measured = measured_memory(row), None
        if states_time(row) or not (memory or ran_out_of_memory(row)):
            measured = job_time(row, job, prediction)
        outcome = _memory(row, job, prediction, memory)
        return replace(
            outcome,
            predicted_s=prediction.iteration_time_s,
            measured_s=measured,
            candidate=self._candidate(job, prediction),
        )

    @cached_by(lambda _, job, prediction: id(prediction))  # the predictor keeps it
    def _candidate(self, job: RowJob, prediction: RowPrediction) -> Candidate:
        """A prediction as a plan that may be chosen; both bases often share it."""
        return candidate_of(self.predictor.model(job), prediction)

    def _memory_peak(self, row: Row, basis: Basis) -> RowOutcome:
        job = self._job(row, basis)
        prediction = self.predictor.predict(job)
        memory = measured_memory(row)
        if len({grid.micro_batch_size for grid in job.grids}) > 1:
            raise RefusedRowError("micro batch not stated", "memory follows from it")
        if memory is None and not ran_out_of_memory(row):
            raise RefusedRowError("no memory measured", f"outcome {row.get('outcome', '')!r}")
        return _memory(row, job, prediction, memory)

    def _by_tool(self, kind: RowKind) -> Callable[[Row, Basis], RowOutcome]:
        """What predicts rows of a kind of which a checkout alone has tables."""
        tool = import_from_checkout(_TOOLS[kind], kind)
        return lambda row, _: cast(RowOutcome, tool.predicted_row(row, self.predictor))

    def _job(self, row: Row, basis: Basis) -> RowJob:
        require_fixed_sequences(row)
        job = job_of(row, self.book, as_planned=basis is Basis.AS_PLANNED)
        return job if self.left_out is None else self.left_out(row.get("source", ""), job)


def _memory(row: Row, job: RowJob, prediction: RowPrediction, measured: Bytes | None) -> RowOutcome:
    out_of_memory, grid = ran_out_of_memory(row), prediction.layout
    device, peak = job.cluster.accelerator, max(prediction.stage_memory)
    limit = allocatable_bytes(device, job.settings, outside_bytes(job.spec, grid, job.cluster))
    return RowOutcome(
        row=row,
        predicted_bytes=predicted_memory(row, job, prediction),
        measured_bytes=None if out_of_memory else measured,
        needed_bytes=peak,
        allocatable_bytes=limit,
        device_bytes=device.memory_bytes,
        risk=out_of_memory_probability(peak, limit, peak_error(grid.zero)),
        fits=prediction.fits,
        out_of_memory=out_of_memory,
        is_moe=job.spec.is_moe,
        has_scans=not SCANNED.isdisjoint(job.spec.blocks),
        zero=grid.zero,
        assumptions=job.assumptions,
    )


def job_time(row: Row, job: RowJob, prediction: RowPrediction) -> Seconds:
    """Measured time of a step, from whatever the row prints."""
    accelerator, spec = job.cluster.accelerator, job.spec
    sequences = job.grids[0].global_batch_size
    work = StepWork(
        sequences=sequences,
        seq_length=spec.seq_length,
        model_flops=prediction.model_flops,
        attention_flops=prediction.attention_flops,
        head_flops=6.0 * sequences * spec.seq_length * spec.hidden_size * spec.vocab_size,
        num_gpus=job.cluster.num_gpus,
        peak_flops_per_s=accelerator.peak_flops_per_s[job.settings.precision],
    )
    require_consistent(row, work)
    return measured_time(row, work)


#: What PyTorch's allocator holds at its peak over what it has handed out. SimuMax prints both for
#: one node of B200: 1.03 to 1.08 times; jobs of 2021 and 2022 lie higher.
_RESERVED, _CACHED = 1.06, 1.2


def predicted_memory(row: Row, job: RowJob, prediction: RowPrediction) -> Bytes | None:
    """Peak bytes of the GPU that the row speaks of; ``None`` where they follow from a choice.

    A job that may have had several micro batches, or may have recomputed several things, was
    taken to be the fastest of those that fit; its peak says nothing of the formula.

    Rank 0, which prints nanotron's, is on the first pipeline stage; everything else is taken as the
    GPU with the highest peak. What a process takes as a whole (``nvidia-smi``, "device memory")
    holds what the allocator caches too, and the reserve outside it. torchtitan prints what the
    allocator holds (``max_reserved_gib``).
    """
    if len({(grid.micro_batch_size, grid.recompute) for grid in job.grids}) > 1:
        return None
    scope = f"{row.get('peak_mem_scope', '')} {row.get('peak_mem_unit', '')}".lower()
    stages, framework = prediction.stage_memory, row.get("framework", "").lower()
    of_first = "rank-0" in scope or "rank 0" in scope or "nanotron" in framework
    peak = stages[0] if of_first else max(stages)
    if "torchtitan" in framework:
        return round(peak * _RESERVED)
    if "device memory" in scope:
        return round(peak * _RESERVED) + job.settings.memory_reserve_bytes
    if "nvidia-smi" not in scope:
        return peak
    return round(peak * _CACHED) + job.settings.memory_reserve_bytes
