"""A stage, and a whole plan, under the artifact's formula (its ``getTimePerBatchForResult``).

The loops follow ``Graph::getLoadOfStageForA`` to the bit, order of additions included. The compiled
kernel is held to them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nest_megatron.research.nest_artifact.records import (
    AS_ARTIFACT,
    ArtifactRule,
    Chain,
    Instance,
    Layer,
    Stage,
    StagePlacement,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLink:
    """A network level between two stages.

    Args:
        factor: how often the way is made (up and down above the first level), times 1,000 where
            links are in milliseconds.
    """

    bandwidth: float
    latency: float
    factor: float

    def time(self, num_bytes: float) -> float:
        """Time to send so many bytes."""
        return self.factor * (num_bytes / self.bandwidth + self.latency)


def links_of(instance: Instance, rule: ArtifactRule) -> tuple[StageLink, ...]:
    """The levels as transfers between stages see them, innermost first."""
    network, unit = instance.network, _unit(rule)
    bandwidths = list(network.bandwidths)
    if rule.pipeline_bandwidth_never_rises:
        bandwidths = list(itertools.accumulate(bandwidths, min))
    return tuple(
        StageLink(bandwidth=bandwidth, latency=latency, factor=(2.0 if level else 1.0) * unit)
        for level, (bandwidth, latency) in enumerate(
            zip(bandwidths, network.latencies, strict=True)
        )
    )


def _unit(rule: ArtifactRule) -> float:
    """What link terms are multiplied by."""
    return 1.0 if rule.seconds_added_to_milliseconds else 1000.0


def recomputed_forward(layer: Layer, rule: ArtifactRule) -> float:
    """A layer's forward pass done once more."""
    return layer.backward if rule.recomputed_forward_costs_backward else layer.forward


def stage_time(
    chain: Chain,
    first: int,
    end: int,
    links: tuple[StageLink, StageLink],
    rule: ArtifactRule,
    *,
    recompute: bool,
) -> float:
    """Forward and backward of a stage for one micro batch.

    Inputs and gradients arrive from time 0 on, beside a recomputed forward pass.

    Args:
        links: to the stage before it and to the one after it.
        recompute: whether the forward pass is done a second time first.
    """
    forward = backward = 0.0
    for layer, edges in zip(chain.layers[first:end], chain.incoming[first:end], strict=True):
        coming = (links[0].time(size) for source, size in edges if source < first)
        forward = max(forward, *coming, 0.0) + layer.forward
        if recompute:
            backward += recomputed_forward(layer, rule)
    for at in range(end - 1, first - 1, -1):
        coming = (links[1].time(size) for target, size in chain.outgoing[at] if target >= end)
        backward = max(backward, *coming, 0.0) + chain.layers[at].backward
    return forward + backward


def weights_of(chain: Chain, first: int, end: int) -> float:
    """Bytes of weights on each device of a stage."""
    return _added(layer.weight_bytes for layer in chain.layers[first:end])


def _added(values: Iterable[float]) -> float:
    """Added one by one; ``sum`` compensates its rounding from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on each device of a stage with 1F1B: of one micro batch, and of every further one."""

    resident: float
    stashed: float

    def at(self, position: int) -> float:
        """Bytes where the stage is so many places from the end, the last being 1."""
        return self.resident + (position - 1) * self.stashed

    def last_position(self, memory_bytes: float, num_devices: int) -> int:
        """The farthest place from the end where it fits; 0 where it fits nowhere.

        ``num_devices`` stands for any place, since a pipeline is never longer.
        """
        if self.at(num_devices) <= memory_bytes:
            return num_devices
        if self.resident > memory_bytes:
            return 0
        return 1 + math.floor((memory_bytes - self.resident) / self.stashed)


