"""The search space that an application's fields can state, and no more."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from nest_megatron.config.job import Job
from nest_megatron.cost_model.execution_flags import execution_of
from nest_megatron.cost_model.target_limits import OF_THE_JOB
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.field_mapping import planned_items
from nest_megatron.integrations.hydra.view import AppView
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.dims import RankOrder
from nest_megatron.parallel.execution_rules import allowed_execution
from nest_megatron.parallel.knobs import KNOBS
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.parallel.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
    selective_recompute,
)
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.solver.space import DEGREES, SearchSpace

Choice = TypeVar("Choice", RankOrder, ZeroStage)

_TENSOR = "tensor_model_parallel_size"
_EXPERT_TENSOR = "expert_tensor_parallel_size"
_OF_EXPERTS = ("expert_model_parallel_size", _EXPERT_TENSOR)
_LAYOUT = "pipeline_model_parallel_layout"
#: Choices that need no field: they follow from others, or only save time where they are set.
_NEED_NO_FIELD = (
    "global_batch_size",
    "data_parallel_size",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    _EXPERT_TENSOR,
)
#: What an application does that has no such field.
_DEFAULTS: tuple[object, ...] = (None, False, 1, "no_shard", "", [])


def space_of(own: SearchSpace, view: AppView, job: Job) -> SearchSpace:
    """The part of a search space that an application's fields can state.

    A choice without a field is held at what Megatron does by itself; one that is given by hand is
    held at that.

    Args:
        own: the space that the user's overrides leave.

    Raises:
        UserInputError: for a choice that can neither be written nor held.
    """
    if not view.is_planned(_LAYOUT) and _given(view, _LAYOUT):
        raise UserInputError(
            str(view.place(_LAYOUT)),
            value=_given(view, _LAYOUT),
            limit="a layout given by hand leaves nothing to search for in a Hydra application",
            fix="Leave it out, or launch without nest.",
        )
    fixed = {**_degrees(own, view, job.spec), **own.fixed}
    granularity_is_free = view.is_planned("recompute_granularity")
    with_modules = view.is_planned("recompute_modules")
    return dataclasses.replace(
        own,
        fixed=fixed,
        limits=own.limits if _divides_sequences(view) else {_TENSOR: 1, **own.limits},
        rank_orders=_common("rank_order", own.rank_orders, _rank_orders(view)),
        zero_stages=_common("zero_stage", own.zero_stages, zero_stages(view, job)),
        recompute=own.recompute if granularity_is_free else _given_recompute(view),
        without_modules=own.without_modules if with_modules else frozenset(RecomputeModule),
        even_stages=not view.is_planned(_LAYOUT),
        batch_unit=job.batch_unit,
    )


def require_expressible(plan: ParallelPlan, view: AppView, job: Job) -> None:
    """Refuse a plan that an application cannot carry out.

    Raises:
        UserInputError: naming the choice that has no field, or another value given by hand.
    """
    for item, value in planned_items(plan).items():
        if item in _NEED_NO_FIELD or view.is_planned(item):
            continue
        given = _given(view, item)
        if given == value or (given in _DEFAULTS and value in _DEFAULTS):
            continue
        place = view.place(item)
        raise UserInputError(
            place or item,
            value=given,
            limit=f"the plan needs {value}"
            + ("" if place else ", and the application has no field for it"),
            fix="Leave it to the plan, or plan again with it held."
            if place
            else f"Name its place in nest.fields.{item}, or hold it with nest.overrides.",
        )
    _require_execution(plan, view, job)
    allowed = zero_stages(view, job)
    if plan.grid().zero not in allowed and plan.parallel.data_parallel_size > 1:
        raise UserInputError(
            "use_distributed_optimizer",
            value=plan.parallel.use_distributed_optimizer,
            limit="the plan says so, and the application's optimizer is another",
            fix="Change the application's optimizer, or plan again.",
        )


def planned_execution(view: AppView) -> frozenset[str]:
    """Fields of ``Execution`` that an application asks the plan for."""
    names = (knob.name for knob in KNOBS if knob.name not in OF_THE_JOB)
    return frozenset(name for name in names if view.is_planned(name))


def _require_execution(plan: ParallelPlan, view: AppView, job: Job) -> None:
    """What the application does not ask for is carried out as its own fields say."""
    grid = plan.grid()
    stated = allowed_execution(execution_of(job.memory_flags), grid)
    wanted, planned = allowed_execution(plan.execution, grid), planned_execution(view)
    for knob in KNOBS:
        own, needed = getattr(stated, knob.name), getattr(wanted, knob.name)
        if knob.name in planned or own == needed or not (plan.model.is_moe or not knob.of_experts):
            continue
        raise UserInputError(
            view.place(knob.name) or knob.name,
            value=own,
            limit=f"the plan was priced with {needed}",
            fix=f"Give a field ${{nest:{knob.name}}}, or plan again with "
            f"+nest.overrides.search.keep=[{knob.choice}].",
        )


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
            value=str(wanted[0]),
            limit=f"the application's fields can only say {', '.join(map(str, possible))}",
            fix="Leave it out of nest.overrides, or give the application a field for it.",
        )
    return found


def _given(view: AppView, item: str) -> Any:
    place = view.place(item)
    return None if place is None else view.at(place)


def _degrees(own: SearchSpace, view: AppView, spec: TransformerSpec) -> dict[str, int]:
    """Degrees that are given by hand, or that the application cannot be told."""
    fixed: dict[str, int] = {}
    for name in DEGREES:
        free = name == "data_parallel_size" or view.is_planned(name) or name in own.fixed
        if free or (name in _OF_EXPERTS and not spec.is_moe):
            continue
        if name == "micro_batch_size":
            fixed[name] = _micro_batch(view)
        elif name != _EXPERT_TENSOR:
            fixed[name] = int(_given(view, name) or 1)
    if spec.is_moe and not view.is_planned(_EXPERT_TENSOR) and _EXPERT_TENSOR not in own.fixed:
        fixed[_EXPERT_TENSOR] = _expert_tensor(view, {**fixed, **own.fixed})
    return fixed


def _micro_batch(view: AppView) -> int:
    given = _given(view, "micro_batch_size")
    if given is None:
        raise UserInputError(
            "micro_batch_size",
            value=None,
            limit="the application has no such field, so its micro batch is not known",
            fix="Name it with nest.fields.micro_batch_size, or hold it with "
            "+nest.overrides.train.micro_batch_size=1.",
        )
    return int(given)


def _expert_tensor(view: AppView, fixed: dict[str, int]) -> int:
    """Where it cannot be told, an expert is cut as far as a layer, as Megatron does by itself."""
    given = _given(view, _EXPERT_TENSOR) or fixed.get(_TENSOR)
    if given is None:
        raise UserInputError(
            _EXPERT_TENSOR,
            value=None,
            limit="the application has no field for it, so it is the tensor-parallel size, which "
            "is free",
            fix=f"Give {view.place(_TENSOR)}, or name the place with nest.fields.{_EXPERT_TENSOR}.",
        )
    return int(given)


def _divides_sequences(view: AppView) -> bool:
    """Whether sequence parallelism comes with tensor parallelism, as every plan wants it."""
    return view.is_planned("sequence_parallel") or bool(_given(view, "sequence_parallel"))


def _rank_orders(view: AppView) -> tuple[RankOrder, ...]:
    if view.is_planned("use_tp_pp_dp_mapping"):
        return tuple(RankOrder)
    swapped = _given(view, "use_tp_pp_dp_mapping")
    return (RankOrder.TP_CP_EP_PP_DP if swapped else RankOrder.TP_CP_EP_DP_PP,)


def _given_recompute(view: AppView) -> Recompute:
    granularity = _given(view, "recompute_granularity")
    if granularity is None:
        return NO_RECOMPUTE
    if granularity != RecomputeGranularity.FULL:
        return selective_recompute(_given(view, "recompute_modules") or ["core_attn"])
    method = _given(view, "recompute_method")
    if method not in [each.value for each in RecomputeMethod]:
        raise UserInputError(
            "recompute_method",
            value=method,
            limit="full recomputation is uniform or block",
            fix="Give one of them, or leave recomputation to the plan.",
        )
    number = _given(view, "recompute_num_layers")
    return Recompute(
        granularity=RecomputeGranularity.FULL,
        method=RecomputeMethod(method),
        num_layers=int(number or 1),
    )
