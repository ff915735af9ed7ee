"""What a plan sets in a configuration of megatron-core, item by item, and what it clears.

An *item* is Megatron's name of a choice; each framework's table says in which field it lies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.fields import ABSENT, FieldValue, find
from nest_megatron.integrations.megatron_lm.attach import launch_request, require_placed
from nest_megatron.integrations.megatron_lm.incompatible_options import contradicted
from nest_megatron.integrations.megatron_lm.rules import require_launchable
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.diff import plan_values, reason
from nest_megatron.parallel.layout import is_uniform
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.parallel.rules import (
    initializes_on_meta_device,
    launched_expert_tensor_size,
)
from nest_megatron.plain import to_plain

#: Fields that state the stage boundaries, and their values where the plan says it.
_STAGE_FIELDS: Mapping[str, object] = {
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
#: Options that only go with some layouts, and their values where they are taken back.
RESETS: Mapping[str, object] = {
    "overlap_p2p_comm_warmup_flush": False,
    "overlap_param_gather_with_optimizer_step": False,
    "microbatch_group_size_per_vp_stage": None,
    "distribute_saved_activations": False,
    "num_distributed_optimizer_instances": 1,
    "fsdp_double_buffer": False,
    "fsdp_manual_registration": False,
    "init_model_with_meta_device": False,
    "use_cpu_initialization": False,
    "moe_single_grouped_weight": False,
    "moe_single_grouped_bias": False,
}
#: Those of them that both frameworks keep in the model's own configuration.
OF_THE_MODEL = (
    "overlap_p2p_comm_warmup_flush",
    "distribute_saved_activations",
    "init_model_with_meta_device",
    "use_cpu_initialization",
    "moe_single_grouped_weight",
    "moe_single_grouped_bias",
)
_FSDP_FORMAT = "fsdp_dtensor"
#: Rules on flags of Megatron-LM's own command line, which these frameworks do without.
_OF_THE_COMMAND_LINE = ("known_version", "activation_flag", "position_type", "positions")
#: What must be the same in the job and in the model that was planned.
_SHAPE = (
    "family",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "query_groups",
    "head_dim",
    "ffn_hidden_size",
    "gated_linear_unit",
    "num_experts",
    "moe_layer_pattern",
    "expert_ffn_hidden_size",
    "moe_router_topk",
    "moe_shared_expert_intermediate_size",
    "multi_latent_attention",
    "num_mtp_layers",
)
_OF_EXPERTS = ("moe_layer_pattern", "expert_ffn_hidden_size", "moe_router_topk")


def planned_items(plan: ParallelPlan) -> dict[str, Any]:
    """What a plan sets, by item, in plain values.

    The layout is left out where stages are the even ones that megatron-core makes by itself.
    """
    items: dict[str, Any] = to_plain(plan_values(plan))
    del items["data_parallel_size"]  # it follows from the number of ranks
    pipelined = plan.parallel.pipeline_model_parallel_size > 1
    items["recompute_modules"] = items["recompute_modules"] or None
    items["use_tp_pp_dp_mapping"] = items["use_tp_pp_dp_mapping"] and pipelined
    items["expert_tensor_parallel_size"] = launched_expert_tensor_size(plan.model, plan.grid().dims)
    if is_even(plan):
        items["pipeline_model_parallel_layout"] = None
    if not plan.parallel.use_megatron_fsdp:
        items["data_parallel_sharding_strategy"] = "no_shard"
    return items


def is_even(plan: ParallelPlan) -> bool:
    """Whether megatron-core divides the layers like the plan where it is told degrees alone."""
    return is_uniform(plan.model, plan.partition())


def layout_fields(plan: ParallelPlan, table: Mapping[str, str]) -> Iterator[FieldValue]:
    """The plan's items in the fields of a framework, and the other ways to state stages cleared.

    Args:
        table: item -> path.
    """
    for item, value in planned_items(plan).items():
        if item in table:
            yield FieldValue(path=table[item], value=value, reason=_reason(plan, item))
    for item, value in _STAGE_FIELDS.items():
        if item in table:
            yield FieldValue(
                path=table[item], value=value, reason="the plan states every stage itself"
            )


def _reason(plan: ParallelPlan, item: str) -> str:
    if item == "pipeline_model_parallel_layout" and plan.parallel.pipeline_model_parallel_layout:
        even = "the stages are even, as the degrees alone make them"
        return even if is_even(plan) else reason(plan, item)
    return reason(plan, item)


def contradicted_fields(
    root: Any, plan: ParallelPlan, table: Mapping[str, str]
) -> Iterator[FieldValue]:
    """The job's own options that contradict the plan, taken back.

    Args:
        table: option -> path; only those of ``RESETS`` are looked at.
    """
    values = {name: find(root, path) for name, path in table.items() if name in RESETS}
    present = {name: value for name, value in values.items() if value not in (ABSENT, None, "")}
    for name, why in contradicted(plan, present).items():
        if name in RESETS:
            yield FieldValue(path=table[name], value=RESETS[name], reason=why)


def fsdp_fields(
    root: Any,
    plan: ParallelPlan,
    *,
    ckpt_format: str,
    async_save: str,
    averaging: str | None,
    model: str,
    gradients: str | None = None,
) -> Iterator[FieldValue]:
    """What goes with Megatron-FSDP, and its checkpoint format taken back where it is not used.

    Args:
        ckpt_format, async_save, averaging: paths; ``averaging`` is ``None`` where the configuration
            of data parallelism is written as a whole.
        model: path of the model's configuration.
        gradients: path of the width of Megatron-FSDP's gradients, which only megatron-core 0.20
            has.

    Source: ``ConfigContainer.validate`` of Megatron-Bridge, ``MegatronParallel.init_ddp`` of NeMo.
    """
    if plan.parallel.use_megatron_fsdp:
        form = "the one format that Megatron-FSDP saves, without a second process"
        yield FieldValue(path=ckpt_format, value=_FSDP_FORMAT, reason=form)
        yield FieldValue(path=async_save, value=False, reason=form)
        if averaging is not None:
            alone = "Megatron-FSDP averages by itself"
            yield FieldValue(path=averaging, value=False, reason=alone)
        fused = "Megatron-FSDP keeps its gradients apart"
        yield FieldValue(path=f"{model}.gradient_accumulation_fusion", value=False, reason=fused)
        if initializes_on_meta_device(plan.model):
            built = "weights are made shard by shard; without it every GPU holds the whole model"
            yield FieldValue(path=f"{model}.init_model_with_meta_device", value=True, reason=built)
        if gradients is not None and find(root, gradients) is not ABSENT:
            yield from _wide_gradients(plan, gradients)
    elif find(root, ckpt_format) == _FSDP_FORMAT:
        form = "only Megatron-FSDP saves that way"
        yield FieldValue(path=ckpt_format, value="torch_dist", reason=form)


def _wide_gradients(plan: ParallelPlan, path: str) -> Iterator[FieldValue]:
    """Megatron-FSDP of 0.20 keeps gradients in the width of the weights unless told otherwise."""
    request = launch_request(plan)
    if request.gradient_bytes == 4 and request.precision is not Precision.FP32:
        import torch

        why = "gradients stay in float32, as they are now"
        yield FieldValue(path=path, value=torch.float32, reason=why)


def expert_fields(plan: ParallelPlan, prefix: str) -> Iterator[FieldValue]:
    """How experts work, as it was priced.

    Args:
        prefix: path of the model's configuration.
    """
    if plan.model.is_moe:
        why = "one kernel for all local experts, as was priced"
        yield FieldValue(path=f"{prefix}.moe_grouped_gemm", value=True, reason=why)


def pipeline_type_field(
    root: Any, plan: ParallelPlan, path: str, *others: str
) -> Iterator[FieldValue]:
    """The number format between stages, where the job gives none.

    Args:
        path: where it is set.
        others: other places that would do.
    """
    given = {find(root, place) for place in (path, *others)}
    if plan.parallel.pipeline_model_parallel_size == 1 or not given <= {None, ABSENT}:
        return
    import torch

    formats = {Precision.FP16: torch.float16, Precision.FP32: torch.float32}
    exchanged = formats.get(plan.train.precision, torch.bfloat16)
    why = "stages exchange activations in the format of training"
    yield FieldValue(path=path, value=exchanged, reason=why)


def require_plannable(plan: ParallelPlan, version: str) -> None:
    """Refuse a plan that megatron-core would refuse, or let pass and fail on later.

    Args:
        version: the release of megatron-core.

    Raises:
        UserInputError: for the first rule broken.
    """
    require_placed(plan)
    require_launchable(launch_request(plan, version=version), but=_OF_THE_COMMAND_LINE)


def require_same_model(plan: ParallelPlan, spec: TransformerSpec) -> None:
    """Refuse to lay out another model than the one that was planned.

    Raises:
        UserInputError: naming everything that differs.
    """
    names = [name for name in _SHAPE if spec.num_experts or name not in _OF_EXPERTS]
    differing = [
        f"{name} {getattr(spec, name)} (plan: {getattr(plan.model, name)})"
        for name in names
        if (getattr(spec, name) or None) != (getattr(plan.model, name) or None)
    ]
    if differing:
        raise UserInputError(
            "model",
            value=spec.name,
            limit=f"the plan is for {plan.model.name}, and these differ: {', '.join(differing)}",
            fix="Plan this model.",
        )


def require_same_job(
    job: Mapping[str, int | None], planned: Mapping[str, int], free: Collection[str]
) -> None:
    """Refuse a plan for another batch, sequence or number of GPUs, unless that may change.

    Args:
        job: what the job says; ``None`` where it leaves it open.
        planned: the same of the plan.

    Raises:
        UserInputError: naming the first that differs, or a name in ``free`` that is none of them.
    """
    for name in free:
        if name not in planned:
            raise UserInputError(
                "free",
                value=name,
                limit=f"what else a plan may change is {', '.join(planned)}",
                fix="Leave it out: the layout itself is always written.",
            )
    for name, value in planned.items():
        if job[name] not in (None, value) and name not in free:
            raise UserInputError(
                name,
                value=job[name],
                limit=f"the plan was made for {value}",
                fix=f"Plan again, or give free=[{name!r}] to have it changed.",
            )
