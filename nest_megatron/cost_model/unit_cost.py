"""One unit's cost to its rank in ticks and bytes, parameters and replicas included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nest_megatron.cluster.records import Accelerator
from nest_megatron.cost_model.data_parallel import ReplicaTraffic
from nest_megatron.cost_model.layer_cost import UnitRun
from nest_megatron.cost_model.memory import (
    ParameterBytes,
    StaticBytes,
    divides_states,
    parameter_bytes,
    replicas_of_states,
    stays_whole,
    unsharded_bytes,
)
from nest_megatron.cost_model.pipeline import UnitCost
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.parameters import ParameterCount
from nest_megatron.model.spec import LayerKind
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.units import Bytes, Seconds, Ticks, to_ticks


class ParameterPrices(NamedTuple):
    """What parameters cost a rank for their replicas' sake: traffic, memory, optimizer step.

    Bytes and seconds are for one parameter; ``first_bucket`` is the share of a rank's traffic that
    nothing can hide; ``whole`` says that what ZeRO-3 gathers stays for the step.
    """

    traffic: ReplicaTraffic
    first_bucket: float
    kept: ParameterBytes
    whole: bool
    dense_step: Seconds
    expert_step: Seconds


class RunCost(NamedTuple):
    """What a unit's passes cost; replicas aside, so grids that run it alike share it."""

    forward_s: Seconds
    backward_s: Seconds
    block_backward_s: Seconds
    forward: Ticks
    backward: Ticks
    block_backward: Ticks
    saved_bytes: Bytes
    block_saved_bytes: Bytes
    working_bytes: Bytes
    block_working_bytes: Bytes


class ReplicaCost(NamedTuple):
    """What a unit's parameters cost for their replicas' sake, whatever its passes take.

    ``reduce_s`` and ``gather_s`` come once a step, the ``shard_`` traffic of ZeRO-2 and ZeRO-3
    once for each micro batch.
    """

    reduce_s: Seconds
    gather_s: Seconds
    shard_forward_s: Seconds
    shard_backward_s: Seconds
    head_least: Ticks
    tail_least: Ticks
    optimizer: Ticks
    static: StaticBytes
    unsharded_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitKind:
    """A distinct unit of a grid: its kind, its run, its parameters on one rank."""

    kind: LayerKind
    run: UnitRun
    block_run: UnitRun
    parameters: ParameterCount
    cost: RunCost


def replicas(dims: ParallelDims) -> tuple[int, int]:
    """Ranks over which ZeRO divides dense and expert parameters."""
    return (
        dims.data_parallel_size * dims.context_parallel_size,
        dims.expert_data_parallel_size,
    )


def kept_bytes(
    dims: ParallelDims, zero: ZeroStage, settings: CostSettings
) -> tuple[ParameterBytes, bool]:
    """What a parameter takes on a rank, and whether what ZeRO-3 gathers stays for the step."""
    dense, expert = replicas(dims)
    whole = stays_whole(zero, dims.pipeline_model_parallel_size, settings)
    return parameter_bytes(zero, dense, expert, settings, whole=whole), whole


def parameter_prices(
    dims: ParallelDims,
    zero: ZeroStage,
    traffic: ReplicaTraffic,
    per_rank: int,
    step: Seconds,
    settings: CostSettings,
) -> ParameterPrices:
    """What one dense and one expert parameter cost in a grid.

    Args:
        per_rank: parameters of a rank, of which the first bucket's traffic cannot be hidden.
        step: of the optimizer, for one parameter.
    """
    dense, expert = replicas(dims)
    divided = divides_states(zero, settings)
    kept, whole = kept_bytes(dims, zero, settings)
    return ParameterPrices(
        traffic=traffic,
        first_bucket=min(1.0, traffic.bucket_parameters / max(1, per_rank)),
        kept=kept,
        whole=whole,
        dense_step=step / (replicas_of_states(dense, settings) if divided else 1),
        expert_step=step / (replicas_of_states(expert, settings) if divided else 1),
    )


def optimizer_step(
    accelerator: Accelerator, settings: CostSettings, times: LayerTimes | None
) -> Seconds:
    """Time of an optimizer step for one parameter: measured, else that of its memory traffic."""
    if settings.traits.frozen_weights:
        return 0.0
    measured = None if times is None else times.optimizer_step()
    if measured is not None:
        return measured
    rate = accelerator.memory_bandwidth_bytes_per_s * accelerator.memory_efficiency
    return settings.optimizer_bytes_per_parameter / rate


def overlap_window(dims: ParallelDims, num_microbatches: int) -> float:
    """Passes of a chunk beside which its traffic between replicas can run.

    Gradients are complete with the chunk's last micro batch, weights are needed by its first. One
    chunk a rank has that pass alone. Of several, each but the last to finish (the first to start)
    has a whole round of ``p`` micro batches through the others as well.
    """
    p, v = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
    return (min(p, num_microbatches) * (v - 1) + 1) / v


