"""Neighbours of a solved plan: simpler ones, and some that need less memory.

The search keeps the fastest plan of a layout. What it leaves out of the same layout is a little
slower and may be worth more: stages that Megatron cuts by itself, fewer virtual stages, a smaller
micro batch, one more module that is recomputed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import pairwise

from nest_megatron.cost_model.pipeline import PipelineProblem, chunk_cost, rank_memory
from nest_megatron.cost_model.stage_problems import StageProblems
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import Recompute, RecomputeGranularity, RecomputeMethod
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.one_partition import judging_even
from nest_megatron.solver.outcome import StageSolution, StageSolver
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.units import Bytes, Ticks

#: Partial partitions that are looked at for the stages of a neighbour.
_MOST_NODES = 1 << 12
#: Shares of a chunk's layers that a neighbour recomputes as a whole.
_BLOCKS = (1 / 8, 1 / 4)


def peak_of(grids: GridSpace, plan: SolvedLayout) -> Bytes:
    """The highest peak of memory over the ranks of a solved plan."""
    problem = StageProblems(grids.model, plan.layout.without_stages()).problem(
        plan.layout.recompute
    )
    return _peak(problem, plan.layout.partition.boundaries)


def _peak(problem: PipelineProblem, boundaries: tuple[int, ...]) -> Bytes:
    chunks = [chunk_cost(problem, first, end) for first, end in pairwise(boundaries)]
    ranks = [chunks[rank :: problem.num_stages] for rank in range(problem.num_stages)]
    return max(rank_memory(problem, rank, held).total for rank, held in enumerate(ranks))


def neighbours(
    grids: GridSpace, plan: SolvedLayout, solve: StageSolver, slowest: Ticks, comfortable: Bytes
) -> Iterator[tuple[SolvedLayout, Bytes]]:
    """Others of a plan's layout, each with the highest peak of its ranks.

    Args:
        grids: what may be chosen.
        slowest: what takes longer is left out.
        comfortable: plans that need more have neighbours that need less.
    """
    if plan.iteration > slowest or grids.space.partition is not None:
        return
    own = plan.layout.without_stages()
    seen = {(own, plan.layout.partition.boundaries)}
    near = [*_fewer_virtual_stages(grids, own)]
    if peak_of(grids, plan) > comfortable:
        near += _less_memory(grids, own)
    for grid in dict.fromkeys(near):
        problem = StageProblems(grids.model, grid).problem(grid.recompute)
        for found in _solved(grids, problem, solve, slowest, comfortable):
            if found.boundaries and (grid, found.boundaries) not in seen:
                seen.add((grid, found.boundaries))
                solved = SolvedLayout.of(grid, grid.recompute, found, grids.space.sharding)
                yield solved, _peak(problem, found.boundaries)


def _solved(
    grids: GridSpace,
    problem: PipelineProblem,
    solve: StageSolver,
    slowest: Ticks,
    comfortable: Bytes,
) -> Iterator[StageSolution]:
    """Partitions of a problem: Megatron's own, the fastest, the fastest in less memory."""
    less = min(comfortable, problem.capacity_bytes)
    even = (judging_even(solve, grids.model.spec), problem)
    asked = [(solve, problem), (solve, dataclasses.replace(problem, capacity_bytes=less))]
    if grids.space.even_stages:
        asked = [even]
    elif problem.num_stages == 1:
        asked = asked[:1]
    elif grids.model.spec.num_layers % problem.num_chunks == 0:
        asked.insert(0, even)
    return (judge(posed, slowest + 1, _MOST_NODES) for judge, posed in asked)


def _fewer_virtual_stages(grids: GridSpace, grid: PartialLayout) -> Iterator[PartialLayout]:
    """A grid with every number of virtual stages up to its own that Megatron accepts."""
    own = grid.dims.virtual_pipeline_model_parallel_size
    one = dataclasses.replace(grid.dims, virtual_pipeline_model_parallel_size=1)
    for laid in grids.interleavings(dataclasses.replace(grid, dims=one)):
        if laid.dims.virtual_pipeline_model_parallel_size > own:
            return
        yield from _as_carried_out(grids, laid, grid.recompute)


def _as_carried_out(
    grids: GridSpace, grid: PartialLayout, recompute: Recompute
) -> Iterator[PartialLayout]:
    """A grid as its execution says, or, where that is not possible there, in every other way."""
    ways = list(grids.executions(grid))
    same = [way for way in ways if way.execution == grid.execution]
    for way in same or ways:
        if recompute in grids.recompute_settings(way):
            yield dataclasses.replace(way, recompute=recompute)


def _less_memory(grids: GridSpace, grid: PartialLayout) -> Iterator[PartialLayout]:
    """A grid with half the micro batch, the next ZeRO stage, or more that is recomputed."""
    half, rest = divmod(grid.micro_batch_size, 2)
    sizes = grids.space.values("micro_batch_size", grids.batch_unit, grids.model.cluster)
    if not rest and half in sizes:
        smaller = dataclasses.replace(grid, micro_batch_size=half)
        yield from _fewer_virtual_stages(grids, smaller)
    for zero in grids.zero_stages(grid.dims):
        if zero == grid.zero + 1:
            more = dataclasses.replace(grid, zero=zero)
            yield from _as_carried_out(grids, more, grid.recompute)
    for recompute in _more_recompute(grids, grid):
        yield from _as_carried_out(grids, grid, recompute)


def _more_recompute(grids: GridSpace, grid: PartialLayout) -> Iterator[Recompute]:
    """Settings that recompute one module more, or a part of the layers as a whole."""
    if grid.recompute.granularity is RecomputeGranularity.FULL:
        return
    own = set(grid.recompute.modules)
    layers = grids.largest_block(grid.dims.num_chunks)
    blocks = {math.ceil(share * layers) for share in _BLOCKS}
    for recompute in grids.recompute_settings(grid):
        is_next = len(recompute.modules) == len(own) + 1 and own < set(recompute.modules)
        is_block = recompute.method is RecomputeMethod.BLOCK and recompute.num_layers in blocks
        if is_next or is_block:
            yield recompute
