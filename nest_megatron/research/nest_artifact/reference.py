"""The stage boundaries of one tensor degree in plain Python: the dullest program that can be right.

Loop order and ties, which the kernel follows: positions from the end, starts ascending, ends
ascending; the first least bottleneck is kept.
"""

from __future__ import annotations

import math
from array import array

from nest_megatron.research.nest_artifact.records import Instance
from nest_megatron.research.nest_artifact.rule import ArtifactRule
from nest_megatron.research.nest_artifact.stage_cost import (
    links_of,
    stage_memory,
    stage_time,
    weights_of,
)


def link_levels(instance: Instance, tp: int, num_stages: int) -> list[int]:
    """The level of the link before the stage at each position from the end; [0] stands for none.

    Stages are packed: position s is on devices (s - 1) a to s a - 1.
    """
    devices, between = instance.devices_per_stage(tp), instance.network.level_between
    inner = [between((s - 1) * devices, s * devices) for s in range(1, num_stages)]
    return [0, *inner, 0]


def fill(
    instance: Instance,
    tp: int,
    rule: ArtifactRule,
    most_weight_bytes: float,
    firsts: array[float],
    ends: array[int],
) -> None:
    """Fill the two tables of a ``BoundaryTable``.

    Args:
        most_weight_bytes: stages with more weights are left out.
        firsts: given infinite.
        ends: given 0.
    """
    n = len(instance.chains[tp].layers)
    num_stages = len(firsts) // (n + 1) - 1
    price = _Pricer(instance, tp, rule, num_stages, most_weight_bytes)
    row = [price(x, n, 1) for x in range(n)]
    for x in range(n):
        ends[n + 1 + x] = n
    if num_stages:
        firsts[n + 1 + n] = row[0]
    for s in range(2, num_stages + 1):
        before, row = row, [math.inf] * n
        for x in range(n - s + 1):
            for y in range(x + 1, n - s + 2):
                found = max(price(x, y, s), before[y])
                if x == 0:
                    firsts[s * (n + 1) + y] = found
                if found < row[x]:
                    row[x], ends[s * (n + 1) + x] = found, y


class _Pricer:
    """Times of stages at positions, each computed once for each pair of links."""

    def __init__(
        self,
        instance: Instance,
        tp: int,
        rule: ArtifactRule,
        num_stages: int,
        most_weight_bytes: float,
    ) -> None:
        self.most_weight_bytes = most_weight_bytes
        self.instance, self.chain, self.rule = instance, instance.chains[tp], rule
        self.links = links_of(instance, rule)
        self.levels = link_levels(instance, tp, num_stages)
        self.times: dict[tuple[int, int, int, int, bool], float] = {}
        self.positions: dict[tuple[int, int], int] = {}

    def __call__(self, first: int, end: int, position: int) -> float:
        if self._last_position(first, end) < position:
            return math.inf
        key = (
            first,
            end,
            self.levels[position],
            self.levels[position - 1],
            self.instance.recompute and position > 1,
        )
        if key not in self.times:
            links = (self.links[key[2]], self.links[key[3]])
            self.times[key] = stage_time(self.chain, first, end, links, self.rule, recompute=key[4])
        return self.times[key]

    def _last_position(self, first: int, end: int) -> int:
        if (first, end) not in self.positions:
            self.positions[first, end] = self._held(first, end)
        return self.positions[first, end]

    def _held(self, first: int, end: int) -> int:
        if weights_of(self.chain, first, end) > self.most_weight_bytes:
            return 0
        memory = stage_memory(self.instance, self.chain, first, end)
        return memory.last_position(self.instance.memory_bytes, self.instance.num_devices)
