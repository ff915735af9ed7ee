"""Groups of devices that lie near each other: network levels, or the classes of a torus or mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from nest_megatron.cluster.records import Cluster, NetworkLevel
from nest_megatron.cost_model.communication import send_time
from nest_megatron.names import Name
from nest_megatron.units import Ticks, to_ticks


class Topology(Name):
    """How the cluster's levels are read."""

    LEVELS = "levels"
    TORUS = "torus"
    MESH = "mesh"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkLevel:
    """Blocks of devices, and the link between two stages that share one; known by identity.

    Args:
        num_devices: of a block; blocks begin at multiples of it.
        level: whose bandwidth and latency a transfer inside has.
        hops: links that the longest way inside a block takes.
    """

    name: str
    num_devices: int
    level: NetworkLevel
    hops: int = 1

    def send(self, num_bytes: float) -> Ticks:
        """Ticks of a transfer; none for nothing."""
        if not num_bytes:
            return 0
        level = dataclasses.replace(self.level, latency_s=self.hops * self.level.latency_s)
        return to_ticks(send_time(num_bytes, level))


def link_levels(cluster: Cluster, topology: Topology) -> tuple[LinkLevel, ...]:
    """Levels from the nearest devices outwards; the last takes in the whole cluster."""
    sizes = cluster.group_sizes()
    if topology is Topology.LEVELS:
        pairs = zip(cluster.levels, sizes, strict=True)
        return tuple(
            LinkLevel(name=level.name, num_devices=size, level=level) for level, size in pairs
        )
    found: list[LinkLevel] = []
    inner, hops = 1, 0
    for level, size in zip(cluster.levels, sizes, strict=True):
        extent = -(-size // inner)
        found.extend(_along(level, inner, extent, hops, topology))
        inner, hops = inner * extent, hops + _longest_way(extent, topology)
    return tuple(found)


def _along(
    level: NetworkLevel, inner: int, extent: int, hops: int, topology: Topology
) -> list[LinkLevel]:
    """Affinity classes that reach along one dimension, all inner ones being whole.

    A part of a dimension has no link around; the whole of a torus' has.
    """
    found, reach = [], 1
    for factor in _prime_factors(extent):
        reach *= factor
        way = _longest_way(extent, topology) if reach == extent else reach - 1
        name = f"{level.name} {reach}"
        size = inner * reach
        found.append(LinkLevel(name=name, num_devices=size, level=level, hops=max(1, hops + way)))
    return found


def _longest_way(extent: int, topology: Topology) -> int:
    return extent // 2 if topology is Topology.TORUS else extent - 1


def _prime_factors(number: int) -> list[int]:
    """Smallest first.

    >>> _prime_factors(12), _prime_factors(1)
    ([2, 2, 3], [])
    """
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def send_ticks(found: tuple[LinkLevel, ...], num_bytes: float) -> tuple[Ticks, ...]:
    """A transfer over each level, the slowest level up to it counting."""
    ticks: list[Ticks] = []
    for level in found:
        ticks.append(max([*ticks[-1:], level.send(num_bytes)]))
    return tuple(ticks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Copies of a pipeline, each on the same number of devices.

    Args:
        stride: devices from the first of a copy to the first of the next.
    """

    count: int
    stride: int

    def boundaries(self, block: int) -> list[int]:
        """Where a block of devices begins in some copy, in the copy's own numbers."""
        starts = {-copy * self.stride % block for copy in range(self.count)}
        places = (range(start, self.stride, block) for start in starts)
        return sorted({place for some in places for place in some if place})


def common_unit(blocks: Sequence[int], replicas: Replicas, stage_devices: Sequence[int]) -> int:
    """The largest number of devices that every boundary and every stage is a multiple of.

    Stages may then begin at its multiples alone: a stage that begins between two can be moved to
    the lower one without leaving a block, and the devices left idle are not missed.
    """
    places = (place for block in set(blocks) for place in replicas.boundaries(block))
    return math.gcd(*stage_devices, *places)


def stretches(block: int, replicas: Replicas, unit: int) -> tuple[int, ...]:
    """For each unit of devices the end of the stretch that lies in one block in every copy."""
    length = replicas.stride // unit
    bounds = [place // unit for place in replicas.boundaries(block)]
    ends, begin = [], 0
    for bound in (*(b for b in bounds if b < length), length):
        ends.extend([bound] * (bound - begin))
        begin = bound
    return tuple(ends)


def level_ends(blocks: Sequence[int], replicas: Replicas, unit: int) -> tuple[tuple[int, ...], ...]:
    """Stretches of every level, whose blocks have so many devices; the last one joins all."""
    inner = tuple(stretches(block, replicas, unit) for block in blocks[:-1])
    length = replicas.stride // unit
    return (*inner, (length,) * length)
