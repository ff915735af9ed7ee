"""Time of one collective, where its group really lies.

A group is described by its *shape*: how many members share a node, how many nodes a leaf, and so on
(``parallel.rank_order.group_shape``). Reductions and gathers run as many rings at once as the group
has members inside a level, each on its own adapter, so that what one device sends through an outer
level is divided by the members inside: with fan-outs ``n_l`` and a message of ``S`` bytes a device
sends ``S / (n_0 ... n_{l-1}) * (1 - 1 / (n_l n_{l+1} ...))`` to level ``l``, what goes further out
included, because it leaves by the same adapter. An exchange sends every peer its own part, so the
parts of all peers beyond level ``l - 1`` pass level ``l``. The levels work at the same time, so the
slowest one counts, and latencies add up. A level's bandwidth is what one device gets while all
others send too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nest_megatron.cluster.records import CollectiveKind, NetworkLevel
from nest_megatron.units import Seconds

#: Share of a level's bandwidth where the cluster's description names none for the collective.
DEFAULT_EFFICIENCY = 0.8

#: Rings around the data for one collective: an all-reduce is a scatter and a gather.
_PASSES = {
    CollectiveKind.ALL_REDUCE: 2,
    CollectiveKind.ALL_GATHER: 1,
    CollectiveKind.REDUCE_SCATTER: 1,
}


def collective_time(
    kind: CollectiveKind,
    message_bytes: float,
    shape: Sequence[int],
    levels: Sequence[NetworkLevel],
) -> Seconds:
    """Time of one collective in seconds.

    Args:
        message_bytes: the whole tensor: gathered, reduced, or what one rank exchanges in all.
        shape: fan-out of the group at each level, innermost first.
        levels: the cluster's levels, as many as ``shape``.
    """
    if math.prod(shape) <= 1 or message_bytes <= 0:
        return 0.0
    if kind is CollectiveKind.ALL_TO_ALL:
        return _exchange_time(message_bytes, shape, levels)
    slowest, latency, size = 0.0, 0.0, message_bytes
    outside = math.prod(shape)
    for index, (fan_out, level) in enumerate(zip(shape, levels, strict=True)):
        if fan_out > 1:
            slowest = max(slowest, size * (1 - 1 / outside) / _rate(level, kind))
            latency += level.latency_s * _steps(kind, index, fan_out)
            size, outside = size / fan_out, outside // fan_out
    return _PASSES[kind] * (slowest + latency)


def _exchange_time(
    message_bytes: float, shape: Sequence[int], levels: Sequence[NetworkLevel]
) -> Seconds:
    size = math.prod(shape)
    inside, slowest, latency = 1, 0.0, 0.0
    for index, (fan_out, level) in enumerate(zip(shape, levels, strict=True)):
        # Peers of the node are reached inside it; all others through the node's adapters.
        last = inside * fan_out if index == 0 else size
        passing = message_bytes * (last - inside) / size
        if fan_out > 1:
            slowest = max(slowest, passing / _rate(level, CollectiveKind.ALL_TO_ALL))
            latency += level.latency_s * _steps(CollectiveKind.ALL_TO_ALL, index, fan_out)
        inside *= fan_out
    return slowest + latency


def ring_step_time(
    message_bytes: float, shape: Sequence[int], levels: Sequence[NetworkLevel]
) -> Seconds:
    """One step of a ring in which every member passes its message to the next.

    The ring crosses each level that it spans on one device's link, so the slowest crossing sets
    the pace of all.
    """
    crossed = [level for fan_out, level in zip(shape, levels, strict=True) if fan_out > 1]
    return max((send_time(message_bytes, level) for level in crossed), default=0.0)


def send_time(message_bytes: float, level: NetworkLevel) -> Seconds:
    """Time of one point-to-point transfer through a level."""
    return level.latency_s + message_bytes / _rate(level, CollectiveKind.SEND_RECV)


def _rate(level: NetworkLevel, kind: CollectiveKind) -> float:
    efficiency = level.efficiency.get(kind, DEFAULT_EFFICIENCY)
    return level.bandwidth_bytes_per_s * efficiency


def _steps(kind: CollectiveKind, level_index: int, fan_out: int) -> int:
    """Hops one after the other: a ring's length, or over many nodes the depth of a tree.

    NCCL has trees for all-reduce; exchanges go to all peers at once, in rounds.
    """
    ring = kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    return fan_out - 1 if ring or level_index == 0 else math.ceil(math.log2(fan_out))
