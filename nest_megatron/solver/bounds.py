"""Nodes of the search, and lower bounds on the step and on memory that need no stage problem.

All bounds are proven, none is sharp.

Six kinds of nodes, from coarse to fine, each with an admissible bound (no plan below the node is
faster):

* *shard*: tensor, context, expert degrees and micro batch. A replica's work on one micro batch is
  known, and the best pipeline can do is to divide it evenly with no bubble at all. Work in a micro
  batch that all others divide is its first bound: its own is priced once a shard comes up.
* *grid*: pipeline size and rank order on top; once it comes up, the bound holds what has to be
  recomputed for the fullest rank to fit in memory (``recompute_bounds``).
* *schedule*: plain or with virtual stages, and the execution of layers; for the plain schedule the
  bound holds the fill and drain of a balanced pipeline.
* *members*: the number of virtual stages and the ZeRO stage on top, with the stage solver's own
  lower bound, in unlimited memory and without recomputation, which only make a partition slower,
  and with what has to be recomputed.
* *blocks*: full recomputation of the first layers of each chunk, block sizes rising lazily.
* *variant*: another recompute setting on top, judged by the stage solver.

A rank that holds a layer takes at least ``w``, what computing one layer again takes, whatever is
recomputed: the layer's activations are there at once, kept or made again. With it lie the
states of its units and, for each of ``l_r`` micro batches on their way, the inputs of its layers.
With ``s`` bytes of states and ``a`` of inputs a unit, ``C`` bytes hold at most
``(C - w) / (s + l_r a)`` units on rank ``r``, and the ranks together have to hold them all.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model import keys
from nest_megatron.cost_model.fsdp_memory import unsharded_bytes
from nest_megatron.cost_model.memory import replicas
from nest_megatron.cost_model.model import CostModel, PassPair
from nest_megatron.cost_model.stage_problems import StageProblems, share_kept_early
from nest_megatron.cost_model.unit_cost import stored_bytes
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import Recompute
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.plain import replace
from nest_megatron.solver.grids import GridSpace
from nest_megatron.units import Ticks, to_ticks

SHARD, GRID, SCHEDULE, MEMBERS, BLOCKS, VARIANT = range(6)


class Node(NamedTuple):
    """An entry of the search's heap; ``serial`` keeps the order of equal bounds fixed.

    ``stages`` are the grid's stage problems, from *members* on.

    Args:
        in_any_memory: a bound that holds in any memory.
        is_stopped: whether a search with more memory starts from here, or from a node above.
    """

    bound: Ticks
    serial: int
    grid: PartialLayout
    level: int
    recompute: Recompute
    stages: StageProblems | None
    in_any_memory: Ticks
    is_stopped: bool

    def problems(self) -> StageProblems:
        """The stage problems of a node that has them."""
        assert self.stages is not None, "made when the family is expanded"
        return self.stages


#: For each kind of unit, ticks that one micro batch takes through it at least.
Each = tuple[Ticks, ...]
#: That, each its own time less two; and the largest share of a unit's time that the forward pass
#: can take.
Work = tuple[Each, float]


class Bounds(Caching):
    """Bounds for the grids of one job; what grids share is computed once.

    Args:
        micro_batches: the sizes that they may have.

    Attributes:
        floor: no plan at all is faster.
    """

    def __init__(
        self, model: CostModel, global_batch_size: int, micro_batches: Iterable[int]
    ) -> None:
        self.model = model
        self.global_batch_size = global_batch_size
        self._micro_batch = math.lcm(*micro_batches)
        self._counts = tuple(model.num_units.values())
        kinds = enumerate(model.num_units)
        layers = (place for place, kind in kinds if kind.blocks and not kind.is_end)
        self.layers = max(layers, key=self._counts.__getitem__)  # the most frequent kind that works
        self.floor = to_ticks(model.settings.iteration_floor_s)

    def waits(self, grid: PartialLayout) -> Ticks:
        """What every plan of a grid waits for its slowest replica, at least.

        Each ``floor`` and each wait is rounded by itself, their sum in ``CostModel.constant`` once.
        """
        return max(0, to_ticks(self.model.straggler_time(grid)) - 1)

    @cached_by(lambda _, grid: keys.SHARD.of(grid))
    def _work(self, grid: PartialLayout) -> Work:
        """One micro batch through the units of a grid, without recomputation."""
        return in_ticks(self.model.pass_times(grid))

    def _of_all(self, each: Each) -> Ticks:
        """What all units take together, from what one of each kind takes."""
        return sum(map(operator.mul, self._counts, each))

    def even(self, grid: PartialLayout) -> Ticks:
        """All ranks busy all the time: the work of the whole batch over all ranks."""
        return self._evenly(grid.dims, self._work(grid)[0], grid.micro_batch_size)

    def _evenly(self, dims: ParallelDims, each: Each, sequences: int) -> Ticks:
        """The step, if the work on so many sequences were divided over all ranks."""
        ranks = dims.tensor_model_parallel_size * dims.context_parallel_size
        whole = self._of_all(each) * self.global_batch_size * ranks
        return self.floor + whole // (sequences * dims.world_size)

    def waiting(self, grid: PartialLayout) -> Ticks:
        """The fullest pipeline rank busy all the time, and what every plan of the grid waits."""
        return self._busy(grid) + self.waits(grid)

    @cached_by(
        lambda _, grid: (
            keys.SHARD.of(grid),
            grid.dims.pipeline_model_parallel_size,
            grid.num_microbatches,
        )
    )
    def _busy(self, grid: PartialLayout) -> Ticks:
        each, _ = self._work(grid)
        ranks = grid.dims.pipeline_model_parallel_size
        return self.floor + grid.num_microbatches * self._fullest(each, ranks)

    def _fullest(self, each: Each, ranks: int) -> Ticks:
        """The least work that the rank with most of it can have: no unit is divided.

        Ranks with at most ``w`` hold ``(ranks - 1) [w / t] + [(w - h) / t]`` layers of the most
        frequent kind, which take ``t`` each, if one of them holds a unit that takes ``h``, the
        longest of the other kinds.
        """
        least = max(*each, -(-self._of_all(each) // ranks))
        layer, count = each[self.layers], self._counts[self.layers]
        if ranks == 1 or not layer:
            return least
        other = max((t for i, t in enumerate(each) if i != self.layers), default=0)
        while (ranks - 1) * (least // layer) + (least - other) // layer < count:
            least += min(layer - least % layer, layer - (least - other) % layer)
        return least

    @cached_by(
        lambda self, grid: (
            keys.INSIDE.of(grid.dims),
            grid.sequence_parallel,
            grid.execution,
            self.model.times and grid.micro_batch_size,
        )
    )
    def in_any_micro_batch(self, grid: PartialLayout) -> Ticks:
        """``even`` in one that all micro batches divide: no sequence takes longer in a larger one.

        What was measured may, so with a profile it is that of the grid itself.
        """
        micro = grid.micro_batch_size if self.model.times else self._micro_batch
        batch, share = micro * grid.dims.data_parallel_size, (1.0 - 1e-12) / micro
        grid = replace(grid, micro_batch_size=micro, global_batch_size=batch)
        times = ((share * ahead, share * back) for ahead, back in self.model.pass_times(grid))
        return self._evenly(grid.dims, in_ticks(times)[0], 1)

    def pipeline(self, grid: PartialLayout) -> Ticks:
        """The fullest rank of a pipeline, or a balanced one with its fill and drain.

        With stage times ``t_i`` the plain schedule takes at least ``T + w_i t_i`` for every stage,
        ``T`` the time of one micro batch through all stages and
        ``w_i = m - 1 - s min(m - 1, p - 1 - i)`` with ``s`` the largest forward share
        (``reference._Search._stage_bound``). The best division of ``T`` makes all ``w_i t_i``
        equal.
        """
        return self._without_waits(grid) + self.waits(grid)

    @cached_by(
        lambda _, grid: (
            keys.SHARD.of(grid),
            grid.dims.pipeline_model_parallel_size,
            grid.dims.virtual_pipeline_model_parallel_size == 1,
        )
    )
    def _without_waits(self, grid: PartialLayout) -> Ticks:
        m, p = grid.num_microbatches, grid.dims.pipeline_model_parallel_size
        each, share = self._work(grid)
        least = m * self._fullest(each, p)
        if p > 1 and grid.dims.virtual_pipeline_model_parallel_size == 1:
            spread = _spread(p, m, share) * (1.0 - 1e-12)
            least = max(least, math.floor(self._of_all(each) * spread))
        return self.floor + least


def in_ticks(times: Iterable[PassPair]) -> Work:
    """Passes of each kind of unit, at least."""
    each, share = [], 0.0
    for ahead_s, back_s in times:
        ahead, back = max(0, to_ticks(ahead_s) - 1), max(0, to_ticks(back_s) - 1)
        each.append(ahead + back)
        share = max(share, (ahead + 1) / max(1, ahead + back))
    return tuple(each), share


@functools.lru_cache(maxsize=4096)
def _spread(p: int, m: int, share: float) -> float:
    """A balanced plain pipeline's time over the time of one micro batch through all stages."""
    weights = [m - 1 - share * min(m - 1, p - 1 - i) for i in range(p)]
    return 1.0 + (1.0 / sum(1.0 / w for w in weights) if min(weights) > 0 else 0.0)


