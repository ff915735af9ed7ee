"""Options of the user that a plan contradicts: left in place, Megatron would refuse the job.

A plan prices none of them, so dropping one costs at most what the option would have gained; each is
named in the changes, with its reason. Source lines: ``args`` is
``megatron/training/arguments.py``, ``mpc`` ``model_parallel_config.py``, ``tc``
``transformer_config.py`` (core_v0.16.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.parallel.recompute import RecomputeGranularity, RecomputeModule
from nest_megatron.parallel.rules import initializes_on_meta_device
from nest_megatron.parallel.zero import ZeroStage

Contradicts = Callable[[ParallelPlan, Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncompatibleOption:
    """Options that only go with some layouts.

    Args:
        dests: destinations of the options.
        contradicts: whether a plan contradicts the user's value.
        reason: said beside the change.
        source: where Megatron refuses the two together.
        turns_off: the option is a switch that turns something off, so it is given where the value
            is false.
        release: the only release that refuses the two together; ``None`` if all do.
    """

    dests: tuple[str, ...]
    contradicts: Contradicts
    reason: str
    source: str
    turns_off: bool = False
    release: str | None = None


def contradicted(
    plan: ParallelPlan, values: Mapping[str, Any], version: str = "0.16.1"
) -> dict[str, str]:
    """Options among the user's that the plan contradicts, with the reason for each."""
    return {
        dest: option.reason
        for option in INCOMPATIBLE_OPTIONS
        for dest in option.dests
        if option.release in (None, version)
        and bool(values.get(dest, option.turns_off)) is not option.turns_off
        and option.contradicts(plan, values[dest])
    }


def _without_sequence_parallel(plan: ParallelPlan, _: Any) -> bool:
    return not plan.parallel.sequence_parallel


def _without_pipeline(plan: ParallelPlan, _: Any) -> bool:
    return plan.parallel.pipeline_model_parallel_size == 1


def _without_virtual_stages(plan: ParallelPlan, _: Any) -> bool:
    return plan.parallel.virtual_pipeline_model_parallel_size is None


def _fully_recomputes(plan: ParallelPlan) -> bool:
    return plan.parallel.recompute_granularity is RecomputeGranularity.FULL


def _gathers_apart(plan: ParallelPlan, value: Any) -> bool:
    return _without_virtual_stages(plan, value) or not plan.parallel.overlap_param_gather


def _group_size(plan: ParallelPlan, size: Any) -> bool:
    """Micro batches in a round of virtual stages: between pp and all of them, in whole rounds."""
    pp, count = plan.parallel.pipeline_model_parallel_size, plan.grid().num_microbatches
    rest = count % size
    return _without_virtual_stages(plan, size) or not pp <= size <= count or 0 < rest < pp


def _two_ranks_without_overlap(plan: ParallelPlan, _: Any) -> bool:
    chosen = plan.parallel
    virtual = chosen.virtual_pipeline_model_parallel_size is not None
    return virtual and chosen.pipeline_model_parallel_size == 2


def _saves_in_another_way(plan: ParallelPlan, _: Any) -> bool:
    chosen = plan.parallel
    split = chosen.tensor_model_parallel_size > 1 and not chosen.sequence_parallel
    return not (split and _fully_recomputes(plan))


def _other_product(plan: ParallelPlan, sizes: Any) -> bool:
    return math.prod(map(int, sizes)) != plan.parallel.context_parallel_size


def _hierarchical(plan: ParallelPlan, kinds: Any) -> bool:
    return "a2a+p2p" in kinds and plan.parallel.context_parallel_size == 1


def _no_expert_overlap(plan: ParallelPlan, _: Any) -> bool:
    chosen = plan.parallel
    plain = chosen.pipeline_model_parallel_size > 1 and _without_virtual_stages(plan, None)
    again = _fully_recomputes(plan) or RecomputeModule.MOE in chosen.recompute_modules
    return chosen.expert_model_parallel_size == 1 or plain or again


def _recomputes_shared_experts(plan: ParallelPlan, _: Any) -> bool:
    return RecomputeModule.SHARED_EXPERTS in plan.parallel.recompute_modules


def _alone(plan: ParallelPlan, _: Any) -> bool:
    return plan.model.is_moe and plan.grid().dims.expert_ranks == 1


