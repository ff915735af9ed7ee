"""The question and the answer of a baseline; networks and layouts as methods see them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import PeakLimit
from nest_megatron.cost_model.pipeline import PipelineProblem, memory_of_ranks
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import FULL_RECOMPUTE, NO_RECOMPUTE, Recompute
from nest_megatron.layout.stage_layout import StagePartition, uniform_partition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import Execution
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.one_partition import join_chunks, solver_of_partition
from nest_megatron.solver.outcome import (
    DEFAULT_NODE_LIMIT,
    NO_THRESHOLD,
    StageSolution,
    StageSolver,
)
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.solver.search import UNLIMITED
from nest_megatron.solver.space import SearchSpace
from nest_megatron.units import Bytes, Seconds, Ticks

Boundaries = tuple[int, ...]

#: Why a method that knows memory finds nothing.
NOTHING_FITS = "nothing that it may choose fits in memory"
#: Degrees that the methods of most papers do not have.
PLAIN = ("context_parallel_size", "virtual_pipeline_model_parallel_size")


@frozen
class ComparisonJob:
    """A job to plan on the real cluster; its stage partition is for the planners to choose.

    Args:
        space: what our search may choose among; a baseline restricts it further.
        peaks: the largest peaks of plans on the real cluster, by their chance to run out of memory.
        out_of_time: called by exact searches; once true they stop with the best so far.
    """

    model: CostModel
    global_batch_size: int
    space: SearchSpace
    solve_stages: StageSolver
    peaks: PeakLimit
    out_of_time: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        if self.space.partition is not None:
            raise UserInputError(
                "stage layout",
                self.space.partition.boundaries,
                "planners are compared by their stages, too",
                "Leave the layout out.",
            )

    def grids(self, space: SearchSpace) -> GridSpace:
        """The legal grids of a space for this job."""
        return GridSpace(self.model, self.global_batch_size, space)

    def families(self, space: SearchSpace) -> Iterator[PartialLayout]:
        """Every legal grid of a space, but for its recomputation."""
        grids = self.grids(space)
        for shard in grids.shards():
            for grid in grids.grids(shard):
                yield from grids.families(grid)

    def all_or_no_recompute(self) -> tuple[Recompute, ...]:
        """Both ends of recomputation, or the user's setting."""
        fixed = self.space.recompute
        return (NO_RECOMPUTE, FULL_RECOMPUTE) if fixed is None else (fixed,)

    def problem(self, grid: PartialLayout) -> PipelineProblem:
        """The stage problem of a grid on the real cluster, under the limit of its memory."""
        return stage_problem(self.model, grid)._replace(capacity_bytes=self.peaks.of(grid))

    def priced(self, plan: SolvedLayout | None) -> SolvedLayout | None:
        """A plan that another cost model chose, on the real cluster."""
        return plan and self.price(plan.layout.without_stages(), plan.layout.partition.boundaries)

    def price(self, grid: PartialLayout, boundaries: Boundaries) -> SolvedLayout | None:
        """A grid with one partition on the real cluster, or ``None`` if it does not fit."""
        judge = solver_of_partition(self.solve_stages, stages_of(grid, boundaries))
        return solved(grid, judge(self.problem(grid), NO_THRESHOLD, DEFAULT_NODE_LIMIT))


@frozen
class BaselineChoice:
    """What a baseline chose among so many candidates, priced by the full cost model.

    Args:
        reason: how it came to this plan, or why it found none; part of a sentence.
    """

    plan: SolvedLayout | None
    reason: str
    candidates: int


def chosen(
    plan: SolvedLayout | None, candidates: int, reason: str, nothing_fits: str = NOTHING_FITS
) -> BaselineChoice:
    """A choice among so many candidates; the reason is for the plan, where there is one."""
    if plan is None:
        legal = "Megatron launches none of the layouts that it may choose"
        reason = nothing_fits if candidates else legal
    return BaselineChoice(plan=plan, reason=reason, candidates=candidates)


def stages_of(grid: PartialLayout, boundaries: Boundaries) -> StagePartition:
    """Boundaries as the stages of a grid."""
    pp = grid.dims.pipeline_model_parallel_size
    return StagePartition(boundaries=boundaries, pipeline_model_parallel_size=pp)


def solved(grid: PartialLayout, found: StageSolution) -> SolvedLayout | None:
    """A grid with the partition that the stage solver found, if it found one."""
    if not found.boundaries:
        return None
    return SolvedLayout.of(grid, grid.recompute, found, None)


