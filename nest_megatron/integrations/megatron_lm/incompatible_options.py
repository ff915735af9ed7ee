"""Options of the user that a plan contradicts: left in place, Megatron would refuse the job.

A plan prices none of them, so dropping one costs at most what the option would have gained; each is
named in the changes, with its reason. Beside each stands where Megatron refuses it: ``args`` is
``megatron/training/arguments.py``, ``mpc`` ``model_parallel_config.py``, ``tc``
``transformer_config.py`` (core_v0.16.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.parallel.recompute import NO_RECOMPUTE, RecomputeGranularity, RecomputeModule
from nest_megatron.parallel.rules import (
    DEFAULT_VERSION,
    allows_interleaving,
    initializes_on_meta_device,
)
from nest_megatron.parallel.zero import DataParallelSharding, ZeroStage


class _Layout:
    def __init__(self, plan: ParallelPlan) -> None:
        layout = plan.layout
        self.layout, self.model = layout, plan.model
        self.dims, self.zero = layout.dims, layout.zero
        growing = plan.train.batch_schedule
        sizes = {layout.global_batch_size, *(growing.sizes if growing else ())}
        together = layout.micro_batch_size * layout.dims.data_parallel_size
        self.numbers_of_microbatches = sorted(size // together for size in sizes)
        self.pp = layout.dims.pipeline_model_parallel_size
        self.virtual = layout.dims.virtual_pipeline_model_parallel_size > 1
        self.fsdp = layout.uses_megatron_fsdp
        self.saves = {
            "fsdp_dtensor": self.fsdp,
            "torch_dcp": layout.sharding is DataParallelSharding.TORCH_FSDP2,
        }
        self.full = layout.recompute.granularity is RecomputeGranularity.FULL

    def recomputes(self, module: RecomputeModule) -> bool:
        return module in self.layout.recompute.modules

    @property
    def splits_activations(self) -> bool:
        return self.dims.tensor_model_parallel_size > 1 and not self.layout.sequence_parallel

    @property
    def experts_alone(self) -> bool:
        """Every rank has all experts, whole."""
        return self.model.is_moe and self.dims.expert_ranks == 1

    @property
    def hides_no_experts(self) -> bool:
        plain = self.pp > 1 and not self.virtual
        recomputed = self.full or self.recomputes(RecomputeModule.MOE)
        return self.dims.expert_model_parallel_size == 1 or plain or recomputed


@dataclass(frozen=True, slots=True)
class IncompatibleOption:
    """An option that only goes with some layouts.

    Args:
        reason: said beside the change.
            turns_off: a switch that turns something off, so it is given where the value is false.
        release: the only release that refuses the two together; ``None`` if all do.
    """

    dest: str
    contradicts: Callable[[_Layout, Any], bool]
    reason: str
    turns_off: bool = False
    release: str | None = None


def contradicted(
    plan: ParallelPlan, values: Mapping[str, Any], version: str = DEFAULT_VERSION
) -> dict[str, str]:
    """Options among the user's that the plan contradicts, with the reason for each."""
    layout = _Layout(plan)
    return {
        option.dest: option.reason
        for option in INCOMPATIBLE_OPTIONS
        if option.release in (None, version)
        and bool(values.get(option.dest, option.turns_off)) is not option.turns_off
        and option.contradicts(layout, values[option.dest])
    }


def _group_size(layout: _Layout, size: int) -> bool:
    """Rounds of virtual stages of a size that the plan's micro batches do not allow."""
    virtual = layout.dims.virtual_pipeline_model_parallel_size
    return not all(
        allows_interleaving(layout.pp, virtual, count, size)
        for count in layout.numbers_of_microbatches
    )


def _uneven_instances(layout: _Layout, instances: int) -> bool:
    dims = layout.dims
    replicas = dims.data_parallel_size * dims.context_parallel_size
    experts = layout.model.is_moe and dims.expert_data_parallel_size % instances
    uneven = not layout.layout.shards_optimizer or replicas % instances or experts
    return instances > 1 and bool(uneven)


_BESIDE_OVERLAP = "it goes with --overlap-moe-expert-parallel-comm"
_FLEX_ALONE = "the flex dispatcher exchanges tokens among several ranks"
_OF_FSDP = "it belongs to Megatron-FSDP"
_ONE_BY_ONE = "Megatron-FSDP shards the experts one by one"
_Row = IncompatibleOption

