"""The checkpoint that a planned job saves, as ``read_checkpoint`` would find it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nest_megatron.integrations.megatron_lm.checkpoint import SavedCheckpoint
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.facts import release_number

#: Flags that a checkpoint keeps and that decide how it can be loaded.
_KEPT = ("ddp_bucket_size", "ddp_num_buckets", "no_save_optim", "no_save_rng", "moe_grouped_gemm")


def saved_by(
    plan: ParallelPlan, values: Mapping[str, Any], version: str, name: str
) -> SavedCheckpoint:
    """What a plan's job saves.

    Source: ``_build_sharded_state_dict_metadata`` (core_v0.16.1 ``training/checkpointing.py``:405;
    0.20 :527), and what ``checkpoint.py`` says of each part.

    Args:
        values: the job's arguments by destination; Megatron's defaults where it states none.
        version: of Megatron-LM.
        name: for errors.
    """
    layout, dims, experts = plan.layout, plan.layout.dims, plan.model.is_moe
    ep, tp = dims.expert_model_parallel_size, dims.tensor_model_parallel_size
    replicas = dims.data_parallel_size * dims.context_parallel_size
    release = release_number(version)
    kind = (
        "fsdp_dtensor" if layout.uses_megatron_fsdp else values.get("ckpt_format") or "torch_dist"
    )
    sharding = "dp_reshardable"
    if kind == "fsdp_dtensor":
        sharding = kind
    elif values.get("dist_ckpt_optim_fully_reshardable"):
        sharding = "fully_reshardable"
    apart = ep > 1 or (release >= (0, 19) and dims.expert_tensor_parallel_size != tp)
    stages = dims.pipeline_model_parallel_size
    return SavedCheckpoint(
        directory=Path(name),
        iteration=0,
        format=kind,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=dims.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=dims.expert_tensor_parallel_size,
        pipeline_model_parallel_layout=plan.arguments["pipeline_model_parallel_layout"],
        use_distributed_optimizer=layout.shards_optimizer,
        distrib_optim_sharding_type=sharding if layout.shards_optimizer else None,
        num_optimizers=1 + (experts and apart),
        largest_buffer=max(stage.parameters for stage in plan.predicted.stages),
        rng_shape=(stages, tp, replicas) if release == (0, 16) and ep > 1 else (stages, tp),
        arguments={
            **{name: values.get(name) for name in _KEPT},
            "data_parallel_size": dims.data_parallel_size,
            "context_parallel_size": dims.context_parallel_size,
            "overlap_grad_reduce": layout.overlap_grad_reduce,
        },
    )
