"""How much memory a job needs at the least, for when nothing fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from nest_megatron.cost_model.stage_problems import StageProblems
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.recompute import Recompute
from nest_megatron.solver.choices import sparing
from nest_megatron.solver.outcome import DEFAULT_NODE_LIMIT, OutOfTime, StageSolver, Status
from nest_megatron.solver.search import UNLIMITED, Search
from nest_megatron.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The plan that needs least memory on its fullest GPU, and how much that is."""

    grid: Grid
    needed_bytes: Bytes


def least_memory(search: Search, out_of_time: OutOfTime = lambda: False) -> Shortage | None:
    """Over all plans of the search's space, the one whose fullest GPU needs least.

    Args:
        search: a search of the job; its own run does not matter.
        out_of_time: once true, the plan that needs least of those looked at is taken.

    Returns:
        ``None`` if the space is empty.
    """
    best: Shortage | None = None
    for grid in _families(search):
        if best is not None and out_of_time():
            break
        capacity = best.needed_bytes if best else UNLIMITED
        if search.bounds.least_static_bytes(grid.dims, grid.zero) >= capacity:
            continue
        stages = StageProblems(search.model, grid)
        for recompute in sparing(search.grids.recompute_settings(grid)):
            needed = _least_capacity(search.solve_stages, stages, recompute, capacity - 1)
            if needed is not None:
                capacity = needed
                candidate = dataclasses.replace(grid, recompute=recompute)
                best = Shortage(grid=candidate, needed_bytes=needed)
    return best


def _families(search: Search) -> Iterator[Grid]:
    for shard in search.grids.shards():
        for grid in search.grids.grids(shard):
            yield from search.grids.families(grid)


def _least_capacity(
    solve: StageSolver, stages: StageProblems, recompute: Recompute, enough: Bytes
) -> Bytes | None:
    """Smallest capacity up to ``enough`` with which some partition fits, by halving."""

    def fits(capacity: Bytes) -> bool:
        problem = stages.problem(recompute, capacity_bytes=capacity)
        return solve(problem, 0, DEFAULT_NODE_LIMIT).status is not Status.INFEASIBLE

    if not fits(enough):
        return None
    low, high = 0, enough
    while high > 2 * max(1, low) and fits(high // 2):
        high //= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high
