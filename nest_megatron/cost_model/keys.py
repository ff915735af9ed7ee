"""What the parts of a cost depend on, and so what they are kept by."""

from __future__ import annotations

from nest_megatron.caching import Key
from nest_megatron.layout.dims import LAYER_DEGREES, ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
)
from nest_megatron.model.execution import OUTSIDE_EXPERTS
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators.common import dispatch_buffer_bytes
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec

#: Fan-outs at each network level of a layer's groups: tensor, context, expert, expert-tensor.
GroupPlaces = tuple[tuple[int, ...], ...]
_TP, _CP, _EP, _ETP = LAYER_DEGREES
_PP, _VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
_DP, _ORDER = "data_parallel_size", "rank_order"
#: Everything that places ranks; virtual stages do not.
DEGREES = Key(
    ParallelDims,
    reads=(*LAYER_DEGREES, _PP, _DP, _ORDER),
    without_effect=(_VPP,),
)
#: What the groups inside a layer lie by: both rank orders number them first.
INSIDE = Key(
    ParallelDims,
    reads=(*LAYER_DEGREES, "world_size"),
    without_effect=(_PP, _VPP, _DP, _ORDER),
)
#: What a unit's time depends on besides recomputation.
SHARD = Key(
    PartialLayout,
    reads=("micro_batch_size", "sequence_parallel", "execution"),
    without_effect=("global_batch_size", "recompute", "zero"),
    dims=INSIDE,
)
#: What decides the states of all pipelines over so many ranks: context ranks are replicas too.
STATES = Key(
    ParallelDims,
    reads=(_TP, _EP, _ETP, "world_size"),
    without_effect=(_CP, _PP, _VPP, _DP, _ORDER),
)
#: What decides the states of one pipeline, apart from its replicas.
STATES_OF_PIPELINE = Key(
    ParallelDims,
    reads=(_TP, _EP, _ETP, _PP),
    without_effect=(_CP, _VPP, _DP, _ORDER),
)
#: What ``unit_key`` gives.
UnitKey = tuple[object, ...]


def dense_shape(places: GroupPlaces, shard: LayerShard) -> tuple[object, ...]:
    """What a block without experts depends on, apart from its execution."""
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

    Expert degrees matter to units with experts alone; the others share memory with the dispatcher's
    buffers.
    """
    if kind.has_experts or kind is LayerKind.MTP:
        expert = (shard.expert_model_parallel_size, shard.expert_tensor_parallel_size)
        return (kind, *dense_shape(places, shard), places[2:], expert, shard.execution)
    buffers = dispatch_buffer_bytes(spec, shard)
    return (kind, *dense_shape(places, shard), OUTSIDE_EXPERTS.of(shard.execution), buffers)


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
