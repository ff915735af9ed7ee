"""Time of one collective, where its group really lies.

A group is described by its *shape*: how many members share a node, how many nodes a leaf, and so on
(``parallel.rank_order.group_shape``). Reductions and gathers run as many rings at once as the group
has members inside a level, each on its own adapter, so that what one device sends through an outer
level is divided by the members inside: with fan-outs ``n_l`` and a message of ``S`` bytes a device
sends ``S / (n_0 ... n_{l-1}) * (n_l - 1) / n_l`` through level ``l``. An exchange sends every peer
its own part, so level ``l`` carries the share of peers that lie beyond level ``l - 1``. The levels
work at the same time, each on its own links, so the slowest one counts, and latencies add up. A
level's bandwidth is what one device gets while all others send too.
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
    for index, (fan_out, level) in enumerate(zip(shape, levels, strict=True)):
        if fan_out > 1:
            share = (fan_out - 1) / fan_out
            slowest = max(slowest, share * size / _rate(level, kind))
            latency += level.latency_s * _steps(index, fan_out)
            size /= fan_out
    return _PASSES[kind] * (slowest + latency)


def _exchange_time(
    message_bytes: float, shape: Sequence[int], levels: Sequence[NetworkLevel]
) -> Seconds:
    size = math.prod(shape)
    inside, slowest, latency = 1, 0.0, 0.0
    for index, (fan_out, level) in enumerate(zip(shape, levels, strict=True)):
        reached = inside * fan_out
        beyond = message_bytes * (reached - inside) / size
        slowest = max(slowest, beyond / _rate(level, CollectiveKind.ALL_TO_ALL))
        if fan_out > 1:
            latency += level.latency_s * _steps(index, fan_out)
        inside = reached
    return slowest + latency


def send_time(message_bytes: float, level: NetworkLevel) -> Seconds:
    """Time of one point-to-point transfer through a level."""
    return level.latency_s + message_bytes / _rate(level, CollectiveKind.SEND_RECV)


def _rate(level: NetworkLevel, kind: CollectiveKind) -> float:
    efficiency = level.efficiency.get(kind, DEFAULT_EFFICIENCY)
    return level.bandwidth_bytes_per_s * efficiency


def _steps(level_index: int, fan_out: int) -> int:
    """Hops one after the other: a ring inside the node, a tree's depth over many nodes."""
    return fan_out - 1 if level_index == 0 else math.ceil(math.log2(fan_out))
