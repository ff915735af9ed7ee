"""What a plan sets in a configuration of megatron-core, item by item, and what it clears.

An *item* is Megatron's name of a choice; each framework's ``ConfigPaths`` say in which field it
lies. Both frameworks keep settings that hide communication in one object (NeMo's
``MegatronCommOverlapCallback``, Megatron-Bridge's ``CommOverlapConfig``) that works out by itself
what is ``None`` there, and both let a job set the same names on the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.fields import ABSENT, ConfigPaths, FieldValue, find
from nest_megatron.integrations.megatron_lm.attach import (
    OF_THE_COMMAND_LINE,
    launch_request,
)
from nest_megatron.integrations.megatron_lm.write import planned_arguments
from nest_megatron.integrations.restore import finetuning_fields
from nest_megatron.layout.batch_schedule import BatchSchedule
from nest_megatron.layout.diff import plan_values, reason
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook import require_launchable
from nest_megatron.layout.rulebook.degrees import launched_expert_tensor_size
from nest_megatron.layout.rulebook.options import contradicted
from nest_megatron.layout.rulebook.sharding import initializes_on_meta_device
from nest_megatron.layout.stage_layout import is_uniform
from nest_megatron.model.sizes import LATENT_SIZES
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import to_plain
from nest_megatron.planner.pinned_job import resolved

#: Fields that state the stage boundaries, and their values where the plan says it.
STAGE_FIELDS: Mapping[str, object] = {
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
#: Items that say what stages there are, the pipeline's own size apart.
_STAGES = ("pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size")
#: Options of the model's configuration that only go with some layouts, and their values where they
#: are taken back; those of data parallelism; and all.
_OF_THE_MODEL = {
    "overlap_p2p_comm_warmup_flush": False,
    "distribute_saved_activations": False,
    "init_model_with_meta_device": False,
    "use_cpu_initialization": False,
    "moe_single_grouped_weight": False,
    "moe_single_grouped_bias": False,
}
_OF_DDP = {"fsdp_double_buffer": False, "fsdp_manual_registration": False}
_RESETS: Mapping[str, object] = {
    **_OF_THE_MODEL,
    **_OF_DDP,
    "overlap_param_gather_with_optimizer_step": False,
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
_FSDP_FORMAT = "fsdp_dtensor"
_DEFERRED = (
    "the last stage would keep the gradients of logits of many micro batches, which the plan's "
    "memory does not count"
)
#: What every plan takes back (``_stale``), so that it weighs on no plan's memory.
TAKEN_BACK = frozenset({"defer_embedding_wgrad_compute"})
_LINKS = "virtual stages overlap their exchanges, others batch them"


def planned_items(plan: ParallelPlan) -> dict[str, Any]:
    """What a plan sets, by item, in plain values.

    The layout is left out where stages are the even ones that megatron-core makes by itself.
    """
    items: dict[str, Any] = to_plain(plan_values(plan))
    del items["data_parallel_size"]  # it follows from the number of ranks
    pipelined = plan.layout.dims.pipeline_model_parallel_size > 1
    items["recompute_modules"] = items["recompute_modules"] or None
    items["use_tp_pp_dp_mapping"] = items["use_tp_pp_dp_mapping"] and pipelined
    items["expert_tensor_parallel_size"] = launched_expert_tensor_size(plan.model, plan.layout.dims)
    if is_even(plan):
        items["pipeline_model_parallel_layout"] = None
    if not plan.layout.uses_megatron_fsdp:
        items["data_parallel_sharding_strategy"] = "no_shard"
    return items


def is_even(plan: ParallelPlan) -> bool:
    """Whether megatron-core divides the layers like the plan where it is told degrees alone."""
    return is_uniform(plan.model, plan.layout.partition)


def layout_fields(
    plan: ParallelPlan, paths: ConfigPaths, *, stages: bool = True
) -> Iterator[FieldValue]:
    """The plan's items in the fields of a framework, and the other ways to state stages cleared.

    Args:
        stages: the fields of the job do not make the plan's stages by themselves.
    """
    pipelined = plan.layout.dims.pipeline_model_parallel_size > 1
    for item, value in planned_items(plan).items():
        if item in paths.items and (stages or item not in _STAGES):
            even = item == "pipeline_model_parallel_layout" and pipelined and is_even(plan)
            why = "the stages are even, as the degrees alone make them"
            yield paths.items[item], value, why if even else reason(plan, item)
    for item, value in STAGE_FIELDS.items() if stages else ():
        if item in paths.items:
            yield paths.items[item], value, "the plan states every stage itself"


def fields_beside(
    root: Any, plan: ParallelPlan, paths: ConfigPaths, overlaps: Sequence[str]
) -> Iterator[FieldValue]:
    """What must change beside the layout's own fields, and what the layout makes stale."""
    yield from _fsdp(root, plan, paths)
    yield from finetuning_fields(root, plan, paths)
    yield from _pipeline_type(root, plan, paths)
    own = {name: f"{paths.model}.{name}" for name in _OF_THE_MODEL}
    of_ddp = {name: f"{paths.ddp}.{name}" for name in _OF_DDP}
    yield from _contradicted(root, plan, {**own, **of_ddp, **paths.incompatible})
    same_shapes = _keeps_shapes(root, plan, paths)
    for path in overlaps:
        yield from _stale(root, plan, path, same_shapes=same_shapes)
        yield from _overlap(root, plan, path)
    yield from _stale(root, plan, paths.model, same_shapes=same_shapes)
    if not overlaps and plan.layout.dims.pipeline_model_parallel_size > 1:
        for name, value in _links(plan).items():
            yield f"{paths.model}.{name}", value, _LINKS
    if plan.model.is_moe:
        why = "one kernel for all local experts, as was priced"
        yield f"{paths.model}.moe_grouped_gemm", True, why


