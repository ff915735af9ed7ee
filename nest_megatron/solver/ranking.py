"""Solved plans, the order of preference among them, and what a search proved."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from operator import attrgetter

from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.recompute import Recompute, RecomputeGranularity
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


def layout_of(grid: Grid) -> tuple[int, ...]:
    """The layout that a grid belongs to."""
    return tuple(_LAYOUT(grid.dims))


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedGrid:
    """A grid with its best stage partition.

    Args:
        iteration: predicted step, in ticks.
    """

    grid: Grid
    boundaries: tuple[int, ...]
    iteration: Ticks

    @classmethod
    def of(cls, grid: Grid, recompute: Recompute, found: StageSolution) -> SolvedGrid:
        """The partition that was found of a grid under a recompute setting."""
        chosen = dataclasses.replace(grid, recompute=recompute)
        return cls(grid=chosen, boundaries=found.boundaries, iteration=found.iteration)

    def partition(self) -> StagePartition:
        """Its stages."""
        pp = self.grid.dims.pipeline_model_parallel_size
        return StagePartition(boundaries=self.boundaries, pipeline_model_parallel_size=pp)

    @property
    def rank(self) -> tuple[object, ...]:
        """Order of preference: faster first, then the tie rule on what is simpler to run."""
        return (self.iteration, *preference(self.grid))


def preference(grid: Grid) -> tuple[object, ...]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What the search proved.

    Args:
        finished: false if time ended the search: what it did not decide is in no count but
            ``candidates``, which then holds those met so far.
        optimal: nothing in the declared space is faster than the answer.
        lower_bound: nothing in it is faster than this, in ticks.
        candidates: plans in the space, each a grid with recompute and ZeRO choice.
        bounded: those proven too slow without being solved.
        infeasible: those that cannot fit, by reason.
        solved: those whose best stage partition was computed.
        illegal: combinations of degrees that Megatron refuses, by rule.
        nodes, simulations: work of the stage solver.
    """

    finished: bool
    optimal: bool
    lower_bound: Ticks
    candidates: int
    bounded: int
    infeasible: dict[str, int]
    solved: int
    illegal: dict[str, int]
    nodes: int
    simulations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan of each of the best layouts, fastest first, and what is proven.

    Args:
        present: what the job runs today, if it fits.
    """

    plans: tuple[SolvedGrid, ...]
    certificate: Certificate
    present: SolvedGrid | None = None

    @property
    def fastest(self) -> SolvedGrid:
        """The plan with the shortest step; of equal ones what runs today."""
        own = self.present
        return own if own and own.iteration == self.plans[0].iteration else self.plans[0]

    @property
    def known(self) -> tuple[SolvedGrid, ...]:
        """The plans, and what runs today if it is none of them."""
        own = (self.present,) if self.present is not None else ()
        return tuple(dict.fromkeys((*self.plans, *own)))
