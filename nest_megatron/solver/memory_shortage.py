"""How much memory a job lacks at the least, for when nothing fits; no step is priced for it."""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from nest_megatron.cost_model.pipeline import PipelineProblem
from nest_megatron.cost_model.stage_problems import StageProblems
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import Recompute
from nest_megatron.plain import frozen
from nest_megatron.solver.outcome import DEFAULT_NODE_LIMIT, StageSolver, Status
from nest_megatron.solver.search import UNLIMITED, Search
from nest_megatron.solver.space import settings_keeping_least
from nest_megatron.units import Bytes


@frozen
class Shortage:
    """The plan that lacks least memory on the GPU with the highest peak.

    Args:
        needed_bytes: its peak.
        limit_bytes: the highest peak that it may have.
    """

    grid: PartialLayout
    needed_bytes: Bytes
    limit_bytes: Bytes

    @property
    def missing_bytes(self) -> Bytes:
        """What it lacks; below 0 where it fits."""
        return self.needed_bytes - self.limit_bytes


def fits(search: Search) -> bool:
    """Whether some plan of a search's space fits; once its time is out, only if one was found.

    Args:
        search: a search of the job, run or not.
    """
    needed = search.memory.of_shard_states
    for shard in sorted(search.grids.shards(), key=needed):
        if search.out_of_time() or needed(shard) > search.most_bytes:
            return False
        for grid in _pipelines(search, shard):
            for schedule in search.grids.schedules(grid, search.zeros_that_fit(grid)):
                for family, most in search.families_that_fit(schedule):
                    stages = StageProblems(search.model, family, most)
                    problems = map(stages.problem, _settings_keeping_least(search, family))
                    if any(_has_partition(search.solve_stages, problem) for problem in problems):
                        return True
    return False


def least_memory(search: Search) -> Shortage | None:
    """Over all plans of the search's space, the one whose highest peak lacks least.

    Once its time is out, it is the one of those looked at.

    Args:
        search: a search of the job, run or not.

    Returns:
        ``None`` if the space is empty.
    """
    best = None
    for missing, grid in _by_bound(search):
        if best is not None and (missing >= best.missing_bytes or search.out_of_time()):
            break
        stages, limit = StageProblems(search.model, grid), search.peaks.of(grid)
        for recompute in _settings_keeping_least(search, grid):
            most = limit + best.missing_bytes - 1 if best else UNLIMITED
            least = math.floor(limit + missing)
            needed = _least_capacity(search.solve_stages, stages, recompute, least, most)
            if needed is not None:
                candidate = dataclasses.replace(grid, recompute=recompute)
                best = Shortage(grid=candidate, needed_bytes=needed, limit_bytes=limit)
    return best


def _settings_keeping_least(search: Search, grid: PartialLayout) -> Sequence[Recompute]:
    """Settings of which one keeps least; where there is one partition, any of them may."""
    settings = search.grids.recompute_settings(grid)
    return settings if search.only_one else settings_keeping_least(settings)


def _by_bound(search: Search) -> Iterator[tuple[float, PartialLayout]]:
    """Families of the space, those first that can lack least memory, with the bound."""
    bounds, most, serial = search.memory, search.most_bytes, itertools.count()
    heap = [
        (bounds.of_shard_states(shard) - most, next(serial), True, shard)
        for shard in search.grids.shards()
    ]
    heapq.heapify(heap)
    while heap:
        missing, _, is_shard, grid = heapq.heappop(heap)
        if not is_shard:
            yield missing, grid
            continue
        families = itertools.chain(*map(search.grids.families, _pipelines(search, grid)))
        for family in families:
            bound = bounds.of_family(family) - search.peaks.of(family)
            heapq.heappush(heap, (bound, next(serial), False, family))


def _pipelines(search: Search, shard: PartialLayout) -> Iterator[PartialLayout]:
    """Of the rank orders the first stands for all: they change no rank's memory."""
    seen = 0
    for grid in search.grids.grids(shard):
        if grid.dims.pipeline_model_parallel_size != seen:
            seen = grid.dims.pipeline_model_parallel_size
            yield grid


def _has_partition(solve: StageSolver, problem: PipelineProblem) -> bool:
    return solve(problem, 0, DEFAULT_NODE_LIMIT).status is not Status.INFEASIBLE


def _least_capacity(
    solve: StageSolver, stages: StageProblems, recompute: Recompute, low: Bytes, high: Bytes
) -> Bytes | None:
    """Smallest capacity above a lower bound, up to ``high``, with which some partition fits."""
    problem = stages.problem(recompute)

    def enough(capacity: Bytes) -> bool:
        return _has_partition(solve, problem._replace(capacity_bytes=capacity))

    if not enough(high):
        return None
    return low + bisect.bisect_left(range(low, high), True, key=enough)
