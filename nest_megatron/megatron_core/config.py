"""A model's shape as megatron-core's ``TransformerConfig``."""

from __future__ import annotations

from typing import Any

from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.layout import layout_string
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.recompute import NO_RECOMPUTE, Recompute, RecomputeGranularity
from nest_megatron.parallel.rules import launched_expert_tensor_size

_LATENT_FIELDS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)


def transformer_config(
    spec: TransformerSpec,
    dims: ParallelDims,
    partition: StagePartition | None,
    *,
    sequence_parallel: bool,
    recompute: Recompute = NO_RECOMPUTE,
    **changes: Any,
) -> Any:
    """The ``TransformerConfig`` that Megatron's arguments would become.

    Args:
        changes: fields that are set to something else in the end.

    Source: ``megatron.training.arguments.core_transformer_config_from_args``.
    """
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    fields = {
        **_shape_fields(spec),
        **_expert_fields(spec),
        **_parallel_fields(spec, dims, partition),
        "sequence_parallel": sequence_parallel,
        **_recompute_fields(recompute),
        **changes,
    }
    if not spec.multi_latent_attention:
        return TransformerConfig(**fields)
    return MLATransformerConfig(
        **fields,
        **{name: getattr(spec, name) for name in _LATENT_FIELDS},
        rope_type="rope",
    )


def _shape_fields(spec: TransformerSpec) -> dict[str, Any]:
    import torch
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    functions = {
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
        "squared_relu": squared_relu,
        "quick_gelu": quick_gelu,
    }
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": None if spec.multi_latent_attention else spec.num_query_groups,
        "kv_channels": spec.kv_channels,
        "normalization": spec.normalization,
        "layernorm_epsilon": spec.layernorm_epsilon,
        "activation_func": functions[spec.activation],
        "gated_linear_unit": spec.gated_linear_unit,
        "add_bias_linear": spec.add_bias_linear,
        "add_qkv_bias": spec.add_qkv_bias or spec.add_bias_linear,
        "qk_layernorm": spec.qk_layernorm,
        "softmax_type": spec.softmax_type,
        "window_size": None if spec.window_size is None else (spec.window_size - 1, 0),
        "window_attn_skip_freq": spec.window_attn_skip_freq,
        "mtp_num_layers": spec.mtp_num_layers,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
    }


def _expert_fields(spec: TransformerSpec) -> dict[str, Any]:
    if spec.num_experts is None:
        return {}
    return {
        "num_moe_experts": spec.num_experts,
        "moe_layer_freq": list(spec.moe_layer_pattern),
        "moe_ffn_hidden_size": spec.expert_ffn_hidden_size,
        "moe_router_topk": spec.moe_router_topk,
        "moe_router_pre_softmax": spec.moe_router_topk == 1,
        "moe_shared_expert_intermediate_size": spec.moe_shared_expert_intermediate_size,
        "moe_router_enable_expert_bias": spec.moe_router_enable_expert_bias,
        "moe_router_score_function": (
            "sigmoid" if spec.moe_router_enable_expert_bias else "softmax"
        ),
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }


def _parallel_fields(
    spec: TransformerSpec, dims: ParallelDims, partition: StagePartition | None
) -> dict[str, Any]:
    vpp = dims.virtual_pipeline_model_parallel_size
    piped = dims.pipeline_model_parallel_size > 1 and partition is not None
    return {
        "tensor_model_parallel_size": dims.tensor_model_parallel_size,
        "pipeline_model_parallel_size": dims.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "context_parallel_size": dims.context_parallel_size,
        "expert_model_parallel_size": dims.expert_model_parallel_size,
        "expert_tensor_parallel_size": launched_expert_tensor_size(spec, dims),
        "pipeline_model_parallel_layout": (
            layout_string(spec, partition) if piped and partition is not None else None
        ),
    }


def _recompute_fields(recompute: Recompute) -> dict[str, Any]:
    if recompute.granularity is RecomputeGranularity.NONE:
        return {}
    modules = [module.value for module in recompute.modules]
    return {
        "recompute_granularity": recompute.granularity.value,
        "recompute_method": recompute.method and recompute.method.value,
        "recompute_num_layers": recompute.num_layers,
        "recompute_modules": modules or None,
    }
