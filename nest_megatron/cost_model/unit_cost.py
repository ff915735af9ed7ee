"""One unit's cost to its rank in ticks and bytes, parameters and replicas included."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from nest_megatron.cluster.records import Accelerator
from nest_megatron.cost_model.data_parallel import ReplicaTraffic
from nest_megatron.cost_model.fsdp_memory import RankParameters, unsharded_bytes
from nest_megatron.cost_model.layer_cost import host_step
from nest_megatron.cost_model.memory import (
    ParameterBytes,
    StaticBytes,
    divides_states,
    parameter_bytes,
    quantized_bytes,
    ranks_of_states,
    replicas,
    stays_whole,
)
from nest_megatron.cost_model.pipeline import UnitCost
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.unit_run import UnitRun
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.block_parameters import ParameterCount
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.units import Bytes, Seconds, Ticks, to_ticks

#: Share of NCCL's channels that collectives need in registered buffers: 4 of 16.
USER_BUFFER_CHANNELS = 0.25


class Passes(NamedTuple):
    """A unit's run in seconds, ticks and bytes; what is recomputed counts as ``backward``."""

    run: UnitRun
    forward_s: Seconds
    backward_s: Seconds
    forward: Ticks
    backward: Ticks
    saved_bytes: Bytes
    working_bytes: Bytes


class Structure(NamedTuple):
    """The units of a model on a grid.

    Args:
        sequence: index into ``units`` of each unit of the model, in order.
        units: the distinct units, with the parameters of each on one rank.
        parameters: of a rank that held all units.
        layer: parameters of the mean layer.
    """

    sequence: bytes
    units: tuple[tuple[LayerKind, ParameterCount], ...]
    parameters: ParameterCount
    layer: ParameterCount

    def on_rank(self, dims: ParallelDims, settings: CostSettings) -> RankParameters:
        """Those of the mean rank."""
        held = self.parameters.over(dims.pipeline_model_parallel_size)
        return RankParameters(replicas(dims), held, self.layer, settings)


class UnitKind(NamedTuple):
    """A distinct unit of a grid; nothing of it depends on the replicas.

    Args:
        parameters: on one rank.
        own: its passes outside the layers that block recomputation covers.
        block: its passes among them.
    """

    kind: LayerKind
    parameters: ParameterCount
    own: Passes
    block: Passes


class ReplicaCost(NamedTuple):
    """What a unit's parameters cost for their replicas' sake, whatever its passes take.

    ``reduce_s`` and ``gather_s`` come once a step, the ``shard_`` traffic of ZeRO-2 and ZeRO-3
    once for each micro batch, and with it ``exposed_`` time that nothing overlaps. The former slows
    work down by its share of NCCL's ``channels``.
    """

    reduce_s: Seconds
    gather_s: Seconds
    shard_forward_s: Seconds
    shard_backward_s: Seconds
    exposed_forward_s: Seconds
    exposed_backward_s: Seconds
    gather_unhidden: Ticks
    reduce_unhidden: Ticks
    optimizer: Ticks
    static: StaticBytes
    static_bytes: Bytes
    unsharded_bytes: Bytes
    channels: float


def stored_bytes(
    dims: ParallelDims, zero: ZeroStage, settings: CostSettings
) -> tuple[ParameterBytes, bool]:
    """What a parameter takes on a rank, and whether what ZeRO-3 gathers stays for the step."""
    whole = stays_whole(zero, dims.pipeline_model_parallel_size, settings)
    return parameter_bytes(zero, replicas(dims), settings, whole=whole), whole


def optimizer_step(
    accelerator: Accelerator, settings: CostSettings, times: LayerTimes | None
) -> Seconds:
    """Time of an optimizer step for one parameter: measured, else that of its memory traffic."""
    moved = settings.traits.optimizer_offload_fraction
    on_host = moved * host_step(accelerator, settings) if moved else 0.0
    measured = None if times is None else times.optimizer_step()
    if measured is not None:
        return (1.0 - moved) * measured + on_host
    return settings.optimizer_bytes_per_parameter * memory_time(accelerator) + on_host


