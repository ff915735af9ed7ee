"""What the parts of a cost depend on, and so what they are kept by."""

from __future__ import annotations

from nest_megatron.model.execution import Execution
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators.common import dispatch_buffer_bytes
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.dims import ParallelDims, RankOrder
from nest_megatron.parallel.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
)

#: Fan-outs at each network level of a layer's groups: tensor, context, expert, expert-tensor.
GroupPlaces = tuple[tuple[int, ...], ...]
#: Everything that places ranks: the degrees inside a layer, pipeline, data, the rank order.
Degrees = tuple[int, int, int, int, int, int, RankOrder]
#: What a unit's time depends on besides recomputation: the degrees inside a layer, the world's
#: size, micro batch, sequence parallelism, execution.
ShardKey = tuple[int, int, int, int, int, int, bool, Execution]
#: What one kind of unit depends on of that, and the places of its groups.
UnitKey = tuple[object, ...]


def dense_shape(places: GroupPlaces, shard: LayerShard) -> tuple[object, ...]:
    """What a block without experts depends on beside how it is carried out."""
    return (
        *places[:2],
        shard.tensor_model_parallel_size,
        shard.context_parallel_size,
        shard.micro_batch_size,
        shard.sequence_parallel,
    )


def unit_key(
    spec: TransformerSpec, kind: LayerKind, places: GroupPlaces, shard: LayerShard
) -> UnitKey:
    """What a unit's time and memory depend on.

    Expert degrees matter to units with experts alone; the others work beside the dispatcher's
    buffers.
    """
    if kind.has_experts or kind is LayerKind.MTP:
        expert = (shard.expert_model_parallel_size, shard.expert_tensor_parallel_size)
        return (kind, *dense_shape(places, shard), places[2:], expert, shard.execution)
    beside = dispatch_buffer_bytes(spec, shard)
    return (kind, *dense_shape(places, shard), shard.execution.outside_experts, beside)


def inner_degrees(dims: ParallelDims) -> tuple[int, int, int, int]:
    """Degrees inside a layer: tensor, context, expert, expert-tensor."""
    return (
        dims.tensor_model_parallel_size,
        dims.context_parallel_size,
        dims.expert_model_parallel_size,
        dims.expert_tensor_parallel_size,
    )


def degrees(dims: ParallelDims) -> Degrees:
    """Everything that places ranks; virtual stages do not."""
    return (
        *inner_degrees(dims),
        dims.pipeline_model_parallel_size,
        dims.data_parallel_size,
        dims.rank_order,
    )


_BLOCK = Recompute(
    granularity=RecomputeGranularity.FULL, method=RecomputeMethod.BLOCK, num_layers=1
)


def split_block(recompute: Recompute) -> tuple[Recompute, Recompute]:
    """The setting for layers at the head of a chunk, and for all others.

    How many layers a block holds changes no layer's cost, so all blocks share one setting.
    """
    if recompute.method is RecomputeMethod.BLOCK:
        return _BLOCK, NO_RECOMPUTE
    return recompute, recompute
