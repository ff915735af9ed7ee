"""What a plan sets in a configuration of megatron-core, item by item, and what it clears.

An *item* is Megatron's name of a choice; each framework's ``Recipe`` says in which field it lies.
Both frameworks keep settings that hide communication in one object (NeMo's
``MegatronCommOverlapCallback``, Megatron-Bridge's ``CommOverlapConfig``) that works out by itself
what is ``None`` there, and both let a job set the same names on the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.fields import ABSENT, FieldValue, changes
from nest_megatron.integrations.megatron_lm.attach import (
    OF_THE_COMMAND_LINE,
    launch_request,
)
from nest_megatron.integrations.megatron_lm.layout_arguments import stated_partition
from nest_megatron.integrations.megatron_lm.write import planned_arguments
from nest_megatron.integrations.recipe import TAKEN_BACK, Recipe
from nest_megatron.integrations.restore import finetuning_fields
from nest_megatron.layout.diff import Change, plan_values, reason
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook import require_launchable
from nest_megatron.layout.rulebook.degrees import launched_expert_tensor_size
from nest_megatron.layout.rulebook.devices import initializes_on_meta_device
from nest_megatron.layout.rulebook.options import contradicted
from nest_megatron.layout.stage_layout import is_uniform
from nest_megatron.model.spec import LATENT_SIZES, TransformerSpec
from nest_megatron.plain import to_plain
from nest_megatron.planner.pinned_job import resolved

#: Fields that state the stage boundaries, and their values where the plan says it.
_STAGE_FIELDS = {
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
#: Options of the model's configuration that only go with some layouts.
_OF_THE_MODEL = (
    "overlap_p2p_comm_warmup_flush",
    "distribute_saved_activations",
    "init_model_with_meta_device",
    "use_cpu_initialization",
    "moe_single_grouped_weight",
    "moe_single_grouped_bias",
)
#: Values of such options where they are taken back and not off.
_RESETS = {
    "microbatch_group_size_per_vp_stage": None,
    "num_distributed_optimizer_instances": 1,
}
#: What must be the same in the job and in the model that was planned.
_SHAPE = (
    "family",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "gated_linear_unit",
    "num_experts",
    "moe_layer_pattern",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_shared_expert_intermediate_size",
    "multi_latent_attention",
    *LATENT_SIZES,
    "mtp_num_layers",
    "hybrid_layer_pattern",
    "heterogeneous_layers",
    "linear_attention_freq",
    "variant",
)
_DEFERRED = (
    "the last stage would keep the gradients of logits of many micro batches, which the plan's "
    "memory does not count"
)
_LINKS = "virtual stages overlap their exchanges, others batch them"


def planned_items(plan: ParallelPlan) -> dict[str, Any]:
    """What a plan sets, by item, in plain values.

    The layout is left out where stages are the even ones that megatron-core makes by itself.
    """
    items: dict[str, Any] = to_plain(plan_values(plan))
    del items["data_parallel_size"]  # it follows from the number of ranks
    items["recompute_modules"] = items["recompute_modules"] or None
    items["use_tp_pp_dp_mapping"] &= items["pipeline_model_parallel_size"] > 1
    items["expert_tensor_parallel_size"] = launched_expert_tensor_size(plan.model, plan.layout.dims)
    if is_uniform(plan.model, plan.layout.partition):
        items["pipeline_model_parallel_layout"] = None
    if not plan.layout.uses_megatron_fsdp:
        items["data_parallel_sharding_strategy"] = "no_shard"
    return items


def layout_fields(recipe: Recipe, plan: ParallelPlan) -> Iterator[FieldValue]:
    """The plan's items in the fields of a framework, and the other ways to state stages cleared.

    What states the plan's stages already stays.
    """
    pp, even = plan.layout.dims.pipeline_model_parallel_size, "pipeline_model_parallel_layout"
    arguments = recipe.arguments()
    stays = arguments.get("pipeline_model_parallel_size") == pp
    try:
        stays = stays and stated_partition(plan.model, arguments, pp) == plan.layout.partition
    except UserInputError:
        stays = False
    of_stages = (even, "virtual_pipeline_model_parallel_size") if stays else ()
    for item, value in planned_items(plan).items():
        if item not in recipe.items or item in of_stages:
            continue
        why, path = reason(plan, item), recipe.items[item]
        if item == even and plan.model.hybrid_layer_pattern:
            path = f"{recipe.model}.hybrid_layer_pattern"
            if value is not None or "|" in str(recipe.find(path)):
                yield path, value or plan.model.hybrid_layer_pattern, why
            continue
        if item == even and pp > 1 and value is None:
            why = "the stages are even, as the degrees alone make them"
        yield path, value, why
    for item, cleared in _STAGE_FIELDS.items():
        if item in recipe.items and not stays:
            yield recipe.items[item], cleared, "the plan states every stage itself"


def fields_beside(recipe: Recipe, plan: ParallelPlan) -> Iterator[FieldValue]:
    """What must change beside the layout's own fields, and what the layout makes stale."""
    yield from _fsdp(recipe, plan)
    yield from finetuning_fields(recipe, plan)
    yield from _pipeline_type(recipe, plan)
    options = {name: f"{recipe.model}.{name}" for name in _OF_THE_MODEL}
    for name in ("fsdp_double_buffer", "fsdp_manual_registration"):
        options[name] = f"{recipe.ddp}.{name}"
    yield from _contradicted(recipe, plan, {**options, **recipe.incompatible})
    planned, overlaps = plan_values(plan), recipe.places.overlap
    sizes = ("tensor_model_parallel_size", "context_parallel_size", "micro_batch_size")
    same_shapes = recipe.find(recipe.seq_length) == plan.train.seq_length and all(
        recipe.find(recipe.items[name]) == planned[name] for name in sizes
    )
    virtual = plan.layout.dims.virtual_pipeline_model_parallel_size > 1
    links = {"overlap_p2p_comm": virtual, "batch_p2p_comm": not virtual}  # ``schedules.py``
    for path in overlaps:
        yield from _stale(recipe, plan, path, same_shapes=same_shapes)
        yield from _overlap(recipe, plan, path, links)
    yield from _stale(recipe, plan, recipe.model, same_shapes=same_shapes)
    if not overlaps and plan.layout.dims.pipeline_model_parallel_size > 1:
        for name, value in links.items():
            yield f"{recipe.model}.{name}", value, _LINKS
    if plan.model.is_moe:
        why = "one kernel for all local experts, as was priced"
        yield f"{recipe.model}.moe_grouped_gemm", True, why


