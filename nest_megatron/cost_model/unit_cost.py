"""One unit's cost to its rank in ticks and bytes, parameters and replicas included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nest_megatron.cluster.records import Accelerator
from nest_megatron.cost_model.data_parallel import ReplicaTraffic
from nest_megatron.cost_model.layer_cost import UnitRun
from nest_megatron.cost_model.memory import (
    fp8_copy_bytes,
    static_bytes_per_parameter,
    unsharded_bytes,
)
from nest_megatron.cost_model.pipeline import UnitCost
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.parameters import ParameterCount
from nest_megatron.model.spec import LayerKind
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.units import Seconds, Ticks, to_ticks


class ParameterPrices(NamedTuple):
    """What parameters cost a rank for their replicas' sake: traffic, memory, optimizer step.

    Bytes and seconds are for one parameter; ``first_bucket`` is the share of a rank's traffic that
    nothing can hide.
    """

    traffic: ReplicaTraffic
    first_bucket: float
    dense_bytes: float
    expert_bytes: float
    dense_step: Seconds
    expert_step: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitKind:
    """A distinct unit of a grid: its kind, its run, its parameters on one rank."""

    kind: LayerKind
    run: UnitRun
    block_run: UnitRun
    parameters: ParameterCount


def replicas(dims: ParallelDims) -> tuple[int, int]:
    """Ranks over which ZeRO divides dense and expert parameters."""
    return (
        dims.data_parallel_size * dims.context_parallel_size,
        dims.expert_data_parallel_size,
    )


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
    return ParameterPrices(
        traffic=traffic,
        first_bucket=min(1.0, traffic.bucket_parameters / max(1, per_rank)),
        dense_bytes=static_bytes_per_parameter(zero, dense, settings),
        expert_bytes=static_bytes_per_parameter(zero, expert, settings),
        dense_step=step / dense if zero else step,
        expert_step=step / expert if zero else step,
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


def unit_cost(
    unit: UnitKind,
    prices: ParameterPrices,
    zero: ZeroStage,
    settings: CostSettings,
    window: float = 1.0,
) -> UnitCost:
    """One unit in ticks and bytes, data-parallel traffic included.

    Args:
        window: passes of the unit beside which traffic between replicas can run.
    """
    count, overlap = unit.parameters, settings.dp_overlap * window
    run, block = unit.run, unit.block_run
    forward = run.forward.total
    backward = run.backward.total + run.recompute.total
    block_backward = block.backward.total + block.recompute.total
    reduce, gather = prices.traffic.reduce(count), prices.traffic.gather(count)
    if zero >= ZeroStage.GRADIENTS:  # once for each micro batch, beside the unit's own work
        fetch = gather if zero >= ZeroStage.WEIGHTS else 0.0
        forward = _beside(settings, forward, fetch)
        backward = _beside(settings, backward, reduce + fetch)
        block_backward = _beside(settings, block_backward, reduce + fetch)
        gather, reduce = gather - fetch, 0.0
    if settings.traits.frozen_weights:
        reduce = gather = 0.0
    static = count.dense * prices.dense_bytes + count.expert * prices.expert_bytes
    # Gathered weights go again after use, and their fp8 copies with them.
    if unit.kind not in (LayerKind.EMBEDDING, LayerKind.HEAD) and zero < ZeroStage.WEIGHTS:
        static += count.total * fp8_copy_bytes(settings)
    unsharded = unsharded_bytes(count.total, zero)
    return UnitCost(
        forward=to_ticks(forward),
        backward=to_ticks(backward),
        block_backward=to_ticks(block_backward),
        head_least=to_ticks(prices.first_bucket * gather),
        head_rest=_signed_ticks(gather - overlap * forward),
        tail_least=to_ticks(prices.first_bucket * reduce),
        tail_rest=_signed_ticks(reduce - overlap * backward),
        optimizer=to_ticks(count.dense * prices.dense_step + count.expert * prices.expert_step),
        static_bytes=round(static),
        saved_bytes=round(run.saved_bytes),
        block_saved_bytes=round(block.saved_bytes),
        working_bytes=round(run.working_bytes) + unsharded,
        block_working_bytes=round(block.working_bytes) + unsharded,
    )


def _beside(settings: CostSettings, work: Seconds, traffic: Seconds) -> Seconds:
    """Work with traffic beside it, which slows it down; what does not fit comes after."""
    hidden = min(traffic, settings.dp_overlap * work)
    return work + settings.overlap_slowdown * hidden + traffic - hidden


def _signed_ticks(seconds: Seconds) -> Ticks:
    return to_ticks(seconds) if seconds >= 0 else -to_ticks(-seconds)
