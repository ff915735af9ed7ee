"""A plan in the fields of a NeMo 2.x recipe; whatever it makes stale is cleared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from nest_megatron.cost_model.target_defaults import NEMO
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
from nest_megatron.integrations.fields import (
    FieldValue,
    carry_out,
    changes,
    find,
    value_or,
)
from nest_megatron.integrations.finetuning import finetuning_fields, packed_sequence_size
from nest_megatron.integrations.megatron_lm.attach import is_blackwell
from nest_megatron.integrations.nemo.read import (
    FIELDS,
    execution_places,
    num_devices,
    overlap_paths,
    read_spec,
    turns_on_deepep,
)
from nest_megatron.integrations.overlap import (
    keeps_shapes,
    link_fields,
    overlap_fields,
    stale_fields,
)
from nest_megatron.parallel.diff import Change, reason
from nest_megatron.parallel.plan import ParallelPlan

_STRATEGY = "trainer.strategy"
#: Options that only go with some layouts -> where a recipe has them.
_INCOMPATIBLE = {
    **{name: f"model.config.{name}" for name in OF_THE_MODEL},
    "microbatch_group_size_per_vp_stage": f"{_STRATEGY}.microbatch_group_size_per_vp_stage",
    "num_distributed_optimizer_instances": f"{_STRATEGY}.num_distributed_optimizer_instances",
    "fsdp_double_buffer": f"{_STRATEGY}.ddp.fsdp_double_buffer",
    "fsdp_manual_registration": f"{_STRATEGY}.ddp.fsdp_manual_registration",
}


def apply_plan(recipe: Any, plan: ParallelPlan, *, free: Sequence[str] = ()) -> tuple[Change, ...]:
    """Write a plan into a recipe, in place; nothing is changed if any of it cannot be.

    Degrees go to the strategy, which overwrites those of ``model.config``.

    Args:
        recipe: as for ``read_recipe``.
        free: what else may change where it differs from the plan: ``global_batch_size``,
            ``seq_length``, ``num_gpus``.

    Returns:
        Every field that has another value now, in the order of the plan, with the reason.

    Raises:
        UserInputError: if the plan is for another model or job, breaks a rule of megatron-core, or
            needs a field that this NeMo does not have.
    """
    found = plan_changes(recipe, plan, free=free)
    carry_out(recipe, found)
    return found


def plan_changes(
    recipe: Any, plan: ParallelPlan, *, free: Sequence[str] = ()
) -> tuple[Change, ...]:
    """As ``apply_plan``, but the recipe stays as it is."""
    require_plannable(plan, NEMO.megatron_core)
    spec, _ = read_spec(recipe, plan.model.vocab_size)
    require_same_model(plan, spec)
    per_node = num_devices(recipe)
    job = {
        "global_batch_size": find(recipe, FIELDS["global_batch_size"]),
        "seq_length": spec.seq_length,
        "num_gpus": per_node * value_or(recipe.trainer, "num_nodes", 1),
    }
    planned = {
        "global_batch_size": plan.train.global_batch_size,
        "seq_length": plan.train.seq_length,
        "num_gpus": plan.placement.num_gpus,
    }
    require_same_job(job, planned, free)
    return changes(recipe, _wanted(recipe, plan))


def _wanted(recipe: Any, plan: ParallelPlan) -> Iterator[FieldValue]:
    yield from _machines(recipe, plan)
    yield from _sequence(recipe, plan)
    ddp = find(recipe, f"{_STRATEGY}.ddp")
    for each in layout_fields(plan, FIELDS):
        # without a DDP config of its own the strategy makes one, which the next step replaces
        if not isinstance(ddp, str) or not each.path.startswith(f"{_STRATEGY}.ddp."):
            yield each
    yield from _data_parallel(recipe, plan, ddp)
    averaging = None if isinstance(ddp, str) else f"{_STRATEGY}.ddp.average_in_collective"
    yield from finetuning_fields(
        recipe,
        plan,
        data="data",
        model="model.config",
        averaging=averaging,
    )
    stage_type = (f"{_STRATEGY}.pipeline_dtype", "trainer.plugins.pipeline_dtype")
    yield from pipeline_type_field(recipe, plan, *stage_type)
    yield from contradicted_fields(recipe, plan, _INCOMPATIBLE)
    yield from _overlap(recipe, plan)
    yield from expert_fields(plan, "model.config")
    yield from _execution(recipe, plan)


def _machines(recipe: Any, plan: ParallelPlan) -> Iterator[FieldValue]:
    """Nodes and their GPUs; whole nodes stay as the recipe has them."""
    gpus, per_node = plan.placement.num_gpus, num_devices(recipe)
    per_node = min(per_node, gpus)
    if gpus % per_node:
        raise UserInputError(
            "num_gpus",
            value=gpus,
            limit=f"the recipe's nodes have {per_node} GPUs each",
            fix="Set trainer.devices to the size of a node, and plan for whole nodes.",
        )
    why = "the GPUs that were planned for"
    yield FieldValue(path="trainer.num_nodes", value=gpus // per_node, reason=why)
    if per_node != num_devices(recipe):
        yield FieldValue(path="trainer.devices", value=per_node, reason=why)


def _sequence(recipe: Any, plan: ParallelPlan) -> Iterator[FieldValue]:
    """The data's length is the job's; the model's own follows where context parallelism asks."""
    length, why = plan.train.seq_length, "the sequences that were planned for"
    if packed_sequence_size(recipe.data) is None:  # else the length is that of a pack
        yield FieldValue(path="data.seq_length", value=length, reason=why)
    cp = plan.parallel.context_parallel_size
    if cp > 1 and value_or(recipe.model.config, "seq_length", length) % (2 * cp):
        yield FieldValue(path="model.config.seq_length", value=length, reason=why)


