"""Where a stage's groups lie when it begins at some device, as fan-outs at each network level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from nest_megatron.cost_model.keys import GroupPlaces
from nest_megatron.research.nest_dp.links import Replicas

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
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


class Line(NamedTuple):
    """Shapes of a stage's groups along a replica: the distinct ones, and which is where."""

    distinct: tuple[StageGroupShapes, ...]
    numbers: tuple[int, ...]


class GroupShapes:
    """Shapes of stages in one cluster with one number of replicas; each is worked out once.

    Args:
        sizes: devices in one group of each level, the last one all.
    """

    def __init__(self, sizes: tuple[int, ...], replicas: Replicas) -> None:
        self.sizes = sizes
        self.replicas = replicas
        self._period = sizes[-2] if len(sizes) > 1 else 1
        self._known: dict[tuple[Block, int, int], StageGroupShapes] = {}
        self._lines: dict[tuple[Block, int, int], Line] = {}
        self._groups: dict[Block, _Groups] = {}
        self._fewest: dict[tuple[Groups, int], Shape] = {}

    def of(self, block: Block, degree: int, first: int) -> StageGroupShapes:
        """The shapes of a stage that begins at a device of the first replica, and of its copies.

        Args:
            degree: ZeRO's; the block stands so many times side by side.
        """
        key = (block, degree, first % self._period)
        if key not in self._known:
            self._known[key] = self._shapes(*key)
        return self._known[key]

    def along(self, block: Block, degree: int, unit: int) -> Line:
        """The shapes at every unit of a replica's devices, each distinct one once."""
        key = (block, degree, unit)
        if key not in self._lines:
            starts = range(0, self.replicas.stride // unit * unit, unit)
            lie = [self.of(block, degree, first) for first in starts]
            numbers = {place: number for number, place in enumerate(dict.fromkeys(lie))}
            self._lines[key] = Line(tuple(numbers), tuple(numbers[place] for place in lie))
        return self._lines[key]

    def _shapes(self, block: Block, degree: int, first: int) -> StageGroupShapes:
        if block not in self._groups:
            self._groups[block] = _Groups.of(block, self.replicas)
        groups, stride = self._groups[block], self.replicas.stride
        blocks = [first + at * block.num_devices for at in range(degree)]
        begins = [first + copy * stride for copy in range(self.replicas.count)]
        everywhere = [at + begin - first for at in blocks for begin in begins]
        return StageGroupShapes(
            inner=tuple(self._worst(everywhere, inner) for inner in groups.inner),
            zero=self._worst(begins, _side_by_side(block, degree)),
            dense=self._worst(blocks, groups.dense),
            expert=self._worst(blocks, groups.expert),
        )

    def _worst(self, begins: Iterable[int], groups: Groups) -> Shape:
        """The shape in which no member has more neighbours than it has from any beginning."""
        fewest = [self._fewest_at(groups, at) for at in {at % self._period for at in begins}]
        return fan_outs([min(level) for level in zip(*fewest, strict=True)], groups.size)

    def _fewest_at(self, groups: Groups, begin: int) -> Shape:
        """At each level, the fewest members that share one of its groups with a member."""
        if (groups, begin) not in self._fewest:
            self._fewest[groups, begin] = tuple(
                min(_fewest_neighbours(group, begin, size) for group in groups.members)
                for size in self.sizes
            )
        return self._fewest[groups, begin]


class Groups:
    """Groups of devices, numbered from the first device of a stage; known by identity."""

    def __init__(self, members: tuple[tuple[int, ...], ...]) -> None:
        self.members = members
        self.size = len(members[0])


class _Groups(NamedTuple):
    """The groups of a block and of its copies in other replicas."""

    inner: tuple[Groups, ...]
    dense: Groups
    expert: Groups

    @classmethod
    def of(cls, block: Block, replicas: Replicas) -> _Groups:
        return cls(
            inner=tuple(Groups(members) for members in _inner_groups(block)),
            dense=_copies(block, replicas, block.tp),
            expert=_copies(block, replicas, block.tp * block.ep),
        )


@cache
def _side_by_side(block: Block, degree: int) -> Groups:
    """The devices of a block and those that divide their states with them."""
    return Groups(_strided(block.num_devices * degree, block.num_devices, degree))


def _copies(block: Block, replicas: Replicas, shard: int) -> Groups:
    """Devices that hold the same share, ``shard`` apart in a block, in all replicas."""
    begins = [copy * replicas.stride for copy in range(replicas.count)]
    return Groups(
        tuple(
            tuple(at + member for at in begins for member in range(share, block.num_devices, shard))
            for share in range(shard)
        )
    )


def _fewest_neighbours(group: Iterable[int], begin: int, size: int) -> int:
    return min(Counter([(begin + device) // size for device in group]).values())


def _inner_groups(block: Block) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Tensor, context, expert and expert-tensor groups inside a block that begins at 0."""
    tp, cp, ep, size = block.tp, block.cp, block.ep, block.num_devices
    tensor = tuple(tuple(range(begin, begin + tp)) for begin in range(0, size, tp))
    yield tensor
    yield _strided(size, tp, cp)
    yield _strided(size, tp, ep)
    yield tensor


def _strided(size: int, stride: int, members: int) -> tuple[tuple[int, ...], ...]:
    """Groups of devices ``stride`` apart.

    >>> _strided(8, 2, 2)
    ((0, 2), (1, 3), (4, 6), (5, 7))
    """
    width = stride * members
    return tuple(
        tuple(range(first + at, first + width, stride))
        for first in range(0, size, width)
        for at in range(stride)
    )


def fan_outs(fewest: Sequence[int], size: int) -> Shape:
    """Fan-outs from the fewest members at each level; the outermost takes the rest, rounded up.

    The product is at least the group's size and no member is put nearer than it is, as in
    ``parallel.rank_order.group_shape``.

    >>> fan_outs([2, 8, 8], 8), fan_outs([1, 3, 3], 3)
    ((2, 4, 1), (1, 3, 1))
    """
    shape, placed = [], 1
    for members in fewest[:-1]:
        shape.append(max(1, members // placed))
        placed *= shape[-1]
    return (*shape, -(-size // placed))
