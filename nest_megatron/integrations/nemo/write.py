"""A plan in the fields of a NeMo 2.x recipe; whatever it makes stale is cleared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.field_mapping import (
    Recorded,
    fields_beside,
    layout_fields,
)
from nest_megatron.integrations.field_mapping import plan_changes as recipe_changes
from nest_megatron.integrations.fields import FieldValue, carry_out, changes, value_or
from nest_megatron.integrations.megatron_lm.attach import is_blackwell
from nest_megatron.integrations.nemo.read import NemoRecipe, turns_on_deepep
from nest_megatron.integrations.restore import packed_sequence_size
from nest_megatron.integrations.watching import STEPS
from nest_megatron.layout import plan_file
from nest_megatron.layout.diff import Change, reason
from nest_megatron.layout.plan import ParallelPlan


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
    return carry_out(recipe, plan_changes(recipe, plan, free=free))


def plan_changes(
    recipe: Any, plan: ParallelPlan | Recorded, *, free: Sequence[str] = ()
) -> tuple[Change, ...]:
    """As ``apply_plan``, but the recipe stays as it is."""
    return recipe_changes(NemoRecipe(recipe), plan, free, _wanted)


def _wanted(recipe: NemoRecipe, plan: ParallelPlan) -> Iterator[FieldValue]:
    yield from _machines(recipe, plan)
    yield from _sequence(recipe, plan)
    fsdp, why = plan.layout.uses_megatron_fsdp, reason(plan, "use_megatron_fsdp")
    inside = f"{recipe.ddp}."
    layout = layout_fields(recipe, plan)
    if isinstance(recipe.find(recipe.ddp), str):  # it has no fields, and becomes an object
        yield from (row for row in layout if not row[0].startswith(inside))
        why_ddp = "the plan's time counts on gradients and weights that travel beside the work"
        yield recipe.ddp, _ddp_config(recipe, plan), why_ddp
    else:
        yield from layout
        yield f"{inside}use_megatron_fsdp", fsdp, why
    yield "trainer.strategy.fsdp", "megatron" if fsdp else None, why
    yield from fields_beside(recipe, plan)
    yield from _execution(recipe, plan)


def _machines(recipe: NemoRecipe, plan: ParallelPlan) -> Iterator[FieldValue]:
    """Nodes and their GPUs; whole nodes stay as the recipe has them."""
    gpus, (_, devices) = plan.layout.num_gpus, recipe.size()
    per_node = min(devices, gpus)
    if gpus % per_node:
        raise UserInputError(
            "num_gpus",
            gpus,
            f"the recipe's nodes have {per_node} GPUs each",
            "Set trainer.devices to the size of a node, and plan for whole nodes.",
        )
    why = "the GPUs that were planned for"
    yield "trainer.num_nodes", gpus // per_node, why
    if per_node != devices:
        yield "trainer.devices", per_node, why


def _sequence(recipe: NemoRecipe, plan: ParallelPlan) -> Iterator[FieldValue]:
    """The data's length is the job's; the model's own follows where context parallelism asks."""
    length, why = plan.train.seq_length, "the sequences that were planned for"
    if packed_sequence_size(recipe.root.data) is None:  # else the length is that of a pack
        yield recipe.seq_length, length, why
    cp = plan.layout.dims.context_parallel_size
    if cp > 1 and value_or(recipe.root.model.config, "seq_length", length) % (2 * cp):
        yield "model.config.seq_length", length, why


def _ddp_config(recipe: NemoRecipe, plan: ParallelPlan) -> Any:
    """A configuration in the place of the text ``megatron``, of the kind that recipes use."""
    from megatron.core.distributed import DistributedDataParallelConfig

    if not _is_unbuilt(recipe.root):
        raise UserInputError(
            recipe.ddp,
            "megatron",
            "a strategy that is built already cannot take another DDP configuration",
            "Give the recipe itself, before it is built.",
        )
    names = (
        "overlap_grad_reduce",
        "overlap_param_gather",
        "use_distributed_optimizer",
        "use_megatron_fsdp",
    )
    return type(recipe.root.trainer.strategy)(
        DistributedDataParallelConfig,
        check_for_nan_in_grad=True,  # what the strategy sets by itself
        **{name: plan.arguments[name] for name in names},
        data_parallel_sharding_strategy=plan.arguments["data_parallel_sharding_strategy"]
        or "no_shard",
    )


def _execution(recipe: NemoRecipe, plan: ParallelPlan) -> Iterator[FieldValue]:
    """How layers are carried out, without the callback that would change it as training starts."""
    places, option = recipe.places, "tp_comm_overlap"
    added = plan.layout.execution.tp_comm_overlap and not places.overlap
    if added and _is_unbuilt(recipe.root):
        yield _overlap_callback(recipe, plan)
        able = {name: why for name, why in places.lacks.items() if name != option}
        places = dataclasses.replace(places, lacks=able)
        own = f"{places.model}.{option}"  # the callback sets it as training starts
        found = tuple(row for row in places.fields(plan) if row[0] != own)
    else:
        found = tuple(places.fields(plan))
    works = not is_blackwell(plan.cluster.accelerator.name)
    if not places.forced or not plan.model.is_moe or (works and not changes(recipe.root, found)):
        yield from found
        return
    yield from dataclasses.replace(places, forced={}).fields(plan)
    others = [each for each in recipe.callbacks if not turns_on_deepep(each)]
    why = "the plan states the dispatcher itself, which this callback would replace"
    yield "trainer.callbacks", others, why


def _is_unbuilt(recipe: Any) -> bool:
    return hasattr(recipe.trainer.strategy, "__fn_or_cls__")


def _overlap_callback(recipe: NemoRecipe, plan: ParallelPlan) -> FieldValue:
    """The callbacks with the one that makes user buffers, which a plain recipe does not have.

    It exchanges between stages as plans do, and would overlap gradients and weights by itself
    (``MegatronCommOverlapCallback``).
    """
    from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

    callback = type(recipe.root.trainer.strategy)(
        MegatronCommOverlapCallback,
        tp_comm_overlap=True,
        overlap_grad_reduce=plan.arguments["overlap_grad_reduce"],
        overlap_param_gather=plan.arguments["overlap_param_gather"],
    )
    why = "it makes the user buffers of tp_comm_overlap"
    return "trainer.callbacks", [*recipe.callbacks, callback], why


def watch_recipe(recipe: Any, plan: ParallelPlan, *, steps: int = STEPS) -> None:
    """Have a planned recipe's run keep a record of itself, beside what the plan predicts.

    Where it trains, nest-megatron has to be installed, and writes to the history of that host.

    Args:
        recipe: as for ``read_recipe``; its callbacks get one more, in place.
        plan: the one in its fields.
        steps: how many are watched.
    """
    from nest_megatron.integrations.lightning import WatchCallback

    def is_other(callback: Any) -> bool:
        return getattr(callback, "__fn_or_cls__", type(callback)) is not WatchCallback

    fields = {"plan": plan_file.dump(plan), "steps": steps}
    if _is_unbuilt(recipe):
        callback = type(recipe.trainer.strategy)(WatchCallback, **fields)
    else:
        callback = WatchCallback(**fields)
    others = filter(is_other, value_or(recipe.trainer, "callbacks", []))
    recipe.trainer.callbacks = [*others, callback]
