"""Where devices and groups lie: levels, replicas, and a stage's groups as fan-outs per level."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from nest_megatron.cluster.communication import send_time
from nest_megatron.cluster.records import Cluster, NetworkLevel
from nest_megatron.cost_model.keys import GroupPlaces
from nest_megatron.plain import Name, frozen
from nest_megatron.units import Ticks, to_ticks

Shape = tuple[int, ...]


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
        hops: links of the longest path inside a block.
    """

    name: str
    num_devices: int
    level: NetworkLevel
    hops: int = 1


def link_levels(cluster: Cluster, topology: Topology) -> tuple[LinkLevel, ...]:
    """Levels from the nearest devices outwards; the last takes in the whole cluster.

    Of a torus or mesh, affinity classes: those that reach along one dimension, all inner ones being
    whole. A part of a dimension has no link around; the whole of a torus' has.
    """
    found = []
    inner, hops = 1, 0
    for level, size in zip(cluster.levels, cluster.group_sizes(), strict=True):
        if topology is Topology.LEVELS:
            found.append(LinkLevel(name=level.name, num_devices=size, level=level))
            continue
        extent, reach = -(-size // inner), 1
        longest = extent // 2 if topology is Topology.TORUS else extent - 1
        for factor in _prime_factors(extent):
            reach *= factor
            path = hops + (longest if reach == extent else reach - 1)
            name, block = f"{level.name} {reach}", inner * reach
            found.append(LinkLevel(name=name, num_devices=block, level=level, hops=max(1, path)))
        inner, hops = inner * extent, hops + longest
    return tuple(found)


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
    """A transfer over each level, the slowest level up to it counting; none for nothing."""
    if not num_bytes:
        return (0,) * len(found)
    levels = (replace(each.level, latency_s=each.hops * each.level.latency_s) for each in found)
    return tuple(accumulate((to_ticks(send_time(num_bytes, level)) for level in levels), max))


@frozen
class Replicas:
    """Copies of a pipeline, each on the same number of devices.

    Args:
        stride: devices from the first of a copy to the first of the next.
    """

    count: int
    stride: int

    def boundaries(self, block: int) -> list[int]:
        """Where a block of devices begins in some copy, in the copy's numbers."""
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


def stretches(block: int, replicas: Replicas, unit: int) -> Shape:
    """For each unit of devices the end of the stretch that lies in one block in every copy."""
    length = replicas.stride // unit
    bounds = [place // unit for place in replicas.boundaries(block)]
    ends: list[int] = []
    for bound in (*(b for b in bounds if b < length), length):
        ends += [bound] * (bound - len(ends))
    return tuple(ends)


def level_ends(blocks: Sequence[int], replicas: Replicas, unit: int) -> tuple[Shape, ...]:
    """Stretches of every level, whose blocks have so many devices; the last one joins all."""
    inner = tuple(stretches(block, replicas, unit) for block in blocks[:-1])
    length = replicas.stride // unit
    return (*inner, (length,) * length)


class Block(NamedTuple):
    """Devices that work on one stage: tensor ranks nearest, then context, then expert ranks.

    Experts are split over the tensor ranks and, next to them, the expert ranks; context ranks hold
    copies of them. The order is Megatron's ``tp-cp-ep-dp-pp``.
    """

    tp: int
    cp: int
    ep: int

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.tp * self.cp * self.ep


class StageGroupShapes(NamedTuple):
    """Shapes of a stage's groups.

    ``inner`` are those inside a layer: tensor, context, expert, expert-tensor. ``zero`` divides
    states, ``dense`` and ``expert`` sum gradients over all copies of a parameter.
    """

    inner: GroupPlaces
    zero: Shape
    dense: Shape
    expert: Shape


class _Groups:
    """Groups of devices, numbered from the first device of a stage; known by identity."""

    def __init__(self, members: Iterable[Iterable[int]]) -> None:
        self.members = [tuple(group) for group in members]
        self.size = len(self.members[0])


class GroupShapes:
    """Shapes of stages in one cluster with one number of replicas; each is worked out once.

    Args:
        sizes: devices in one group of each level, the last one all.

    Attributes:
        along: the distinct shapes along a replica's devices, and which of them is at every unit, by
            block, ZeRO degree and unit.
    """

    def __init__(self, sizes: Shape, replicas: Replicas) -> None:
        self.sizes = sizes
        self.replicas = replicas
        self._period = sizes[-2] if len(sizes) > 1 else 1
        self.along = cache(self._along)
        self._shapes = cache(self._shapes_from)
        self._groups = cache(self._groups_of)
        self._fewest = cache(self._fewest_at)
        # the devices of a block and those that divide their states with them
        self._side_by_side = cache(lambda size, zero: _Groups(_strided(size * zero, size, zero)))

    def of(self, block: Block, degree: int, first: int) -> StageGroupShapes:
        """The shapes of a stage that begins at a device of the first replica, and of its copies.

        Args:
            degree: ZeRO's; the block stands so many times side by side.
        """
        return self._shapes(block, degree, first % self._period)

    def _along(
        self, block: Block, degree: int, unit: int
    ) -> tuple[tuple[StageGroupShapes, ...], Shape]:
        starts = range(0, self.replicas.stride // unit * unit, unit)
        shapes = [self.of(block, degree, first) for first in starts]
        numbers = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
        return tuple(numbers), tuple(numbers[shape] for shape in shapes)

    def _shapes_from(self, block: Block, degree: int, first: int) -> StageGroupShapes:
        inner, dense, expert = self._groups(block)
        stride, size = self.replicas.stride, block.num_devices
        blocks = [first + at * size for at in range(degree)]
        begins = [first + copy * stride for copy in range(self.replicas.count)]
        everywhere = [at + begin - first for at in blocks for begin in begins]
        return StageGroupShapes(
            inner=tuple(self._worst(everywhere, groups) for groups in inner),
            zero=self._worst(begins, self._side_by_side(size, degree)),
            dense=self._worst(blocks, dense),
            expert=self._worst(blocks, expert),
        )

    def _worst(self, begins: Iterable[int], groups: _Groups) -> Shape:
        """The shape in which no member has more neighbours than it has from any beginning."""
        fewest = [self._fewest(groups, at) for at in {at % self._period for at in begins}]
        return fan_outs([min(level) for level in zip(*fewest, strict=True)], groups.size)

    def _fewest_at(self, groups: _Groups, begin: int) -> Shape:
        """At each level, the fewest members that share one of its groups with a member."""
        return tuple(
            min(
                min(Counter((begin + device) // size for device in group).values())
                for group in groups.members
            )
            for size in self.sizes
        )

    def _groups_of(self, block: Block) -> tuple[tuple[_Groups, ...], _Groups, _Groups]:
        """Those inside a block, of all copies of a parameter, and of an expert's."""
        tp, size = block.tp, block.num_devices
        strides = ((1, tp), (tp, block.cp), (tp, block.ep), (1, tp))
        inner = tuple(_Groups(_strided(size, stride, members)) for stride, members in strides)
        return inner, self._copies(size, tp), self._copies(size, tp * block.ep)

    def _copies(self, size: int, shard: int) -> _Groups:
        """Devices that hold the same share, ``shard`` apart in a block, in all replicas."""
        begins = [copy * self.replicas.stride for copy in range(self.replicas.count)]
        return _Groups(
            [at + member for at in begins for member in range(share, size, shard)]
            for share in range(shard)
        )


def _strided(size: int, stride: int, members: int) -> list[range]:
    """Groups of devices ``stride`` apart.

    >>> [tuple(group) for group in _strided(8, 2, 2)]
    [(0, 2), (1, 3), (4, 6), (5, 7)]
    """
    width = stride * members
    return [
        range(first + at, first + width, stride)
        for first in range(0, size, width)
        for at in range(stride)
    ]


def fan_outs(fewest: Sequence[int], size: int) -> Shape:
    """Fan-outs from the fewest members at each level; the outermost takes the rest, rounded up.

    The product is at least the group's size and no member is put nearer than it is, as in
    ``layout.rank_order.group_shape``.

    >>> fan_outs([2, 8, 8], 8), fan_outs([1, 3, 3], 3)
    ((2, 4, 1), (1, 3, 1))
    """
    shape, placed = [], 1
    for members in fewest[:-1]:
        shape.append(max(1, members // placed))
        placed *= shape[-1]
    return (*shape, -(-size // placed))
