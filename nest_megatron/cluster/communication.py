"""Time of one collective, where its group really lies.

A group is described by its *shape*: how many members share a node, how many nodes a leaf, and so on
(``layout.rank_order.group_shape``). Reductions and gathers run as many rings at once as the group
has members inside a level, each on its own adapter, so that what one device sends through an outer
level is divided by the members inside (``max_rails`` of them at most). A level's bandwidth is what
one device gets while all others send too. The levels work at the same time, so the slowest one
counts; the latencies of the hops that one piece of the data makes add up. A message in pieces that
follow each other over hops of ``a`` seconds in all takes ``a + t + 2 sqrt(a t)`` at best, where
``t`` is its time on the slowest level: the outermost level's ``ramp`` stands for the 2. NCCL's
pieces grow no further than ``PIECE_BYTES``, so that a tree's hop between nodes also takes the time
of one piece, however large the message.

With fan-outs ``n_l``, ``N`` members in all and a message of ``S`` bytes a device sends:

- gather, scatter: rings through all members, ``S / (n_0 ... n_{l-1}) * (1 - 1 / N)`` to level
  ``l``, and its own part once to itself. A piece makes ``N - 1`` hops, one of them in each ring to
  another node, so that the links inside carry ``1 - 1 / n_0`` of the rings;
- all-reduce: what is faster of a ring (a scatter and a gather) and of a tree, where each node sums
  first and sends one sum: twice ``S / (n_0 ... n_{l-1}) * (1 - 1 / (n_l n_{l+1} ...))``. Where the
  network reduces (NVLS, SHARP) a device sends its message once, and one sum: ``S * (1 + 1 / n_l)``;
- all-to-all: every peer gets its own part, so the parts of all peers beyond level ``l - 1`` pass
  level ``l``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nest_megatron.cluster.records import CollectiveKind, NetworkLevel
from nest_megatron.units import Seconds

#: Share of a level's bandwidth where the cluster's description names none for the collective.
DEFAULT_EFFICIENCY = 0.8

#: Largest piece of a message that a tree passes on at once: 16 channels of an eighth of NCCL's
#: buffer of 4 MiB. The public rows of two, four, ten and twenty nodes fit 9 MB.
PIECE_BYTES = 16 * 2**19
#: What a member's own part, copied to its place, takes of the time of one that comes over the link.
OWN_PART = 0.1
#: What a tree reaches inside a node without in-network reduction, of what a ring does: devices sum
#: and pass on in both directions. From Azure's two nodes of eight A100, where rings are chosen.
TREE_INSIDE = 0.8


class _Crossing(NamedTuple):
    """A level that a group crosses, as seen by one of its devices.

    ``before`` members lie inside one group of the level below, ``fan_out`` such groups in one of
    this level, and ``after`` of these in the whole.
    """

    level: NetworkLevel
    is_innermost: bool
    before: int
    fan_out: int
    after: int

    @property
    def rails(self) -> int:
        """Adapters that carry a collective out of one group of the level below."""
        most = self.level.max_rails
        return self.before if most is None else min(self.before, most)


def collective_time(
    kind: CollectiveKind,
    message_bytes: float,
    shape: Sequence[int],
    levels: Sequence[NetworkLevel],
    copies: int = 1,
) -> Seconds:
    """Time of one collective in seconds; of send and receive, a step of the ring of all members.

    Args:
        message_bytes: the whole tensor: gathered, reduced, what one rank exchanges or passes on.
        shape: fan-out of the group at each level, innermost first.
        levels: the cluster's levels, as many as ``shape``.
        copies: of an all-to-all that sends each token to this many members at random, and only once
            to each group of the innermost level, which passes it on.
    """
    size = math.prod(shape)
    if size <= 1 or message_bytes <= 0:
        return 0.0
    if kind is CollectiveKind.SEND_RECV:
        return ring_step_time(message_bytes, shape, levels)
    crossings = tuple(_crossings(shape, levels, size))
    startup = max(crossing.level.startup_s for crossing in crossings)
    if kind is CollectiveKind.ALL_TO_ALL:
        return startup + _all_to_all_time(message_bytes, crossings, size, copies)
    ring = _ring_time(kind, message_bytes, crossings, size)
    if kind is CollectiveKind.ALL_REDUCE:
        return startup + min(2 * ring, _tree_time(message_bytes, crossings))
    return startup + ring


def num_hops(kind: CollectiveKind, shape: Sequence[int]) -> int:
    """Hops that follow each other, of a ring where others are possible."""
    if kind is CollectiveKind.SEND_RECV:
        return 1
    if kind is CollectiveKind.ALL_TO_ALL:
        return sum(fan_out - 1 for fan_out in shape)
    return (2 if kind is CollectiveKind.ALL_REDUCE else 1) * (math.prod(shape) - 1)


def _crossings(
    shape: Sequence[int], levels: Sequence[NetworkLevel], size: int
) -> Iterator[_Crossing]:
    before, after = 1, size
    for index, (fan_out, level) in enumerate(zip(shape, levels, strict=True)):
        if fan_out > 1:
            after //= fan_out
            yield _Crossing(level, index == 0, before, fan_out, after)
            before *= fan_out


def _ring_time(
    kind: CollectiveKind, message_bytes: float, crossings: Sequence[_Crossing], size: int
) -> Seconds:
    """Once around all members, in as many rings as there are adapters."""
    slowest, latency, share = 0.0, 0.0, 1 - (1 - OWN_PART) / size
    for crossing in crossings:
        sent = message_bytes / crossing.rails * share
        if crossing.is_innermost and crossing.after > 1:
            sent *= 1 - 1 / crossing.fan_out
        slowest = max(slowest, _transfer_time(sent, crossing, kind))
        latency += crossing.level.latency_s * (crossing.fan_out - 1) * crossing.after
    return _pipelined(latency, slowest, crossings)


def _tree_time(message_bytes: float, crossings: Sequence[_Crossing]) -> Seconds:
    """Sums inside each group first, then of these sums, and the same way back."""
    slowest, latency, pieces = 0.0, 0.0, 0.0
    for crossing in crossings:
        level, fan_out = crossing.level, crossing.fan_out
        part = message_bytes / crossing.rails
        slowest = max(slowest, part * _tree_seconds_per_byte(crossing))
        if crossing.is_innermost:
            latency += 2 * level.latency_s * (fan_out - 1)
            continue
        latency += 2 * level.latency_s * math.ceil(math.log2(fan_out))
        if level.reduction_efficiency is None:
            pieces += 2 * math.log2(fan_out) * min(part, PIECE_BYTES) / _tree_rate(crossing)
    return pieces + _pipelined(latency, slowest, crossings)


def _tree_seconds_per_byte(crossing: _Crossing) -> float:
    level, fan_out = crossing.level, crossing.fan_out
    if level.reduction_efficiency is not None:
        return (1 + 1 / fan_out) / (level.bandwidth_bytes_per_s * level.reduction_efficiency)
    own = OWN_PART if crossing.is_innermost else 0.0
    return 2 * (1 - (1 - own) / (fan_out * crossing.after)) / _tree_rate(crossing)


def _all_to_all_time(
    message_bytes: float, crossings: Sequence[_Crossing], size: int, copies: int
) -> Seconds:
    slowest, latency = 0.0, 0.0
    inside = crossings[0].fan_out if crossings[0].is_innermost else 1
    once = _sent_once(size // inside, copies)
    for crossing in crossings:
        # Peers of the node are reached inside it; all others through the node's adapters.
        last = crossing.fan_out if crossing.is_innermost else size
        sent = message_bytes * (last - crossing.before) / size
        if not crossing.is_innermost:
            sent *= once
        slowest = max(slowest, _transfer_time(sent, crossing, CollectiveKind.ALL_TO_ALL))
        latency += crossing.level.latency_s * (crossing.fan_out - 1)
    return _pipelined(latency, slowest, crossings)


def _sent_once(nodes: int, copies: int) -> float:
    """Nodes that a token goes to, over its copies: several copies may go to one node.

    >>> _sent_once(nodes=8, copies=1), round(_sent_once(nodes=8, copies=8), 3)
    (1.0, 0.656)
    """
    return nodes * (1 - (1 - 1 / nodes) ** copies) / copies


def _pipelined(latency: Seconds, transfer: Seconds, crossings: Sequence[_Crossing]) -> Seconds:
    return latency + transfer + crossings[-1].level.ramp * math.sqrt(latency * transfer)


def ring_step_time(
    message_bytes: float, shape: Sequence[int], levels: Sequence[NetworkLevel]
) -> Seconds:
    """One step of a ring in which every member passes its message to the next.

    The ring crosses each level that it spans on one device's link, so the slowest crossing sets
    the pace of all.
    """
    return max(
        (
            send_time(message_bytes, level, level.chain_share if fan_out > 2 else 1.0)
            for fan_out, level in zip(shape, levels, strict=True)
            if fan_out > 1
        ),
        default=0.0,
    )


def send_time(message_bytes: float, level: NetworkLevel, share: float = 1.0) -> Seconds:
    """Time of one point-to-point transfer through a level, at a share of its rate."""
    seconds = message_bytes / (_rate(level, CollectiveKind.SEND_RECV) * share)
    between = level.ramp * math.sqrt(level.latency_s * seconds)
    return level.startup_s + level.latency_s + seconds + between


def _transfer_time(sent: float, crossing: _Crossing, kind: CollectiveKind) -> Seconds:
    return sent / (_rate(crossing.level, kind) * crossing.level.ring_share(crossing.fan_out))


def _tree_rate(crossing: _Crossing) -> float:
    level = crossing.level
    if level.tree_efficiency is not None and not crossing.is_innermost:
        return level.bandwidth_bytes_per_s * level.tree_efficiency
    links = level.ring_share(crossing.fan_out)
    if crossing.is_innermost and crossing.after > 1:
        links *= TREE_INSIDE
    return _rate(level, CollectiveKind.ALL_REDUCE) * links


def _rate(level: NetworkLevel, kind: CollectiveKind) -> float:
    return level.bandwidth_bytes_per_s * level.efficiency.get(kind, DEFAULT_EFFICIENCY)


def split_group(shape: Sequence[int], within: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A group's fan-out at each level within parts of neighbours, and over the parts.

    >>> split_group((8, 4), 16), split_group((8, 4), 32)
    (((8, 2), (1, 2)), ((8, 4), (1, 1)))
    """
    inside, left = [], within
    for fan in shape:
        inside.append(math.gcd(fan, left))
        left //= inside[-1]
    return tuple(inside), tuple(fan // part for fan, part in zip(shape, inside, strict=True))