INCOMPATIBLE_OPTIONS: tuple[IncompatibleOption, ...] = (
    _Row(
        "tp_comm_overlap",  # args:916
        lambda layout, _: not layout.layout.sequence_parallel,
        "it needs sequence parallelism",
    ),
    _Row(
        "defer_embedding_wgrad_compute",  # mpc:426
        lambda layout, _: layout.pp == 1,
        "the plan has no pipeline",
    ),
    _Row(
        "overlap_p2p_comm_warmup_flush",  # mpc:452
        lambda layout, _: not layout.virtual,
        "the plan has no virtual stages",
    ),
    _Row(
        "overlap_p2p_comm",  # args:579
        lambda layout, _: layout.virtual and layout.pp == 2,
        "virtual stages on two pipeline ranks need it",
        turns_off=True,
    ),
    _Row(
        "overlap_param_gather_with_optimizer_step",  # args:640
        lambda layout, _: not (layout.virtual and layout.layout.shards_optimizer),
        "it needs virtual stages and overlapped gathering of weights",
    ),
    _Row(
        "microbatch_group_size_per_vp_stage",  # schedules.py:995-1015 (run)
        _group_size,
        "the plan's rounds of micro batches are of another size",
    ),
    _Row(
        "hybrid_override_pattern",  # 0.20 args:746
        lambda layout, _: bool(layout.model.hybrid_layer_pattern),
        "--hybrid-layer-pattern states the layers and their stages",
        release="0.20",
    ),
    _Row(
        "distribute_saved_activations",  # args:885
        lambda layout, _: not (layout.full and layout.splits_activations),
        "sequence parallelism spreads them already",
    ),
    _Row(
        "hierarchical_context_parallel_sizes",  # args:405
        lambda layout, sizes: math.prod(map(int, sizes)) != layout.dims.context_parallel_size,
        "the plan has another context-parallel size",
    ),
    _Row(
        "cp_comm_type",  # args:407
        lambda layout, kinds: "a2a+p2p" in kinds and layout.dims.context_parallel_size == 1,
        "the plan has no context parallelism",
    ),
    _Row(
        "overlap_moe_expert_parallel_comm",  # tc:1858
        lambda layout, _: layout.hides_no_experts,
        "it needs expert parallelism, virtual stages and no full recomputation",
    ),
    _Row(
        # model_chunk_schedule_plan.py (0.20 combined_1f1b.py:68 allows it)
        "overlap_moe_expert_parallel_comm",
        lambda layout, _: layout.fsdp,
        "its schedule passes by the layers' forward, where Megatron-FSDP gathers weights",
        release="0.16.1",
    ),
    _Row(
        "delay_wgrad_compute",  # tc:1872
        lambda layout, _: layout.hides_no_experts,
        _BESIDE_OVERLAP,
    ),
    _Row(
        "delay_wgrad_compute",  # tc:1872
        lambda layout, _: layout.fsdp,
        _BESIDE_OVERLAP,
        release="0.16.1",
    ),
    _Row(
        "moe_shared_expert_overlap",  # tc:1234
        lambda layout, _: layout.recomputes(RecomputeModule.SHARED_EXPERTS),
        "the plan recomputes shared experts",
    ),
    _Row(
        "moe_token_dispatcher_type",  # moe/token_dispatcher.py:1346
        lambda layout, kind: kind == "flex" and layout.experts_alone,
        _FLEX_ALONE,
    ),
    *(
        _Row(
            dest,  # moe/token_dispatcher.py:1346
            lambda layout, _: layout.experts_alone,
            _FLEX_ALONE,
        )
        for dest in ("moe_flex_dispatcher_backend", "moe_enable_deepep")
    ),
    _Row(
        "cpu_offloading_num_layers",  # tc:1144, tc:1149
        lambda layout, _: layout.pp > 1 or layout.layout.recompute != NO_RECOMPUTE,
        "whole layers are moved to the host without a pipeline and without recomputation",
    ),
    _Row(
        "fine_grained_activation_offloading",  # 0.20 tc:2163 (run)
        lambda layout, _: layout.full,
        "the plan recomputes whole layers, so nothing of them is saved",
    ),
    _Row(
        "num_distributed_optimizer_instances",  # parallel_state.py:833
        _uneven_instances,
        "it does not divide the plan's replicas",
    ),
    _Row(
        # mcore_fsdp_adapter.py:206-221, megatron_fsdp.py:246
        "num_distributed_optimizer_instances",
        lambda layout, n: n > 1 and layout.fsdp and layout.dims.expert_model_parallel_size > 1,
        "Megatron-FSDP of 0.16.1 has no groups of experts within an instance",
        release="0.16.1",
    ),
    _Row(
        "ckpt_format",  # args:690, :1042
        lambda layout, name: not layout.saves.get(name, True),
        "the plan's data-parallel sharding does not save that way",
    ),
    _Row("fsdp_double_buffer", lambda layout, _: not layout.fsdp, _OF_FSDP),  # args:680
    _Row("fsdp_manual_registration", lambda layout, _: not layout.fsdp, _OF_FSDP),  # args:694
    _Row(
        "init_model_with_meta_device",  # training.py:1266 (run)
        lambda layout, _: (
            not (layout.fsdp or layout.layout.sharding is DataParallelSharding.TORCH_FSDP2)
        ),
        "without Megatron-FSDP weights of the meta device keep whatever memory holds",
    ),
    _Row(
        "use_cpu_initialization",  # param_and_grad_buffer.py:2198 (run)
        lambda layout, _: layout.fsdp and initializes_on_meta_device(layout.model),
        "Megatron-FSDP makes the weights from the meta device, and cannot make the embedding's "
        "there with it",
    ),
    _Row(
        "check_weight_hash_across_dp_replicas_interval",  # args:684
        lambda layout, _: layout.fsdp and layout.zero is ZeroStage.WEIGHTS,
        "no replica holds all weights",
    ),
    _Row("moe_single_grouped_weight", lambda layout, _: layout.fsdp, _ONE_BY_ONE),  # 0.20 args:1138
    _Row("moe_single_grouped_bias", lambda layout, _: layout.fsdp, _ONE_BY_ONE),  # 0.20 args:1138
)
