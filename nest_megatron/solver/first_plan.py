"""Some plan that fits, as soon as possible, for a search that may have to end before it has one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from nest_megatron.cost_model.stage_problems import StageProblems
from nest_megatron.parallel.grid import Grid
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.memory_bounds import MemoryBounds
from nest_megatron.solver.outcome import NO_THRESHOLD, StageSolver
from nest_megatron.solver.ranking import SolvedGrid
from nest_megatron.solver.space import sparing

#: Grids that are tried before the search goes on without a plan: some hundredths of a second.
_MOST_TRIED = 16
#: Share of the memory that states may take, so that activations have the rest.
_FOR_STATES = 0.5


def first_plan(grids: GridSpace, memory: MemoryBounds, solve: StageSolver) -> SolvedGrid | None:
    """A plan that fits, from the grids that a rule of thumb would try.

    Tensor parallelism as wide as it goes, then as much context parallelism as it takes, experts
    spread over as many ranks as there are; of the pipelines the shortest that leaves room for
    activations, and the one that divides states most. The smallest micro batch, the plain schedule,
    the recompute settings that keep least, and the stage solver's first guess.

    Returns:
        ``None`` if none of these fits: the search itself has to tell.
    """
    for laid in itertools.islice(_tried(grids, memory), _MOST_TRIED):
        for grid in grids.executions(laid):
            stages = StageProblems(memory.model, grid)
            for recompute in sparing(grids.recompute_settings(grid)):
                found = solve(stages.problem(recompute), NO_THRESHOLD, 1)
                if found.boundaries:
                    return SolvedGrid.of(grid, recompute, found)
    return None


def _tried(grids: GridSpace, memory: MemoryBounds) -> Iterator[Grid]:
    capacity = memory.model.capacity_bytes
    for shard in _shards(grids):
        needed = {}
        for grid in grids.grids(shard):
            laid = next(grids.interleavings(grid), None)
            allowed = grids.zero_stages(grid.dims)
            if laid is not None and allowed:
                laid = dataclasses.replace(laid, zero=max(allowed))
                needed[laid] = memory.of_states(laid.dims, laid.zero)
        roomy = next((grid for grid in needed if needed[grid] <= _FOR_STATES * capacity), None)
        if roomy is not None:
            yield roomy
        least = min(needed, key=lambda grid: needed[grid], default=None)
        if least is not None and least != roomy and needed[least] <= capacity:
            yield least


def _shards(grids: GridSpace) -> list[Grid]:
    """For each tensor and context size the shard with the most expert ranks, wide tensors first.

    Of several the one with the smallest micro batch.
    """
    chosen: dict[tuple[int, int, int], Grid] = {}
    for shard in sorted(grids.shards(), key=_spread, reverse=True):
        dims = shard.dims
        tp, cp = dims.tensor_model_parallel_size, dims.context_parallel_size
        chosen.setdefault((-dims.world_size, -tp, cp), shard)
    return [chosen[key] for key in sorted(chosen)]


def _spread(shard: Grid) -> tuple[int, int]:
    return shard.dims.expert_model_parallel_size, -shard.micro_batch_size
