"""Lower bounds on the highest memory peak, with no stage problem and no step priced.

A rank that holds a layer takes at least ``w``, what computing one layer again takes, whatever is
recomputed: the layer's activations are there at once, kept or made anew. Beside it lie the
states of its units and, for each of ``l_r`` micro batches on their way, the inputs of its layers.
With ``s`` bytes of states and ``a`` of inputs a unit, ``C`` bytes hold at most
``(C - w) / (s + l_r a)`` units on rank ``r``, and the ranks together have to hold them all.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

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


class _States(NamedTuple):
    """States of a pipeline: of each kind one unit, kept and gathered."""

    units: tuple[float, ...]
    unsharded: tuple[int, ...]


class _Activations(NamedTuple):
    """Of each kind what one unit saves at least, and what it takes beside that at work."""

    saved: tuple[float, ...]
    working: tuple[float, ...]


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
        """The same over all pipelines and ZeRO stages of a shard."""
        pipelines = self._pipelines(shard.dims)
        return min((self.of_states(dims, zero) for dims, zero in pipelines), default=math.inf)

    def of_shard(self, shard: PartialLayout) -> float:
        """Activations of at least one micro batch with them, on every rank."""
        settings = self.grids.keeping_least()
        each = [self._active(grid, settings) for grid in self.grids.with_least_memory(shard)]
        least = (tuple(map(min, zip(*ways, strict=True))) for ways in zip(*each, strict=True))
        active = _Activations(*least)
        saved = self._sum(active.saved)
        needs = [math.inf]
        for dims, zero in self._pipelines(shard.dims):
            p, states = dims.pipeline_model_parallel_size, self._of_pipeline(dims, zero)
            beside, without = self._at_work(states, active, p)
            needed = beside + (self._sum(states.units) + saved - without) / p
            needs.append(max(self.of_states(dims, zero), needed))
        return min(needs) - 2 * self._num_units

    @cached_by(STATES)
    def _pipelines(self, dims: ParallelDims) -> list[tuple[ParallelDims, ZeroStage]]:
        """Each size and ZeRO stage of a pipeline that shards of these degrees may have."""
        return [
            (pipeline, zero)
            for pipeline in self.grids.pipelines(dims)
            for zero in self.grids.zero_stages(pipeline)
        ]

    def of_family(self, grid: PartialLayout) -> float:
        """A grid with its virtual stages and ZeRO stage, whatever is recomputed."""
        return self.under(grid, self.grids.keeping_least(grid))

    @cached_by(
        lambda _, grid, settings: (
            STATES_OF_PIPELINE.of(grid.dims),
            SHARD.of(grid),
            grid.zero,
            settings,
            grid.dims.virtual_pipeline_model_parallel_size == 1 and grid.num_microbatches,
            share_kept_early(grid),
        )
    )
    def under(self, grid: PartialLayout, settings: tuple[Recompute, ...]) -> float:
        """The same under one of some settings; numbers of virtual stages share it."""
        dims = grid.dims
        is_plain = dims.virtual_pipeline_model_parallel_size == 1
        most = grid.num_microbatches if is_plain else dims.pipeline_model_parallel_size
        live = least_live(dims.pipeline_model_parallel_size, most, is_plain=is_plain)
        active = self._active(grid, settings)
        if more := share_kept_early(grid):
            active = active._replace(saved=tuple((1.0 + more) * saved for saved in active.saved))
        states = self._of_pipeline(dims, grid.zero)
        return max(self.of_states(dims, grid.zero), self._peak(states, active, live))

    def _peak(self, states: _States, active: _Activations, live: Counter[int]) -> float:
        """Any weights of the units give a bound; these are near the best.

        Args:
            live: on how many ranks how many micro batches are on their way.
        """
        p = live.total()
        beside, without = self._at_work(states, active, p)
        mean_live = sum(count * ranks for count, ranks in live.items()) / p
        units = list(zip(self._counts, states.units, active.saved, strict=True))
        weights = [s + mean_live * a for _, s, a in units]
        weighed = [(w, s, a) for (_, s, a), w in zip(units, weights, strict=True) if w]
        most = {count: max([w / (s + count * a) for w, s, a in weighed]) for count in live}
        total = self._sum(weights) - without * max(most.values())
        spread = beside + total / sum(ranks * most[count] for count, ranks in live.items())
        one_kind = max(
            w + u + -(-n // p) * (s + min(live) * a)
            for (n, s, a), w, u in zip(units, active.working, states.unsharded, strict=True)
        )
        return max(spread, one_kind) - self._num_units * (1 + max(live))

    def _sum(self, each: Sequence[float]) -> float:
        return sum(count * one for count, one in zip(self._counts, each, strict=True))

    def _at_work(self, states: _States, active: _Activations, p: int) -> tuple[float, float]:
        """What a layer at work takes on a rank, and on all ranks that may hold none together."""
        kinds = zip(self._kinds, active.working, states.unsharded, strict=True)
        at_work = [w + u for kind, w, u in kinds if not kind.is_end]
        beside = max(at_work) if p == 1 else min(at_work)
        return beside, min(self._num_outside, p - 1) * beside

    @cached_by(lambda _, grid, settings: (SHARD.of(grid), settings))
    def _active(self, grid: PartialLayout, settings: tuple[Recompute, ...]) -> _Activations:
        """Saved and at work; embedding and head may have a rank for themselves.

        What sets of modules do not save they need at work, as much as with nothing recomputed.
        """
        places, shard = self.model.places(grid.dims), self.model.shard(grid)
        saved, working = [], []
        for kind in self._kinds:
            runs = [self.model.run(kind, places, shard, recompute) for recompute in settings]
            saved.append(min(run.saved_bytes for run in runs))
            together = min(run.saved_bytes + run.working_bytes for run in runs)
            working.append(0.0 if kind.is_end else together - saved[-1])
        return _Activations(tuple(saved), tuple(working))

    @cached_by(_pipeline_key)
    def _of_pipeline(self, dims: ParallelDims, zero: ZeroStage) -> _States:
        settings, structure = self.model.settings, self.model.structure(dims)
        each, stays = stored_bytes(dims, zero, settings)
        rank = structure.on_rank(dims, settings)
        units, unsharded = [], []
        for kind in self._kinds:
            own = [count for each_kind, count in structure.units if each_kind is kind]
            units.append(min(each.of_unit(kind, count).total for count in own))
            in_layer = not kind.is_end
            whole = (unsharded_bytes(c, rank, zero, in_layer=in_layer) for c in own)
            unsharded.append(0 if stays else min(whole))
        return _States(units=tuple(units), unsharded=tuple(unsharded))


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
