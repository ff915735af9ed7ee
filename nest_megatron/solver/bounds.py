"""Lower bounds of grids that need no stage problem; all are proven, none is sharp."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from nest_megatron.cost_model.memory import static_bytes_per_parameter
from nest_megatron.cost_model.model import CostModel, replicas, shard_of
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.recompute import NO_RECOMPUTE, Recompute, RecomputeMethod
from nest_megatron.units import Ticks, to_ticks


class Bounds:
    """Bounds for the grids of one job; what grids share is computed once."""

    def __init__(self, model: CostModel, global_batch_size: int) -> None:
        self.model = model
        self.global_batch_size = global_batch_size
        self._sums: dict[object, tuple[Ticks, Ticks, float]] = {}
        self._kinds = Counter(model.spec.layer_kinds())
        self._num_units = len(model.spec.layer_kinds())
        self._floor = to_ticks(model.settings.iteration_floor_s)

    def _work(self, grid: Grid, recompute: Recompute) -> tuple[Ticks, Ticks, float]:
        """Forward and backward time of one micro batch through all units.

        Returns:
            Both sums, and the largest share of a unit's time that is forward.
        """
        if recompute.method is RecomputeMethod.BLOCK:
            recompute = NO_RECOMPUTE  # how many layers blocks cover depends on the partition
        key = (self.model.shard_key(grid), recompute)
        if key not in self._sums:
            several = len(recompute.modules) > 1
            summed = self._sum_of_modules if several else self._sum_of_units
            self._sums[key] = summed(grid, recompute)
        return self._sums[key]

    def _sum_of_units(self, grid: Grid, recompute: Recompute) -> tuple[Ticks, Ticks, float]:
        forward = backward = 0
        share = 0.0
        places, shard = self.model.places(grid.dims), shard_of(grid)
        for kind, count in self._kinds.items():
            ahead, back = self.model.least_time(kind, places, shard, recompute)
            forward, backward = forward + count * ahead, backward + count * back
            share = max(share, (ahead + 1) / max(1, ahead + back))
        return forward, backward, share

    def _sum_of_modules(self, grid: Grid, recompute: Recompute) -> tuple[Ticks, Ticks, float]:
        """What each module adds by itself: modules searched together cover different parts."""
        forward, backward, share = self._work(grid, NO_RECOMPUTE)
        together = backward
        for module in recompute.modules:
            alone = dataclasses.replace(recompute, modules=(module,))
            together += self._work(grid, alone)[1] - backward - self._num_units
        return forward, together, share

    def even(self, grid: Grid, recompute: Recompute = NO_RECOMPUTE) -> Ticks:
        """All ranks busy all the time: the work of the whole batch over all ranks."""
        dims = grid.dims
        forward, backward, _ = self._work(grid, recompute)
        ranks = dims.tensor_model_parallel_size * dims.context_parallel_size
        work = (forward + backward) * self.global_batch_size * ranks
        return self._floor + work // (grid.micro_batch_size * dims.world_size)

    def least_static_bytes(self, grid: Grid) -> float:
        """Weights and states of the fullest stage are at least the mean over stages."""
        dense, expert = replicas(grid.dims)
        count = self.model.parameters(grid.dims)
        total = count.dense * static_bytes_per_parameter(grid.zero, dense)
        total += count.expert * static_bytes_per_parameter(grid.zero, expert)
        return total / grid.dims.pipeline_model_parallel_size - self._num_units

    def pipeline(self, grid: Grid, recompute: Recompute) -> Ticks:
        """A balanced pipeline with its fill and drain (plain schedule), or with none.

        With stage times ``t_i`` the plain schedule takes at least ``T + w_i t_i`` for every stage,
        ``T`` the time of one micro batch through all stages and ``w_i = m - 1 - s min(m - 1, p - 1
        - i)`` with ``s`` the largest forward share (``reference._Search._stage_bound``). The best
        division of ``T`` makes all ``w_i t_i`` equal.
        """
        even = self.even(grid, recompute)
        dims, m = grid.dims, grid.num_microbatches
        p = dims.pipeline_model_parallel_size
        if p == 1 or dims.virtual_pipeline_model_parallel_size > 1:
            return even
        forward, backward, share = self._work(grid, recompute)
        weights = [m - 1 - share * min(m - 1, p - 1 - i) for i in range(p)]
        if min(weights) <= 0:
            return max(even, self._floor + forward + backward)
        spread = 1.0 + 1.0 / sum(1.0 / w for w in weights)
        whole = math.floor((forward + backward) * spread * (1.0 - 1e-12))
        return max(even, self._floor + whole)
