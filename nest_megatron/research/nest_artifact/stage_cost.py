"""Time and memory of one stage, in the artifact's own order of additions.

The loops follow ``Graph::getLoadOfStageForA`` to the bit. The compiled kernel is held to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nest_megatron.research.nest_artifact.records import Chain, Edges, Instance
from nest_megatron.research.nest_artifact.rule import ArtifactRule

_MILLISECONDS = 1000.0


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
    network, unit = instance.network, unit_of(rule)
    links: list[StageLink] = []
    for level, given in enumerate(network.bandwidths):
        falls = links and rule.pipeline_bandwidth_never_rises
        bandwidth = min(given, links[-1].bandwidth) if falls else given
        ways = 2.0 if level else 1.0
        links.append(
            StageLink(bandwidth=bandwidth, latency=network.latencies[level], factor=ways * unit)
        )
    return tuple(links)


def unit_of(rule: ArtifactRule) -> float:
    """What link terms are multiplied by."""
    return 1.0 if rule.seconds_added_to_milliseconds else _MILLISECONDS


def forward_time(chain: Chain, first: int, end: int, link: StageLink) -> float:
    """The forward pass, inputs from other stages arriving over ``link`` from time 0 on."""
    finished = 0.0
    for at in range(first, end):
        start = finished
        for source, num_bytes in chain.incoming[at]:
            if source < first:
                start = max(start, link.time(num_bytes))
        finished = start + chain.layers[at].forward
    return finished


def backward_time(
    chain: Chain, first: int, end: int, link: StageLink, begins: float = 0.0
) -> float:
    """The backward pass, not before ``begins``; gradients arrive over ``link`` from time 0 on."""
    finished = begins
    for at in range(end - 1, first - 1, -1):
        start = finished
        for target, num_bytes in chain.outgoing[at]:
            if target >= end:
                start = max(start, link.time(num_bytes))
        finished = start + chain.layers[at].backward
    return finished


def recomputed_time(chain: Chain, first: int, end: int, rule: ArtifactRule) -> float:
    """The forward pass done once more, before the backward pass and beside its transfer."""
    again = 0.0
    for layer in chain.layers[first:end]:
        again += layer.backward if rule.recomputed_forward_costs_backward else layer.forward
    return again


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

    Args:
        links: to the stage before it and to the one after it.
        recompute: whether the forward pass is done again first.
    """
    begins = recomputed_time(chain, first, end, rule) if recompute else 0.0
    forward = forward_time(chain, first, end, links[0])
    return forward + backward_time(chain, first, end, links[1], begins)


def weights_of(chain: Chain, first: int, end: int) -> float:
    """Bytes of weights on each device of a stage."""
    weights = 0.0
    for layer in chain.layers[first:end]:
        weights += layer.weight_bytes
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on each device of a stage, with the schedule 1F1B.

    Args:
        resident: weights, gradients, optimizer states, one micro batch's activations.
        stashed: kept for every further micro batch in flight.
    """

    resident: float
    stashed: float

    def at(self, position: int) -> float:
        """Bytes where the stage is so many places from the end, the last being 1."""
        return self.resident + (position - 1) * self.stashed

    def last_position(self, memory_bytes: float, num_devices: int) -> int:
        """The farthest place from the end where it fits; 0 where it fits nowhere.

        ``num_devices`` stands for any place, since a pipeline is never longer.
        """
        if self.resident + (num_devices - 1) * self.stashed <= memory_bytes:
            return num_devices
        if self.resident > memory_bytes:
            return 0
        return 1 + math.floor((memory_bytes - self.resident) / self.stashed)


def stage_memory(instance: Instance, chain: Chain, first: int, end: int) -> StageMemory:
    """What a stage holds: all activations of each micro batch, or its inputs if it recomputes."""
    weights, activations = weights_of(chain, first, end), 0.0
    for layer in chain.layers[first:end]:
        activations += layer.activation_bytes
    states = instance.optimizer.state_bytes_per_weight_byte * weights
    stashed = activations
    if instance.recompute:
        stashed = sum(_bytes_before(chain.incoming[first:end], first), 0.0)
    return StageMemory(resident=2.0 * weights + states + activations, stashed=stashed)


def _bytes_before(incoming: tuple[Edges, ...], first: int) -> Iterator[float]:
    """Of the edges that come from before ``first``."""
    for edges in incoming:
        for source, num_bytes in edges:
            if source < first:
                yield num_bytes