def _contradicted(root: Any, plan: ParallelPlan, table: Mapping[str, str]) -> Iterator[FieldValue]:
    """The job's own options (-> path) that contradict the plan, taken back."""
    values = {name: find(root, path) for name, path in table.items()}
    present = {name: value for name, value in values.items() if value not in (ABSENT, None, "")}
    for name, why in contradicted(plan, present).items():
        if name in _RESETS:
            yield table[name], _RESETS[name], why


def _fsdp(root: Any, plan: ParallelPlan, paths: ConfigPaths) -> Iterator[FieldValue]:
    """What goes with Megatron-FSDP, and its checkpoint format taken back where it is not used.

    Source: ``ConfigContainer.validate`` of Megatron-Bridge, ``MegatronParallel.init_ddp`` of NeMo.
    """
    if plan.layout.uses_megatron_fsdp:
        planned = planned_arguments(launch_request(plan))
        form = "the one format that Megatron-FSDP saves, without a second process"
        yield paths.ckpt_format, planned["ckpt_format"], form
        yield paths.async_save, False, form
        yield f"{paths.ddp}.average_in_collective", False, "Megatron-FSDP averages by itself"
        fused = "Megatron-FSDP keeps its gradients apart"
        fusion = "gradient_accumulation_fusion"
        yield f"{paths.model}.{fusion}", planned[fusion], fused
        if initializes_on_meta_device(plan.model):
            built = "weights are made shard by shard; without it every GPU holds the whole model"
            yield f"{paths.model}.init_model_with_meta_device", True, built
        name = "megatron_fsdp_main_grads_dtype"
        gradients = f"{paths.ddp}.{name}"
        if (
            planned[name] and find(root, gradients) is not ABSENT
        ):  # 0.20 takes the weights' unless told
            import torch

            yield gradients, torch.float32, "gradients stay in float32, as they are now"
    elif find(root, paths.ckpt_format) == _FSDP_FORMAT:
        yield paths.ckpt_format, "torch_dist", "only Megatron-FSDP saves that way"


def _pipeline_type(root: Any, plan: ParallelPlan, paths: ConfigPaths) -> Iterator[FieldValue]:
    """The number format between stages, where neither the job nor a recipe that it names has it."""
    is_named = any(isinstance(find(root, p.rpartition(".")[0]), str) for p in paths.pipeline_types)
    given = {find(root, path) for path in paths.pipeline_types}
    if (
        plan.layout.dims.pipeline_model_parallel_size == 1
        or is_named
        or not given <= {None, ABSENT}
    ):
        return
    import torch

    formats = {Precision.FP16: torch.float16, Precision.FP32: torch.float32}
    why = "stages exchange activations in the format of training"
    yield paths.pipeline_types[0], formats.get(plan.train.precision, torch.bfloat16), why


def _keeps_shapes(root: Any, plan: ParallelPlan, paths: ConfigPaths) -> bool:
    wanted = {
        paths.items["tensor_model_parallel_size"]: plan.layout.dims.tensor_model_parallel_size,
        paths.items["context_parallel_size"]: plan.layout.dims.context_parallel_size,
        paths.items["micro_batch_size"]: plan.layout.micro_batch_size,
        paths.seq_length: plan.train.seq_length,
    }
    return all(find(root, path) == value for path, value in wanted.items())