def restricted(
    job: ComparisonJob,
    without: Iterable[str] = (),
    *,
    zero_stages: tuple[ZeroStage, ...] = tuple(ZeroStage),
    rank_orders: tuple[RankOrder, ...] = (RankOrder.TP_CP_EP_DP_PP,),
    recompute: Recompute | None = None,
) -> SearchSpace:
    """The part of a job's space that a method searches.

    Args:
        without: degrees that the method does not have; they are 1 unless the user fixes them.
        zero_stages, rank_orders: those that the method has; the user's if these exclude all.
        recompute: the one setting to try, if the user fixes none.
    """
    space, cluster = job.space, job.model.cluster
    # Stated, because a copy of the cluster without network levels has no node to default to.
    limits = {
        name: space.limit(name, cluster)
        for name in ("tensor_model_parallel_size", "expert_tensor_parallel_size")
        if name not in space.fixed
    }
    return replace(
        space,
        fixed={**dict.fromkeys(without, 1), **space.fixed},
        limits={**limits, **space.limits},
        zero_stages=tuple(z for z in zero_stages if z in space.zero_stages) or space.zero_stages,
        rank_orders=tuple(r for r in rank_orders if r in space.rank_orders) or space.rank_orders,
        recompute=space.recompute or recompute,
        use_all_gpus=True,
    )


def with_network_levels(model: CostModel, number: int) -> CostModel:
    """A cost model with the innermost levels alone, of which the last one joins all devices.

    With one level all GPUs are neighbours, with two all nodes.
    """
    inner, last = model.cluster.levels[: number - 1], model.cluster.levels[number - 1 : number]
    endless = (replace(level, num_devices=None) for level in last)
    cluster = replace(model.cluster, levels=(*inner, *endless))
    return CostModel(model.spec, cluster, model.settings, model.times)


def layer_traffic(model: CostModel, grid: PartialLayout, units: slice = slice(None)) -> Seconds:
    """Traffic inside the layers of some units for one micro batch, none of it hidden."""
    sequence, kinds = model.unit_kinds(grid)
    traffic = 0.0
    for index in sequence[units]:
        run = kinds[index].own.run
        for one in (run.forward, run.backward):
            traffic += one.tp + one.cp + one.ep
    return traffic


def even_partition(spec: TransformerSpec, num_chunks: int) -> Boundaries | None:
    """What Megatron makes without a layout: as many layers in each chunk.

    Where the layers do not divide, embedding and head count as a layer each
    (``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split``);
    ``None`` where that does not come out whole either.
    """
    for counted in (False, spec.num_layers + 2 >= 2 * num_chunks):
        with contextlib.suppress(UserInputError):
            return uniform_partition(
                spec, num_chunks, account_embedding=counted, account_loss=counted
            ).boundaries
    return None


def balanced_partition(spec: TransformerSpec, num_chunks: int) -> Boundaries:
    """Layers as evenly as they go, bigger chunks first; only end chunks may hold none."""
    size, rest = divmod(spec.num_layers, num_chunks)
    layers = [size + 1] * rest + [size] * (num_chunks - rest)
    if not size:
        layers = [spec.num_layers - (num_chunks - 2), *[1] * (num_chunks - 2), 0]
    # the embedding joins the first chunk, MTP layers and the head join the last
    return (0, *(1 + count for count in accumulate(layers[:-1])), spec.num_units)


def moved(boundaries: Boundaries, at: int, by: int) -> Boundaries:
    """A partition with one stage boundary moved."""
    return (*boundaries[:at], boundaries[at] + by, *boundaries[at + 1 :])


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
            # After two rounds of micro batches a rank never holds more than it has held before;
            # fewer of them are much quicker to count.
            rounds = min(one.num_microbatches, 2 * one.num_stages)
            ranks = memory_of_ranks(
                one._replace(num_microbatches=rounds), range(one.num_chunks + 1)
            )
            missing = max(rank.total for rank in ranks) - one.capacity_bytes
        return State(
            grid=grid, boundaries=boundaries, iteration=found.iteration, missing_bytes=missing
        )

    def _solve(self, one: PipelineProblem) -> StageSolution:
        return self.job.solve_stages(one, NO_THRESHOLD, DEFAULT_NODE_LIMIT)


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