def _flex_alone(plan: ParallelPlan, kind: Any) -> bool:
    return kind == "flex" and _alone(plan, kind)


def _keeps_layers(plan: ParallelPlan, _: Any) -> bool:
    again = plan.parallel.recompute_granularity
    return plan.parallel.pipeline_model_parallel_size > 1 or again is not None


def _uneven_instances(plan: ParallelPlan, instances: Any) -> bool:
    dims = plan.grid().dims
    replicas = dims.data_parallel_size * dims.context_parallel_size
    experts = plan.model.is_moe and dims.expert_data_parallel_size % instances
    return not plan.parallel.use_distributed_optimizer or bool(replicas % instances or experts)


def _expert_instances(plan: ParallelPlan, instances: Any) -> bool:
    chosen = plan.parallel
    return instances > 1 and chosen.use_megatron_fsdp and chosen.expert_model_parallel_size > 1


def _other_checkpoints(plan: ParallelPlan, name: Any) -> bool:
    chosen = plan.parallel
    owners = {"fsdp_dtensor": chosen.use_megatron_fsdp, "torch_dcp": chosen.use_torch_fsdp2}
    return not owners.get(name, True)


def _without_fsdp(plan: ParallelPlan, _: Any) -> bool:
    return not plan.parallel.use_megatron_fsdp


def _with_fsdp(plan: ParallelPlan, _: Any) -> bool:
    return plan.parallel.use_megatron_fsdp


def _without_any_fsdp(plan: ParallelPlan, _: Any) -> bool:
    return not (plan.parallel.use_megatron_fsdp or plan.parallel.use_torch_fsdp2)


def _made_on_meta_device(plan: ParallelPlan, _: Any) -> bool:
    return plan.parallel.use_megatron_fsdp and initializes_on_meta_device(plan.model)


def _divides_weights(plan: ParallelPlan, _: Any) -> bool:
    return plan.parallel.use_megatron_fsdp and plan.grid().zero is ZeroStage.WEIGHTS


_VIRTUAL = "the plan has no virtual stages"
_PIPELINE = "the plan has no pipeline"