def _contradicted(
    recipe: Recipe, plan: ParallelPlan, table: Mapping[str, str]
) -> Iterator[FieldValue]:
    """The job's own options (-> path) that contradict the plan, taken back."""
    values = {name: recipe.find(path) for name, path in table.items()}
    present = {name: value for name, value in values.items() if value not in (ABSENT, None, "")}
    for name, why in contradicted(plan, present).items():
        yield table[name], _RESETS.get(name, False), why


def _fsdp(recipe: Recipe, plan: ParallelPlan) -> Iterator[FieldValue]:
    """What goes with Megatron-FSDP, and its checkpoint format taken back where it is not used.

    Source: ``ConfigContainer.validate`` of Megatron-Bridge, ``MegatronParallel.init_ddp`` of NeMo.
    """
    if not plan.layout.uses_megatron_fsdp:
        if recipe.find(recipe.ckpt_format) == "fsdp_dtensor":
            yield recipe.ckpt_format, "torch_dist", "only Megatron-FSDP saves that way"
        return
    planned = planned_arguments(launch_request(plan))
    form = "the one format that Megatron-FSDP saves, without a second process"
    yield recipe.ckpt_format, planned["ckpt_format"], form
    yield recipe.async_save, False, form
    yield f"{recipe.ddp}.average_in_collective", False, "Megatron-FSDP averages by itself"
    fused, fusion = "Megatron-FSDP keeps its gradients apart", "gradient_accumulation_fusion"
    yield f"{recipe.model}.{fusion}", planned[fusion], fused
    if initializes_on_meta_device(plan.model):
        built = "weights are made shard by shard; without it every GPU holds the whole model"
        yield f"{recipe.model}.init_model_with_meta_device", True, built
    name = "megatron_fsdp_main_grads_dtype"  # 0.20 takes the weights' unless told
    if planned[name] and recipe.find(f"{recipe.ddp}.{name}") is not ABSENT:
        import torch

        kept = "gradients stay in float32, as they are now"
        yield f"{recipe.ddp}.{name}", torch.float32, kept


def _pipeline_type(recipe: Recipe, plan: ParallelPlan) -> Iterator[FieldValue]:
    """The number format between stages, where neither the job nor a recipe that it names has it."""
    for path in recipe.pipeline_types:
        is_named = isinstance(recipe.find(path.rpartition(".")[0]), str)
        if is_named or recipe.find(path) not in (None, ABSENT):
            return
    if plan.layout.dims.pipeline_model_parallel_size > 1:
        import torch

        formats = {Precision.FP16: torch.float16, Precision.FP32: torch.float32}
        why = "stages exchange activations in the format of training"
        yield recipe.pipeline_types[0], formats.get(plan.train.precision, torch.bfloat16), why


