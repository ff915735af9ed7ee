"""What a collective sends through each level, and in how many hops.

The algebra of ``cost_model.communication`` as a fit needs it: hops and bytes are counted once
for a sample and do not depend on the figures that are fitted. This package lies below the cost
model and cannot ask it; ``tests/profile/test_network_routes.py`` holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from nest_megatron.cluster.records import CollectiveKind, NetworkLevel
from nest_megatron.units import Seconds

#: As in ``cost_model.communication``: share of the bandwidth where a level names none.
DEFAULT_EFFICIENCY = 0.8
#: As there: largest piece that a tree passes on, cost of the own part, a tree inside a node.
PIECE_BYTES, OWN_PART, TREE_INSIDE = 16 * 2**19, 0.1, 0.8


class Leg(NamedTuple):
    """A level that a route crosses.

    ``hops`` follow each other; ``share`` of the message passes a device's link; ``rate`` names the
    field of the level that says how fast: a kind of collective, ``tree_efficiency`` or
    ``reduction_efficiency``. A tree sends ``pieces`` times, one after the other, what
    ``piece_share`` of the message is, but no more than ``PIECE_BYTES`` each.
    """

    level: int
    hops: float
    share: float
    rate: str
    pieces: float = 0.0
    piece_share: float = 0.0


class _Crossing(NamedTuple):
    """As in ``cost_model.communication``, with the level's place in the list."""

    place: int
    level: NetworkLevel
    before: int
    fan_out: int
    after: int

    @property
    def rails(self) -> int:
        most = self.level.max_rails
        return self.before if most is None else min(self.before, most)

    @property
    def links(self) -> float:
        return self.level.ring_share(self.fan_out)


Route = tuple[Leg, ...]


def routes(
    kind: CollectiveKind, shape: Sequence[int], levels: Sequence[NetworkLevel]
) -> tuple[Route, ...]:
    """The ways that a collective can take; the fastest counts (of a send, the slowest leg).

    Args:
        shape: fan-out at each level, innermost first.
        levels: as many levels; their figures are not read, only what they are (rails, rings, trees,
            a switch that sums).
    """
    size = math.prod(shape)
    crossings = _crossings(shape, levels, size)
    if kind is CollectiveKind.SEND_RECV:
        return tuple((Leg(c.place, 1.0, float(c.fan_out > 2), kind),) for c in crossings)
    if kind is CollectiveKind.ALL_TO_ALL:
        return (tuple(_all_to_all(c, size) for c in crossings),)
    if kind is CollectiveKind.ALL_REDUCE:
        ring = tuple(_ring(c, kind, size, rounds=2) for c in crossings)
        return (ring, tuple(_tree(c) for c in crossings))
    return (tuple(_ring(c, kind, size, rounds=1) for c in crossings),)


def outermost(shape: Sequence[int]) -> int:
    """Index of the last level that a group crosses."""
    return max(index for index, fan_out in enumerate(shape) if fan_out > 1)


def route_time(
    kind: CollectiveKind,
    ways: Sequence[Route],
    message_bytes: float,
    levels: Sequence[NetworkLevel],
) -> Seconds:
    """Time of one collective over its routes, in seconds."""
    if kind is CollectiveKind.SEND_RECV:
        return max(_pass_time(way[0], message_bytes, levels) for way in ways)
    startup = max(levels[leg.level].startup_s for leg in ways[0])
    return startup + min(_way_time(way, message_bytes, levels) for way in ways)


def _crossings(
    shape: Sequence[int], levels: Sequence[NetworkLevel], size: int
) -> tuple[_Crossing, ...]:
    found: list[_Crossing] = []
    before, after = 1, size
    for index, (fan_out, level) in enumerate(zip(shape, levels, strict=True)):
        if fan_out > 1:
            after //= fan_out
            found.append(_Crossing(index, level, before, fan_out, after))
            before *= fan_out
    return tuple(found)


def _ring(crossing: _Crossing, kind: CollectiveKind, size: int, *, rounds: int) -> Leg:
    hops = rounds * (crossing.fan_out - 1) * crossing.after
    share = rounds * (1 - (1 - OWN_PART) / size) / crossing.rails / crossing.links
    if crossing.place == 0 and crossing.after > 1:
        share *= 1 - 1 / crossing.fan_out
    return Leg(crossing.place, hops, share, kind)


def _tree(crossing: _Crossing) -> Leg:
    inner, fan_out = crossing.place == 0, crossing.fan_out
    hops = 2 * (fan_out - 1 if inner else math.ceil(math.log2(fan_out)))
    if crossing.level.reduction_efficiency is not None:
        share = (1 + 1 / fan_out) / crossing.rails
        return Leg(crossing.place, hops, share, "reduction_efficiency")
    own = OWN_PART if inner else 0.0
    share = 2 * (1 - (1 - own) / (fan_out * crossing.after)) / crossing.rails
    pieces = 0.0 if inner else 2 * math.log2(fan_out)
    leg = Leg(crossing.place, hops, share, "tree_efficiency", pieces, 1 / crossing.rails)
    if crossing.level.tree_efficiency is not None and not inner:
        return leg
    links = crossing.links * (TREE_INSIDE if inner and crossing.after > 1 else 1.0)
    return leg._replace(share=share / links, pieces=pieces / links, rate=CollectiveKind.ALL_REDUCE)


def _all_to_all(crossing: _Crossing, size: int) -> Leg:
    """Peers of the node are reached inside it; all others through the node's adapters."""
    last = crossing.fan_out if crossing.place == 0 else size
    share = (last - crossing.before) / size / crossing.links
    return Leg(crossing.place, crossing.fan_out - 1, share, CollectiveKind.ALL_TO_ALL)


def _way_time(way: Route, message_bytes: float, levels: Sequence[NetworkLevel]) -> Seconds:
    latency = sum(levels[leg.level].latency_s * leg.hops for leg in way)
    transfer = max(message_bytes * leg.share / _rate(levels[leg.level], leg.rate) for leg in way)
    ramp = levels[way[-1].level].ramp
    pieces = sum(_piece_time(leg, message_bytes, levels) for leg in way)
    return pieces + latency + transfer + ramp * math.sqrt(latency * transfer)


def _piece_time(leg: Leg, message_bytes: float, levels: Sequence[NetworkLevel]) -> Seconds:
    if not leg.pieces:
        return 0.0
    piece = min(message_bytes * leg.piece_share, PIECE_BYTES)
    return leg.pieces * piece / _rate(levels[leg.level], leg.rate)


def _pass_time(leg: Leg, message_bytes: float, levels: Sequence[NetworkLevel]) -> Seconds:
    """One pass to a neighbour; ``share`` marks a ring of more than two."""
    level = levels[leg.level]
    transfer = message_bytes / _rate(level, leg.rate)
    if leg.share:
        transfer /= level.chain_share
    between = level.ramp * math.sqrt(level.latency_s * transfer)
    return level.startup_s + level.latency_s + transfer + between


def _rate(level: NetworkLevel, name: str) -> float:
    if name in ("reduction_efficiency", "tree_efficiency"):
        share: float = getattr(level, name)
    else:
        share = level.efficiency.get(CollectiveKind(name), DEFAULT_EFFICIENCY)
    return level.bandwidth_bytes_per_s * share
