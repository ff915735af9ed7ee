"""Traffic between replicas: gradients reduced, weights gathered, and what hides of it."""

from __future__ import annotations

from dataclasses import dataclass

from nest_megatron.cluster.records import Cluster, CollectiveKind
from nest_megatron.cost_model.communication import collective_time
from nest_megatron.cost_model.memory import GRADIENT_BYTES, WEIGHT_BYTES
from nest_megatron.model.parameters import ParameterCount
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.rank_order import GroupKind, group_shape
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTraffic:
    """Seconds for each parameter of a rank, dense and expert, in buckets of Megatron's size.

    Args:
        reduce_dense, reduce_expert: to bring gradients together once.
        gather_dense, gather_expert: to spread updated weights once (none without ZeRO).
        bucket_parameters: parameters that travel in one bucket.
    """

    reduce_dense: Seconds
    reduce_expert: Seconds
    gather_dense: Seconds
    gather_expert: Seconds
    bucket_parameters: int

    def reduce(self, count: ParameterCount) -> Seconds:
        """Time to reduce the gradients of some parameters."""
        return self.reduce_dense * count.dense + self.reduce_expert * count.expert

    def gather(self, count: ParameterCount) -> Seconds:
        """Time to gather the weights of some parameters."""
        return self.gather_dense * count.dense + self.gather_expert * count.expert


def replica_traffic(
    dims: ParallelDims,
    zero: ZeroStage,
    cluster: Cluster,
    layer_parameters: int,
    gradient_bytes: int = GRADIENT_BYTES,
    slowdown: float = 1.0,
) -> ReplicaTraffic:
    """Price data-parallel traffic where its groups lie.

    ``DistributedDataParallel`` sends buckets of 40 M parameters, or of 1 M for each replica if that
    is more; Megatron-FSDP sends one layer at a time. Latency is paid once for each.

    Args:
        layer_parameters: parameters of one layer on a rank.
        gradient_bytes: width of a gradient on the wire.
        slowdown: time of the traffic over what the network needs for it.
    """
    sizes = cluster.group_sizes()
    bucket = max(40_000_000, 1_000_000 * dims.data_parallel_size * dims.context_parallel_size)
    if zero.is_fsdp:
        bucket = max(1, layer_parameters)
    reduce = CollectiveKind.REDUCE_SCATTER if zero else CollectiveKind.ALL_REDUCE

    def price(kind: CollectiveKind, group: GroupKind, width: int) -> Seconds:
        shape = group_shape(dims, group, sizes)
        seconds = collective_time(kind, bucket * width, shape, cluster.levels)
        return slowdown * seconds / bucket

    gather = CollectiveKind.ALL_GATHER
    return ReplicaTraffic(
        reduce_dense=price(reduce, GroupKind.DP_CP, gradient_bytes),
        reduce_expert=price(reduce, GroupKind.EDP, gradient_bytes),
        gather_dense=price(gather, GroupKind.DP_CP, WEIGHT_BYTES) if zero else 0.0,
        gather_expert=price(gather, GroupKind.EDP, WEIGHT_BYTES) if zero else 0.0,
        bucket_parameters=bucket,
    )
