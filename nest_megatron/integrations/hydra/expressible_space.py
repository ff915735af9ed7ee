"""The search space that an application's fields can state, and no more."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from nest_megatron.config.job import Job
from nest_megatron.config.overrides import choice
from nest_megatron.cost_model.execution_flags import execution_of
from nest_megatron.cost_model.target_defaults import OF_THE_JOB
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.field_mapping import planned_items
from nest_megatron.integrations.hydra.view import AppView
from nest_megatron.integrations.megatron_lm.read import read_recompute
from nest_megatron.integrations.recipe import RECOMPUTE
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.knobs import KNOBS
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import (
    NO_RECOMPUTE,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.solver.space import DEGREES, SearchSpace

Choice = TypeVar("Choice", RankOrder, ZeroStage)

_OF_EXPERTS = ("expert_model_parallel_size", "expert_tensor_parallel_size")
#: Choices that need no field: they follow from others, or only save time where they are set.
_NEED_NO_FIELD = (
    "global_batch_size",
    "data_parallel_size",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    "expert_tensor_parallel_size",
)
#: Degrees that are not 1 where the application has no field for them: what is wrong, and the fix.
_UNKNOWN = {
    "micro_batch_size": (
        "the application has no such field, so its micro batch is not known",
        "Name it with nest.fields.micro_batch_size, or fix it with "
        "+nest.overrides.train.micro_batch_size=1.",
    ),
    "expert_tensor_parallel_size": (
        "the application has no field for it, so it is the tensor-parallel size, which is free",
        "Give {tensor}, or name the place with nest.fields.expert_tensor_parallel_size.",
    ),
}
#: What an application does that has no such field.
_DEFAULTS: tuple[object, ...] = (None, False, 1, "no_shard", "", [])


def space_of(own: SearchSpace, view: AppView, job: Job) -> SearchSpace:
    """The part of the user's search space that an application's fields can state.

    A choice without a field is fixed at what Megatron does by itself; one that is given by hand is
    fixed at that; ``UserInputError`` for one that can be neither.
    """
    if not view.is_planned("pipeline_model_parallel_layout") and view.given(
        "pipeline_model_parallel_layout"
    ):
        raise UserInputError(
            str(view.place("pipeline_model_parallel_layout")),
            view.given("pipeline_model_parallel_layout"),
            "a layout given by hand leaves nothing to search for in a Hydra application",
            "Leave it out, or launch without nest.",
        )
    mapping = "use_tp_pp_dp_mapping"
    order = RankOrder.TP_CP_EP_PP_DP if view.given(mapping) else RankOrder.TP_CP_EP_DP_PP
    orders = tuple(RankOrder) if view.is_planned(mapping) else (order,)
    # sequence parallelism comes with tensor parallelism, as every plan wants it
    divides_sequences = view.is_planned("sequence_parallel") or view.given("sequence_parallel")
    recompute = own.recompute
    if not view.is_planned("recompute_granularity"):
        said = {name: view.given(name) for name in RECOMPUTE}
        if said["recompute_granularity"] == RecomputeGranularity.FULL:
            choice("recompute_method", str(said["recompute_method"]), RecomputeMethod)
            said["recompute_num_layers"] = int(said["recompute_num_layers"] or 1)
        recompute = read_recompute(said) or NO_RECOMPUTE
    with_modules = view.is_planned("recompute_modules")
    return dataclasses.replace(
        own,
        fixed={**_degrees(own, view, job.spec), **own.fixed},
        limits=own.limits if divides_sequences else {"tensor_model_parallel_size": 1, **own.limits},
        rank_orders=_common("rank_order", own.rank_orders, orders),
        zero_stages=_common("zero_stage", own.zero_stages, zero_stages(view, job)),
        recompute=recompute,
        without_modules=own.without_modules if with_modules else frozenset(RecomputeModule),
        even_stages=not view.is_planned("pipeline_model_parallel_layout"),
    )


def require_expressible(plan: ParallelPlan, view: AppView, job: Job) -> None:
    """Refuse a plan that needs a field which the application lacks, or has another value in."""
    for item, value in planned_items(plan).items():
        if item in _NEED_NO_FIELD or view.is_planned(item):
            continue
        given = view.given(item)
        if given == value or (given in _DEFAULTS and value in _DEFAULTS):
            continue
        limit, fix = f"the plan needs {value}", "Leave it to the plan, or plan again with it fixed."
        if (place := view.place(item)) is None:
            limit = f"{limit}, and the application has no field for it"
            fix = f"Name its place in nest.fields.{item}, or fix it with nest.overrides."
        raise UserInputError(place or item, given, limit, fix)
    # what the application does not ask for is carried out as its own fields say
    stated = allowed_execution(execution_of(job.memory_flags), plan.layout)
    wanted = allowed_execution(plan.layout.execution, plan.layout)
    for knob in KNOBS:
        own, needed = getattr(stated, knob.name), getattr(wanted, knob.name)
        applies = plan.model.is_moe or not knob.of_experts
        if own != needed and applies and knob.name not in planned_execution(view):
            raise UserInputError(
                view.place(knob.name) or knob.name,
                own,
                f"the plan was priced with {needed}",
                f"Give a field ${{nest:{knob.name}}}, or plan again with "
                f"+nest.overrides.search.keep=[{knob.choice}].",
            )
    allowed = zero_stages(view, job)
    if plan.layout.zero not in allowed and plan.layout.dims.data_parallel_size > 1:
        raise UserInputError(
            "use_distributed_optimizer",
            plan.layout.shards_optimizer,
            "the plan says so, and the application's optimizer is another",
            "Change the application's optimizer, or plan again.",
        )


def planned_execution(view: AppView) -> frozenset[str]:
    """Fields of ``Execution`` that an application asks the plan for."""
    names = (knob.name for knob in KNOBS if knob.name not in OF_THE_JOB)
    return frozenset(name for name in names if view.is_planned(name))


def zero_stages(view: AppView, job: Job) -> tuple[ZeroStage, ...]:
    """The ways to share states among replicas that an application can be told, or has."""
    if view.is_planned("use_megatron_fsdp") and view.is_planned("data_parallel_sharding_strategy"):
        return tuple(ZeroStage)
    if view.is_planned("use_distributed_optimizer"):
        return (ZeroStage.NONE, ZeroStage.OPTIMIZER)
    return (ZeroStage.OPTIMIZER if job.use_distributed_optimizer else ZeroStage.NONE,)


def _common(
    name: str, wanted: tuple[Choice, ...], possible: tuple[Choice, ...]
) -> tuple[Choice, ...]:
    found = tuple(each for each in wanted if each in possible)
    if not found:
        raise UserInputError(
            f"parallel.{name}",
            str(wanted[0]),
            f"the application's fields can only say {', '.join(map(str, possible))}",
            "Leave it out of nest.overrides, or give the application a field for it.",
        )
    return found


def _degrees(own: SearchSpace, view: AppView, spec: TransformerSpec) -> dict[str, int]:
    """Degrees that are given by hand, or that the application cannot be told."""
    fixed: dict[str, int] = {}
    for name in DEGREES:
        free = name == "data_parallel_size" or view.is_planned(name) or name in own.fixed
        if free or (name in _OF_EXPERTS and not spec.is_moe):
            continue
        given = view.given(name)
        if name == "expert_tensor_parallel_size":  # Megatron divides an expert like a layer
            given = given or fixed.get(
                "tensor_model_parallel_size", own.fixed.get("tensor_model_parallel_size")
            )
        if given is None and name in _UNKNOWN:
            limit, fix = _UNKNOWN[name]
            fix = fix.format(tensor=view.place("tensor_model_parallel_size"))
            raise UserInputError(name, None, limit, fix)
        fixed[name] = 1 if given is None else int(given)
    return fixed
