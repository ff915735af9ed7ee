"""What to measure for a job, the most useful first: the best plans' shapes, then near ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from nest_megatron.cost_model.model import CostModel
from nest_megatron.model.implementation import Implementation
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.plan import Alternative, ParallelChoice, ParallelPlan
from nest_megatron.planner import PlanRequest
from nest_megatron.profile.lookup import Point, point_of
from nest_megatron.profile.records import LayerBlock
from nest_megatron.profile.session import Task, tasks_of
from nest_megatron.solver.grids import GridSpace

#: A block and the point that its time depends on.
Shape = tuple[LayerBlock, Point]


def tasks_for(
    plan: ParallelPlan, request: PlanRequest, implementation: Implementation
) -> tuple[Task, ...]:
    """Layer blocks and shapes in the order in which they are to be timed.

    Args:
        plan: the best plan without measurements, with its runners-up.
    """
    like = LayerShard(flash_attention=implementation is Implementation.TRANSFORMER_ENGINE)
    best = _shard(plan.parallel, plan.train.micro_batch_size, like)

    def distance(shard: LayerShard) -> tuple[float, ...]:
        """Doublings from the best shape; what is equally far goes by size."""
        pairs = zip(_degrees(shard), _degrees(best), strict=True)
        return (math.fsum(abs(math.log2(a / b)) for a, b in pairs), *_degrees(shard))

    near = sorted(set(_legal(request, like)), key=distance)
    others = (_shard(other, other.micro_batch_size, like) for other in plan.alternatives)
    shapes: dict[Shape, Task] = {}
    for task in map(_without_context, tasks_of(request.spec, (best, *others, *near))):
        shapes.setdefault(shape_of(request.spec, task), task)  # several may have become one
    return tuple(shapes.values())


def shape_of(spec: TransformerSpec, task: Task) -> Shape:
    """What tells two tasks apart: the block, and what its time depends on."""
    return task.block, point_of(spec, task.block, task.shard)


def _without_context(task: Task) -> Task:
    """Attention is timed over whole sequences.

    A context rank has its share of the queries and meets all keys, which a shorter sequence does
    not show; what is measured of a whole one carries over in proportion.
    """
    if task.block is not LayerBlock.ATTENTION:
        return task
    return Task(task.block, dataclasses.replace(task.shard, context_parallel_size=1))


def _shard(
    degrees: ParallelChoice | Alternative | ParallelDims, micro_batch_size: int, like: LayerShard
) -> LayerShard:
    tp = degrees.tensor_model_parallel_size
    return dataclasses.replace(
        like,
        tensor_model_parallel_size=tp,
        context_parallel_size=degrees.context_parallel_size,
        expert_model_parallel_size=degrees.expert_model_parallel_size,
        expert_tensor_parallel_size=degrees.expert_tensor_parallel_size,
        micro_batch_size=micro_batch_size,
        sequence_parallel=tp > 1,
    )


def _legal(request: PlanRequest, like: LayerShard) -> Iterator[LayerShard]:
    """Shapes that the search may choose and whose groups lie inside a node."""
    model = CostModel(request.spec, request.cluster, request.settings)
    node = request.cluster.gpus_per_node
    for grid in GridSpace(model, request.global_batch_size, request.space).shards():
        dims = grid.dims
        inside = max(dims.tensor_model_parallel_size, dims.expert_ranks) <= node
        if inside and dims.context_parallel_size == 1:
            shard = _shard(dims, grid.micro_batch_size, like)
            yield dataclasses.replace(shard, sequence_parallel=grid.sequence_parallel)


def _degrees(shard: LayerShard) -> tuple[int, ...]:
    return (
        shard.tensor_model_parallel_size,
        shard.micro_batch_size,
        shard.expert_model_parallel_size,
        shard.expert_tensor_parallel_size,
    )
