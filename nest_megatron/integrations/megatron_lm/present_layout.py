"""The layout that a job runs today, as its flags or fields state it; why Megatron refuses one."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.compose import Settings
from nest_megatron.config.job import CostInputs, Job
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.attach import (
    is_blackwell,
    layout_request,
)
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    OVERLAPS,
    Values,
    flag_error,
    naming_fields,
    partition_of_values,
    rank_order_of,
    read_recompute,
    read_zero,
)
from nest_megatron.layout.dims import REPLICA_DEGREES, ParallelDims
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.layout import Layout, PartialLayout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.policy import violations
from nest_megatron.layout.recompute import NO_RECOMPUTE, RecomputeGranularity
from nest_megatron.layout.rulebook import first_broken
from nest_megatron.layout.rulebook.options import BESIDE_PLANS
from nest_megatron.layout.stage_layout import is_uniform, uniform_partition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import Execution
from nest_megatron.planner import Request
from nest_megatron.planner.changes import Refusal
from nest_megatron.planner.layouts import Variant, estimate_for

_TP, _MICRO = "tensor_model_parallel_size", "micro_batch_size"
_DISPATCHER = "moe_token_dispatcher_type"


def with_device_settings(job: Job, cluster: Cluster) -> Job:
    """A job with the settings that its recipe has on the devices of a cluster alone."""
    if not (job.on_blackwell and is_blackwell(cluster.accelerator.name)):
        return job
    return replace(job, memory_flags={**job.memory_flags, **job.on_blackwell})


def with_present_layout(request: Request, job: Job, composed: Settings) -> Request:
    """A job's request with what runs today as a point of its space, where that may be kept.

    It may where the job states a whole layout that Megatron launches, and nothing that is fixed, by
    a setting, a checkpoint or a policy, forbids it.
    """
    try:
        variant, refused = typed_layout(job, request, composed)
    except UserInputError:  # such as no micro batch: it is no job that runs
        return request
    if refused:
        return replace(
            request,
            notes=(*request.notes, f"The present layout is no point of the search. {refused}"),
        )
    layout = variant.layout
    if not _is_in_space(request, layout):
        return request
    if request.policy:
        plan = estimate_for(request, layout)
        if any(any(violations(plan, file)) for file in request.policy):
            return request
    space = request.space
    recompute = layout.recompute
    # a limit that the user has set holds for other layouts
    beyond = {
        name: value
        for name, value in layout.sizes.items()
        if name not in (*space.fixed, *space.limits)
        and not space.allows(name, value, request.cluster)
    }
    is_full = recompute.granularity is RecomputeGranularity.FULL
    is_tried = space.without_modules.isdisjoint(recompute.modules)
    is_tried &= space.full_recompute or not is_full
    return replace(
        request,
        present=layout,
        present_settings=None if variant.settings == request.settings else variant.settings,
        space=replace(space, present=beyond, present_recompute=recompute if is_tried else None),
    )


def _is_in_space(request: Request, layout: Layout) -> bool:
    """Whether a layout is one of the space but for its limits."""
    space = request.space
    sizes = layout.sizes
    return (
        all(sizes[name] == value for name, value in space.fixed.items())
        and all(sizes[name] >= least for name, least in space.least.items())
        and layout.zero in space.zero_stages
        and layout.sharding is (space.sharding or layout.zero.sharding)
        and layout.dims.rank_order in space.rank_orders
        and layout.recompute in (space.recompute or layout.recompute,)
        and layout.sequence_parallel in (sizes[_TP] > 1 and space.sequence_parallel, False)
        and layout.partition in (space.partition or layout.partition,)
        and (not space.even_stages or is_uniform(request.spec, layout.partition))
        and (not space.use_all_gpus or layout.num_gpus == request.cluster.num_gpus)
    )


def typed_layout(job: Job, request: Request, composed: Settings) -> tuple[Variant, str]:
    """A command's layout, and why Megatron or this planner refuses it.

    What is not typed is Megatron's default (``validate_args``): degrees of 1, one replica on the
    GPUs that are left, nothing overlapped or divided.

    Raises:
        UserInputError: for degrees that do not multiply out to the GPUs or divide the batch, and
            stages that Megatron does not build.
    """
    values = job.values
    spec = request.spec
    dims = _dims(job, request)
    pp = dims.pipeline_model_parallel_size
    stages = partition_of_values(spec, values, pp) or uniform_partition(spec, pp)
    virtual = stages.num_chunks // pp
    if (micro := values.get(_MICRO)) is None:
        raise flag_error(
            _MICRO, None, "Megatron-LM does not start without it", "Add it to the command."
        )
    grid = PartialLayout(
        dims=replace(dims, virtual_pipeline_model_parallel_size=virtual),
        global_batch_size=request.global_batch_size,
        micro_batch_size=int(micro),
        # Megatron turns it off where there is no tensor group
        sequence_parallel=bool(values.get("sequence_parallel"))
        and dims.tensor_model_parallel_size > 1,
        recompute=read_recompute(values) or NO_RECOMPUTE,
        zero=read_zero(values) or ZeroStage.NONE,
    )
    asked = _execution(job, request, composed)
    done = allowed_execution(asked, grid)
    if not spec.moe_shared_expert_intermediate_size:  # there is nothing to overlap
        done = replace(done, moe_shared_expert_overlap=False)
    grid = replace(grid, execution=done)
    settings = request.settings
    traits = request.settings.traits
    reduces, gathers = (  # True, or of a recipe the number of replicas from which on it is
        values.get(name) in range(1, dims.data_parallel_size + 1) for name in OVERLAPS
    )
    if "cost.dp_overlap" not in composed.given:  # what is overlapped hides, and no more
        if not (reduces or grid.zero.is_fsdp):  # which does by itself (megatron_fsdp.py:277)
            settings = replace(settings, dp_overlap=0.0)
        elif not gathers and grid.zero in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS):
            traits = replace(traits, overlap_param_gather=False)
    if virtual > 1 and values.get("overlap_p2p_comm") is False:
        traits = replace(traits, overlap_p2p_comm=False)
    layout = replace(
        grid.with_stages(stages, job.sharding),
        overlap_grad_reduce=reduces,
        overlap_param_gather=gathers,
    )
    variant = Variant(settings=replace(settings, traits=traits), layout=layout)
    return variant, refusal(request, job, asked)(variant)


def refusal(request: Request, job: Job, asked: Execution | None = None) -> Refusal:
    """Why Megatron refuses a layout of a command's job: the first rule, with its source.

    Args:
        asked: how layers are to run, where not as the layout says.
    """
    return lambda variant: refusal_text(
        request,
        variant,
        job.values,
        job.version,
        asked,
        options={**job.values, **job.options} if asked else None,
    )


def refusal_text(
    request: Request,
    variant: Variant,
    values: Values,
    version: str,
    asked: Execution | None = None,
    *,
    but: Collection[str] = BESIDE_PLANS,
    options: Values | None = None,
) -> str:
    """Who refuses a layout of a job, with the first rule that it breaks; empty for none.

    Args:
        values: the job's arguments by destination.
        but: rules that are left out.
        options: those that stay; a plan takes back what contradicts it.
    """
    launched = layout_request(
        request.spec,
        variant.layout,
        variant.settings,
        execution=asked or variant.layout.execution,
        schedule=request.batch_schedule,
        values=values,
        version=version,
    )
    return first_broken(replace(launched, options=options or launched.options), but=but)


def _dims(job: Job, request: Request) -> ParallelDims:
    """The degrees that are typed, one virtual stage a rank; the GPUs that are left replicate."""
    values = job.values
    degrees = {
        name: int(values.get(name) or 1)
        for name in (*REPLICA_DEGREES, "expert_model_parallel_size")
    }
    if request.spec.is_moe:
        etp = "expert_tensor_parallel_size"
        degrees[etp] = int(values.get(etp) or degrees[_TP])
    replica = math.prod(degrees[name] for name in REPLICA_DEGREES)
    gpus = request.cluster.num_gpus
    if gpus % replica:
        raise UserInputError(
            "tp * cp * pp",
            replica,
            f"tp * cp * pp must divide the {gpus} GPUs of the job (arguments.py:317)",
            "Change a degree, or say with cluster.num_gpus or the launcher how many GPUs run it.",
        )
    return ParallelDims(
        **degrees, data_parallel_size=gpus // replica, rank_order=rank_order_of(values)
    )


def _execution(job: Job, request: Request, composed: Settings) -> Execution:
    """As the flags say; of experts with the dispatcher that Megatron has where none is typed."""
    flags = {**with_device_settings(job, request.cluster).memory_flags}
    if request.spec.is_moe and (own := job.values.get(_DISPATCHER)) is not None:
        flags[_DISPATCHER] = own
    job = replace(job, spec=request.spec, memory_flags=flags)
    return CostInputs(composed, job, request.cluster.accelerator.name).execution()


def typed_plan(job: Job, request: Request, composed: Settings) -> tuple[ParallelPlan, Variant]:
    """The plan that a command is as it is typed, and its layout.

    Raises:
        UserInputError: for what no plan may have, with the rule of Megatron or of ours.
    """
    with naming_fields(job.fields):
        variant, refused = typed_layout(job, request, composed)
        for name, need in job.required.items():
            own = variant.layout.sizes.get(name, need.value)
            if need.value not in (None, own):
                refused = f"{name} = {own}: {need.limit}"
        if refused:
            raise UserInputError(
                "--from",
                job.script,
                refused,
                "Change its flags (--set)." if job.command else "Change the recipe's fields.",
            )
    return estimate_for(request, variant.layout, settings=variant.settings), variant
