"""A command's own layout: what runs today, exactly as it is typed; nothing is searched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nest_megatron.config.compose import Composed
from nest_megatron.config.job import Job, ReadCommand
from nest_megatron.config.request import request_for
from nest_megatron.config.target import read_execution
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.fields import find
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, layout_request
from nest_megatron.integrations.megatron_lm.layout_arguments import flag_error
from nest_megatron.integrations.megatron_lm.planning import on_device
from nest_megatron.integrations.megatron_lm.read import read_recompute, read_zero
from nest_megatron.integrations.megatron_lm.rules import first_broken
from nest_megatron.integrations.megatron_lm.stage_options import stated_partition
from nest_megatron.integrations.typed_command import CommandPlan, made_for, read_typed
from nest_megatron.model.execution import Execution
from nest_megatron.parallel.dims import ParallelDims, RankOrder
from nest_megatron.parallel.execution_rules import allowed_execution
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.layout import uniform_partition
from nest_megatron.parallel.plan import LaunchCommand, ParallelPlan
from nest_megatron.parallel.plan_file import sealed
from nest_megatron.parallel.recompute import NO_RECOMPUTE
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.planner import PlanRequest
from nest_megatron.planner.changes import Refusal
from nest_megatron.planner.layouts import Layout, estimate_for
from nest_megatron.solver.space import SearchSpace

_TP, _PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_DISPATCHER = "moe_token_dispatcher_type"


def estimate_command(
    text: str | Sequence[str], composed: Composed, *, version: str, strict: bool = False
) -> CommandPlan:
    """Price a command, or the script that launches it, as it is typed.

    Args:
        strict: refuse flags that Megatron-LM does not have.

    Raises:
        UserInputError: for a command that cannot be read, that Megatron refuses, with its rule, or
            a setting of the layout, which is the command's.
    """
    job, cluster = read_typed(text, composed, version=version, strict=strict)
    for name in sorted(composed.given):
        if name.startswith("parallel."):
            limit, fix = "the layout is that of the command", "Give its flag with --set."
            value = find(composed.config, name)
            raise UserInputError(name, value=value, limit=limit, fix=fix)
    job = dataclasses.replace(job, num_gpus=job.num_gpus or cluster.num_gpus)
    asked = on_device(job, cluster)
    request = request_for(asked, cluster, composed, SearchSpace(), choose_execution=False)
    found = typed_plan(job, request, composed, "estimate --from")
    return CommandPlan(
        job=job, request=request, plan=found, notes=request.notes, command=job.command, changes=()
    )


def typed_plan(job: Job, request: PlanRequest, composed: Composed, made_by: str) -> ParallelPlan:
    """The plan that a command is as it is typed, sealed, with that command.

    Raises:
        UserInputError: for what Megatron refuses.
    """
    layout, execution = typed_layout(job, request, composed)
    refused = refusal(request, job, execution)(layout)
    if refused:
        limit, fix = f"Megatron-LM {job.version} refuses it: {refused}", "Change its flags (--set)."
        if job.command is None:
            limit = f"the rules of Megatron-LM {job.version} refuse it: {refused}"
            fix = "Change the recipe's fields."
        raise UserInputError("--from", value=job.script, limit=limit, fix=fix)
    found = estimate_for(
        request,
        layout.grid,
        layout.partition,
        settings=layout.settings,
        sharding=layout.sharding,
    )
    found = dataclasses.replace(
        made_for(found, job, made_by),
        parallel=dataclasses.replace(
            found.parallel,
            overlap_grad_reduce=bool(job.values.get("overlap_grad_reduce")),
            overlap_param_gather=bool(job.values.get("overlap_param_gather")),
        ),
        launch={} if job.command is None else {LAUNCHER: _launch(job.command)},
    )
    return sealed(found)


def _launch(command: ReadCommand) -> LaunchCommand:
    return LaunchCommand(script=command.script, argv=command.argv, environment=command.environment)


def typed_layout(job: Job, request: PlanRequest, composed: Composed) -> tuple[Layout, Execution]:
    """A command's layout, and how its layers are asked to be carried out.

    What is not typed is Megatron's default (``validate_args``): degrees of 1, one replica on the
    GPUs that are left, nothing overlapped or divided.

    Raises:
        UserInputError: for degrees that do not multiply out to the GPUs or divide the batch, and
            stages that Megatron does not build.
    """
    values, spec = job.values, request.spec
    dims = _dims(job, request)
    pp = dims.pipeline_model_parallel_size
    stages = stated_partition(spec, values, pp) or uniform_partition(spec, pp)
    virtual = stages.num_chunks // pp
    zero = read_zero(values)
    grid = Grid(
        dims=dataclasses.replace(dims, virtual_pipeline_model_parallel_size=virtual),
        global_batch_size=request.global_batch_size,
        micro_batch_size=_micro_batch(values),
        # Megatron turns it off where there is no tensor group
        sequence_parallel=bool(values.get("sequence_parallel"))
        and dims.tensor_model_parallel_size > 1,
        recompute=read_recompute(values) or NO_RECOMPUTE,
        zero=ZeroStage.NONE if zero is None else zero,
    )
    asked = _execution(job, request, composed)
    grid = dataclasses.replace(grid, execution=allowed_execution(asked, grid))
    settings = request.settings
    if "cost.dp_overlap" not in composed.given:
        settings = _overlapped(settings, values, grid.zero)
    layout = Layout(settings=settings, grid=grid, partition=stages, sharding=job.sharding)
    return layout, asked


def _overlapped(settings: CostSettings, values: Mapping[str, Any], zero: ZeroStage) -> CostSettings:
    """What hides of the traffic between replicas: what the flags have overlapped, and no more.

    FSDP overlaps gradients by itself (0.16.1 megatron_fsdp.py:277).
    """
    if not values.get("overlap_grad_reduce") and not zero.is_fsdp:
        return dataclasses.replace(settings, dp_overlap=0.0)
    gathers = zero in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS)
    if not gathers or values.get("overlap_param_gather"):
        return settings
    traits = dataclasses.replace(settings.traits, overlap_param_gather=False)
    return dataclasses.replace(settings, traits=traits)


def refusal(request: PlanRequest, job: Job, asked: Execution | None = None) -> Refusal:
    """Why Megatron refuses a layout of a command's job: the first rule, with its source.

    Args:
        asked: how layers are asked to be carried out, where not as the layout says.
    """

    def refused(layout: Layout) -> str:
        grid = layout.grid
        launched = layout_request(
            request.spec,
            grid,
            layout.partition,
            layout.settings,
            sharding=layout.sharding or grid.zero.sharding,
            execution=asked or grid.execution,
            schedule=request.batch_schedule,
            values=job.values,
            version=job.version,
        )
        return first_broken(launched)

    return refused


def _dims(job: Job, request: PlanRequest) -> ParallelDims:
    """The degrees that are typed, one virtual stage a rank; the GPUs that are left replicate."""
    values = job.values
    names = (_TP, _PP, "context_parallel_size", "expert_model_parallel_size")
    degrees = {name: int(values.get(name) or 1) for name in names}
    if request.spec.is_moe:
        experts = values.get("expert_tensor_parallel_size")
        degrees["expert_tensor_parallel_size"] = int(experts or degrees[_TP])
    replica = degrees[_TP] * degrees[_PP] * degrees["context_parallel_size"]
    gpus = request.cluster.num_gpus
    if gpus % replica:
        limit = f"tp * cp * pp must divide the {gpus} GPUs of the job (arguments.py:317)"
        fix = "Change a degree, or say with cluster.num_gpus or the launcher how many GPUs run it."
        raise UserInputError("tp * cp * pp", value=replica, limit=limit, fix=fix)
    inner = values.get("use_tp_pp_dp_mapping")
    order = RankOrder.TP_CP_EP_PP_DP if inner else RankOrder.TP_CP_EP_DP_PP
    return ParallelDims(**degrees, data_parallel_size=gpus // replica, rank_order=order)


def _micro_batch(values: Mapping[str, Any]) -> int:
    if (micro := values.get("micro_batch_size")) is not None:
        return int(micro)
    limit, fix = "Megatron-LM does not start without it", "Add it to the command."
    raise flag_error("micro_batch_size", None, limit, fix)


def _execution(job: Job, request: PlanRequest, composed: Composed) -> Execution:
    """As the flags say; of experts with the dispatcher that Megatron has where none is typed."""
    own = job.values.get(_DISPATCHER) if request.spec.is_moe else None
    own_flags = on_device(job, request.cluster).memory_flags
    flags = {**own_flags, **({} if own is None else {_DISPATCHER: own})}
    job = dataclasses.replace(job, spec=request.spec, memory_flags=flags)
    return read_execution(composed.config, job, request.cluster.accelerator.name)
