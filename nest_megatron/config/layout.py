"""The layout that ``estimate`` prices, and how it divides a layer: Megatron fills what is open."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from nest_megatron.config.compose import Settings
from nest_megatron.config.request import request_of
from nest_megatron.config.space import (
    check_quotients,
    fixed_degrees,
    read_rank_order,
    read_recompute,
    read_zero,
)
from nest_megatron.config.train import REPLICA_DEGREES
from nest_megatron.errors import UserInputError, require_at_least
from nest_megatron.layout.dims import ParallelDims, RankOrder
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.layout.rulebook import require_legal
from nest_megatron.layout.rulebook.facts import LaunchRequest
from nest_megatron.layout.stage_layout import (
    expand_layout,
    parse_layout,
    spread_partition,
    uniform_partition,
)
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import Request, plan
from nest_megatron.planner.layouts import estimate_for
from nest_megatron.solver.space import DEGREES, SearchSpace

#: Degrees that change what one rank does in a layer.
LAYER_DEGREES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def estimate_layout(settings: Settings) -> tuple[ParallelPlan, tuple[str, ...]]:
    """Price the layout of a configuration, if Megatron launches it; with what was assumed."""
    request = request_of(settings, SearchSpace())
    grid, notes = _grid(settings, request)
    notes = (*notes, *request.profile_notes)
    text = settings.parallel.pipeline_model_parallel_layout
    pp = grid.dims.pipeline_model_parallel_size
    if text is not None:
        partition = parse_layout(text, request.spec, pp)
        return estimate_for(request, grid.with_stages(partition)), notes
    try:
        virtual = grid.dims.virtual_pipeline_model_parallel_size
        partition = uniform_partition(request.spec, pp, virtual)
    except UserInputError as error:
        found, note = _uneven(request, grid)
        return found, (*notes, f"{error.what} = {error.value} does not split evenly; {note}")
    return estimate_for(request, grid.with_stages(partition)), notes


def _uneven(request: Request, grid: PartialLayout) -> tuple[ParallelPlan, str]:
    """The fastest partition of a grid that does not split evenly, or the evenest if none fits."""
    if grid.sequence_parallel == (grid.dims.tensor_model_parallel_size > 1):
        fixed = {name: getattr(grid.dims, name) for name in DEGREES if name != "micro_batch_size"}
        space = replace(
            request.space,
            fixed={**fixed, "micro_batch_size": grid.micro_batch_size},
            rank_orders=(grid.dims.rank_order,),
            zero_stages=(grid.zero,),
            recompute=grid.recompute,
        )
        check_quotients(space, request.cluster.num_gpus, request.global_batch_size)
        request = replace(request, space=space, num_alternatives=0)
        found = plan(request)
        if isinstance(found, ParallelPlan):
            which = "" if found.search.certificate == "optimal" else " found in the time"
            return found, f"the fastest uneven layout{which} that fits is used."
    partition = spread_partition(request.spec, grid.dims)
    return estimate_for(
        request, grid.with_stages(partition)
    ), "the layers are spread as evenly as they go."


def _grid(settings: Settings, request: Request) -> tuple[PartialLayout, tuple[str, ...]]:
    given = fixed_degrees(settings)
    micro = given.pop("micro_batch_size", 1)
    dims, notes = _dims(settings, request, given), list[str]()
    batch = request.global_batch_size
    if settings.train.global_batch_size is None and request.batch_schedule is None:
        step = micro * dims.data_parallel_size
        batch = -(-batch // step) * step
        notes.append(f"train.global_batch_size is not given; {batch} sequences are assumed.")
    sequence_parallel = settings.parallel.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = dims.tensor_model_parallel_size > 1
    zero, recompute = read_zero(settings.parallel), read_recompute(settings.parallel)
    grid = PartialLayout(
        dims=dims,
        global_batch_size=batch,
        micro_batch_size=micro,
        sequence_parallel=sequence_parallel,
        recompute=NO_RECOMPUTE if recompute is None else recompute,
        zero=ZeroStage.OPTIMIZER if zero is None else zero,
    )
    execution = allowed_execution(request.space.execution, grid)
    return replace(grid, execution=execution), tuple(notes)


def _dims(settings: Settings, request: Request, given: dict[str, int]) -> ParallelDims:
    parallel = settings.parallel
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
                said,
                limit=f"the layout has {virtual} virtual stages on each of the {pp} ranks",
                fix="Leave it out.",
            )
    if "data_parallel_size" not in given:  # all GPUs that are left replicate
        given["data_parallel_size"] = _replicas(request.cluster.num_gpus, given)
    order = read_rank_order(parallel) or RankOrder.TP_CP_EP_DP_PP
    return ParallelDims(**given, rank_order=order)


def _replicas(gpus: int, given: Mapping[str, int]) -> int:
    degrees: dict[str, Any] = {name: given.get(name, 1) for name in REPLICA_DEGREES}
    one_replica = ParallelDims(**degrees).world_size
    if gpus % one_replica == 0:
        return gpus // one_replica
    limit = f"it must divide the {gpus} GPUs of the cluster"
    fix = "Change a degree or cluster.num_gpus, or give parallel.data_parallel_size."
    raise UserInputError("tp * cp * pp", one_replica, limit, fix)


def read_shard(
    settings: Settings, spec: TransformerSpec, flags: Mapping[str, Any] = MappingProxyType({})
) -> LayerShard:
    """How the configuration divides a layer; what is not given is Megatron's default.

    Args:
        flags: a command's, which count where the configuration says nothing.

    Raises:
        UserInputError: for degrees that Megatron does not build this model with.
    """
    parallel, train = settings.parallel, settings.train
    given = {}
    for name in LAYER_DEGREES:
        stated = getattr(parallel, name)
        given[name] = flags.get(name) if stated is None else stated
    degrees: dict[str, Any] = {name: 1 if n is None else n for name, n in given.items()}
    tp = degrees["tensor_model_parallel_size"]
    if spec.num_experts is not None and given["expert_tensor_parallel_size"] is None:
        degrees["expert_tensor_parallel_size"] = tp  # Megatron's own default
    sequence_parallel = parallel.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = flags.get("sequence_parallel", tp > 1) and tp > 1
    micro_batch_size = train.micro_batch_size
    if micro_batch_size is None:
        micro_batch_size = flags.get("micro_batch_size") or 1
    shard = LayerShard(
        **degrees, micro_batch_size=micro_batch_size, sequence_parallel=sequence_parallel
    )
    _check(spec, shard)
    return shard


def _check(spec: TransformerSpec, shard: LayerShard) -> None:
    """Megatron's rules on degrees, on the smallest grid that holds them."""
    micro, fix = shard.micro_batch_size, "Give the sequences of one micro batch."
    require_at_least("train.micro_batch_size", micro, 1, fix)
    degrees = {name: getattr(shard, name) for name in LAYER_DEGREES}
    for name, value in degrees.items():
        if value < 1:
            ParallelDims(**{name: value})  # says what is wrong with it
    experts = shard.expert_model_parallel_size * shard.expert_tensor_parallel_size
    ranks = shard.tensor_model_parallel_size * shard.context_parallel_size
    replicas = experts // math.gcd(experts, ranks)
    asked = LaunchRequest(
        spec=spec,
        dims=ParallelDims(**degrees, data_parallel_size=replicas),
        micro_batch_size=shard.micro_batch_size,
        global_batch_size=shard.micro_batch_size * replicas,
        sequence_parallel=shard.sequence_parallel,
        moe_grouped_gemm=spec.is_moe,
    )
    require_legal(asked)
