"""Nodes of the search, and lower bounds on the step and on memory that need no stage problem.

All bounds are proven, none is sharp.

Six kinds of nodes, from coarse to fine, each with an admissible bound (no plan below the node is
faster):

* *shard*: tensor, context, expert degrees and micro batch. A replica's work on one micro batch is
  known, and the best pipeline can do is to divide it evenly with no bubble at all. Work that expert
  degrees do not change is its first bound: that of experts is priced once a shard comes up.
* *grid*: pipeline size and rank order on top.
* *schedule*: plain or with virtual stages, and the execution of layers; for the plain schedule the
  bound holds the fill and drain of a balanced pipeline. Another holds what has to be recomputed
  for the fullest rank to fit in memory (``RecomputeBounds``).
* *members*: the number of virtual stages and the ZeRO stage on top, with the stage solver's own
  lower bound, in unlimited memory and without recomputation, which only make a partition slower.
* *blocks*: full recomputation of the first layers of each chunk, block sizes rising lazily; the
  bound holds what every rank recomputes at least.
* *variant*: another recompute setting on top, judged by the stage solver.

A rank that holds a layer takes at least ``w``, what computing one layer again takes, whatever is
recomputed: the layer's activations are there at once, kept or made again. With it lie the
states of its units and, for each of ``l_r`` micro batches on their way, the inputs of its layers.
With ``s`` bytes of states and ``a`` of inputs a unit, ``C`` bytes hold at most
``(C - w) / (s + l_r a)`` units on rank ``r``, and the ranks together have to hold them all.
"""

from __future__ import annotations

import bisect
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
from nest_megatron.cost_model.stage_problems import (
    StageProblems,
    share_kept_early,
)
from nest_megatron.cost_model.unit_cost import stored_bytes
from nest_megatron.cost_model.unit_run import recomputed_alone
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    selective_recompute,
)
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import OUTSIDE_EXPERTS
from nest_megatron.solver.executions import RecomputeKinds
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.outcome import NO_THRESHOLD
from nest_megatron.units import Bytes, Ticks, to_ticks

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


#: Each module recomputed alone.
_ALONE = {module: selective_recompute([module]) for module in RecomputeModule}
#: For each kind of unit, ticks that one micro batch takes through it at least.
Each = tuple[Ticks, ...]
#: That, each its own time less two; and the largest share of a unit's time that the forward pass
#: can take.
Work = tuple[Each, float]