def stage_memory(instance: Instance, chain: Chain, first: int, end: int) -> StageMemory:
    """What a stage holds: all activations of each micro batch, or its inputs if it recomputes."""
    weights = weights_of(chain, first, end)
    activations = _added(layer.activation_bytes for layer in chain.layers[first:end])
    states, stashed = instance.optimizer.state_bytes_per_weight_byte * weights, activations
    if instance.recompute:
        edges = itertools.chain(*chain.incoming[first:end])
        stashed = _added(size for source, size in edges if source < first)
    return StageMemory(resident=2.0 * weights + states + activations, stashed=stashed)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrice:
    """One stage, as it was costed at a place from the end, the last being 1.

    Args:
        time: forward and backward for one micro batch, links included.
        link_before, link_after: levels of the links to its neighbours; ``None`` at the ends.
        fits: whether its memory does.
    """

    node_ids: tuple[int, ...]
    num_devices: int
    position: int
    time: float
    link_before: int | None
    link_after: int | None
    memory_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A plan's time per batch and its terms; stages first to last.

    Args:
        time: slowest stage times micro batches and pipeline depth, plus the sum over replicas.
        refusals: what keeps the plan from running; empty if nothing does.
    """

    stages: tuple[StagePrice, ...]
    time: float
    slowest_stage: float
    num_micro_batches: int
    sync: float
    refusals: tuple[str, ...]

    @property
    def time_per_batch(self) -> float | None:
        """The time, or nothing where the plan cannot run."""
        return None if self.refusals else self.time


def price(instance: Instance, placement: StagePlacement, rule: ArtifactRule = AS_ARTIFACT) -> Price:
    """What a plan costs, whether or not it is one that the search would look at.

    Args:
        placement: its stages cover the chain of its tensor degree, first to last.
    """
    chain = instance.chains[placement.tensor_model_parallel_size]
    backwards = placement.is_baseline and rule.baselines_last_stage_first
    costed = placement.stages[::-1] if backwards else placement.stages
    priced = tuple(_price_stages(instance, chain, costed, _devices(placement, rule), rule))
    slowest = max(each.time for each in priced)
    replicas = placement.data_parallel_size
    micro_batches = -(-instance.num_micro_batches // replicas)
    used = sum(stage.num_devices for stage in costed)
    weights = [weights_of(chain, stage.first, stage.end) for stage in costed]
    summed = weights[0] if rule.sync_first_stage_only else max(weights)
    sync = sync_time(instance, rule, replicas, used, summed)
    return Price(
        stages=priced[::-1] if backwards else priced,
        time=slowest * (micro_batches + len(costed) - 1) + sync,
        slowest_stage=slowest,
        num_micro_batches=micro_batches,
        sync=sync,
        refusals=tuple(_refusals(instance, placement, priced)),
    )


def sync_time(
    instance: Instance, rule: ArtifactRule, replicas: int, stride: int, weight_bytes: float
) -> float:
    """The sum of gradients over replicas that stand ``stride`` devices apart.

    Halving and doubling on the innermost level, then all bytes up and down each level above it
    (``hierarchical_allreduce``).
    """
    network = instance.network
    total = lower = 0.0
    inner = 1.0 / network.bandwidths[0]
    for step in range(replicas.bit_length() - 1):
        total += network.latencies[0] + inner * (weight_bytes / 2**step)
    for level in range(1, network.level_between(0, (replicas - 1) * stride) + 1):
        each_byte = 1.0 / network.bandwidths[level]
        total += 2.0 * (network.latencies[level] + each_byte * weight_bytes) + lower
        if rule.sync_counts_lower_levels_again:
            lower += total
    return _unit(rule) * total


def _devices(placement: StagePlacement, rule: ArtifactRule) -> Sequence[int]:
    """The first device of each layer: as printed, or packed, the last stage first."""
    if placement.printed_devices and rule.links_from_printed_placement:
        return placement.printed_devices
    devices: list[int] = []
    begin = 0
    for stage in placement.stages[::-1]:
        devices = [begin] * (stage.end - stage.first) + devices
        begin += stage.num_devices
    return devices


def _price_stages(
    instance: Instance,
    chain: Chain,
    costed: Sequence[Stage],
    devices: Sequence[int],
    rule: ArtifactRule,
) -> Iterator[StagePrice]:
    links, between = links_of(instance, rule), instance.network.level_between
    for index, stage in enumerate(costed):
        first, end, position = stage.first, stage.end, len(costed) - index
        before = between(devices[first - 1], devices[first]) if first else None
        after = between(devices[end - 1], devices[end]) if end < len(chain.layers) else None
        memory = stage_memory(instance, chain, first, end)
        last_position = memory.last_position(instance.memory_bytes, instance.num_devices)
        ends, recompute = (links[before or 0], links[after or 0]), position > 1
        yield StagePrice(
            node_ids=tuple(layer.node_id for layer in chain.layers[first:end]),
            num_devices=stage.num_devices,
            position=position,
            time=stage_time(
                chain, first, end, ends, rule, recompute=instance.recompute and recompute
            ),
            link_before=before,
            link_after=after,
            memory_bytes=memory.at(position),
            fits=position <= last_position,
        )


def _refusals(
    instance: Instance, placement: StagePlacement, priced: Sequence[StagePrice]
) -> Iterator[str]:
    """Why the artifact refuses such a plan."""
    needed = instance.devices_per_stage(placement.tensor_model_parallel_size)
    replicas = placement.data_parallel_size
    used = replicas * sum(stage.num_devices for stage in placement.stages)
    if used > instance.num_devices:
        yield f"it takes {used} devices, and there are {instance.num_devices}"
    if replicas > min(instance.num_devices, instance.num_micro_batches):
        yield f"{replicas} replicas share {instance.num_micro_batches} micro batches"
    for each in priced:
        name = f"the stage of nodes {each.node_ids[0]} to {each.node_ids[-1]}"
        if each.num_devices < needed:
            yield f"{name} has {each.num_devices} devices and needs {needed}"
        if not each.fits:
            missing = each.memory_bytes - instance.memory_bytes
            yield f"{name} lacks {missing:.0f} bytes on each of its devices"
