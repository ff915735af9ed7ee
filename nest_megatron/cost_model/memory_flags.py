"""Megatron's arguments that look as if they changed memory, and what each does to it.

By Megatron's own names (``dest``), of 0.16.1 and 0.20. A job whose flags are all priced gets a
verdict on memory; one with a flag that is not modelled is planned too, and the verdict names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

#: What ``execution_flags`` reads.
PRICED = frozenset(
    {
        "accumulate_allreduce_grads_in_fp32",
        "attention_backend",
        "bf16",
        "bias_swiglu_fusion",
        "cross_entropy_fusion_impl",
        "cross_entropy_loss_fusion",
        "ddp_bucket_size",
        "ddp_num_buckets",
        "disable_parameter_transpose_cache",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "external_cuda_graph",
        "fp16",
        "fp4",
        "fp4_param",
        "fp4_param_gather",
        "fp8",
        "fp8_param_gather",
        "fp8_recipe",
        "fp8_wgrad",
        "fsdp_double_buffer",
        "grad_reduce_in_bf16",
        "keep_fp8_transpose_cache",
        "main_grads_dtype",
        "main_params_dtype",
        "megatron_fsdp_main_grads_dtype",
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
        "muon_scalar_optimizer",
        "num_distributed_optimizer_instances",
        "optimizer",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        "params_dtype",
        "sgd_momentum",
        "store_param_remainders",
        "suggested_communication_unit_size",
        "transformer_impl",
        "use_distributed_optimizer",
        "use_megatron_fsdp",
        "use_precision_aware_optimizer",
        "use_torch_fsdp2",
    }
)
#: Argument -> its values that change nothing. Any other value makes memory uncertain.
NOT_MODELLED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        # activations moved to the host, or paged there
        "cpu_offloading": (),
        "cpu_offloading_num_layers": (),
        "fine_grained_activation_offloading": (),
        "moe_paged_stash": (),
        # number formats of some tensors or layers
        "ddp_param_name_patterns_for_fp32_local_accumulation": (),
        "first_last_layers_bf16": (),
        "fp16_lm_cross_entropy": (),
        "fp32_residual_connection": (),
        "fp4_quantizer_factory": (),
        "fp8_multi_head_attention": (),
        "fp8_dot_product_attention": (),
        "fp8_output_proj": (),
        "fp8_quantizer_factory": (),
        "logit_dtype": (),
        "megatron_fsdp_grad_comm_dtype": ("auto",),
        "megatron_fsdp_main_params_dtype": ("auto", "fp32"),
        "activation_func_fp8_input_store": (),
        "te_precision_config_file": (),
        "use_kitchen_attention": (),
        # layers that keep other tensors than the usual ones
        "distribute_saved_activations": (),
        "mlp_chunks_for_training": (1,),
        "use_transformer_engine_op_fuser": (),
        # buffers that libraries or graphs hold
        "cuda_graph_impl": ("none", "transformer_engine"),
        "enable_cuda_graph": (),
        "megatron_fsdp_max_pool_double_buffer": (),
        "nccl_ub": (),
        "optimizer_cuda_graph": (),
        # more kept between a pass and its weight gradients, or two micro batches at once
        "defer_embedding_wgrad_compute": (),
        "delay_wgrad_compute": (),
        "ep_overlap_early_attn_memory_release": (),
        "overlap_moe_expert_parallel_comm": (),
        "overlap_dispatch_backward_with_experts_wgrad": (),
        # sharding that is not ZeRO over all replicas
        "enable_full_sharding_in_hsdp": (),
        "expert_tensor_parallel_num_weight_shards": (1,),
        "gtp_weight_remat_size": (1,),
        "outer_dp_sharding_strategy": ("no_shard",),
        "tensor_parallel_num_weight_shards": (1,),
        "torch_fsdp2_reshard_after_forward": (True,),
        # tokens that are dropped, or filled up
        "moe_expert_rank_capacity_factor": (),
    }
)
#: Optimizers whose states are known (``execution_flags``).
OPTIMIZERS = ("adam", "sgd", "muon", "dist_muon", "lion")
#: What ``execution_flags.execution_of`` reads besides.
EXECUTION = (
    "cp_comm_type",
    "cuda_graph_modules",
    "cuda_graph_scope",
    "cuda_graph_scope_deprecated",
    "hierarchical_context_parallel_sizes",
    "moe_combine_bwd_dtype",
    "moe_dispatch_fwd_dtype",
    "moe_enable_deepep",
    "moe_flex_dispatcher_backend",
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_shared_expert_overlap",
    "moe_token_dispatcher_type",
    "offload_modules",
    "tp_comm_overlap",
)
#: Arguments that a job is asked for, whatever holds them.
READ = (*sorted(PRICED), *NOT_MODELLED, *EXECUTION)
#: Argument -> its flag, where that is not the name itself.
_FLAGS = {
    "fp4": "--fp4-format",
    "fp4_param": "--fp4-param-gather",
    "logit_dtype": "--output-logit-dtype",
    "nccl_ub": "--use-nccl-ub",
    "torch_fsdp2_reshard_after_forward": "--torch-fsdp2-no-reshard-after-forward",
}
_OFF = (None, False, 0, "", "none")


def memory_flags(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a job says of all that its memory depends on beside the layout."""
    said = {name: values.get(name) for name in READ}
    plain = {k: v for k, v in said.items() if v is not None and not isinstance(v, Mapping)}
    return MappingProxyType(plain)


def not_modelled(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Flags of a job whose effect on memory is not known here, as they are typed.

    >>> not_modelled({"fine_grained_activation_offloading": True, "bf16": True})
    ('--fine-grained-activation-offloading',)
    """
    found = [
        _FLAGS.get(name, f"--{name.replace('_', '-')}")
        for name, inert in NOT_MODELLED.items()
        if name in flags and not _is_off(name, flags[name], inert)
    ]
    if text(flags.get("transformer_impl") or "") in ("local", "inference_optimized"):
        found.append(f"--transformer-impl {text(flags['transformer_impl'])}")
    if (optimizer := text(flags.get("optimizer") or "adam")) not in OPTIMIZERS:
        found.append(f"--optimizer {optimizer}")
    return tuple(dict.fromkeys(found))


def text(value: object) -> str:
    """Megatron's short word for an enum's member or a torch type; no torch is loaded for it.

    >>> text("torch.bfloat16"), text("fp32")
    ('bf16', 'fp32')
    """
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
    word = str(getattr(value, "name", value)).removeprefix("torch.")
    return names.get(word, word)


def _is_off(name: str, value: object, inert: tuple[object, ...]) -> bool:
    if name == "torch_fsdp2_reshard_after_forward":
        return value is not False
    plain = value if isinstance(value, bool | int | float | str | list | tuple) else text(value)
    if isinstance(plain, list | tuple):
        return not plain
    return plain in _OFF or plain in inert
