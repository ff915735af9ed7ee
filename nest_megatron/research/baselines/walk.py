"""What a local search moves among: legal layouts, those one step away, and their price."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from nest_megatron.cost_model.pipeline import PipelineProblem, memory_of_ranks
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import Recompute
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import Execution
from nest_megatron.plain import frozen
from nest_megatron.research.baselines.job import (
    Boundaries,
    ComparisonJob,
    balanced_partition,
    stages_of,
)
from nest_megatron.solver.one_partition import join_chunks
from nest_megatron.solver.outcome import DEFAULT_NODE_LIMIT, NO_THRESHOLD, StageSolution
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.solver.search import UNLIMITED
from nest_megatron.solver.space import SearchSpace
from nest_megatron.units import Bytes, Ticks


class Shard(NamedTuple):
    """How a layer is divided, and the micro batch."""

    tensor: int
    context: int
    expert: int
    micro_batch: int
    expert_tensor: int


class PipelineShape(NamedTuple):
    """The rest of a grid without its recomputation."""

    stages: int
    virtual: int
    order: RankOrder
    zero: ZeroStage
    execution: Execution


@frozen
class State:
    """A layout with its partition and predicted step, whatever memory says.

    Args:
        missing_bytes: what the GPU with the highest peak lacks; 0 if all fit.
    """

    grid: PartialLayout
    boundaries: Boundaries
    iteration: Ticks
    missing_bytes: Bytes

    @property
    def plan(self) -> SolvedLayout | None:
        """The state as a plan, if it fits."""
        if self.missing_bytes:
            return None
        stages = stages_of(self.grid, self.boundaries)
        return SolvedLayout(layout=self.grid.with_stages(stages), iteration=self.iteration)


class Layouts:
    """The layouts of a space.

    Attributes:
        shards: one grid for each division of a layer.
        families: every pipeline, rank order and ZeRO stage on a shard.
        one_step_from: shards with another degree or micro batch, whatever the expert-tensor one.
    """

    def __init__(self, job: ComparisonJob, space: SearchSpace) -> None:
        self.job = job
        self.grids = job.grids(space)
        self.shards = {shard_of(grid): grid for grid in self.grids.shards()}
        self.families = cache(self._families)
        self.one_step_from = cache(self._one_step_from)
        self._priced = cache(self._price)

    @property
    def priced(self) -> int:
        """How many states have been priced."""
        return self._priced.cache_info().currsize

    def _families(self, shard: Shard) -> list[PartialLayout]:
        grids = self.grids.grids(self.shards[shard])
        return [family for grid in grids for family in self.grids.families(grid)]

    def _one_step_from(self, shard: Shard) -> list[Shard]:
        return [s for s in self.shards if s != shard and differing(s[:-1], shard[:-1]) <= 1]

    def recomputed(self, grid: PartialLayout, wanted: Recompute) -> PartialLayout:
        """A grid with the setting wanted, or with the first one that the grid allows."""
        settings = self.grids.recompute_settings(grid)
        return replace(grid, recompute=wanted if wanted in settings else settings[0])

    def state(self, grid: PartialLayout, boundaries: Boundaries | None = None) -> State:
        """A grid with a partition, the balanced one by default, and its price."""
        spec = self.job.model.spec
        return self._priced(grid, boundaries or balanced_partition(spec, grid.dims.num_chunks))

    def _price(self, grid: PartialLayout, boundaries: Boundaries) -> State:
        one = join_chunks(self.job.problem(grid), boundaries)
        found, missing = self._solve(one), 0
        if not found.boundaries:
            found = self._solve(one._replace(capacity_bytes=UNLIMITED))
            missing = _needed_bytes(one) - one.capacity_bytes
        return State(
            grid=grid, boundaries=boundaries, iteration=found.iteration, missing_bytes=missing
        )

    def _solve(self, one: PipelineProblem) -> StageSolution:
        return self.job.solve_stages(one, NO_THRESHOLD, DEFAULT_NODE_LIMIT)


def _needed_bytes(one: PipelineProblem) -> Bytes:
    """Peak memory of the ranks where every unit is a chunk.

    After two rounds of micro batches a rank never holds more than it has held before; fewer of them
    are much quicker to count.
    """
    rounds = min(one.num_microbatches, 2 * one.num_stages)
    one = one._replace(num_microbatches=rounds)
    return max(rank.total for rank in memory_of_ranks(one, range(one.num_chunks + 1)))


def shard_of(grid: PartialLayout) -> Shard:
    """How a grid divides a layer."""
    dims = grid.dims
    return Shard(
        dims.tensor_model_parallel_size,
        dims.context_parallel_size,
        dims.expert_model_parallel_size,
        grid.micro_batch_size,
        dims.expert_tensor_parallel_size,
    )


def pipeline_of(grid: PartialLayout) -> PipelineShape:
    """The rest of a grid."""
    dims = grid.dims
    stages, virtual = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
    return PipelineShape(stages, virtual, dims.rank_order, grid.zero, grid.execution)


def nearest(grids: Iterable[PartialLayout], to: PartialLayout) -> list[PartialLayout]:
    """Those of the grids whose pipelines differ least from a grid's, in as few things."""
    wanted = pipeline_of(to)
    differences = [(grid, differing(pipeline_of(grid), wanted)) for grid in grids]
    least = min((count for _, count in differences), default=0)
    return [grid for grid, count in differences if count == least]


def differing(one: tuple[object, ...], other: tuple[object, ...]) -> int:
    """In how many places two tuples differ.

    >>> differing((1, 2, 3), (1, 5, 4))
    2
    """
    return sum(map(operator.ne, one, other))