def _data_parallel(recipe: Any, plan: ParallelPlan, ddp: Any) -> Iterator[FieldValue]:
    chosen = plan.parallel
    fsdp, why = chosen.use_megatron_fsdp, reason(plan, "use_megatron_fsdp")
    if isinstance(ddp, str):
        why_ddp = "the plan's time counts on gradients and weights that travel beside the work"
        yield FieldValue(path=f"{_STRATEGY}.ddp", value=_ddp_config(recipe, plan), reason=why_ddp)
    else:
        yield FieldValue(path=f"{_STRATEGY}.ddp.use_megatron_fsdp", value=fsdp, reason=why)
    yield FieldValue(path=f"{_STRATEGY}.fsdp", value="megatron" if fsdp else None, reason=why)
    yield from fsdp_fields(
        recipe,
        plan,
        ckpt_format=f"{_STRATEGY}.save_ckpt_format",
        async_save=f"{_STRATEGY}.ckpt_async_save",
        averaging=None if isinstance(ddp, str) else f"{_STRATEGY}.ddp.average_in_collective",
        model="model.config",
    )


def _ddp_config(recipe: Any, plan: ParallelPlan) -> Any:
    """A configuration in the place of the text ``megatron``, of the kind that recipes use."""
    from megatron.core.distributed import DistributedDataParallelConfig

    chosen = plan.parallel
    config_kind = type(recipe.trainer.strategy)
    if not hasattr(recipe.trainer.strategy, "__fn_or_cls__"):
        raise UserInputError(
            f"{_STRATEGY}.ddp",
            value="megatron",
            limit="a strategy that is built already cannot take another DDP configuration",
            fix="Give the recipe itself, before it is built.",
        )
    return config_kind(
        DistributedDataParallelConfig,
        check_for_nan_in_grad=True,  # what the strategy sets by itself
        overlap_grad_reduce=chosen.overlap_grad_reduce,
        overlap_param_gather=chosen.overlap_param_gather,
        use_distributed_optimizer=chosen.use_distributed_optimizer,
        use_megatron_fsdp=chosen.use_megatron_fsdp,
        data_parallel_sharding_strategy=chosen.data_parallel_sharding_strategy or "no_shard",
    )


def _overlap(recipe: Any, plan: ParallelPlan) -> Iterator[FieldValue]:
    same = keeps_shapes(recipe, plan, FIELDS, "data.seq_length")
    paths = overlap_paths(recipe)
    for path in paths:
        yield from overlap_fields(recipe, plan, path, same_shapes=same)
    yield from stale_fields(recipe, plan, "model.config", same_shapes=same)
    if not paths:
        yield from link_fields(plan, "model.config")


def _execution(recipe: Any, plan: ParallelPlan) -> Iterator[FieldValue]:
    """How layers are carried out, without the callback that would change it as training starts."""
    places = execution_places(recipe)
    found = tuple(execution_fields(recipe, plan, places))
    works = not is_blackwell(plan.cluster.accelerator.name)
    if not places.forced or not plan.model.is_moe or (works and not changes(recipe, found)):
        yield from found
        return
    yield from execution_fields(recipe, plan, dataclasses.replace(places, forced={}))
    others = [each for each in recipe.trainer.callbacks if not turns_on_deepep(each)]
    why = "the plan states the dispatcher itself, which this callback would replace"
    yield FieldValue(path="trainer.callbacks", value=others, reason=why)
