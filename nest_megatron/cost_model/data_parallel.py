"""Traffic between replicas: gradients reduced, weights gathered, and what hides of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nest_megatron.cluster.communication import collective_time, split_group
from nest_megatron.cluster.records import Cluster, CollectiveKind
from nest_megatron.cost_model.memory import divides_states, gathered_bytes
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.parameters import ParameterCount
from nest_megatron.model.spec import LayerKind
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.rank_order import GroupKind, group_shape
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTraffic:
    """Seconds for each parameter of a rank, dense and expert, in buckets of Megatron's size.

    Args:
        reduce_dense, reduce_expert: to bring gradients together once, within an instance of the
            optimizer.
        sum_dense, sum_expert: to sum each share of them over the instances.
        gather_dense, gather_expert: to spread updated weights of layers once (none where each
            replica updates all of them).
        gather_outside: the same for embedding and head, which are never gathered in fp8.
    """

    reduce_dense: Seconds
    reduce_expert: Seconds
    sum_dense: Seconds
    sum_expert: Seconds
    gather_dense: Seconds
    gather_expert: Seconds
    gather_outside: Seconds
    bucket_parameters: int

    def reduce(self, count: ParameterCount) -> Seconds:
        """Time to reduce the gradients of some parameters, within an instance of the optimizer."""
        return self.reduce_dense * count.dense + self.reduce_expert * count.expert

    def sum(self, count: ParameterCount) -> Seconds:
        """Time to sum their shares over the instances."""
        return self.sum_dense * count.dense + self.sum_expert * count.expert

    def gather(self, kind: LayerKind, count: ParameterCount) -> Seconds:
        """Time to gather the weights of a unit."""
        if kind in (LayerKind.EMBEDDING, LayerKind.HEAD):
            return self.gather_outside * count.dense + self.gather_expert * count.expert
        return self.gather_dense * count.dense + self.gather_expert * count.expert


def replica_traffic(
    dims: ParallelDims,
    zero: ZeroStage,
    cluster: Cluster,
    layer: ParameterCount,
    settings: CostSettings,
) -> ReplicaTraffic:
    """Price data-parallel traffic where its groups lie.

    ``DistributedDataParallel`` sends buckets of 40 M parameters, or of 1 M for each replica if that
    is more, where the job states no size; Megatron-FSDP sends one layer at a time, its experts
    apart from the rest (``_get_parameter_groups``). Latency is paid once for each. With several
    optimizer instances, gradients are scattered within an instance, whose ranks follow each other,
    and each share is summed over the instances; weights are gathered within an instance
    (``_ParamAndGradBucketGroup.start_grad_sync``).

    Args:
        layer: parameters of one layer on a rank.
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

    instances = settings.traits.optimizer_instances if zero else 1

    def price(kind: CollectiveKind, group: GroupKind, width: float) -> Seconds:
        within, _ = split(group)
        seconds = collective_time(kind, buckets[group] * width, within, cluster.levels)
        return settings.dp_slowdown * seconds / buckets[group]

    def split(group: GroupKind) -> tuple[Sequence[int], Sequence[int]]:
        shape = group_shape(dims, group, sizes)
        return split_group(shape, max(1, math.prod(shape) // instances))

    def summed(group: GroupKind, width: int) -> Seconds:
        if not zero:
            return 0.0
        within, across = split(group)
        share = buckets[group] * width / math.prod(within)
        seconds = collective_time(CollectiveKind.ALL_REDUCE, share, across, cluster.levels)
        return settings.dp_slowdown * seconds / buckets[group]

    def gather(group: GroupKind, *, in_layer: bool) -> Seconds:
        if not divides_states(zero, settings):
            return 0.0
        width = gathered_bytes(settings, zero, in_layer=in_layer)
        return price(CollectiveKind.ALL_GATHER, group, width)

    width = settings.traits.gradient_bytes
    return ReplicaTraffic(
        reduce_dense=price(reduce, GroupKind.DP_CP, width),
        reduce_expert=price(reduce, GroupKind.EDP, width),
        sum_dense=summed(GroupKind.DP_CP, width),
        sum_expert=summed(GroupKind.EDP, width),
        gather_dense=gather(GroupKind.DP_CP, in_layer=True),
        gather_expert=gather(GroupKind.EDP, in_layer=True),
        gather_outside=gather(GroupKind.DP_CP, in_layer=False),
        bucket_parameters=bucket,
    )
