"""The recurrence on the layers of the authors' artifact: their sizes, their latencies, their links.

Layer latencies are taken as milliseconds and links in seconds, both as what they are. A ZeRO
collective is a ring over the level where its group lies. Sums of gradients are left out.
``recurrence.py`` prints the paper's Table 7 with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.paper.ablation import NUM_GPUS
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.research.nest_artifact.price import Chain, Instance, Layer
from nest_megatron.research.nest_dp.records import (
    CheckpointPolicy,
    Downsets,
    LayerDag,
    NodeTimes,
    PricedStrategy,
    Problem,
    Schedule,
    ZeroOption,
    downsets_of,
)
from nest_megatron.research.nest_dp.search import best_pipeline
from nest_megatron.research.nest_dp.topology import Replicas, level_ends
from nest_megatron.units import Bytes, Seconds, to_ticks

_MILLISECOND = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorsRow:
    """What is found for the authors' layers.

    Args:
        fits_without: there is a plan without ZeRO.
        settings: ZeRO stage and degree of each stage, first to last; empty if there is no plan.
        num_devices: over all replicas.
    """

    fits_without: bool
    settings: tuple[tuple[int, int], ...]
    num_devices: int


def authors_row(instance: Instance, memory_bytes: Bytes, replicas: int) -> AuthorsRow:
    """One row for an instance of the artifact on ``NUM_GPUS`` devices.

    Args:
        replicas: as many as the table has.
    """
    without, problem = (
        artifact_problem(instance, NUM_GPUS, replicas, memory_bytes, zero=zero)
        for zero in (False, True)
    )
    found = best_pipeline(problem)
    stages = () if found is None else found.stages
    options = [problem.strategies[0].options[stage.option] for stage in stages]
    return AuthorsRow(
        fits_without=best_pipeline(without) is not None,
        settings=tuple((int(option.zero_stage), option.zero_degree) for option in options),
        num_devices=replicas * sum(option.num_devices for option in options),
    )


def artifact_problem(
    instance: Instance, num_devices: int, replicas: int, memory_bytes: Bytes, *, zero: bool
) -> Problem:
    """An instance whose layers are not sharded, on a cluster of another size.

    Args:
        num_devices: what the outermost level is grown to.
        replicas: each has as many devices, and the last ones may stay idle.
        memory_bytes: of a device.
        zero: stages may take more devices to divide their states.
    """
    chain = instance.chains[1]
    downsets = downsets_of(_dag(chain))
    copies = Replicas(count=replicas, stride=num_devices // replicas)
    blocks = [math.prod(instance.network.fan_outs[: at + 1]) for at in range(_levels(instance) - 1)]
    ends = level_ends([*blocks, num_devices], copies, 1)
    return Problem(
        downsets=downsets,
        ends=ends,
        strategies=(_strategy(instance, downsets, ends, zero=zero),),
        num_microbatches=-(-instance.num_micro_batches // replicas),
        schedule=Schedule.ONE_F_ONE_B,
        capacity_bytes=memory_bytes,
        most_stages=min(len(chain.layers), copies.stride),
    )


def _levels(instance: Instance) -> int:
    return len(instance.network.fan_outs)


def _dag(chain: Chain) -> LayerDag:
    edges = tuple((at, to) for at, outgoing in enumerate(chain.outgoing) for to, _ in outgoing)
    return LayerDag(names=tuple(str(layer.node_id) for layer in chain.layers), edges=edges)


def _link_time(instance: Instance, level: int, num_bytes: float) -> Seconds:
    """A transfer; no level is faster than those inside it."""
    network = instance.network
    return max(
        num_bytes / network.bandwidths[at] + network.latencies[at] for at in range(level + 1)
    )


def _strategy(
    instance: Instance, downsets: Downsets, ends: tuple[tuple[int, ...], ...], *, zero: bool
) -> PricedStrategy:
    chain = instance.chains[1]
    outputs = [max((num for _, num in edges), default=0.0) for edges in chain.outgoing]
    crossing = tuple(downsets.cut_bytes([math.ceil(num) for num in outputs]))
    return PricedStrategy(
        label="unsharded",
        options=tuple(_options(instance, ends, zero=zero)),
        policies=tuple(_policy(chain, crossing, recompute=again) for again in (False, True)),
        send=tuple(
            tuple(to_ticks(_link_time(instance, level, num)) if num else 0 for num in crossing)
            for level in range(_levels(instance))
        ),
    )


def _policy(chain: Chain, crossing: tuple[int, ...], *, recompute: bool) -> CheckpointPolicy:
    n, kept = len(chain.layers), tuple(math.ceil(at.activation_bytes) for at in chain.layers)
    return CheckpointPolicy(
        recompute=recompute,
        first_bytes=kept,
        further_bytes=(0,) * n if recompute else kept,
        entry_bytes=crossing if recompute else (0,) * len(crossing),
        peak_bytes=(0,) * n,
    )


def _options(
    instance: Instance, ends: tuple[tuple[int, ...], ...], *, zero: bool
) -> Iterator[ZeroOption]:
    yield _option(instance, ends, ZeroStage.NONE, 1)
    degree = 2
    while zero and degree <= len(ends[0]):
        for stage in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS, ZeroStage.WEIGHTS):
            yield _option(instance, ends, stage, degree)
        degree *= 2


def _option(
    instance: Instance, ends: tuple[tuple[int, ...], ...], stage: ZeroStage, degree: int
) -> ZeroOption:
    layers, devices = instance.chains[1].layers, len(ends[0])
    states = instance.optimizer.state_bytes_per_weight_byte
    shares = (
        (1.0, ZeroStage.WEIGHTS),
        (1.0, ZeroStage.GRADIENTS),
        (states, ZeroStage.OPTIMIZER),
    )
    each = sum(width / (degree if stage >= divided else 1) for width, divided in shares)
    levels = [
        next(level for level, row in enumerate(ends) if row[at] >= min(at + degree, devices))
        for at in range(devices)
    ]
    return ZeroOption(
        zero_stage=stage,
        zero_degree=degree,
        num_devices=degree,
        static_bytes=tuple(math.ceil(each * layer.weight_bytes) for layer in layers),
        times_at=tuple(levels),
        times=tuple(_times(instance, stage, degree, level) for level in range(len(ends))),
    )


def _times(instance: Instance, stage: ZeroStage, degree: int, level: int) -> NodeTimes:
    layers = instance.chains[1].layers

    def collective(layer: Layer, least: ZeroStage) -> Seconds:
        if stage < least:
            return 0.0
        return _link_time(instance, level, layer.weight_bytes * (1 - 1 / degree))

    gather = [collective(layer, ZeroStage.WEIGHTS) for layer in layers]
    scatter = [collective(layer, ZeroStage.GRADIENTS) for layer in layers]
    forward = [layer.forward * _MILLISECOND for layer in layers]
    backward = [layer.backward * _MILLISECOND for layer in layers]
    return NodeTimes(
        forward=tuple(map(to_ticks, map(sum, zip(forward, gather, strict=True)))),
        recompute=tuple(map(to_ticks, forward)),
        backward=tuple(map(to_ticks, map(sum, zip(backward, scatter, gather, strict=True)))),
        sync=(0,) * len(layers),
    )
