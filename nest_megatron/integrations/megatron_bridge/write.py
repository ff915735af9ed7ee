"""A plan in the fields of a Megatron-Bridge ``ConfigContainer``; what it makes stale is cleared."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.execution_fields import execution_fields
from nest_megatron.integrations.field_mapping import (
    OF_THE_MODEL,
    contradicted_fields,
    expert_fields,
    fsdp_fields,
    layout_fields,
    pipeline_type_field,
    require_plannable,
    require_same_job,
    require_same_model,
)
from nest_megatron.integrations.fields import ABSENT, FieldValue, carry_out, changes, find
from nest_megatron.integrations.finetuning import finetuning_fields, packed_sequence_size
from nest_megatron.integrations.megatron_bridge.read import (
    FIELDS,
    execution_places,
    installed_target,
    ranks,
    read_spec,
    uses_fsdp,
)
from nest_megatron.integrations.overlap import (
    keeps_shapes,
    link_fields,
    overlap_fields,
    stale_fields,
)
from nest_megatron.parallel.diff import Change, reason
from nest_megatron.parallel.plan import ParallelPlan

_PREDICTORS = "model.mtp_num_layers"
#: Variable of HybridEP: ranks of a group of experts that share NVLink. A wrong one spoils the
#: exchange (Megatron-Bridge's notes on dispatchers).
NVLINK_RANKS = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
_EXPERT_DEGREES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
#: Options that only go with some layouts -> where a configuration has them.
_INCOMPATIBLE = {
    **{name: f"model.{name}" for name in (*OF_THE_MODEL, "microbatch_group_size_per_vp_stage")},
    "num_distributed_optimizer_instances": "ddp.num_distributed_optimizer_instances",
    "fsdp_double_buffer": "ddp.fsdp_double_buffer",
    "fsdp_manual_registration": "ddp.fsdp_manual_registration",
}


def apply_plan(
    cfg: Any,
    plan: ParallelPlan,
    *,
    free: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[Change, ...]:
    """Write a plan into a configuration, in place; nothing is changed if any of it cannot be.

    Args:
        cfg: as for ``read_recipe``.
        free: what else may change where it differs from the plan: ``global_batch_size``,
            ``seq_length``. The number of ranks is the launcher's.
        environment: the launcher's variables; those of this process if not given.

    Returns:
        Every field that has another value now, in the order of the plan, with the reason.

    Raises:
        UserInputError: if the plan is for another model or job, breaks a rule of megatron-core, or
            needs a field that this Megatron-Bridge does not have.
    """
    found = plan_changes(cfg, plan, free=free, environment=environment)
    carry_out(cfg, found)
    return found


def plan_changes(
    cfg: Any,
    plan: ParallelPlan,
    *,
    free: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[Change, ...]:
    """As ``apply_plan``, but the configuration stays as it is."""
    require_plannable(plan, installed_target().megatron_core)
    spec = read_spec(cfg, plan.model.vocab_size)
    require_same_model(plan, spec)
    started = ranks(os.environ if environment is None else environment)
    require_same_job({"num_gpus": started}, {"num_gpus": plan.placement.num_gpus}, ())
    job = {
        "global_batch_size": find(cfg, FIELDS["global_batch_size"]),
        "seq_length": spec.seq_length,
    }
    planned = {
        "global_batch_size": plan.train.global_batch_size,
        "seq_length": plan.train.seq_length,
    }
    require_same_job(job, planned, free)
    return changes(cfg, _wanted(cfg, plan))


def _wanted(cfg: Any, plan: ParallelPlan) -> Iterator[FieldValue]:
    length, why = plan.train.seq_length, "the sequences that were planned for"
    packed = packed_sequence_size(cfg.dataset) is not None  # the length is that of a pack
    for path in () if packed else ("dataset.seq_length", "model.seq_length"):
        if find(cfg, path) is not ABSENT:
            yield FieldValue(path=path, value=length, reason=why)
    yield from layout_fields(plan, FIELDS)
    if find(cfg, "dataset.micro_batch_size") is not ABSENT:  # Energon's data keep a copy
        micro, why = plan.train.micro_batch_size, "the data and training state the same size"
        yield FieldValue(path="dataset.micro_batch_size", value=micro, reason=why)
    yield FieldValue(
        path="ddp.use_distributed_optimizer",
        value=plan.parallel.use_distributed_optimizer,
        reason=reason(plan, "use_distributed_optimizer"),
    )
    yield from _fsdp(cfg, plan)
    yield from finetuning_fields(
        cfg,
        plan,
        data="dataset",
        model="model",
        averaging="ddp.average_in_collective",
    )
    if not isinstance(find(cfg, "mixed_precision"), str):  # a named recipe brings its own
        stage_type = ("model.pipeline_dtype", "mixed_precision.pipeline_dtype")
        yield from pipeline_type_field(cfg, plan, *stage_type)
    yield from contradicted_fields(cfg, plan, _INCOMPATIBLE)
    yield from _overlap(cfg, plan)
    yield from expert_fields(plan, "model")
    yield from execution_fields(cfg, plan, execution_places(cfg))
    yield from _nvlink_ranks(cfg, plan)
    if plan.execution.overlap_moe_expert_parallel_comm and find(cfg, _PREDICTORS) == 0:
        why = "with the overlapped exchange Megatron-Bridge 0.3 takes 1 or nothing"
        yield FieldValue(path=_PREDICTORS, value=None, reason=why)


def _nvlink_ranks(cfg: Any, plan: ParallelPlan) -> Iterator[FieldValue]:
    """Take out a number of ranks that was for another group; HybridEP finds it by itself."""
    variables = find(cfg, "env_vars")
    stated = [find(cfg, FIELDS[name]) for name in _EXPERT_DEGREES]
    planned = [getattr(plan.parallel, name) for name in _EXPERT_DEGREES]
    if isinstance(variables, Mapping) and NVLINK_RANKS in variables and stated != planned:
        others = {name: value for name, value in variables.items() if name != NVLINK_RANKS}
        why = f"{NVLINK_RANKS} was for another group of experts; HybridEP finds it by itself"
        yield FieldValue(path="env_vars", value=others, reason=why)


def _fsdp(cfg: Any, plan: ParallelPlan) -> Iterator[FieldValue]:
    """Megatron-FSDP and what goes with it. Source: ``ConfigContainer.validate``."""
    fsdp, why = plan.parallel.use_megatron_fsdp, reason(plan, "use_megatron_fsdp")
    if fsdp and not uses_fsdp(cfg) and find(cfg, "model._pre_wrap_hooks") not in (ABSENT, None, []):
        raise UserInputError(
            "use_megatron_fsdp",
            value=True,
            limit="a hook changes the model before it is wrapped (register_pre_wrap_hook): the "
            "weights are then on the meta device, and what it loads is lost",
            fix="Load weights from a checkpoint, or leave use_megatron_fsdp as it is.",
        )
    if fsdp or uses_fsdp(cfg):
        for path in ("dist.use_megatron_fsdp", "ddp.use_megatron_fsdp"):
            yield FieldValue(path=path, value=fsdp, reason=why)
    yield from fsdp_fields(
        cfg,
        plan,
        ckpt_format="checkpoint.ckpt_format",
        async_save="checkpoint.async_save",
        averaging="ddp.average_in_collective",
        model="model",
        gradients="ddp.megatron_fsdp_main_grads_dtype",
    )


def _overlap(cfg: Any, plan: ParallelPlan) -> Iterator[FieldValue]:
    same = keeps_shapes(cfg, plan, FIELDS, "model.seq_length")
    yield from stale_fields(cfg, plan, "model", same_shapes=same)
    if find(cfg, "comm_overlap") in (ABSENT, None):
        yield from link_fields(plan, "model")
        return
    yield from overlap_fields(cfg, plan, "comm_overlap", same_shapes=same)
