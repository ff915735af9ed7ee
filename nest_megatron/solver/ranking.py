"""Solved plans, the order of preference among them, and what a search proved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from nest_megatron.layout.layout import Layout, PartialLayout
from nest_megatron.layout.recompute import Recompute, RecomputeGranularity
from nest_megatron.layout.stage_layout import StagePartition, is_uniform
from nest_megatron.layout.zero import DataParallelSharding
from nest_megatron.model.spec import TransformerSpec
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


class FastestPlans:
    """The best plan of each of the best layouts, and the plans that tie with the fastest.

    Args:
        spec: the job's model.
        num_layouts, tie_percent, slowest: as of ``Search``.
        cuts_alike: all plans have the stages that Megatron cuts by itself, or none has.

    Attributes:
        slowest: plans that take longer change nothing.
        longest_tie: nor do those that are not the best of their layout, if they take longer.
    """

    def __init__(
        self,
        spec: TransformerSpec,
        num_layouts: int,
        tie_percent: float,
        slowest: Ticks,
        *,
        cuts_alike: bool,
    ) -> None:
        self.spec, self.num_layouts, self.tie_percent = spec, num_layouts, tie_percent
        self.slowest = self.longest_tie = slowest
        self.cuts_alike = cuts_alike
        self.best: dict[tuple[Any, ...], SolvedLayout] = {}
        self.ties: dict[tuple[Any, ...], SolvedLayout] = {}

    def keep(self, plan: SolvedLayout | None) -> None:
        """Keep a plan that is the best of its layout, or simpler than what ties with it."""
        if plan is None or plan.iteration > self.slowest:
            return
        longest = math.floor(plan.iteration * (1 + self.tie_percent / 100))
        self.longest_tie = min(self.longest_tie, longest)
        _keep_better(self.ties, _tie_of(plan.layout, is_even=False), plan)
        if is_uniform(self.spec, plan.layout.partition):
            _keep_better(self.ties, _tie_of(plan.layout, is_even=True), plan)
        is_best = _keep_better(self.best, layout_of(plan.layout), plan)
        if is_best and len(self.best) >= self.num_layouts:
            times = sorted(kept.iteration for kept in self.best.values())
            self.slowest = min(self.slowest, max(times[self.num_layouts - 1], self.longest_tie))

    def threshold(self, grid: PartialLayout, *, decided: bool = True) -> Ticks:
        """Largest time with which a plan of a grid still matters.

        Args:
            decided: whether the grid has its number of virtual stages.
        """
        if not decided:
            return max(_least(self.best, layout_of(grid), self.slowest), self.longest_tie)
        return max(self.threshold_of_any_stages(grid), self.threshold_of_even_stages(grid))

    def threshold_of_any_stages(self, grid: PartialLayout) -> Ticks:
        """Largest time of the fastest plan of the layout, or of a tie with its virtual stages."""
        best = _least(self.best, layout_of(grid), self.slowest)
        return max(best, _least(self.ties, _tie_of(grid, is_even=False), self.longest_tie))

    def threshold_of_even_stages(self, grid: PartialLayout) -> Ticks:
        """Largest time of a tie with the stages that Megatron cuts by itself; -1 for none."""
        if self.cuts_alike or self.spec.num_layers % grid.dims.num_chunks:
            return -1
        return _least(self.ties, _tie_of(grid, is_even=True), self.longest_tie)

    def has_even_tie(self, grid: PartialLayout) -> bool:
        """Whether a plan is known that ties with the fastest and has such stages."""
        return _tie_of(grid, is_even=True) in self.ties

    def least(self) -> Ticks | None:
        """The time of the fastest, ``None`` before there is one."""
        return min((plan.iteration for plan in self.best.values()), default=None)

    def ranked(self) -> tuple[tuple[SolvedLayout, ...], tuple[SolvedLayout, ...]]:
        """The best plans, and those that tie, each in the order of preference."""
        best = sorted(self.best.values(), key=lambda plan: plan.rank)[: self.num_layouts]
        ties = [plan for plan in self.ties.values() if plan.iteration <= self.longest_tie]
        return tuple(best), tuple(sorted(dict.fromkeys(ties), key=lambda plan: plan.rank))


def _least(kept: dict[tuple[Any, ...], SolvedLayout], name: tuple[Any, ...], most: Ticks) -> Ticks:
    """The time of the plan that is kept under a name, ``most`` where it is longer or none is."""
    known = kept.get(name)
    return most if known is None else min(known.iteration, most)


def _keep_better(
    kept: dict[tuple[Any, ...], SolvedLayout], name: tuple[Any, ...], plan: SolvedLayout
) -> bool:
    """Keep a plan under a name where none is kept that is better."""
    is_better = name not in kept or plan.rank <= kept[name].rank
    if is_better:
        kept[name] = plan
    return is_better


def _tie_of(grid: PartialLayout, *, is_even: bool) -> tuple[object, ...]:
    """What tells plans that tie apart."""
    return (*layout_of(grid), grid.dims.virtual_pipeline_model_parallel_size, is_even)


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
