"""The layout that ``estimate`` prices: what the user gave, the rest by Megatron's own defaults."""

from __future__ import annotations

import dataclasses

from nest_megatron.config.compose import Composed
from nest_megatron.config.request import check_quotients, request_of
from nest_megatron.config.space import fixed_degrees, read_rank_order, read_recompute, read_zero
from nest_megatron.errors import UserInputError
from nest_megatron.parallel.dims import ParallelDims, RankOrder
from nest_megatron.parallel.execution_rules import allowed_execution
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.layout import expand_layout, parse_layout, uniform_partition
from nest_megatron.parallel.objective import Objective
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.parallel.recompute import NO_RECOMPUTE
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.planner import PlanRequest, estimate_plan, plan
from nest_megatron.solver.space import DEGREES, SearchSpace


def estimate_layout(composed: Composed) -> tuple[ParallelPlan, tuple[str, ...]]:
    """Price the layout of a configuration.

    Returns:
        The plan with its prediction, and notes on what was assumed.

    Raises:
        UserInputError: if the layout is none that Megatron launches.
    """
    request = request_of(composed, SearchSpace())
    grid, notes = _grid(composed, request)
    notes = (*notes, *request.profile_notes)
    text = composed.config.parallel.pipeline_model_parallel_layout
    pp = grid.dims.pipeline_model_parallel_size
    if text is not None:
        partition = parse_layout(text, request.spec, pp)
        return _priced(request, grid, partition), notes
    try:
        partition = uniform_partition(request.spec, pp, _virtual(grid))
    except UserInputError as error:
        found, note = _uneven(request, grid)
        return found, (*notes, f"{error.what} = {error.value} does not split evenly; {note}")
    return _priced(request, grid, partition), notes


def _priced(request: PlanRequest, grid: Grid, partition: StagePartition) -> ParallelPlan:
    return estimate_plan(
        request.spec,
        request.cluster,
        request.settings,
        grid,
        partition,
        request.times,
        request.reliability,
    )


def _virtual(grid: Grid) -> int:
    return grid.dims.virtual_pipeline_model_parallel_size


def _uneven(request: PlanRequest, grid: Grid) -> tuple[ParallelPlan, str]:
    """The fastest partition of a grid that does not split evenly, or the evenest if none fits."""
    if grid.sequence_parallel == (grid.dims.tensor_model_parallel_size > 1):
        space = _this_grid(request.space, grid)
        check_quotients(space, request.cluster.num_gpus, request.global_batch_size)
        request = dataclasses.replace(
            request, space=space, num_alternatives=0, objective=Objective.NOMINAL
        )
        found = plan(request)
        if isinstance(found, ParallelPlan):
            which = "" if found.search.certificate == "optimal" else " found in the time"
            return found, f"the fastest uneven layout{which} that fits is used."
    partition = even_partition(request, grid)
    return _priced(request, grid, partition), "the layers are spread as evenly as they go."


def even_partition(request: PlanRequest, grid: Grid) -> StagePartition:
    """Layers spread over the virtual stages so that no two differ by more than one."""
    chunks, units = grid.dims.num_chunks, len(request.spec.layer_kinds())
    if chunks > units:
        raise UserInputError(
            "pipeline_model_parallel_size * virtual_pipeline_model_parallel_size",
            value=chunks,
            limit=f"every stage holds a unit, and the model has {units}",
            fix="Use fewer stages.",
        )
    boundaries = tuple(k * units // chunks for k in range(chunks + 1))
    pp = grid.dims.pipeline_model_parallel_size
    return StagePartition(boundaries=boundaries, pipeline_model_parallel_size=pp)


def _this_grid(space: SearchSpace, grid: Grid) -> SearchSpace:
    fixed = {name: getattr(grid.dims, name) for name in DEGREES if name != "micro_batch_size"}
    return dataclasses.replace(
        space,
        fixed={**fixed, "micro_batch_size": grid.micro_batch_size},
        rank_orders=(grid.dims.rank_order,),
        zero_stages=(grid.zero,),
        recompute=grid.recompute,
    )


def _grid(composed: Composed, request: PlanRequest) -> tuple[Grid, tuple[str, ...]]:
    config = composed.config
    given = fixed_degrees(config)
    micro = given.pop("micro_batch_size", 1)
    dims, notes = _dims(composed, request, given)
    batch = request.global_batch_size
    if config.train.global_batch_size is None:
        step = micro * dims.data_parallel_size
        batch = -(-batch // step) * step
        notes.append(f"train.global_batch_size is not given; {batch} sequences are assumed.")
    sequence_parallel = config.parallel.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = dims.tensor_model_parallel_size > 1
    zero, recompute = read_zero(config.parallel), read_recompute(config.parallel)
    grid = Grid(
        dims=dims,
        global_batch_size=batch,
        micro_batch_size=micro,
        sequence_parallel=sequence_parallel,
        recompute=NO_RECOMPUTE if recompute is None else recompute,
        zero=ZeroStage.OPTIMIZER if zero is None else zero,
    )
    execution = allowed_execution(request.space.execution, grid)
    return dataclasses.replace(grid, execution=execution), tuple(notes)


def _dims(
    composed: Composed, request: PlanRequest, given: dict[str, int]
) -> tuple[ParallelDims, list[str]]:
    notes: list[str] = []
    parallel = composed.config.parallel
    if request.spec.num_experts is not None:
        # Megatron's default for an absent --expert-tensor-parallel-size.
        tp = given.get("tensor_model_parallel_size", 1)
        given.setdefault("expert_tensor_parallel_size", tp)
    text, pp = parallel.pipeline_model_parallel_layout, given.get("pipeline_model_parallel_size", 1)
    if text is not None and len(expand_layout(text)) % pp == 0:
        virtual = len(expand_layout(text)) // pp
        said = given.setdefault("virtual_pipeline_model_parallel_size", virtual)
        if said != virtual:
            raise UserInputError(
                "parallel.virtual_pipeline_model_parallel_size",
                value=said,
                limit=f"the layout has {virtual} virtual stages on each of the {pp} ranks",
                fix="Leave it out.",
            )
    _fill_data_parallel(request, given)
    order = read_rank_order(parallel) or RankOrder.TP_CP_EP_DP_PP
    return ParallelDims(**given, rank_order=order), notes


def _fill_data_parallel(request: PlanRequest, given: dict[str, int]) -> None:
    """All GPUs that are left replicate, unless the user says how many do."""
    if "data_parallel_size" in given:
        return
    one_replica = ParallelDims(
        tensor_model_parallel_size=given.get("tensor_model_parallel_size", 1),
        context_parallel_size=given.get("context_parallel_size", 1),
        pipeline_model_parallel_size=given.get("pipeline_model_parallel_size", 1),
    ).world_size
    gpus = request.cluster.num_gpus
    if gpus % one_replica:
        raise UserInputError(
            "tp * cp * pp",
            value=one_replica,
            limit=f"it must divide the {gpus} GPUs of the cluster",
            fix="Change a degree or cluster.num_gpus, or give parallel.data_parallel_size.",
        )
    given["data_parallel_size"] = gpus // one_replica