INCOMPATIBLE_OPTIONS: tuple[IncompatibleOption, ...] = (
    IncompatibleOption(
        dests=("tp_comm_overlap",),
        contradicts=_without_sequence_parallel,
        reason="it needs sequence parallelism",
        source="args:916",
    ),
    IncompatibleOption(
        dests=("defer_embedding_wgrad_compute",),
        contradicts=_without_pipeline,
        reason=_PIPELINE,
        source="mpc:426",
    ),
    IncompatibleOption(
        dests=("overlap_p2p_comm_warmup_flush",),
        contradicts=_without_virtual_stages,
        reason=_VIRTUAL,
        source="mpc:452",
    ),
    IncompatibleOption(
        dests=("overlap_p2p_comm",),
        contradicts=_two_ranks_without_overlap,
        reason="virtual stages on two pipeline ranks need it",
        source="args:579",
        turns_off=True,
    ),
    IncompatibleOption(
        dests=("overlap_param_gather_with_optimizer_step",),
        contradicts=_gathers_apart,
        reason="it needs virtual stages and overlapped gathering of weights",
        source="args:640",
    ),
    IncompatibleOption(
        dests=("microbatch_group_size_per_vp_stage",),
        contradicts=_group_size,
        reason="the plan's rounds of micro batches are of another size",
        source="schedules.py:995-1015 (run)",
    ),
    IncompatibleOption(
        dests=("distribute_saved_activations",),
        contradicts=_saves_in_another_way,
        reason="sequence parallelism spreads them already",
        source="args:885",
    ),
    IncompatibleOption(
        dests=("hierarchical_context_parallel_sizes",),
        contradicts=_other_product,
        reason="the plan has another context-parallel size",
        source="args:405",
    ),
    IncompatibleOption(
        dests=("cp_comm_type",),
        contradicts=_hierarchical,
        reason="the plan has no context parallelism",
        source="args:407",
    ),
    IncompatibleOption(
        dests=("overlap_moe_expert_parallel_comm",),
        contradicts=_no_expert_overlap,
        reason="it needs expert parallelism, virtual stages and no full recomputation",
        source="tc:1858",
    ),
    IncompatibleOption(
        dests=("overlap_moe_expert_parallel_comm",),
        contradicts=_with_fsdp,
        reason="its schedule passes by the layers' forward, where Megatron-FSDP gathers weights",
        source="model_chunk_schedule_plan.py (0.20 combined_1f1b.py:68 allows it)",
        release="0.16.1",
    ),
    IncompatibleOption(
        dests=("delay_wgrad_compute",),
        contradicts=_no_expert_overlap,
        reason="it goes with --overlap-moe-expert-parallel-comm",
        source="tc:1872",
    ),
    IncompatibleOption(
        dests=("delay_wgrad_compute",),
        contradicts=_with_fsdp,
        reason="it goes with --overlap-moe-expert-parallel-comm",
        source="tc:1872",
        release="0.16.1",
    ),
    IncompatibleOption(
        dests=("moe_shared_expert_overlap",),
        contradicts=_recomputes_shared_experts,
        reason="the plan computes shared experts again",
        source="tc:1234",
    ),
    IncompatibleOption(
        dests=("moe_token_dispatcher_type",),
        contradicts=_flex_alone,
        reason="the flex dispatcher exchanges tokens among several ranks",
        source="moe/token_dispatcher.py:1346",
    ),
    IncompatibleOption(
        dests=("moe_flex_dispatcher_backend", "moe_enable_deepep"),
        contradicts=_alone,
        reason="the flex dispatcher exchanges tokens among several ranks",
        source="moe/token_dispatcher.py:1346",
    ),
    IncompatibleOption(
        dests=("cpu_offloading_num_layers",),
        contradicts=_keeps_layers,
        reason="whole layers are moved to the host without a pipeline and without recomputation",
        source="tc:1144, tc:1149",
    ),
    IncompatibleOption(
        dests=("fine_grained_activation_offloading",),
        contradicts=lambda plan, _: _fully_recomputes(plan),
        reason="the plan computes whole layers again, so nothing of them is kept",
        source="0.20 tc:2163 (run)",
    ),
    IncompatibleOption(
        dests=("num_distributed_optimizer_instances",),
        contradicts=lambda plan, n: n > 1 and _uneven_instances(plan, n),
        reason="it does not divide the plan's replicas",
        source="parallel_state.py:833",
    ),
    IncompatibleOption(
        dests=("num_distributed_optimizer_instances",),
        contradicts=_expert_instances,
        reason="Megatron-FSDP of 0.16.1 has no groups of experts within an instance",
        source="mcore_fsdp_adapter.py:206-221, megatron_fsdp.py:246",
        release="0.16.1",
    ),
    IncompatibleOption(
        dests=("ckpt_format",),
        contradicts=_other_checkpoints,
        reason="the plan's data-parallel sharding does not save that way",
        source="args:690, :1042",
    ),
    IncompatibleOption(
        dests=("fsdp_double_buffer",),
        contradicts=_without_fsdp,
        reason="it belongs to Megatron-FSDP",
        source="args:680",
    ),
    IncompatibleOption(
        dests=("fsdp_manual_registration",),
        contradicts=_without_fsdp,
        reason="it belongs to Megatron-FSDP",
        source="args:694",
    ),
    IncompatibleOption(
        dests=("init_model_with_meta_device",),
        contradicts=_without_any_fsdp,
        reason="without Megatron-FSDP weights of the meta device keep whatever memory holds",
        source="training.py:1266 (run)",
    ),
    IncompatibleOption(
        dests=("use_cpu_initialization",),
        contradicts=_made_on_meta_device,
        reason="Megatron-FSDP makes the weights from the meta device, and cannot make the "
        "embedding's there with it",
        source="param_and_grad_buffer.py:2198 (run)",
    ),
    IncompatibleOption(
        dests=("check_weight_hash_across_dp_replicas_interval",),
        contradicts=_divides_weights,
        reason="no replica holds all weights",
        source="args:684",
    ),
    IncompatibleOption(
        dests=("moe_single_grouped_weight", "moe_single_grouped_bias"),
        contradicts=_with_fsdp,
        reason="Megatron-FSDP shards the experts one by one",
        source="0.20 args:1138",
    ),
)
