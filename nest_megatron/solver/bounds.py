"""Lower bounds on the step that need no stage problem; all are proven, none is sharp."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model.keys import SHARD, split_block
from nest_megatron.cost_model.model import CostModel, Sides
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    selective_recompute,
)
from nest_megatron.model.execution import OUTSIDE_EXPERTS
from nest_megatron.units import Ticks, to_ticks

#: Each module recomputed alone.
_ALONE = {module: selective_recompute([module]) for module in RecomputeModule}


class Bounds(Caching):
    """Bounds for the grids of one job; what grids share is computed once.

    Attributes:
        floor: no plan at all is faster.
    """

    def __init__(self, model: CostModel, global_batch_size: int) -> None:
        self.model = model
        self.global_batch_size = global_batch_size
        self._num_units = model.spec.num_units
        self.floor = to_ticks(model.settings.iteration_floor_s)

    def waits(self, grid: PartialLayout) -> Ticks:
        """What every plan of a grid waits for its slowest replica, at least.

        Each ``floor`` and each wait is rounded by itself, their sum in ``CostModel.constant`` once.
        """
        return max(0, to_ticks(self.model.straggler_time(grid)) - 1)

    @cached_by(lambda _, grid, recompute: (SHARD.of(grid), recompute))
    def _work(self, grid: PartialLayout, recompute: Recompute) -> tuple[Ticks, Ticks, float]:
        """Forward and backward time of one micro batch through all units, as ``_add_up`` says."""
        if recompute.method is RecomputeMethod.BLOCK:
            recompute = NO_RECOMPUTE  # how many layers blocks cover depends on the partition
        return self._add_up(self.model.pass_times(grid, recompute))

    def _add_up(self, times: Iterable[Sides]) -> tuple[Ticks, Ticks, float]:
        """Ticks of all units from the time of each kind of unit: at least, to within one a unit.

        Returns:
            Both sums, and the largest share of a unit's time that is forward.
        """
        forward = backward = 0
        share = 0.0
        for count, (ahead_s, back_s) in zip(self.model.num_units.values(), times, strict=True):
            ahead, back = max(0, to_ticks(ahead_s) - 1), max(0, to_ticks(back_s) - 1)
            forward, backward = forward + count * ahead, backward + count * back
            share = max(share, (ahead + 1) / max(1, ahead + back))
        return forward, backward, share

    def even(self, grid: PartialLayout, recompute: Recompute = NO_RECOMPUTE) -> Ticks:
        """All ranks busy all the time: the work of the whole batch over all ranks."""
        forward, backward, _ = self._work(grid, recompute)
        return self._evenly(grid, forward + backward)

    def waiting(self, grid: PartialLayout) -> Ticks:
        """The same, and what every plan of the grid waits."""
        return self.even(grid) + self.waits(grid)

    def _evenly(self, grid: PartialLayout, work: Ticks) -> Ticks:
        """The step, if the work of each micro batch were divided over all ranks."""
        dims = grid.dims
        ranks = dims.tensor_model_parallel_size * dims.context_parallel_size
        whole = work * self.global_batch_size * ranks
        return self.floor + whole // (grid.micro_batch_size * dims.world_size)

    @cached_by(
        lambda _, grid: (
            grid.dims.world_size,
            grid.dims.tensor_model_parallel_size,
            grid.dims.context_parallel_size,
            grid.micro_batch_size,
            grid.sequence_parallel,
            OUTSIDE_EXPERTS.of(grid.execution),
        )
    )
    def outside_experts(self, grid: PartialLayout) -> Ticks:
        """The same, by what expert degrees do not change."""
        forward, backward, _ = self._add_up(self.model.pass_times_outside_experts(grid))
        return self._evenly(grid, forward + backward)

    def pipelines(self, grid: PartialLayout, settings: tuple[Recompute, ...]) -> list[Ticks]:
        """A balanced pipeline with its fill and drain (plain schedule), or with none, by setting.

        With stage times ``t_i`` the plain schedule takes at least ``T + w_i t_i`` for every stage,
        ``T`` the time of one micro batch through all stages and
        ``w_i = m - 1 - s min(m - 1, p - 1 - i)`` with ``s`` the largest forward share
        (``reference._Search._stage_bound``). The best division of ``T`` makes all ``w_i t_i``
        equal.

        Modules that are searched together cover different parts of a layer, so what a set adds is
        the sum of what its modules add by themselves.
        """
        waits = self.waits(grid)
        return [bound + waits for bound in self._without_waits(grid, settings)]

    @cached_by(
        lambda _, grid, settings: (
            SHARD.of(grid),
            grid.dims.pipeline_model_parallel_size,
            grid.dims.virtual_pipeline_model_parallel_size == 1,
            settings,
        )
    )
    def _without_waits(self, grid: PartialLayout, settings: tuple[Recompute, ...]) -> list[Ticks]:
        dims, m = grid.dims, grid.num_microbatches
        p = dims.pipeline_model_parallel_size
        forward, backward, share = self._work(grid, NO_RECOMPUTE)
        plain = p > 1 and dims.virtual_pipeline_model_parallel_size == 1
        spread = _spread(p, m, share) * (1.0 - 1e-12) if plain else 0.0
        added: dict[Recompute, Ticks] = {}
        bounds = []
        for recompute in settings:
            work = forward + backward
            alone = [_ALONE[module] for module in recompute.modules]
            for part in alone or [recompute]:
                if part not in added:
                    more = self._work(grid, part)[1] - backward - self._num_units
                    added[part] = max(0, more)
                work += added[part]
            bounds.append(self.floor + max(work * m // p, math.floor(work * spread)))
        return bounds

    def added_by_blocks(self, grid: PartialLayout, block: Recompute) -> Ticks:
        """What blocks of full recomputation add to each bound of the grid without them, at least.

        Of the chunks of ``chunk_space``, all but the first and the last hold ``q`` layers or one
        more, and those two at most ``q + 1`` layers each; so with ``n`` layers in ``c`` chunks
        ``q >= (n + 1) / c - 1``. A rank has ``v - 1`` chunks besides the first or the last, and
        recomputes ``min(q, block)`` layers in each of them for every micro batch. Bounds of
        grids with virtual stages hold all work of one rank, or the mean over all ranks, and nothing
        else in them (way in and out, head, least tail, optimizer) gets shorter by recomputation.
        """
        layers, chunks = self.model.spec.num_layers, grid.dims.num_chunks
        recomputed = min(-(-(layers + 1) // chunks) - 1, block.num_layers or 0)
        kinds = self.model.kinds_under(grid, *split_block(block))
        dearer = [k.block.backward - k.own.backward for k in kinds if k.kind.is_layer]
        inner = grid.dims.virtual_pipeline_model_parallel_size - 1
        return grid.num_microbatches * inner * recomputed * max(0, min(dearer))


@functools.lru_cache(maxsize=4096)
def _spread(p: int, m: int, share: float) -> float:
    """A balanced plain pipeline's time over the time of one micro batch through all stages."""
    weights = [m - 1 - share * min(m - 1, p - 1 - i) for i in range(p)]
    return 1.0 + (1.0 / sum(1.0 / w for w in weights) if min(weights) > 0 else 0.0)