def memory_time(accelerator: Accelerator) -> Seconds:
    """Time that the device's memory takes for one byte."""
    return 1.0 / (accelerator.memory_bandwidth_bytes_per_s * accelerator.memory_efficiency)


def overlap_window(dims: ParallelDims, num_microbatches: int) -> float:
    """Passes of a chunk that its traffic between replicas can overlap.

    Gradients are complete with the chunk's last micro batch, weights are needed by its first; other
    chunks of the rank have a whole round of ``p`` micro batches before or after it.
    """
    v = dims.virtual_pipeline_model_parallel_size
    return (min(dims.pipeline_model_parallel_size, num_microbatches) * (v - 1) + 1) / v


def passes(run: UnitRun) -> Passes:
    """A unit's run on the solver's clock."""
    forward, backward = run.forward.total, run.backward.total + run.recompute.total
    return Passes(
        run=run,
        forward_s=forward,
        backward_s=backward,
        forward=to_ticks(forward),
        backward=to_ticks(backward),
        saved_bytes=round(run.saved_bytes),
        working_bytes=round(run.working_bytes),
    )


def replica_costs(
    units: Iterable[tuple[LayerKind, ParameterCount]],
    dims: ParallelDims,
    zero: ZeroStage,
    traffic: ReplicaTraffic,
    rank: RankParameters,
    step_s: Seconds,
    byte_s: Seconds,
) -> tuple[ReplicaCost, ...]:
    """What the parameters of each unit cost a rank that holds all of ``rank``.

    ``step_s`` is the optimizer's time for one parameter, ``byte_s`` the memory's for one byte.

    Megatron-FSDP reduces the gradients of every micro batch within an optimizer instance, and sums
    them over the instances after the last one. It gathers weights for every pass: the first layer's
    wait for a pass to begin, the last gradients for it to end (``GradReducePipeline.reset``). What
    is in no layer it gathers once a step. Below ZeRO-3 the optimizer gathers all weights before the
    next step begins, unless they travel during its forward pass (``step_with_ready_grads``). Frozen
    weights travel under ZeRO-3 alone.
    """
    settings, dense_s, expert_s = rank.settings, step_s, step_s
    if divides_states(zero, settings):
        ranks = ranks_of_states(rank.replicas, settings)
        dense_s, expert_s = (step_s / number for number in ranks)
    sent_by_rank = rank.held if zero >= ZeroStage.WEIGHTS else rank.held.trained
    unhidden = min(1.0, traffic.bucket_parameters / max(1, sent_by_rank.total))
    stored, whole = stored_bytes(dims, zero, settings)
    in_open = zero < ZeroStage.WEIGHTS and not settings.traits.overlap_param_gather

    def cost(kind: LayerKind, count: ParameterCount) -> ReplicaCost:
        trained = count.trained
        reduce, summed, gather = traffic.of_unit(kind, trained)
        fetch = again = sent = 0.0
        copies = (0.0, 0.0)
        if zero >= ZeroStage.GRADIENTS and not whole:
            sent, reduce = reduce, 0.0
            copies = _copied_bytes(kind, zero, settings, is_frozen=count.frozen.total > 0)
            if zero >= ZeroStage.WEIGHTS and (not kind.is_end or settings.traits.torch_fsdp2):
                fetch, gather = traffic.of_unit(kind, count).gather, 0.0
                again = fetch if settings.traits.reshard_after_forward else 0.0
        reduce += summed
        copy_s, static = byte_s * count.total, stored.of_unit(kind, count)
        return ReplicaCost(
            reduce_s=reduce,
            gather_s=gather,
            shard_forward_s=fetch,
            shard_backward_s=again + sent,
            exposed_forward_s=unhidden * fetch + copies[0] * copy_s,
            exposed_backward_s=unhidden * (again + sent) + copies[1] * copy_s,
            gather_unhidden=to_ticks(gather if in_open else unhidden * gather),
            reduce_unhidden=to_ticks(unhidden * reduce),
            optimizer=to_ticks(trained.dense * dense_s + trained.expert * expert_s),
            static=static,
            static_bytes=int(static.total),
            unsharded_bytes=0
            if whole
            else unsharded_bytes(count, rank, zero, in_layer=not kind.is_end),
            channels=traffic.channels_of(count),
        )

    return tuple(cost(kind, count) for kind, count in units)