class Bounds(Caching):
    """Bounds for the grids of one job; what grids share is computed once.

    Attributes:
        floor: no plan at all is faster.
    """

    def __init__(self, model: CostModel, global_batch_size: int) -> None:
        self.model = model
        self.global_batch_size = global_batch_size
        self.counts = tuple(model.num_units.values())
        layers = (place for place, kind in enumerate(model.num_units) if not kind.is_end)
        self.layers = max(layers, key=self.counts.__getitem__)  # the most frequent kind
        self.floor = to_ticks(model.settings.iteration_floor_s)

    def waits(self, grid: PartialLayout) -> Ticks:
        """What every plan of a grid waits for its slowest replica, at least.

        Each ``floor`` and each wait is rounded by itself, their sum in ``CostModel.constant`` once.
        """
        return max(0, to_ticks(self.model.straggler_time(grid)) - 1)

    @cached_by(lambda _, grid, recompute: (keys.SHARD.of(grid), recompute))
    def work(self, grid: PartialLayout, recompute: Recompute) -> Work:
        """One micro batch through the units of a grid; blocks count as no recomputation."""
        if recompute.method is RecomputeMethod.BLOCK:
            recompute = NO_RECOMPUTE  # how many layers blocks cover depends on the partition
        return _in_ticks(self.model.pass_times(grid, recompute))

    def of_all(self, each: Each) -> Ticks:
        """What all units take together, from what one of each kind takes."""
        return sum(map(operator.mul, self.counts, each))

    def even(self, grid: PartialLayout, recompute: Recompute = NO_RECOMPUTE) -> Ticks:
        """All ranks busy all the time: the work of the whole batch over all ranks."""
        return self._evenly(grid, self.of_all(self.work(grid, recompute)[0]))

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
        each, _ = self.work(grid, NO_RECOMPUTE)
        ranks = grid.dims.pipeline_model_parallel_size
        return self.floor + grid.num_microbatches * self._fullest(each, ranks)

    def _fullest(self, each: Each, ranks: int) -> Ticks:
        """The least work that the rank with most of it can have: no unit is divided.

        Ranks with at most ``w`` hold ``(ranks - 1) [w / t] + [(w - h) / t]`` layers of the most
        frequent kind, which take ``t`` each, if one of them holds a unit that takes ``h``, the
        longest of the other kinds.
        """
        least = max(*each, -(-self.of_all(each) // ranks))
        layer, count = each[self.layers], self.counts[self.layers]
        if ranks == 1 or not layer:
            return least
        other = max((t for i, t in enumerate(each) if i != self.layers), default=0)
        while (ranks - 1) * (least // layer) + (least - other) // layer < count:
            least += min(layer - least % layer, layer - (least - other) % layer)
        return least

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
        """``even`` by the work that expert degrees do not change."""
        each, _ = _in_ticks(self.model.pass_times_outside_experts(grid))
        return self._evenly(grid, self.of_all(each))

    def pipelines(self, grid: PartialLayout, settings: tuple[Recompute, ...]) -> list[Ticks]:
        """The fullest rank of a pipeline, or a balanced one with its fill and drain, by setting.

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
            keys.SHARD.of(grid),
            grid.dims.pipeline_model_parallel_size,
            grid.dims.virtual_pipeline_model_parallel_size == 1,
            settings,
        )
    )
    def _without_waits(self, grid: PartialLayout, settings: tuple[Recompute, ...]) -> list[Ticks]:
        m, p = grid.num_microbatches, grid.dims.pipeline_model_parallel_size
        own, share = self.work(grid, NO_RECOMPUTE)
        plain = p > 1 and grid.dims.virtual_pipeline_model_parallel_size == 1
        spread = _spread(p, m, share) * (1.0 - 1e-12) if plain else 0.0
        added = {}
        bounds = []
        for recompute in settings:
            each = own
            for part in [_ALONE[module] for module in recompute.modules] or [recompute]:
                if part not in added:
                    pairs = zip(self.work(grid, part)[0], own, strict=True)
                    added[part] = tuple(max(0, with_it - without - 1) for with_it, without in pairs)
                each = tuple(map(operator.add, each, added[part]))
            busy = m * self._fullest(each, p)
            bounds.append(self.floor + max(busy, math.floor(self.of_all(each) * spread)))
        return bounds


def _in_ticks(times: Iterable[PassPair]) -> Work:
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
        early, (saved, working) = share_kept_early(grid), self.active(grid, settings)
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
    def active(self, grid: PartialLayout, settings: tuple[Recompute, ...]) -> _PerKind:
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
            counts = [count for each_kind, count in structure.units if each_kind is kind]
            units.append(min(each.of_unit(kind, count).total for count in counts))
            in_layer = not kind.is_end
            whole = (unsharded_bytes(c, rank, zero, in_layer=in_layer) for c in counts)
            unsharded.append(0 if stays else min(whole))
        return units, unsharded


@functools.lru_cache(maxsize=4096)
def least_live(p: int, most: int, *, is_plain: bool) -> Counter[int]:
    """On how many ranks how many micro batches keep activations in all chunks at once."""
    return Counter(_live(p, most, is_plain=is_plain))


@functools.lru_cache(maxsize=4096)
def _live(p: int, most: int, *, is_plain: bool) -> tuple[int, ...]:
    """On each rank, how many micro batches keep activations in all chunks at once.

    With virtual stages the last chunk to start has fewest, whatever their number: a rank starts two
    micro batches of it for each rank behind it before its first backward pass.
    """
    step = 1 if is_plain else 2
    return tuple(min(most, step * (p - rank - 1) + 1) for rank in range(p))


class _Layer(NamedTuple):
    """A layer of the most frequent kind under a recompute setting.

    Args:
        time: of one micro batch, in ticks.
        saved: bytes of each micro batch; ``working``, besides while it is at work.
    """

    time: Ticks
    saved: float
    working: float


class RecomputeBounds(Caching):
    """What has to be recomputed for a grid to fit in memory, as a bound on the step.

    Layers of the most frequent kind speak for all. With ``s`` bytes of states, ``a`` that are saved
    for each of ``l_r`` micro batches and ``w`` at work, ``C`` bytes hold at most
    ``n_r = (C - w) / (s + l_r a)`` of them on rank ``r``. If ``u`` is the least number for which
    the sum of ``min(u, n_r)`` reaches all layers, some rank has ``u`` or more, and is busy with
    them all the time. Blocks of full recomputation cover ``k`` layers of each rank.
    """

    def __init__(self, bounds: Bounds, memory: MemoryBounds) -> None:
        self.bounds, self.memory, self.grids = bounds, memory, memory.grids
        self._place = bounds.layers
        self._kind, self._count = list(memory.model.num_units.items())[self._place]
        every = self.grids.allowed_settings(0, self.grids.executions.kinds)
        self._modules = dict.fromkeys(module for each in every for module in each.modules)

    def of_grid(
        self, grid: PartialLayout, zeros: Sequence[ZeroStage], capacity: Bytes, bound: Ticks
    ) -> Ticks:
        """What all schedules of a grid take at least in so much memory, however layers run.

        Executions that stand for all save and take no more than any, but for those that move
        activations to the host.

        Args:
            zeros: the ZeRO stages that it may have.
            bound: of the grid in any memory, where nothing longer is proven.
        """
        executions, least = self.grids.executions, NO_THRESHOLD
        for each in self.grids.fastest(grid):
            found = self._least(each, zeros, capacity, executions.kinds, any_schedule=True)
            least = min(least, found)
            if executions.offloads or least <= bound:
                return bound
        return least

    def of_family(self, grid: PartialLayout, capacity: Bytes) -> Ticks:
        """What a grid takes at least in so much memory with any number of virtual stages.

        Args:
            grid: with its ZeRO stage, and with virtual stages or none.
        """
        _, kinds = self.grids.settings_key(grid)
        return self._least(grid, [grid.zero], capacity, kinds, any_schedule=False)

    def _least(
        self,
        grid: PartialLayout,
        zeros: Sequence[ZeroStage],
        capacity: Bytes,
        kinds: RecomputeKinds,
        *,
        any_schedule: bool,
    ) -> Ticks:
        """A bound, ``NO_THRESHOLD`` where nothing fits."""
        each = zip(*(self.memory.of_pipeline(grid.dims, zero) for zero in zeros), strict=True)
        of_layer = tuple(min(units[self._place] for units in stages) for stages in each)
        is_plain = any_schedule or grid.dims.virtual_pipeline_model_parallel_size == 1
        least = grid.num_microbatches * self._fullest(grid, of_layer, capacity, kinds, is_plain)
        return min(self.bounds.floor + least + self.bounds.waits(grid), NO_THRESHOLD)

    @cached_by(
        lambda _, grid, of_layer, capacity, kinds, is_plain: (
            keys.SHARD.of(grid),
            grid.dims.pipeline_model_parallel_size,
            grid.num_microbatches,
            of_layer,
            capacity,
            kinds,
            is_plain,
        )
    )
    def _fullest(
        self,
        grid: PartialLayout,
        of_layer: tuple[float, ...],
        capacity: Bytes,
        kinds: RecomputeKinds,
        is_plain: bool,
    ) -> Ticks:
        """One micro batch through the fullest rank; 0 where nothing has to be recomputed."""
        p, count = grid.dims.pipeline_model_parallel_size, self._count
        live = _live(p, grid.num_microbatches if is_plain else p, is_plain=is_plain)
        states, room = max(1.0, of_layer[0]), capacity - of_layer[1]
        room += self.memory.num_units * (1 + max(live))  # what rounding may hide
        even, least, plain = -(-count // p), NO_THRESHOLD, self._layer(grid, NO_RECOMPUTE)
        if room - plain.working >= even * (states + live[0] * plain.saved):
            return 0
        for layer in self._settings(grid, kinds):
            if layer.time * even >= least:
                break
            left = max(0.0, room - layer.working)
            if p * int(left / (states + live[-1] * layer.saved)) >= count:  # the last holds most
                most = [int(left / (states + n * layer.saved)) for n in live]
                if held := _fullest_rank(most, count):
                    least = min(least, layer.time * held)
        if FULL_RECOMPUTE not in kinds or not self.grids.largest_block(grid.dims.num_chunks):
            return least
        full = self._layer(grid, FULL_RECOMPUTE)
        left, again = max(0.0, room - full.working), full.time - plain.time
        in_blocks = [int(left / (states + n * full.saved)) for n in live]
        if sum(in_blocks) < count:
            return least

        def held_with(covered: int) -> int:
            freed = covered * (plain.saved - full.saved)
            most = [
                each if each <= covered else int((left + n * freed) / (states + n * plain.saved))
                for each, n in zip(in_blocks, live, strict=True)
            ]
            return _fullest_rank(most, count)

        first = bisect.bisect_left(
            range(count), True, 1, key=lambda covered: held_with(covered) > 0
        )
        for covered in range(first, count + 1):
            if plain.time * even + again * min(covered, even) >= least:
                break
            held = held_with(covered)
            least = min(least, plain.time * held + again * min(covered, held))
            if held <= covered:
                break
        return least

    @cached_by(lambda _, grid, kinds: (keys.SHARD.of(grid), kinds))
    def _settings(self, grid: PartialLayout, kinds: RecomputeKinds) -> list[_Layer]:
        """A layer under each setting but blocks; those that take longer save less."""
        plain, added = self._layer(grid, NO_RECOMPUTE), self._added(grid)
        found = []
        for each in self.grids.allowed_settings(0, kinds):
            if each.modules:
                time, freed = plain.time, 0.0
                for module in each.modules:
                    more, free = added[module]
                    time, freed = time + more, freed + free
                found.append(_Layer(time, plain.saved - freed, plain.working + freed))
            elif each.method is not RecomputeMethod.BLOCK:
                found.append(self._layer(grid, each))
        rising: list[_Layer] = []
        for layer in sorted(found):
            if not rising or layer.saved < rising[-1].saved:
                rising.append(layer)
        return rising

    @cached_by(lambda _, grid: keys.SHARD.of(grid))
    def _added(self, grid: PartialLayout) -> dict[RecomputeModule, tuple[Ticks, float]]:
        """What recomputing a module adds to a layer, less two, and what it frees."""
        model, executions = self.memory.model, self.grids.executions
        times = model.unit_time(self._kind, model.places(grid.dims), model.shard(grid))
        latent, found = model.spec.multi_latent_attention, {}
        for module in self._modules:
            again, freed = recomputed_alone(times, self._kind, module, latent_attention=latent)
            if module is RecomputeModule.LAYERNORM and executions.may_keep_norm:
                again = 0.0
            found[module] = max(0, to_ticks(max(0.0, again)) - 2), freed
        return found

    @cached_by(lambda _, grid, recompute: (keys.SHARD.of(grid), recompute))
    def _layer(self, grid: PartialLayout, recompute: Recompute) -> _Layer:
        """A layer under a setting, its time less two."""
        model = self.memory.model
        places, shard = model.places(grid.dims), model.shard(grid)
        run = model.run(self._kind, places, shard, recompute)
        (time,), _ = _in_ticks([(run.forward.total, run.backward.total + run.recompute.total)])
        return _Layer(time, run.saved_bytes, run.working_bytes)


def _fullest_rank(most: list[int], count: int) -> int:
    """How many of ``count`` layers some rank holds at least; 0 where they do not fit.

    Args:
        most: layers that each rank can hold, rising.
    """
    if sum(most) < count:
        return 0
    left, ranks = count, len(most)
    for holds in most:
        if ranks * holds >= left:
            break
        left, ranks = left - holds, ranks - 1
    return -(-left // ranks)
