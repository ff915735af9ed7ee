"""Solved plans, the order of preference among them, and what a search proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from operator import attrgetter

from nest_megatron.layout.layout import Layout, PartialLayout
from nest_megatron.layout.recompute import Recompute, RecomputeGranularity
from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.layout.zero import DataParallelSharding
from nest_megatron.plain import frozen
from nest_megatron.solver.outcome import StageSolution
from nest_megatron.units import Ticks

#: From least to most recomputation.
_GRANULARITIES = tuple(RecomputeGranularity)


#: What tells one alternative from another. Context parallelism and micro batch are not in it:
#: splitting twice the micro batch over twice the context ranks is nearly the same plan.
_LAYOUT = attrgetter(
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def layout_of(grid: PartialLayout) -> tuple[int, ...]:
    """The layout that a grid belongs to."""
    return tuple(_LAYOUT(grid.dims))


@frozen
class SolvedLayout:
    """A layout with its best stages.

    Args:
        iteration: predicted step, in ticks.
    """

    layout: Layout
    iteration: Ticks

    @classmethod
    def of(
        cls,
        grid: PartialLayout,
        recompute: Recompute,
        found: StageSolution,
        sharding: DataParallelSharding | None,
    ) -> SolvedLayout:
        """The stages that were found of a layout under a recompute setting.

        Args:
            sharding: what divides states among replicas; ``None`` is what carries the ZeRO stage.
        """
        pp = grid.dims.pipeline_model_parallel_size
        stages = StagePartition(boundaries=found.boundaries, pipeline_model_parallel_size=pp)
        chosen = dataclasses.replace(grid, recompute=recompute)
        return cls(layout=chosen.with_stages(stages, sharding), iteration=found.iteration)

    @property
    def rank(self) -> tuple[object, ...]:
        """Order of preference: faster first, then the tie rule on what is simpler to run."""
        return (self.iteration, *preference(self.layout))


def fastest(plans: Iterable[SolvedLayout | None]) -> SolvedLayout | None:
    """The first of the plans in the order of preference."""
    return min((plan for plan in plans if plan is not None), key=lambda p: p.rank, default=None)


def preference(grid: PartialLayout) -> tuple[object, ...]:
    """Tie rule: fewer GPUs, then smaller degrees, then less recomputation and less sharding."""
    dims, recompute = grid.dims, grid.recompute
    return (
        dims.world_size,
        dims.tensor_model_parallel_size,
        dims.pipeline_model_parallel_size,
        dims.context_parallel_size,
        dims.expert_tensor_parallel_size,
        dims.expert_model_parallel_size,
        dims.virtual_pipeline_model_parallel_size,
        grid.micro_batch_size,
        int(grid.zero),
        _GRANULARITIES.index(recompute.granularity),
        recompute.method or "",
        recompute.num_layers or 0,
        recompute.modules,
        dims.rank_order.value,
        repr(grid.execution),
    )


@frozen
class SearchResult:
    """The best plan of each of the best layouts, fastest first, and what is proven.

    Args:
        ties: the plans that take hardly longer than the fastest, one for each layout, number of
            virtual stages, and whether Megatron cuts its stages by itself.
        present: what the job runs today, if it fits.
        finished: false if time ended the search: what it did not decide is in no count but
            ``candidates``, which then holds those met so far.
        optimal: nothing in the declared space is faster than the answer.
        lower_bound: nothing in it is faster than this, in ticks.
        candidates: plans in the space, each a grid with recompute and ZeRO choice.
        bounded: those proven too slow without being solved; 0 where time ended the search, which
            then counts no more.
        infeasible: those that cannot fit, by reason.
        solved: those whose best stage partition was computed.
        illegal: what refuses some combinations of degrees: rules of Megatron, or the space.
        nodes, simulations: work of the stage solver.
    """

    plans: tuple[SolvedLayout, ...]
    ties: tuple[SolvedLayout, ...]
    present: SolvedLayout | None
    finished: bool
    optimal: bool
    lower_bound: Ticks
    candidates: int
    bounded: int
    infeasible: dict[str, int]
    solved: int
    illegal: tuple[str, ...]
    nodes: int
    simulations: int

    @property
    def fastest(self) -> SolvedLayout:
        """The plan with the shortest step; of equal ones what runs today."""
        present, first = self.present, self.plans[0]
        return present if present and present.iteration == first.iteration else first

    @property
    def known(self) -> tuple[SolvedLayout, ...]:
        """All of them, each once."""
        plans = (*self.plans, *self.ties, self.present)
        return tuple(plan for plan in dict.fromkeys(plans) if plan is not None)
