"""A plan in the fields of a NeMo 2.x recipe; whatever it makes stale is cleared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from nest_megatron.cost_model.target_defaults import NEMO
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.execution_fields import execution_fields
from nest_megatron.integrations.field_mapping import (
    Recorded,
    fields_beside,
    layout_fields,
    plan_record,
    require_plannable,
    require_same_job,
    require_same_schedule,
)
from nest_megatron.integrations.fields import FieldValue, carry_out, changes, find, value_or
from nest_megatron.integrations.megatron_lm.attach import is_blackwell
from nest_megatron.integrations.nemo.read import (
    PATHS,
    execution_places,
    num_devices,
    overlap_paths,
    read_spec,
    turns_on_deepep,
)
from nest_megatron.integrations.recipe import batch_schedule, makes_stages_of
from nest_megatron.integrations.restore import packed_sequence_size
from nest_megatron.integrations.watching import STEPS
from nest_megatron.layout import plan_file
from nest_megatron.layout.diff import Change, reason
from nest_megatron.layout.plan import ParallelPlan

_OVERLAP = "tp_comm_overlap"


def apply_plan(
    recipe: Any, plan: ParallelPlan | Recorded, *, free: Sequence[str] = ()
) -> tuple[Change, ...]:
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
    recipe: Any, plan: ParallelPlan | Recorded, *, free: Sequence[str] = ()
) -> tuple[Change, ...]:
    """As ``apply_plan``, but the recipe stays as it is."""
    plan = plan_record(plan)
    spec, _ = read_spec(recipe, plan.model.vocab_size)
    require_plannable(plan, NEMO.megatron_core, spec)
    job = {
        "global_batch_size": find(recipe, PATHS.items["global_batch_size"]),
        "seq_length": spec.seq_length,
        "num_gpus": num_devices(recipe) * value_or(recipe.trainer, "num_nodes", 1),
    }
    require_same_job(plan, job, free)
    require_same_schedule(plan, batch_schedule(recipe, PATHS, spec.seq_length, NEMO))
    return changes(recipe, _wanted(recipe, plan))


def _wanted(recipe: Any, plan: ParallelPlan) -> Iterator[FieldValue]:
    yield from _machines(recipe, plan)
    yield from _sequence(recipe, plan)
    fsdp, why = plan.layout.uses_megatron_fsdp, reason(plan, "use_megatron_fsdp")
    inside = f"{PATHS.ddp}."
    layout = layout_fields(plan, PATHS, stages=not makes_stages_of(recipe, plan, PATHS))
    if isinstance(find(recipe, PATHS.ddp), str):  # it has no fields, and becomes an object
        yield from (row for row in layout if not row[0].startswith(inside))
        why_ddp = "the plan's time counts on gradients and weights that travel beside the work"
        yield PATHS.ddp, _ddp_config(recipe, plan), why_ddp
    else:
        yield from layout
        yield f"{inside}use_megatron_fsdp", fsdp, why
    yield "trainer.strategy.fsdp", "megatron" if fsdp else None, why
    yield from fields_beside(recipe, plan, PATHS, overlap_paths(recipe))
    yield from _execution(recipe, plan)


def _machines(recipe: Any, plan: ParallelPlan) -> Iterator[FieldValue]:
    """Nodes and their GPUs; whole nodes stay as the recipe has them."""
    gpus = plan.layout.num_gpus
    per_node = min(num_devices(recipe), gpus)
    if gpus % per_node:
        limit = f"the recipe's nodes have {per_node} GPUs each"
        fix = "Set trainer.devices to the size of a node, and plan for whole nodes."
        raise UserInputError("num_gpus", gpus, limit, fix)
    why = "the GPUs that were planned for"
    yield "trainer.num_nodes", gpus // per_node, why
    if per_node != num_devices(recipe):
        yield "trainer.devices", per_node, why


def _sequence(recipe: Any, plan: ParallelPlan) -> Iterator[FieldValue]:
    """The data's length is the job's; the model's own follows where context parallelism asks."""
    length, why = plan.train.seq_length, "the sequences that were planned for"
    if packed_sequence_size(recipe.data) is None:  # else the length is that of a pack
        yield PATHS.seq_length, length, why
    cp = plan.layout.dims.context_parallel_size
    if cp > 1 and value_or(recipe.model.config, "seq_length", length) % (2 * cp):
        yield "model.config.seq_length", length, why


