"""An instance of the artifact's solver, a plan for it, and what a plan costs under its formula.

A plan is priced as its ``getTimePerBatchForResult`` does, with a switch for each peculiarity. The
loops follow ``Graph::getLoadOfStageForA`` to the bit, order of additions included. The compiled
kernel is held to them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from nest_megatron.errors import UserInputError
from nest_megatron.plain import Count, NonNegative, frozen, written_as

#: Edges at one end of a node: the node at the other end, and bytes.
Edges = tuple[tuple[int, float], ...]


class Optimizer(Enum):
    """Optimizers of the format, with the bytes of states for each byte of weights."""

    SGD = "SGD"
    ADAM = "Adam"

    @property
    def state_bytes_per_weight_byte(self) -> float:
        """Adam keeps momentum, variance and a copy in float32 of weights in 16 bits."""
        return 6.0 if self is Optimizer.ADAM else 0.0


@frozen
class Layer:
    """A node of the layer graph; -1 is the embedding. Latencies are in the instance's unit.

    Args:
        weight_bytes: of its parameters, at 2 bytes each.
        activation_bytes: outputs of all its operators for one micro batch.
    """

    node_id: int = written_as("id")
    weight_bytes: NonNegative = written_as("parameterSize")
    activation_bytes: NonNegative = written_as("activationSize")
    forward: NonNegative = written_as("optimalLatencyFw")
    backward: NonNegative = written_as("optimalLatencyBw")


@frozen
class Chain:
    """The layers for one tensor degree, in the only order that their edges allow.

    Args:
        incoming, outgoing: edges of each layer by its place in ``layers``; some may skip layers.
    """

    layers: tuple[Layer, ...]
    incoming: tuple[Edges, ...]
    outgoing: tuple[Edges, ...]


@frozen
class Network:
    """Levels, innermost first: fan-out, bytes per second, seconds."""

    fan_outs: tuple[int, ...]
    bandwidths: tuple[float, ...]
    latencies: tuple[float, ...]

    def level_between(self, one: int, other: int) -> int:
        """The innermost level whose group holds both devices.

        >>> network = Network(fan_outs=(8, 4), bandwidths=(2.0, 1.0), latencies=(0.0, 0.0))
        >>> network.level_between(0, 7), network.level_between(7, 8)
        (0, 1)
        """
        for level, fan_out in enumerate(self.fan_outs):
            one, other = one // fan_out, other // fan_out
            if one == other:
                return level
        return len(self.fan_outs) - 1


@frozen
class FixedPlan:
    """A fixed plan, in the words of the format: stages, replicas, tensor degree, layers."""

    p: Count
    d: Count
    t: Count
    num_transformer_layers: Count
    layer_partition: tuple[Count, ...] | None = None


@frozen
class Instance:
    """What the artifact's solver reads: chains by tensor degree, fixed plans by name.

    Args:
        num_micro_batches: of one batch, over all pipelines.
        notes: what the file holds and this format does not.
    """

    chains: dict[int, Chain]
    network: Network
    num_devices: int
    memory_bytes: float
    num_micro_batches: int
    expert_model_parallel_size: int
    context_parallel_size: int
    sequence_parallel: bool
    recompute: bool
    optimizer: Optimizer
    baselines: dict[str, FixedPlan]
    notes: tuple[str, ...] = ()

    def devices_per_stage(self, tensor_model_parallel_size: int) -> int:
        """Devices that a stage takes: every layer on all of them, whatever it holds."""
        shards = self.expert_model_parallel_size * self.context_parallel_size
        return tensor_model_parallel_size * shards


@frozen
class Stage:
    """Layers ``first`` to ``end`` (exclusive) by their places in the chain."""

    first: int
    end: int
    num_devices: int


@frozen
class StagePlacement:
    """A plan: stages first to last, and degrees.

    Args:
        is_baseline: costed as the artifact costs its fixed plans.
        printed_devices: the device of each layer as a solver printed it, if it did.
    """

    stages: tuple[Stage, ...]
    data_parallel_size: int
    tensor_model_parallel_size: int
    is_baseline: bool = False
    printed_devices: tuple[int, ...] = ()


@frozen
class ArtifactRule:
    """How a plan is priced; as it stands, exactly as the artifact prices it.

    Args:
        seconds_added_to_milliseconds: links are priced in seconds and added to layers in
            milliseconds. Off: links are in milliseconds as well, 1,000 times heavier.
        recomputed_forward_costs_backward: a recomputed forward pass is charged the time of the
            backward pass. Off: that of the forward pass.
        sync_first_stage_only: the gradients of the first stage alone are summed over replicas.
            Off: those of the stage with the most weights.
        sync_counts_lower_levels_again: from the third network level up, what lower levels took is
            added once more. Off: each level counts once.
        pipeline_bandwidth_never_rises: between stages no level is faster than the one below it.
            Off: the bandwidths as they are, which the sum over replicas always uses.
        baselines_last_stage_first: the stages of a baseline are costed in reversed order, so that
            the last one recomputes, stashes most and is the one whose weights are summed. Off: in
            the order of any other plan.
        baseline_cuts_count_embedding: the cuts of a baseline count the embedding as its first
            layer, so that the last stage has one layer more. Off: the embedding comes on top.
        links_from_printed_placement: where a solver's output holds a placement, links between
            stages are looked up there although its cuts may be others. Off: stages stand packed,
            the last one first, as they are listed.
    """

    seconds_added_to_milliseconds: bool = True
    recomputed_forward_costs_backward: bool = True
    sync_first_stage_only: bool = True
    sync_counts_lower_levels_again: bool = True
    pipeline_bandwidth_never_rises: bool = True
    baselines_last_stage_first: bool = True
    baseline_cuts_count_embedding: bool = True
    links_from_printed_placement: bool = True


AS_ARTIFACT = ArtifactRule()
SWITCHES = tuple(field.name for field in dataclasses.fields(ArtifactRule))


def rule_without(switches: Sequence[str]) -> ArtifactRule:
    """The artifact's rule with some of its peculiarities off; ``all`` turns every one off.

    Raises:
        UserInputError: for a name that is no switch.

    >>> rule_without(["sync_first_stage_only"]).sync_first_stage_only
    False
    """
    known = (*SWITCHES, "all")
    for name in switches:
        if name not in known:
            limit, fix = "the formula has no such switch", f"Known: {', '.join(known)}."
            raise UserInputError("--without", name, limit, fix)
    off = SWITCHES if "all" in switches else switches
    return ArtifactRule(**dict.fromkeys(off, False))


@frozen
class StageLink:
    """A network level between two stages.

    Args:
        factor: how often the link is crossed (up and down above the first level), times 1,000 where
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

    Inputs and gradients arrive from time 0 on, during a recomputed forward pass.

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


@frozen
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


@frozen
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


@frozen
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
