"""Traffic between replicas: gradients reduced, weights gathered, and what hides of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from nest_megatron.cluster.communication import collective_time, split_group
from nest_megatron.cluster.records import Cluster, CollectiveKind
from nest_megatron.cost_model.memory import (
    divides_states,
    gathered_bytes,
    optimizer_instances,
    replicas,
)
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.rank_order import GroupKind, group_shape
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.block_parameters import ParameterCount
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.units import Seconds


class Traffic(NamedTuple):
    """Seconds of traffic between replicas.

    Args:
        reduce: gradients are reduced once within an instance of the optimizer.
        across: each share of them is summed over the instances.
        gather: updated weights are gathered once; 0 where each replica updates all of them.
    """

    reduce: Seconds
    across: Seconds
    gather: Seconds


class ReplicaTraffic(NamedTuple):
    """Traffic of each parameter of a rank, in buckets of Megatron's size.

    ``outside`` is that of embedding and head, which are never gathered in fp8; ``channels`` is the
    share of NCCL's channels that dense and expert traffic takes.
    """

    dense: Traffic
    expert: Traffic
    outside: Traffic
    bucket_parameters: int
    channels: tuple[float, float]

    def of_unit(self, kind: LayerKind, count: ParameterCount) -> Traffic:
        """Traffic of a unit's parameters."""
        pairs = zip(self.outside if kind.is_end else self.dense, self.expert, strict=True)
        return Traffic(*(dense * count.dense + expert * count.expert for dense, expert in pairs))

    def channels_of(self, count: ParameterCount) -> float:
        """Mean share of NCCL's channels while a layer's weights are gathered."""
        seconds = self.dense.gather * count.dense, self.expert.gather * count.expert
        return sum(map(mul, seconds, self.channels)) / sum(seconds) if any(seconds) else 1.0


#: Channels that NCCL gives a group with one GPU in each node, over those of one with eight. Source:
#: its logs, NVIDIA/nccl issue 1344 (four nodes of one GPU: channels 00 and 01) and nccl-tests issue
#: 213 (eight GPUs of a node: trees 0 to 15).
_RAIL_CHANNELS = 2 / 16


def replica_traffic(
    dims: ParallelDims,
    zero: ZeroStage,
    cluster: Cluster,
    layer: ParameterCount,
    settings: CostSettings,
) -> ReplicaTraffic:
    """Price data-parallel traffic where its groups lie; ``layer`` counts one layer on a rank.

    ``DistributedDataParallel`` sends buckets of 40 M parameters, or of 1 M for each replica if that
    is more, where the job states no size; Megatron-FSDP sends one layer at a time, its experts
    apart from the rest (``_get_parameter_groups``). Latency is paid once for each. With several
    optimizer instances, gradients are scattered within an instance, whose ranks follow each other,
    and each share is summed over the instances; weights are gathered within an instance
    (``_ParamAndGradBucketGroup.start_grad_sync``).
    """
    sizes = cluster.group_sizes()
    bucket = settings.traits.ddp_bucket_size or max(
        40_000_000, 1_000_000 * dims.data_parallel_size * dims.context_parallel_size
    )
    buckets = {GroupKind.DP_CP: bucket, GroupKind.EDP: bucket}
    if zero.is_fsdp:
        bucket = max(1, layer.total)
        buckets = {GroupKind.DP_CP: max(1, layer.dense), GroupKind.EDP: max(1, layer.expert)}
    reduce = CollectiveKind.REDUCE_SCATTER if zero else CollectiveKind.ALL_REDUCE
    instances = optimizer_instances(replicas(dims), settings) if zero else 1
    width = settings.traits.gradient_bytes

    def of_group(group: GroupKind, *, in_layer: bool) -> Traffic:
        bucket, shape = buckets[group], group_shape(dims, group, sizes)
        within, across = split_group(shape, max(1, math.prod(shape) // instances))

        def price(kind: CollectiveKind, num_bytes: float, members: Sequence[int]) -> Seconds:
            seconds = collective_time(kind, num_bytes, members, cluster.levels)
            return settings.dp_slowdown * seconds / bucket

        summed = gathered = 0.0
        if zero:
            summed = price(CollectiveKind.ALL_REDUCE, bucket * width / math.prod(within), across)
        if divides_states(zero, settings):
            wire = gathered_bytes(settings, zero, in_layer=in_layer)
            gathered = price(CollectiveKind.ALL_GATHER, bucket * wire, within)
        return Traffic(price(reduce, bucket * width, within), summed, gathered)

    def channels(group: GroupKind) -> float:
        shape = group_shape(dims, group, sizes)
        is_rail = shape[0] == 1 and math.prod(shape) > 1
        return _RAIL_CHANNELS if is_rail else 1.0

    return ReplicaTraffic(
        dense=of_group(GroupKind.DP_CP, in_layer=True),
        expert=of_group(GroupKind.EDP, in_layer=True),
        outside=of_group(GroupKind.DP_CP, in_layer=False),
        bucket_parameters=bucket,
        channels=(channels(GroupKind.DP_CP), channels(GroupKind.EDP)),
    )