def _links(plan: ParallelPlan) -> Mapping[str, bool]:
    """How pipeline ranks exchange. Source: ``schedules.py``."""
    virtual = plan.layout.dims.virtual_pipeline_model_parallel_size > 1
    return {"overlap_p2p_comm": virtual, "batch_p2p_comm": not virtual}


def _overlap(root: Any, plan: ParallelPlan, prefix: str) -> Iterator[FieldValue]:
    """What an object of overlap settings loses or changes, beside ``_stale``."""

    def stated(name: str) -> Any:
        value = find(root, f"{prefix}.{name}")
        return None if value is ABSENT else value

    if stated("wgrad_deferral_limit") is not None:
        yield f"{prefix}.wgrad_deferral_limit", None, _DEFERRED
    links = _links(plan)
    if any(stated(name) not in (None, value) for name, value in links.items()):
        for name in links:
            if stated(name) is not None:
                yield f"{prefix}.{name}", None, f"{_LINKS}, by themselves"
    arguments = plan.arguments
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        planned = arguments[name]
        if stated(name) not in (None, planned):
            why = "the plan's time counts on it" if planned else "there is nothing to gather"
            yield f"{prefix}.{name}", planned, why


def _stale(
    root: Any, plan: ParallelPlan, prefix: str, *, same_shapes: bool
) -> Iterator[FieldValue]:
    """What a plan makes stale both in an object of overlap settings and on the model itself."""
    option = "overlap_param_gather_with_optimizer_step"
    yield from _contradicted(root, plan, {option: f"{prefix}.{option}"})
    buffers = f"{prefix}.tp_comm_overlap_cfg"
    unused = not plan.layout.sequence_parallel
    if (unused or not same_shapes) and find(root, buffers) not in (ABSENT, None):
        why = "these user buffers were tuned for another layout or micro batch"
        yield buffers, None, why
    for name in TAKEN_BACK:
        if find(root, f"{prefix}.{name}") not in (ABSENT, None, False):
            yield f"{prefix}.{name}", False, _DEFERRED


class Recorded(Protocol):
    """What holds a plan, as ``nest_megatron.Plan`` does."""

    @property
    def record(self) -> ParallelPlan:
        """The plan."""


def plan_record(given: ParallelPlan | Recorded) -> ParallelPlan:
    """A plan as ``auto_recipe`` returns it, or within what ``nest_megatron.load_plan`` returns."""
    found = getattr(given, "record", given)
    if isinstance(found, ParallelPlan):
        return found
    limit = "it is no plan"
    fix = "Give what auto_recipe, nest_megatron.plan or nest_megatron.load_plan(FILE) returned."
    raise UserInputError("plan", given, limit, fix)


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
        limit = f"the plan is for {plan.model.name}, and these differ: {', '.join(differing)}"
        fix = "Plan this model."
        raise UserInputError("model", spec.name, limit, fix)


def require_same_schedule(plan: ParallelPlan, schedule: BatchSchedule | None) -> None:
    """Refuse a plan that was not made for each size of a job's batch."""
    planned = plan.train.batch_schedule
    if schedule is not None and (planned is None or planned.sizes != schedule.sizes):
        limit = (
            f"the plan was made for {planned.words() if planned else plan.layout.global_batch_size}"
        )
        what, now = "rampup_batch_size", schedule.words()
        raise UserInputError(what, now, limit, fix="Plan again.")


def require_same_job(
    plan: ParallelPlan, job: Mapping[str, int | None], free: Collection[str]
) -> None:
    """Refuse a plan for another batch, sequence or number of GPUs, unless that may change.

    Args:
        job: what the job says; ``None`` where it leaves it open.
        free: which of these may change; any other name is refused.
    """
    for name in free:
        if name not in job:
            limit = f"what else a plan may change is {', '.join(job)}"
            fix = "Leave it out: the layout itself is always written."
            raise UserInputError("free", name, limit, fix)
    planned = {
        "global_batch_size": plan.final_batch_size,
        "seq_length": plan.train.seq_length,
        "num_gpus": plan.layout.num_gpus,
    }
    for name, value in job.items():
        if value not in (None, planned[name]) and name not in free:
            limit = f"the plan was made for {planned[name]}"
            fix = f"Plan again, or give free=[{name!r}] to have it changed."
            raise UserInputError(name, value, limit, fix)