def run_cost(run: UnitRun, block: UnitRun) -> RunCost:
    """A unit's passes in ticks and bytes.

    Args:
        block: the run of the unit among the layers that a block computes again.
    """
    forward = run.forward.total
    backward = run.backward.total + run.recompute.total
    block_backward = block.backward.total + block.recompute.total
    return RunCost(
        forward_s=forward,
        backward_s=backward,
        block_backward_s=block_backward,
        forward=to_ticks(forward),
        backward=to_ticks(backward),
        block_backward=to_ticks(block_backward),
        saved_bytes=round(run.saved_bytes),
        block_saved_bytes=round(block.saved_bytes),
        working_bytes=round(run.working_bytes),
        block_working_bytes=round(block.working_bytes),
    )


def replica_cost(
    kind: LayerKind,
    count: ParameterCount,
    prices: ParameterPrices,
    zero: ZeroStage,
    settings: CostSettings,
) -> ReplicaCost:
    """What the parameters of one unit cost a rank."""
    reduce, gather = prices.traffic.reduce(count), prices.traffic.gather(kind, count)
    if settings.traits.frozen_weights:
        reduce = 0.0
    fetch = gather if zero >= ZeroStage.WEIGHTS else 0.0
    shard = (fetch, reduce + fetch) if zero >= ZeroStage.GRADIENTS else (0.0, 0.0)
    if zero >= ZeroStage.GRADIENTS:  # once for each micro batch, beside the unit's own work
        gather, reduce = gather - fetch, 0.0
    if settings.traits.frozen_weights:
        gather = 0.0
    static = prices.kept.of_unit(kind, count)
    return ReplicaCost(
        reduce_s=reduce,
        gather_s=gather,
        shard_forward_s=shard[0],
        shard_backward_s=shard[1],
        head_least=to_ticks(prices.first_bucket * gather),
        tail_least=to_ticks(prices.first_bucket * reduce),
        optimizer=to_ticks(count.dense * prices.dense_step + count.expert * prices.expert_step),
        static=static,
        unsharded_bytes=0 if prices.whole else unsharded_bytes(count.total, zero, settings),
    )


def unit_cost(
    run: RunCost,
    held: ReplicaCost,
    settings: CostSettings,
    window: float,
    *,
    least_tail: bool = False,
) -> UnitCost:
    """One unit in ticks and bytes, data-parallel traffic included.

    Args:
        held: of the unit's parameters.
        window: passes of the unit beside which traffic between replicas can run.
        least_tail: hide as much of the gradient reduction as any recompute setting can hide.
            Recomputation lengthens passes and hides more behind them; with the first counted as
            none and the second as all, a partition takes no longer than under any setting.
    """
    if held.shard_backward_s:
        run = _beside_shards(run, held, settings)
    overlap = settings.dp_overlap * window
    tail_rest = held.tail_least
    if not least_tail:
        tail_rest = _signed_ticks(held.reduce_s - overlap * run.backward_s)
    return UnitCost(
        forward=run.forward,
        backward=run.backward,
        block_backward=run.block_backward,
        head_least=held.head_least,
        head_rest=_signed_ticks(held.gather_s - overlap * run.forward_s),
        tail_least=held.tail_least,
        tail_rest=tail_rest,
        optimizer=held.optimizer,
        static_bytes=int(held.static.total),
        saved_bytes=run.saved_bytes,
        block_saved_bytes=run.block_saved_bytes,
        working_bytes=run.working_bytes + held.unsharded_bytes,
        block_working_bytes=run.block_working_bytes + held.unsharded_bytes,
    )


def _beside_shards(run: RunCost, held: ReplicaCost, settings: CostSettings) -> RunCost:
    """Passes beside which shards travel, in each micro batch."""
    forward = _beside(settings, run.forward_s, held.shard_forward_s)
    backward = _beside(settings, run.backward_s, held.shard_backward_s)
    block_backward = _beside(settings, run.block_backward_s, held.shard_backward_s)
    return run._replace(
        forward_s=forward,
        backward_s=backward,
        block_backward_s=block_backward,
        forward=to_ticks(forward),
        backward=to_ticks(backward),
        block_backward=to_ticks(block_backward),
    )


def _beside(settings: CostSettings, work: Seconds, traffic: Seconds) -> Seconds:
    """Work with traffic beside it, which slows it down; what does not fit comes after."""
    hidden = min(traffic, settings.dp_overlap * work)
    return work + settings.overlap_slowdown * hidden + traffic - hidden


def _signed_ticks(seconds: Seconds) -> Ticks:
    return to_ticks(seconds) if seconds >= 0 else -to_ticks(-seconds)
