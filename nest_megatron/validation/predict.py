"""The cost model's prediction for a measured job."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model.estimate import attention_flops_per_sequence, model_flops_per_sequence
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import PipelineProblem, chunk_cost, rank_memory
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.errors import UserInputError
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.layout.stage_layout import StagePartition, uniform_partition
from nest_megatron.solver.backend import choose, solver_of
from nest_megatron.solver.one_partition import joined
from nest_megatron.solver.outcome import DEFAULT_NODE_LIMIT, NO_THRESHOLD
from nest_megatron.units import Bytes, Seconds, Ticks, to_seconds
from nest_megatron.validation.job import RowJob
from nest_megatron.validation.rows import RefusedRowError

#: More memory than any device has.
_NO_LIMIT = 1 << 55


@dataclass(frozen=True, slots=True, kw_only=True)
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
            problems.append((grid, dataclasses.replace(problem, num_microbatches=between)))
        partition = measured_partition(job, problems[0][1])
        memory = [stage_memory(problem, partition) for _, problem in problems]
        needs = [max(stages) for stages in memory]
        fitting = [i for i, need in enumerate(needs) if need <= problems[i][1].capacity_bytes]
        if not fitting:
            fitting = [needs.index(min(needs))]
        # Recomputing something is never faster than recomputing nothing, where that fits.
        plain = [dataclasses.replace(grid, recompute=NO_RECOMPUTE) for grid in job.grids]
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
    question = dataclasses.replace(
        problem, capacity_bytes=_NO_LIMIT, num_microbatches=few, block_num_layers=0
    )
    try:
        boundaries = solver_of(choose())(question, NO_THRESHOLD, _MOST_NODES).boundaries
    except UserInputError as error:
        raise RefusedRowError("schedule is impossible", str(error)) from error
    if not boundaries:
        units, chunks = problem.num_units, problem.num_chunks
        boundaries = tuple(-(-units * k // chunks) for k in range(chunks + 1))
    return StagePartition(boundaries=boundaries, pipeline_model_parallel_size=problem.num_stages)


def iteration_ticks(problem: PipelineProblem, partition: StagePartition) -> Ticks:
    """Iteration time of a partition, whether it fits in memory or not.

    The stage solver judges it: asked for the one partition, it simulates the one schedule.
    """
    unbounded = dataclasses.replace(problem, capacity_bytes=_NO_LIMIT)
    try:
        only = joined(unbounded, partition.boundaries)
        return solver_of(choose())(only, NO_THRESHOLD, DEFAULT_NODE_LIMIT).iteration
    except UserInputError as error:
        raise RefusedRowError("schedule is impossible", str(error)) from error


def stage_memory(problem: PipelineProblem, partition: StagePartition) -> tuple[Bytes, ...]:
    """Peak bytes of each pipeline rank."""
    parts = [partition.chunk(k) for k in range(partition.num_chunks)]
    chunks = [chunk_cost(problem, part.start, part.stop) for part in parts]
    p = problem.num_stages
    return tuple(rank_memory(problem, rank, chunks[rank::p]).total for rank in range(p))