def _overlap(
    recipe: Recipe, plan: ParallelPlan, prefix: str, links: Mapping[str, bool]
) -> Iterator[FieldValue]:
    """What an object of overlap settings loses or changes, beside ``_stale``."""
    names = (*links, "wgrad_deferral_limit", "overlap_grad_reduce", "overlap_param_gather")
    found = {name: recipe.find(f"{prefix}.{name}") for name in names}
    stated = {name: value for name, value in found.items() if value not in (ABSENT, None)}
    if "wgrad_deferral_limit" in stated:
        yield f"{prefix}.wgrad_deferral_limit", None, _DEFERRED
    if any(stated.get(name, value) != value for name, value in links.items()):
        for name in filter(stated.__contains__, links):
            yield f"{prefix}.{name}", None, f"{_LINKS}, by themselves"
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        planned = plan.arguments[name]
        if stated.get(name, planned) != planned:
            why = "the plan's time counts on it" if planned else "there is nothing to gather"
            yield f"{prefix}.{name}", planned, why


def _stale(
    recipe: Recipe, plan: ParallelPlan, prefix: str, *, same_shapes: bool
) -> Iterator[FieldValue]:
    """What a plan makes stale both in an object of overlap settings and on the model itself."""
    option = "overlap_param_gather_with_optimizer_step"
    yield from _contradicted(recipe, plan, {option: f"{prefix}.{option}"})
    buffers, deferral = f"{prefix}.tp_comm_overlap_cfg", f"{prefix}.{TAKEN_BACK}"
    keeps = same_shapes and plan.layout.sequence_parallel
    if not keeps and recipe.find(buffers) not in (ABSENT, None):
        yield buffers, None, "these user buffers were tuned for another layout or micro batch"
    if recipe.find(deferral) not in (ABSENT, None, False):
        yield deferral, False, _DEFERRED


class Recorded(Protocol):
    """What holds a plan, as ``nest_megatron.Plan`` does."""

    @property
    def record(self) -> ParallelPlan:
        """The plan."""


def plan_changes(
    recipe: Recipe, plan: ParallelPlan | Recorded, free: Collection[str]
) -> tuple[Change, ...]:
    """What a plan changes in a recipe, which stays as it is.

    Args:
        plan: as ``auto_recipe`` returns it, or within what ``nest_megatron.load_plan`` returns.
        free: what of the job may change where it differs from the plan.

    Raises:
        UserInputError: if it is for another model or job, breaks a rule of megatron-core, or needs
            a field that the framework does not have.
    """
    found = getattr(plan, "record", plan)
    if not isinstance(found, ParallelPlan):
        raise UserInputError(
            "plan",
            plan,
            "it is no plan",
            "Give what auto_recipe, nest_megatron.plan or nest_megatron.load_plan(FILE) returned.",
        )
    spec, _ = recipe.spec(found.model.vocab_size)
    require_plannable(found, recipe.target.megatron_core, spec)
    job = {
        "global_batch_size": recipe.find(recipe.items["global_batch_size"]),
        "seq_length": spec.seq_length,
    }
    size = {"num_gpus": recipe.size()[0]}
    if recipe.states_size:
        job |= size
    else:  # it is the launcher's
        _require_same(found, size, ())
    _require_same(found, job, free)
    planned, schedule = found.train.batch_schedule, recipe.batch_schedule(spec.seq_length)
    if schedule is not None and (planned is None or planned.sizes != schedule.sizes):
        made_for = planned.words() if planned else found.layout.global_batch_size
        raise UserInputError(
            "rampup_batch_size",
            schedule.words(),
            f"the plan was made for {made_for}",
            "Plan again.",
        )
    return changes(recipe.root, recipe.wanted(found))


def require_plannable(plan: ParallelPlan, version: str, spec: TransformerSpec) -> None:
    """Refuse a plan that this release of megatron-core would refuse, or one of another model."""
    require_launchable(launch_request(plan, version=version), but=OF_THE_COMMAND_LINE)
    rows = [(name, resolved(spec, name), resolved(plan.model, name)) for name in _SHAPE]
    differing = [
        f"{name} {found} (plan: {planned})"
        for name, found, planned in rows
        if (found or None) != (planned or None)
    ]
    if differing:
        raise UserInputError(
            "model",
            spec.name,
            f"the plan is for {plan.model.name}, and these differ: {', '.join(differing)}",
            "Plan this model.",
        )


def _require_same(plan: ParallelPlan, job: Mapping[str, int | None], free: Collection[str]) -> None:
    """Refuse a plan for another batch, sequence or number of GPUs, unless that may change.

    Args:
        job: what the job says; ``None`` where it leaves it open.
        free: which of these may change; any other name is refused.
    """
    for name in free:
        if name not in job:
            raise UserInputError(
                "free",
                name,
                f"what else a plan may change is {', '.join(job)}",
                "Leave it out: the layout itself is always written.",
            )
    planned = {
        "global_batch_size": plan.final_batch_size,
        "seq_length": plan.train.seq_length,
        "num_gpus": plan.layout.num_gpus,
    }
    for name, value in job.items():
        if value not in (None, planned[name]) and name not in free:
            raise UserInputError(
                name,
                value,
                f"the plan was made for {planned[name]}",
                f"Plan again, or give free=[{name!r}] to have it changed.",
            )