def _copied_bytes(
    kind: LayerKind, zero: ZeroStage, settings: CostSettings, *, is_frozen: bool
) -> tuple[float, float]:
    """Bytes that sharding reads and writes for a parameter in a pass forward and one backward.

    Gradients go from where a product leaves them to the buffer that is reduced, as accumulation is
    not fused; weights that were gathered in 16 bits are cast to fp8, and fp8 ones transposed, for
    every micro batch. PyTorch copies what it gathered out of the buffer as well.
    """
    traits, is_layer = settings.traits, not kind.is_end
    forward, backward = 0.0, float(traits.params_bytes + traits.gradient_bytes)
    if is_frozen:
        backward = 0.0
    if zero >= ZeroStage.WEIGHTS and is_layer:
        if traits.torch_fsdp2:
            forward += 2 * traits.params_bytes
            backward += 2 * traits.params_bytes if traits.reshard_after_forward else 0
        if settings.precision.is_quantized and not traits.fp8_weights:
            forward += traits.params_bytes + 2 * quantized_bytes(settings)
        elif settings.precision.is_quantized and not traits.keep_fp8_transpose_cache:
            backward += 2 * quantized_bytes(settings)
    return forward, backward


def unit_cost(
    unit: UnitKind,
    replica: ReplicaCost,
    settings: CostSettings,
    window: float,
    *,
    early_share: float,
    hidden_reduce: bool,
) -> UnitCost:
    """One unit in ticks and bytes; replicas' traffic overlaps ``window`` passes of the unit.

    ``early_share`` is what passes ahead of the schedule add to what is saved. ``hidden_reduce``
    hides as much of the gradient reduction as any recompute setting can, so that a partition takes
    no longer than under any setting.
    """
    own, block = unit.own, unit.block
    if replica.shard_backward_s or replica.exposed_backward_s:
        own, block = (_with_shard_traffic(each, replica, settings) for each in (own, block))
    overlap, more = settings.dp_overlap * window, 1.0 + early_share
    reduce_hideable = replica.reduce_unhidden
    if not hidden_reduce:
        reduce_hideable = _signed_ticks(replica.reduce_s - overlap * own.backward_s)
    return UnitCost(  # by place, since a search makes hundreds of thousands
        own.forward,
        own.backward,
        block.backward,
        replica.gather_unhidden,
        _signed_ticks(replica.gather_s - overlap * own.forward_s),
        replica.reduce_unhidden,
        reduce_hideable,
        replica.optimizer,
        replica.static_bytes,
        math.ceil(more * own.saved_bytes),
        math.ceil(more * block.saved_bytes),
        own.working_bytes + replica.unsharded_bytes,
        block.working_bytes + replica.unsharded_bytes,
    )


def _with_shard_traffic(one: Passes, replica: ReplicaCost, settings: CostSettings) -> Passes:
    slowdown = settings.overlap_slowdown * replica.channels
    if settings.traits.nccl_ub:
        slowdown *= USER_BUFFER_CHANNELS
    overlap = settings.dp_overlap
    forward = _work_with_traffic(overlap, slowdown, one.forward_s, replica.shard_forward_s)
    backward = _work_with_traffic(overlap, slowdown, one.backward_s, replica.shard_backward_s)
    forward += replica.exposed_forward_s
    backward += replica.exposed_backward_s
    return one._replace(
        forward_s=forward,
        backward_s=backward,
        forward=to_ticks(forward),
        backward=to_ticks(backward),
    )


def _work_with_traffic(overlap: float, slowdown: float, work: Seconds, traffic: Seconds) -> Seconds:
    """Work that traffic overlaps, which slows it down; what does not fit comes after."""
    hidden = min(traffic, overlap * work)
    return work + slowdown * hidden + traffic - hidden


def _signed_ticks(seconds: Seconds) -> Ticks:
    ticks = to_ticks(abs(seconds))
    return ticks if seconds >= 0 else -ticks
