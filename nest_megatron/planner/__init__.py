"""From a request to a plan: price, search, explain. The only room that knows all rooms below."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.degree_rules import DEGREE_RULES, violations
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.parallel.rules import LaunchRequest
from nest_megatron.planner.assemble import (
    alternative,
    assemble,
    nothing_searched,
    search_record,
)
from nest_megatron.planner.offers import with_offer
from nest_megatron.planner.request import NUM_ALTERNATIVES, PlanRequest
from nest_megatron.planner.shortage import (
    NoPlan,
    describe_grid,
    no_plan,
    refuse_if_nothing_is_legal,
)
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.solver.backend import choose, solver_of
from nest_megatron.solver.ranking import SearchResult, SolvedGrid
from nest_megatron.solver.search import Search
from nest_megatron.units import Ticks, to_seconds

__all__ = [
    "NUM_ALTERNATIVES",
    "NoPlan",
    "PlanRequest",
    "check_launchable",
    "describe_grid",
    "estimate_plan",
    "plan",
]

#: Called with (candidates solved, best time so far in seconds or None, proven bound in seconds).
Progress = Callable[[int, float | None, float], None]


def plan(
    request: PlanRequest, on_progress: Progress | None = None, *, choose: int = 0
) -> ParallelPlan | NoPlan:
    """Find the fastest plan that fits.

    Args:
        choose: take this runner-up instead of the best (0).

    Returns:
        The plan with its certificate, or what is missing if nothing fits.

    Raises:
        UserInputError: if no combination of degrees is legal, naming the rules that refuse them, or
            there is no such runner-up.
    """
    model = CostModel(request.spec, request.cluster, request.settings, request.times)
    started = time.perf_counter()
    result = _search(request, model, started, on_progress)
    seconds = time.perf_counter() - started
    record = search_record(request, result, seconds)
    if not result.plans:
        refuse_if_nothing_is_legal(request, result)
        return no_plan(request, model, record)
    plans = list(result.plans)
    if choose >= len(plans):
        raise UserInputError(
            "nest.alternative",
            value=choose,
            limit=f"the search ranked {len(plans) - 1} runners-up",
            fix="Give a smaller number, or raise search.num_alternatives.",
        )
    chosen = plans.pop(choose)
    if choose:
        slower = 100.0 * (chosen.iteration - plans[0].iteration) / plans[0].iteration
        record = dataclasses.replace(record, certificate="runner-up", gap_percent=slower)
    alternatives = tuple(alternative(request.spec, chosen, other) for other in plans)
    sharding = request.space.sharding
    found = assemble(model, request.settings, chosen, alternatives, record, sharding)
    return with_offer(found, request, plan)


def estimate_plan(
    spec: TransformerSpec,
    cluster: Cluster,
    settings: CostSettings,
    grid: Grid,
    partition: StagePartition,
    times: LayerTimes | None = None,
) -> ParallelPlan:
    """A plan for a layout that the user chose, with its prediction; nothing is searched.

    Args:
        times: measured times of the model's layers.

    Raises:
        UserInputError: if Megatron would refuse the layout, or it is not of the cluster's size.
    """
    if grid.dims.world_size > cluster.num_gpus:
        raise UserInputError(
            "tp * pp * cp * dp",
            value=grid.dims.world_size,
            limit=f"the cluster has {cluster.num_gpus} GPUs",
            fix="Lower a degree or raise cluster.num_gpus.",
        )
    check_launchable(spec, settings, grid, partition)
    model = CostModel(spec, cluster, settings, times)
    solved = SolvedGrid(grid=grid, boundaries=partition.boundaries, iteration=0)
    return assemble(model, settings, solved, (), nothing_searched())


def check_launchable(
    spec: TransformerSpec, settings: CostSettings, grid: Grid, partition: StagePartition
) -> None:
    """Refuse a layout that breaks one of Megatron's rules on degrees.

    Raises:
        UserInputError: for the first rule broken.
    """
    request = LaunchRequest(
        spec=spec,
        dims=grid.dims,
        micro_batch_size=grid.micro_batch_size,
        global_batch_size=grid.global_batch_size,
        partition=partition,
        recompute=grid.recompute,
        zero=grid.zero,
        precision=settings.precision,
        sequence_parallel=grid.sequence_parallel,
        moe_grouped_gemm=spec.is_moe,
    )
    for _, violation in violations(request, DEGREE_RULES):
        raise UserInputError(
            violation.what, value=violation.value, limit=violation.limit, fix=violation.fix
        )


def _search(
    request: PlanRequest, model: CostModel, started: float, on_progress: Progress | None
) -> SearchResult:
    def report(solved: int, best: Ticks, bound: Ticks) -> None:
        assert on_progress is not None
        on_progress(solved, to_seconds(best), to_seconds(bound))

    search = Search(
        model,
        request.global_batch_size,
        request.space,
        solver_of(choose(request.backend)),
        num_layouts=request.num_alternatives + 1,
        out_of_time=lambda: time.perf_counter() - started > request.max_seconds,
        on_progress=report if on_progress else None,
    )
    return search.run()
