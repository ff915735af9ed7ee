"""Lower bounds on the highest memory peak, with no stage problem and no step priced.

A rank that holds a layer takes at least ``w``, what computing one layer again takes, whatever is
recomputed: the layer's activations are there at once, kept or made again. With it lie the
states of its units and, for each of ``l_r`` micro batches on their way, the inputs of its layers.
With ``s`` bytes of states and ``a`` of inputs a unit, ``C`` bytes hold at most
``(C - w) / (s + l_r a)`` units on rank ``r``, and the ranks together have to hold them all.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model.fsdp_memory import unsharded_bytes
from nest_megatron.cost_model.keys import SHARD, STATES, STATES_OF_PIPELINE
from nest_megatron.cost_model.memory import replicas
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.stage_problems import early_forward_share, priced_microbatches
from nest_megatron.cost_model.unit_cost import stored_bytes
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import Recompute
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.solver.grids import GridSpace

#: Two figures for each kind of unit.
_PerKind = tuple[Sequence[float], Sequence[float]]


def _pipeline_key(_: object, dims: ParallelDims, zero: ZeroStage) -> tuple[object, ...]:
    return STATES_OF_PIPELINE.of(dims), replicas(dims), zero


class MemoryBounds(Caching):
    """Bounds on the memory of grids of one job; what grids share is computed once."""

    def __init__(self, model: CostModel, grids: GridSpace) -> None:
        self.model = model
        self.grids = grids
        kinds = model.num_units
        self._kinds, self._counts = tuple(kinds), tuple(kinds.values())
        self._num_units = kinds.total()
        self._num_outside = sum(count for kind, count in kinds.items() if kind.is_end)

    @cached_by(_pipeline_key)
    def of_states(self, dims: ParallelDims, zero: ZeroStage) -> float:
        """Weights and states of the rank with the highest peak are at least the mean over ranks."""
        each, _ = stored_bytes(dims, zero, self.model.settings)
        total = each.least(self.model.structure(dims).parameters)
        return total / dims.pipeline_model_parallel_size - self._num_units

    @cached_by(lambda _, shard: STATES.of(shard.dims))
    def of_shard_states(self, shard: PartialLayout) -> float:
        """The least of ``of_states`` over all pipelines and ZeRO stages of a shard."""
        needed = (
            self.of_states(pipeline, zero)
            for pipeline in self.grids.pipelines(shard.dims)
            for zero in self.grids.zero_stages(pipeline)
        )
        return min(needed, default=math.inf)

    def of_family(self, grid: PartialLayout) -> float:
        """The highest peak of a grid with its virtual stages, at least, whatever is recomputed."""
        return self.under(grid, self.grids.keeping_least(grid))

    @cached_by(
        lambda _, grid, settings: (
            STATES_OF_PIPELINE.of(grid.dims),
            SHARD.of(grid),
            grid.zero,
            settings,
            grid.num_microbatches if grid.dims.virtual_pipeline_model_parallel_size == 1 else None,
            share_kept_early(grid),
        )
    )
    def under(self, grid: PartialLayout, settings: tuple[Recompute, ...]) -> float:
        """The highest peak under any of some settings, at least, however many virtual stages.

        Any weights of the units give a bound; these are near the best.
        """
        dims, p = grid.dims, grid.dims.pipeline_model_parallel_size
        is_plain = dims.virtual_pipeline_model_parallel_size == 1
        live = least_live(p, grid.num_microbatches if is_plain else p, is_plain=is_plain)
        early, (saved, working) = share_kept_early(grid), self._active(grid, settings)
        states, unsharded = self._of_pipeline(dims, grid.zero)
        units = [
            (n, s, (1.0 + early) * a) for n, s, a in zip(self._counts, states, saved, strict=True)
        ]
        at_work = [w + u for w, u in zip(working, unsharded, strict=True)]
        layers = [w for kind, w in zip(self._kinds, at_work, strict=True) if not kind.is_end]
        layer = max(layers) if p == 1 else min(layers)
        mean_live = sum(count * ranks for count, ranks in live.items()) / p
        weighed = [(n, s + mean_live * a, s, a) for n, s, a in units]
        most = {count: max([w / (s + count * a) for _, w, s, a in weighed if w]) for count in live}
        # Few ranks may hold no layer.
        without = min(self._num_outside, p - 1) * layer
        total = sum(n * w for n, w, _, _ in weighed) - without * max(most.values())
        spread = layer + total / sum(ranks * most[count] for count, ranks in live.items())
        one_kind = max(
            w + -(-n // p) * (s + min(live) * a)
            for (n, s, a), w in zip(units, at_work, strict=True)
        )
        peak = max(spread, one_kind) - self._num_units * (1 + max(live))
        return max(self.of_states(dims, grid.zero), peak)

    @cached_by(lambda _, grid, settings: (SHARD.of(grid), settings))
    def _active(self, grid: PartialLayout, settings: tuple[Recompute, ...]) -> _PerKind:
        """What a unit saves at least, and takes besides at work; ends may have a rank alone.

        What sets of modules do not save they need at work, as much as with nothing recomputed.
        """
        places, shard = self.model.places(grid.dims), self.model.shard(grid)
        saved, working = [], []
        for kind in self._kinds:
            runs = [self.model.run(kind, places, shard, recompute) for recompute in settings]
            saved.append(min(run.saved_bytes for run in runs))
            together = min(run.saved_bytes + run.working_bytes for run in runs)
            working.append(0.0 if kind.is_end else together - saved[-1])
        return saved, working

    @cached_by(_pipeline_key)
    def _of_pipeline(self, dims: ParallelDims, zero: ZeroStage) -> _PerKind:
        """States of a unit that a rank keeps, and those that are gathered at work."""
        settings, structure = self.model.settings, self.model.structure(dims)
        each, stays = stored_bytes(dims, zero, settings)
        rank = structure.on_rank(dims, settings)
        units, unsharded = [], []
        for kind in self._kinds:
            counts = [count for each_kind, count in structure.units if each_kind is kind]
            units.append(min(each.of_unit(kind, count).total for count in counts))
            in_layer = not kind.is_end
            whole = (unsharded_bytes(c, rank, zero, in_layer=in_layer) for c in counts)
            unsharded.append(0 if stays else min(whole))
        return units, unsharded


def share_kept_early(grid: PartialLayout) -> float:
    """What passes ahead of the schedule add to what a grid saves, as a share of it."""
    if not grid.execution.overlap_moe_expert_parallel_comm:
        return 0.0
    p, v = grid.dims.pipeline_model_parallel_size, grid.dims.virtual_pipeline_model_parallel_size
    return early_forward_share(p, v, priced_microbatches(grid))


@functools.lru_cache(maxsize=4096)
def least_live(p: int, most: int, *, is_plain: bool) -> Counter[int]:
    """On how many ranks how many micro batches keep activations in all chunks at once.

    With virtual stages the last chunk to start has fewest, whatever their number: a rank starts two
    micro batches of it for each rank behind it before its first backward pass.
    """
    step = 1 if is_plain else 2
    return Counter(min(most, step * (p - rank - 1) + 1) for rank in range(p))
