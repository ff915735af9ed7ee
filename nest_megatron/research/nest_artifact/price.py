"""A given plan under the artifact's formula (its ``getTimePerBatchForResult``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from nest_megatron.research.nest_artifact.records import Chain, Instance, Stage, StagePlacement
from nest_megatron.research.nest_artifact.rule import AS_ARTIFACT, ArtifactRule
from nest_megatron.research.nest_artifact.stage_cost import (
    links_of,
    stage_memory,
    stage_time,
    unit_of,
    weights_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrice:
    """One stage.

    Args:
        position: places from the end as it was costed, the last being 1.
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
    """A plan's time per batch, its terms, and why it cannot run, if it cannot.

    Args:
        stages: first to last.
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
    devices = _devices(placement, rule)
    costed = _in_costed_order(placement, rule)
    priced = tuple(_price_stages(instance, chain, costed, devices, rule))
    slowest = max(each.time for each in priced)
    replicas = placement.data_parallel_size
    micro_batches = -(-instance.num_micro_batches // replicas)
    used = sum(stage.num_devices for stage in costed)
    weights = [weights_of(chain, stage.first, stage.end) for stage in costed]
    summed = weights[0] if rule.sync_first_stage_only else max(weights)
    sync = sync_time(instance, rule, replicas, used, summed)
    backwards = costed[0] is not placement.stages[0]
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
    return unit_of(rule) * total


def _in_costed_order(placement: StagePlacement, rule: ArtifactRule) -> tuple[Stage, ...]:
    """First to last, or the reverse for a baseline."""
    if placement.is_baseline and rule.baselines_last_stage_first:
        return placement.stages[::-1]
    return placement.stages


def _devices(placement: StagePlacement, rule: ArtifactRule) -> Sequence[int]:
    """The first device of each layer: as printed, or packed, the last stage first."""
    if placement.printed_devices and rule.links_from_printed_placement:
        return placement.printed_devices
    backwards = placement.stages[::-1]
    before = accumulate((stage.num_devices for stage in backwards), initial=0)
    return [
        start
        for stage, start in reversed(list(zip(backwards, before, strict=False)))
        for _ in range(stage.first, stage.end)
    ]


def _price_stages(
    instance: Instance,
    chain: Chain,
    costed: Sequence[Stage],
    devices: Sequence[int],
    rule: ArtifactRule,
) -> Iterator[StagePrice]:
    links, ends = links_of(instance, rule), len(chain.layers)
    between = instance.network.level_between
    for index, stage in enumerate(costed):
        first, end, position = stage.first, stage.end, len(costed) - index
        before = between(devices[first - 1], devices[first]) if first else None
        after = between(devices[end - 1], devices[end]) if end < ends else None
        memory = stage_memory(instance, chain, first, end)
        last_position = memory.last_position(instance.memory_bytes, instance.num_devices)
        yield StagePrice(
            node_ids=tuple(layer.node_id for layer in chain.layers[first:end]),
            num_devices=stage.num_devices,
            position=position,
            time=stage_time(
                chain,
                first,
                end,
                (links[before or 0], links[after or 0]),
                rule,
                recompute=instance.recompute and position > 1,
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