#: Two figures for each kind of unit.
_PerKind = tuple[Sequence[float], Sequence[float]]


def _pipeline_key(_: object, dims: ParallelDims, zero: ZeroStage) -> tuple[object, ...]:
    return keys.STATES_OF_PIPELINE.of(dims), replicas(dims), zero


class MemoryBounds(Caching):
    """Bounds on the memory of grids of one job; what grids share is computed once."""

    def __init__(self, model: CostModel, grids: GridSpace) -> None:
        self.model = model
        self.grids = grids
        kinds = model.num_units
        self._kinds, self._counts = tuple(kinds), tuple(kinds.values())
        self.num_units = kinds.total()
        self._num_outside = sum(count for kind, count in kinds.items() if kind.is_end)

    @cached_by(_pipeline_key)
    def of_states(self, dims: ParallelDims, zero: ZeroStage) -> float:
        """Weights and states of the rank with the highest peak are at least the mean over ranks."""
        each, _ = stored_bytes(dims, zero, self.model.settings)
        total = each.least(self.model.structure(dims).parameters)
        return total / dims.pipeline_model_parallel_size - self.num_units

    @cached_by(lambda _, shard: keys.STATES.of(shard.dims))
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
            keys.STATES_OF_PIPELINE.of(grid.dims),
            keys.SHARD.of(grid),
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
        states, unsharded = self.of_pipeline(dims, grid.zero)
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
        peak = max(spread, one_kind) - self.num_units * (1 + max(live))
        return max(self.of_states(dims, grid.zero), peak)

    @cached_by(lambda _, grid, settings: (keys.SHARD.of(grid), settings))
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
    def of_pipeline(self, dims: ParallelDims, zero: ZeroStage) -> _PerKind:
        """States of a unit that a rank keeps, and those that are gathered at work."""
        settings, structure = self.model.settings, self.model.structure(dims)
        each, stays = stored_bytes(dims, zero, settings)
        rank = structure.on_rank(dims, settings)
        units, unsharded = [], []
        for kind in self._kinds:
            counts = [count for each_kind, count in structure.units if each_kind == kind]
            units.append(min(each.of_unit(kind, count).total for count in counts))
            in_layer = not kind.is_end
            whole = (unsharded_bytes(c, rank, zero, in_layer=in_layer) for c in counts)
            unsharded.append(0 if stays else min(whole))
        return units, unsharded


@functools.lru_cache(maxsize=4096)
def least_live(p: int, most: int, *, is_plain: bool) -> Counter[int]:
    """On how many ranks how many micro batches keep activations in all chunks at once."""
    return Counter(live_microbatches(p, most, is_plain=is_plain))


@functools.lru_cache(maxsize=4096)
def live_microbatches(p: int, most: int, *, is_plain: bool) -> tuple[int, ...]:
    """On each rank, how many micro batches keep activations in all chunks at once.

    With virtual stages the last chunk to start has fewest, whatever their number: a rank starts two
    micro batches of it for each rank behind it before its first backward pass.
    """
    step = 1 if is_plain else 2
    return tuple(min(most, step * (p - rank - 1) + 1) for rank in range(p))
