"""The question and the answer of a baseline; networks and partitions as methods see them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import PeakLimit
from nest_megatron.cost_model.pipeline import PipelineProblem
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import FULL_RECOMPUTE, NO_RECOMPUTE, Recompute
from nest_megatron.layout.stage_layout import StagePartition, uniform_partition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.one_partition import solver_of_partition
from nest_megatron.solver.outcome import (
    DEFAULT_NODE_LIMIT,
    NO_THRESHOLD,
    StageSolution,
    StageSolver,
)
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace
from nest_megatron.units import Seconds

Option = TypeVar("Option")
Boundaries = tuple[int, ...]

#: Why a method that knows memory finds nothing.
NOTHING_FITS = "nothing that it may choose fits in memory"
NOTHING_LEGAL = "Megatron launches none of the layouts that it may choose"
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
            value, limit = (
                self.space.partition.boundaries,
                "planners are compared by their stages, too",
            )
            raise UserInputError("stage layout", value, limit, "Leave the layout out.")

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
        problem = stage_problem(self.model, grid)
        return problem._replace(capacity_bytes=self.peaks.of(grid))

    def search(self, model: CostModel, space: SearchSpace) -> tuple[SolvedLayout | None, int]:
        """The fastest plan of a space under a cost model, and how many candidates there are."""
        search = Search(
            model,
            self.global_batch_size,
            space,
            self.solve_stages,
            limit=self.peaks,
            num_layouts=1,
            out_of_time=self.out_of_time,
        )
        result = search.run()
        return (result.plans[0] if result.plans else None), result.candidates

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


def chosen(plan: SolvedLayout | None, candidates: int, reason: str) -> BaselineChoice:
    """A choice among so many candidates; the reason is for the plan, where there is one."""
    if plan is None:
        reason = NOTHING_FITS if candidates else NOTHING_LEGAL
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
        zero_stages=_allowed(zero_stages, space.zero_stages),
        rank_orders=_allowed(rank_orders, space.rank_orders),
        recompute=space.recompute or recompute,
        use_all_gpus=True,
    )


def _allowed(wanted: tuple[Option, ...], allowed: tuple[Option, ...]) -> tuple[Option, ...]:
    return tuple(option for option in wanted if option in allowed) or allowed


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
        accounts = {"account_embedding": counted, "account_loss": counted}
        with contextlib.suppress(UserInputError):
            return uniform_partition(spec, num_chunks, **accounts).boundaries
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