def _ddp_config(recipe: Any, plan: ParallelPlan) -> Any:
    """A configuration in the place of the text ``megatron``, of the kind that recipes use."""
    from megatron.core.distributed import DistributedDataParallelConfig

    chosen, config_kind = plan.arguments, type(recipe.trainer.strategy)
    if not _is_unbuilt(recipe):
        limit = "a strategy that is built already cannot take another DDP configuration"
        fix = "Give the recipe itself, before it is built."
        raise UserInputError(PATHS.ddp, "megatron", limit, fix)
    return config_kind(
        DistributedDataParallelConfig,
        check_for_nan_in_grad=True,  # what the strategy sets by itself
        overlap_grad_reduce=chosen["overlap_grad_reduce"],
        overlap_param_gather=chosen["overlap_param_gather"],
        use_distributed_optimizer=chosen["use_distributed_optimizer"],
        use_megatron_fsdp=chosen["use_megatron_fsdp"],
        data_parallel_sharding_strategy=chosen["data_parallel_sharding_strategy"] or "no_shard",
    )


def _execution(recipe: Any, plan: ParallelPlan) -> Iterator[FieldValue]:
    """How layers are carried out, without the callback that would change it as training starts."""
    places = execution_places(recipe)
    if plan.layout.execution.tp_comm_overlap and not places.overlap and _is_unbuilt(recipe):
        yield _overlap_callback(recipe, plan)
        able = {name: why for name, why in places.lacks.items() if name != _OVERLAP}
        places = dataclasses.replace(places, lacks=able)
        own = f"{places.model}.{_OVERLAP}"  # the callback sets it as training starts
        found = tuple(row for row in execution_fields(recipe, plan, places) if row[0] != own)
    else:
        found = tuple(execution_fields(recipe, plan, places))
    works = not is_blackwell(plan.cluster.accelerator.name)
    if not places.forced or not plan.model.is_moe or (works and not changes(recipe, found)):
        yield from found
        return
    yield from execution_fields(recipe, plan, dataclasses.replace(places, forced={}))
    others = [each for each in recipe.trainer.callbacks if not turns_on_deepep(each)]
    why = "the plan states the dispatcher itself, which this callback would replace"
    yield "trainer.callbacks", others, why


def _is_unbuilt(recipe: Any) -> bool:
    return hasattr(recipe.trainer.strategy, "__fn_or_cls__")


def _overlap_callback(recipe: Any, plan: ParallelPlan) -> FieldValue:
    """The callbacks with the one that makes user buffers, which a plain recipe does not have.

    It exchanges between stages as plans do, and would overlap gradients and weights by itself
    (``MegatronCommOverlapCallback``).
    """
    from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

    chosen = plan.arguments
    callback = type(recipe.trainer.strategy)(
        MegatronCommOverlapCallback,
        tp_comm_overlap=True,
        overlap_grad_reduce=chosen["overlap_grad_reduce"],
        overlap_param_gather=chosen["overlap_param_gather"],
    )
    why = "it makes the user buffers of tp_comm_overlap"
    return "trainer.callbacks", [*(value_or(recipe.trainer, "callbacks", [])), callback], why


def watch_recipe(recipe: Any, plan: ParallelPlan, *, steps: int = STEPS) -> None:
    """Have a planned recipe's run keep a record of itself, beside what the plan predicts.

    Where it trains, nest-megatron has to be installed, and writes to the history of that host.

    Args:
        recipe: as for ``read_recipe``; its callbacks get one more, in place.
        plan: the one in its fields.
        steps: how many are watched.
    """
    from nest_megatron.integrations.lightning import WatchCallback

    make = type(recipe.trainer.strategy) if _is_unbuilt(recipe) else _built
    given = value_or(recipe.trainer, "callbacks", []) or []
    others = [each for each in given if _kind(each) is not WatchCallback]
    callback = make(WatchCallback, plan=plan_file.dump(plan), steps=steps)
    recipe.trainer.callbacks = [*others, callback]


def _built(kind: Any, **fields: Any) -> Any:
    return kind(**fields)


def _kind(callback: Any) -> Any:
    return getattr(callback, "__fn_or_cls__", type(callback))
