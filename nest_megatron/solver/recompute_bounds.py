"""What has to be recomputed for a grid to fit in memory, as a lower bound on the step."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model import keys
from nest_megatron.cost_model.unit_run import recomputed_alone
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.solver.bounds import Bounds, MemoryBounds, in_ticks, live_microbatches
from nest_megatron.solver.executions import RecomputeKinds
from nest_megatron.solver.outcome import NO_THRESHOLD
from nest_megatron.units import Bytes, Ticks, to_ticks

#: Modules that recomputing the experts as a whole recomputes as well.
_WITHIN_MOE = (RecomputeModule.MOE_ACT, RecomputeModule.SHARED_EXPERTS)


class Layer(NamedTuple):
    """A layer of the most frequent kind under a recompute setting.

    Args:
        time: of one micro batch, in ticks.
        saved: bytes of each micro batch; ``working``, besides while it is at work.
    """

    time: Ticks
    saved: float
    working: float


class Ranks(NamedTuple):
    """What the ranks of a pipeline may hold of such layers.

    Args:
        states: bytes of one.
        room: bytes that a rank may fill.
        live: on each rank, for how many micro batches a layer saves at once.
    """

    states: float
    room: float
    live: tuple[int, ...]

    def layers(self, layer: Layer) -> list[int]:
        """How many each rank can hold, rising."""
        left = max(0.0, self.room - layer.working)
        return [int(left / (self.states + number * layer.saved)) for number in self.live]

    def fullest(self, layer: Layer, count: int) -> Ticks:
        """What the rank with most of ``count`` layers takes at least."""
        held = _held(self.layers(layer), count)
        return layer.time * held if held else NO_THRESHOLD


class RecomputeBounds(Caching):
    """What has to be recomputed for a grid to fit in memory, as a bound on the step.

    Layers of the most frequent kind speak for all. With ``s`` bytes of states, ``a`` that are saved
    for each of ``l_r`` micro batches and ``w`` at work, ``C`` bytes hold at most
    ``n_r = (C - w) / (s + l_r a)`` of them on rank ``r``. If ``u`` is the least number for which
    the sum of ``min(u, n_r)`` reaches all layers, some rank has ``u`` or more, and is busy with
    them all the time. ``NO_THRESHOLD`` stands where nothing fits.
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
        ranks = self._ranks(grid, zeros, capacity, is_plain=True)
        for each in self.grids.fastest(grid):
            least = min(least, self._step(grid, self._fullest(each, ranks, executions.kinds)))
            if executions.offloads or least <= bound:
                return bound
        return least

    def of_family(self, grid: PartialLayout, capacity: Bytes) -> Ticks:
        """What a grid takes at least in so much memory with any number of virtual stages.

        Args:
            grid: with its ZeRO stage, and with virtual stages or none.
        """
        ranks, (_, kinds) = self._ranks_of(grid, capacity), self.grids.settings_key(grid)
        return self._step(grid, self._fullest(grid, ranks, kinds))

    def of_settings(
        self, grid: PartialLayout, capacity: Bytes, settings: tuple[Recompute, ...]
    ) -> list[Ticks]:
        """The same under each of some settings, none of them blocks."""
        fullest = self._each_fullest(grid, self._ranks_of(grid, capacity), settings)
        outside, number = self._step(grid, 0), grid.num_microbatches
        return [min(outside + number * each, NO_THRESHOLD) for each in fullest]

    @cached_by(lambda _, grid, ranks, settings: (keys.SHARD.of(grid), ranks, settings))
    def _each_fullest(
        self, grid: PartialLayout, ranks: Ranks, settings: tuple[Recompute, ...]
    ) -> list[Ticks]:
        layers = [self._under(grid, recompute) for recompute in settings]
        return [ranks.fullest(each, self._count) for each in layers]

    def _ranks_of(self, grid: PartialLayout, capacity: Bytes) -> Ranks:
        is_plain = grid.dims.virtual_pipeline_model_parallel_size == 1
        return self._ranks(grid, [grid.zero], capacity, is_plain=is_plain)

    def _ranks(
        self, grid: PartialLayout, zeros: Sequence[ZeroStage], capacity: Bytes, *, is_plain: bool
    ) -> Ranks:
        p, place = grid.dims.pipeline_model_parallel_size, self._place
        live = live_microbatches(p, grid.num_microbatches if is_plain else p, is_plain=is_plain)
        each = [self.memory.of_pipeline(grid.dims, zero) for zero in zeros]
        states, unsharded = (
            min(units[place] for units in part) for part in zip(*each, strict=True)
        )
        hidden = self.memory.num_units * (1 + max(live))  # by rounding
        return Ranks(max(1.0, states), capacity + hidden - unsharded, live)

    def _step(self, grid: PartialLayout, fullest: Ticks) -> Ticks:
        """The step, if one micro batch takes so long on the fullest rank."""
        step = self.bounds.floor + grid.num_microbatches * fullest + self.bounds.waits(grid)
        return min(step, NO_THRESHOLD)

    @cached_by(lambda _, grid, ranks, kinds: (keys.SHARD.of(grid), ranks, kinds))
    def _fullest(self, grid: PartialLayout, ranks: Ranks, kinds: RecomputeKinds) -> Ticks:
        """One micro batch on the fullest rank; 0 where nothing has to be recomputed."""
        count, plain = self._count, self._layer(grid, NO_RECOMPUTE)
        even, least = -(-count // len(ranks.live)), NO_THRESHOLD
        if ranks.room - plain.working >= even * (ranks.states + ranks.live[0] * plain.saved):
            return 0
        layers = self._settings(grid, kinds)
        if layers:  # the least of each part fits where any of them does
            part_by_part = Layer(*map(min, zip(*layers, strict=True)))
            layers = layers if ranks.fullest(part_by_part, count) < NO_THRESHOLD else []
        for layer in layers:
            if layer.time * even >= least:
                break
            least = min(least, ranks.fullest(layer, count))
        if FULL_RECOMPUTE in kinds and self.grids.largest_block(grid.dims.num_chunks):
            least = min(least, self._in_blocks(grid, ranks, least))
        return least

    def _in_blocks(self, grid: PartialLayout, ranks: Ranks, threshold: Ticks) -> Ticks:
        """The same where the first ``k`` layers of each rank are recomputed, for every ``k``."""
        count, even = self._count, -(-self._count // len(ranks.live))
        plain, full = self._layer(grid, NO_RECOMPUTE), self._layer(grid, FULL_RECOMPUTE)
        in_blocks, room = ranks.layers(full), max(0.0, ranks.room - full.working)
        if sum(in_blocks) < count:
            return NO_THRESHOLD

        def held_with(covered: int) -> int:
            most, freed = [], covered * (plain.saved - full.saved)
            for each, live in zip(in_blocks, ranks.live, strict=True):
                outside = (room + live * freed) / (ranks.states + live * plain.saved)
                most.append(each if each <= covered else int(outside))
            return _held(most, count)

        def fullest(covered: int, held: int) -> Ticks:
            return plain.time * held + (full.time - plain.time) * min(covered, held)

        least = NO_THRESHOLD
        first = bisect.bisect_left(range(count), True, 1, key=lambda k: held_with(k) > 0)
        for covered in range(first, count + 1):
            if fullest(covered, even) >= min(least, threshold):
                break
            held = held_with(covered)
            least = min(least, fullest(covered, held))
            if held <= covered:
                break
        return least

    @cached_by(lambda _, grid, kinds: (keys.SHARD.of(grid), kinds))
    def _settings(self, grid: PartialLayout, kinds: RecomputeKinds) -> list[Layer]:
        """A layer under each setting but blocks, the fastest first, without needless ones."""
        return without_needless(
            self._under(grid, each)
            for each in self.grids.allowed_settings(0, kinds)
            if each.method is not RecomputeMethod.BLOCK
        )

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

    def _under(self, grid: PartialLayout, recompute: Recompute) -> Layer:
        """A layer under a setting; modules that lie side by side add up."""
        if not recompute.modules:
            return self._layer(grid, recompute)
        (time, saved, working), added = self._layer(grid, NO_RECOMPUTE), self._added(grid)
        within = _WITHIN_MOE if RecomputeModule.MOE in recompute.modules else ()
        for module in recompute.modules:
            if module not in within:
                more, freed = added[module]
                time, saved, working = time + more, saved - freed, working + freed
        return Layer(time, saved, working)

    @cached_by(lambda _, grid, recompute: (keys.SHARD.of(grid), recompute))
    def _layer(self, grid: PartialLayout, recompute: Recompute) -> Layer:
        """A layer as it runs under a setting, its time less two."""
        model = self.memory.model
        places, shard = model.places(grid.dims), model.shard(grid)
        run = model.run(self._kind, places, shard, recompute)
        (time,), _ = in_ticks([(run.forward.total, run.backward.total + run.recompute.total)])
        return Layer(time, run.saved_bytes, run.working_bytes)


def without_needless(layers: Iterable[Layer]) -> list[Layer]:
    """Layers under settings, the fastest first, without those that another makes needless.

    Where a slower setting saves no less, and one layer alone needs no less under it, a rank that
    can hold layers can hold as many under the faster one.
    """
    kept: list[Layer] = []
    for layer in sorted(layers):
        one = layer.saved + layer.working
        if not kept or layer.saved < kept[-1].saved or one < kept[-1].saved + kept[-1].working:
            kept.append(layer)
    return kept


def _held(most: list[int], count: int) -> int:
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
