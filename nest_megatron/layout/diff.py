"""What a plan changes in a job, field by field, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import NO_RECOMPUTE, RECOMPUTE_ARGUMENTS
from nest_megatron.layout.rulebook.degrees import launched_expert_tensor_size
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.plain import frozen
from nest_megatron.units import format_gib, format_seconds


@frozen
class Change:
    """One field that a plan sets otherwise; ``None`` is a field that is not set."""

    field: str
    before: object
    after: object
    reason: str


def plan_values(plan: ParallelPlan) -> dict[str, object]:
    """Everything that a plan sets in a job, by Megatron's names."""
    return {
        "global_batch_size": plan.final_batch_size,
        "micro_batch_size": plan.layout.micro_batch_size,
        **plan.arguments,
        "use_tp_pp_dp_mapping": plan.layout.dims.rank_order is RankOrder.TP_CP_EP_PP_DP,
    }


def reason(plan: ParallelPlan, field: str) -> str:
    """Why a plan sets a field as it does, in one sentence."""
    said, value = _REASONS[field], plan.arguments.get(field)
    if callable(said):
        return said(plan, value)
    is_on = value if isinstance(value, bool) else value not in (None, 1)
    text = said if isinstance(said, str) else said[is_on]
    layout, predicted = plan.layout, plan.predicted
    waiting = max(0.0, predicted.terms.get("pipeline_bubble", 0.0))
    return text.format(
        value=value,
        level=plan.placement.group_levels,
        layout=layout,
        sequences=layout.num_microbatches * layout.micro_batch_size,
        seq_length=plan.train.seq_length,
        waiting=100 * waiting / predicted.iteration_time_s,
        peak=format_gib(predicted.peak_memory_bytes),
        capacity=format_gib(predicted.capacity_bytes),
    )


def _experts(plan: ParallelPlan, size: Any) -> str:
    experts = plan.model.num_experts
    if experts is None:
        return "the model has no experts"
    if size == 1:
        return f"every rank holds all {experts} experts, so tokens stay where they are"
    shares = f"every rank holds {experts // size} of {experts} experts"
    level = plan.placement.group_levels.get("ep")  # none where no layer has any
    return f"{shares}; tokens travel within one {level}" if level else shares


def _expert_tensor(plan: ParallelPlan, size: Any) -> str:
    if plan.model.num_experts is None:
        if launched_expert_tensor_size(plan.model, plan.layout.dims) is None:
            return "the model has no experts"
        return "Megatron makes expert groups even so; this rank order needs tp * cp ranks in each"
    return "every expert is whole on its GPU" if size == 1 else f"an expert is cut over {size} GPUs"


def _layout(plan: ParallelPlan, _: Any) -> str:
    times = [stage.forward_s + stage.backward_s for stage in plan.predicted.stages]
    if len(times) == 1:
        return "there is one stage"
    over = 100 * (max(times) * len(times) / sum(times) - 1)
    return f"balanced by time, within memory; the slowest stage is {over:.1f} % above the mean"


def _recompute(plan: ParallelPlan, _: Any) -> str:
    if plan.layout.recompute == NO_RECOMPUTE:
        return "the activations fit as they are, so nothing is computed twice"
    spent = format_seconds(plan.predicted.terms.get("recompute", 0.0))
    return f"recomputing these activations costs {spent} a step and frees their memory"


def _fsdp(plan: ParallelPlan, _: Any) -> str:
    if not plan.layout.uses_megatron_fsdp:
        return "weights and gradients fit without being divided over the replicas"
    if plan.layout.zero <= ZeroStage.OPTIMIZER:
        return "replicas divide the optimizer states alone"
    what = "gradients" if plan.layout.zero == ZeroStage.GRADIENTS else "gradients and weights"
    return f"replicas divide {what} as well, which frees memory"


def _mapping(plan: ParallelPlan, _: Any) -> str:
    if plan.layout.dims.pipeline_model_parallel_size == 1:
        return "without a pipeline both orders of ranks are the same"
    levels, several = plan.placement.group_levels, plan.layout.dims.data_parallel_size > 1
    inner = "pipelines" if plan.layout.dims.rank_order is RankOrder.TP_CP_EP_PP_DP else "replicas"
    said = f"neighbouring ranks belong to {inner}: the pipeline crosses the {levels['pp']}"
    return f"{said}, data-parallel groups the {levels['dp']}" if several else said


def _gathers(plan: ParallelPlan, gathers: Any) -> str:
    if gathers:
        return "updated weights arrive while the first forward passes run"
    if plan.layout.shards_optimizer:
        return "divided weights are gathered before the first forward passes"
    return "there are no divided weights to gather"


#: Field -> the sentence, those where it is off (or 1) and on, or what says it of plan and value.
_REASONS: dict[str, str | tuple[str, str] | Callable[[ParallelPlan, Any], str]] = {
    "global_batch_size": "the batch that the plan was made for",
    "micro_batch_size": (
        "a replica works through {layout.num_microbatches} of these a step, one after another"
    ),
    "tensor_model_parallel_size": (
        "every layer is whole on its GPU, so there is no tensor communication",
        "every layer is cut over {value} GPUs, which talk within one {level[tp]}",
    ),
    "pipeline_model_parallel_size": (
        "all layers fit on every GPU, with a peak of {peak} of {capacity}",
        "the layers are divided into {value} stages, with a peak of {peak} of {capacity} per GPU",
    ),
    "virtual_pipeline_model_parallel_size": (
        "one chunk a rank, the plain schedule; waiting takes {waiting:.1f} % of the step",
        "{value} chunks a rank keep waiting at {waiting:.1f} % of the step",
    ),
    "context_parallel_size": (
        "sequences are whole on their GPU",
        "every sequence of {seq_length} tokens is cut over {value} GPUs",
    ),
    "data_parallel_size": (
        "replicas that fill {layout.num_gpus} GPUs; each sees {sequences} sequences a step"
    ),
    "expert_model_parallel_size": _experts,
    "expert_tensor_parallel_size": _expert_tensor,
    "sequence_parallel": (
        "there is no tensor group to divide the sequence over",
        "norms and residuals keep a share of the sequence each, which saves activation memory",
    ),
    "pipeline_model_parallel_layout": _layout,
    **dict.fromkeys(RECOMPUTE_ARGUMENTS, _recompute),
    "use_distributed_optimizer": (
        "the optimizer states fit as copies",
        "replicas divide the optimizer states instead of copying them",
    ),
    "use_megatron_fsdp": _fsdp,
    "use_torch_fsdp2": "the job's own sharding stays",
    "data_parallel_sharding_strategy": _fsdp,
    "overlap_grad_reduce": "gradients are summed while the last backward passes run",
    "overlap_param_gather": _gathers,
    "use_tp_pp_dp_mapping": _mapping,
}
