"""Which timings speak for a block in a shape: its timing, or its neighbours' with weights.

Where a shape was not measured, the ratio of measured to analytic time is carried over from the
nearest measured shapes of the same block, at most ``NUM_NEIGHBOURS``. The axes of shapes are the
logarithms of tensor-parallel size, tokens of a rank, context-parallel size, expert-parallel size
and expert-tensor-parallel size, and a step for sequence parallelism; the logarithms of the ratios
are averaged with weights of one over the squared distance.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import field
from typing import NamedTuple

from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen, set_field
from nest_megatron.profile.records import SHAPE, LayerProfile, Source, Timing
from nest_megatron.units import Seconds

#: Measured shapes that an interpolation draws from: the corners around a shape that lies between
#: measured ones on two axes, tensor-parallel size and tokens.
NUM_NEIGHBOURS = 4

#: Stands between the names of several profiles; no name holds a space.
NAMES_BETWEEN = " + "
#: What a block's compute time depends on: tensor, context, expert, expert-tensor size, tokens of a
#: rank, sequence parallelism; 1 where the block does not depend on it.
Point = tuple[int, int, int, int, float, bool]


class Neighbour(NamedTuple):
    """A timing and its weight; the weights of a lookup add up to one."""

    timing: Timing
    weight: float


@frozen
class LayerTimes:
    """Timings for a model's layers.

    Args:
        profiles: the most trusted first. A shape's timing wins over an interpolation, and what
            was measured here over both of what was imported.
    """

    spec: TransformerSpec
    profiles: tuple[LayerProfile, ...]
    _own: dict[LayerBlock, _Table] = field(default_factory=dict)
    _imported: dict[LayerBlock, _Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, imported in (("_own", False), ("_imported", True)):
            chosen = [p for p in self.profiles if p.imported is imported]
            set_field(self, name, _tables(self.spec, chosen))

    @property
    def name(self) -> str:
        """The profiles' names."""
        return NAMES_BETWEEN.join(profile.name for profile in self.profiles)

    def blocks(self) -> frozenset[LayerBlock]:
        """Blocks that some profile has a timing of."""
        return frozenset(self._own) | frozenset(self._imported)

    def optimizer_step(self) -> Seconds | None:
        """Seconds of an optimizer step for one parameter, or ``None`` where none was timed.

        Large blocks count most: a step runs over all of a rank's parameters at once, so what a
        small block loses to its launches is not lost there.
        """
        for imported in (False, True):
            chosen = (p for p in self.profiles if p.imported is imported)
            timed = [t for p in chosen for t in p.timings if t.optimizer_s and t.parameters]
            if timed:
                seconds = math.fsum(timing.optimizer_s for timing in timed)
                return seconds / sum(timing.parameters for timing in timed)
        return None

    def find(self, block: LayerBlock, shard: LayerShard) -> tuple[Source, tuple[Neighbour, ...]]:
        """What speaks for a block in a shape, by precedence; no neighbours is analytic."""
        point = point_of(self.spec, block, shard)
        if (own := self._own.get(block)) is not None:
            source = Source.MEASURED if point in own.exact else Source.INTERPOLATED
            return source, own.nearest(point)
        if (foreign := self._imported.get(block)) is not None:
            return Source.IMPORTED, foreign.nearest(point)
        return Source.ANALYTIC, ()


class _Table(NamedTuple):
    exact: dict[Point, Timing]
    places: tuple[tuple[tuple[float, ...], Timing], ...]

    def nearest(self, point: Point) -> tuple[Neighbour, ...]:
        """The nearest timings by weight; the shape's alone, if it is there."""
        if point in self.exact:
            return (Neighbour(self.exact[point], 1.0),)
        here = _place(point)
        squares = (
            (math.fsum((a - b) ** 2 for a, b in zip(here, there, strict=True)), index)
            for index, (there, _) in enumerate(self.places)
        )
        chosen = heapq.nsmallest(NUM_NEIGHBOURS, squares)
        total = math.fsum(1.0 / square for square, _ in chosen)
        return tuple(
            Neighbour(self.places[index][1], 1.0 / square / total) for square, index in chosen
        )


def point_of(spec: TransformerSpec, block: LayerBlock, shard: LayerShard) -> Point:
    """What a block's compute time depends on in a shape.

    Attention alone tells context parallelism from a shorter micro batch; all else sees a rank's
    tokens, as ``CostModel`` prices it.
    """
    tp = shard.tensor_model_parallel_size
    has_experts = block is LayerBlock.EXPERTS
    return (
        tp,
        shard.context_parallel_size if block.mixes_tokens else 1,
        shard.expert_model_parallel_size if has_experts else 1,
        shard.expert_tensor_parallel_size if has_experts else 1,
        shard.tokens(spec),
        shard.sequence_parallel and tp > 1,
    )


def shard_of(timing: Timing, like: LayerShard) -> LayerShard:
    """How a timing's block was divided; what no timing holds is that of another shard."""
    return LayerShard(
        **{name: getattr(timing, name) for name in SHAPE},
        flash_attention=like.flash_attention,
        loss_bytes=like.loss_bytes,
        loss_traffic_bytes=like.loss_traffic_bytes,
    )


def _place(point: Point) -> tuple[float, ...]:
    *sizes, sequence_parallel = point
    return (*(math.log2(size) for size in sizes), float(sequence_parallel))


def _tables(spec: TransformerSpec, profiles: Iterable[LayerProfile]) -> dict[LayerBlock, _Table]:
    """Timings by block and point; of several for a point the first profile's first."""
    points: dict[LayerBlock, dict[Point, Timing]] = {}
    anything = LayerShard()
    for profile in profiles:
        for timing in profile.timings:
            point = point_of(spec, timing.block, shard_of(timing, anything))
            points.setdefault(timing.block, {}).setdefault(point, timing)
    return {
        block: _Table(
            exact=exact,
            places=tuple((_place(point), timing) for point, timing in exact.items()),
        )
        for block, exact in points.items()
    }
