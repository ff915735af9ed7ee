"""Megatron's arguments that look as if they changed memory, and what each does to it.

By Megatron's own names (``dest``), of 0.16.1 and 0.20; NeMo and Megatron-Bridge use the same for
their fields. A job whose flags are all priced gets a verdict on memory; one with a flag that is not
modelled is planned as well, and the verdict names the flag.
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
#: Memory of the layout itself: read with it, or set by the plan.
OF_THE_LAYOUT = frozenset(
    {
        "account_for_embedding_in_pipeline_split",
        "checkpoint_activations",
        "data_parallel_sharding_strategy",
        "moe_layer_recompute",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "recompute_activations",
        "recompute_granularity",
        "recompute_method",
        "recompute_modules",
        "recompute_num_layers",
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
#: No bytes on the device, or fewer than the error of all predictions: names, logs, files, host
#: memory, schedules of what is priced, parts of a flag above, and gradients of one product that are
#: made beside the buffer for a moment.
NO_EFFECT = frozenset(
    {
        "activation_offload_fraction",
        "align_grad_reduce",
        "align_param_gather",
        "apply_rope_fusion",
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "bias_gelu_fusion",
        "cache_mla_latents",
        "check_for_large_grads",
        "check_for_nan_in_loss_and_grad",
        "ckpt_load_validate_sharding_integrity",
        "ckpt_pg_tensors_cache_create",
        "ckpt_pg_tensors_cache_path",
        "clip_grad",
        "cpu_offloading_retain_pinned_cpu_buffers",
        "cuda_graph_modules",
        "cuda_graph_scope",
        "cuda_graph_scope_deprecated",
        "cuda_graph_warmup_steps",
        "data_cache_path",
        "data_sharding",
        "dataloader_fast_cache_load",
        "ddp_average_in_collective",
        "ddp_pad_buckets_for_high_nccl_busbw",
        "ddp_reduce_scatter_with_fp32_accumulation",
        "decode_only_cuda_graphs",
        "delay_offload_until_cuda_graph",
        "delta_offload_bytes_across_pp_ranks",
        "disable_bf16_reduced_precision_matmul",
        "disable_symmetric_registration",
        "dist_ckpt_optim_fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient",
        "dsa_indexer_k_norm_fp32",
        "dump_param_to_param_group_map",
        "embedding_init_method_std",
        "empty_unused_memory_level",
        "fine_grained_offloading_max_inflight_offloads",
        "flight_recorder_trace_buffer_size",
        "fp4_recipe",
        "fp8_amax_compute_algo",
        "fp8_amax_history_len",
        "fp8_interval",
        "fp8_margin",
        "fsdp_db_use_persist_buf_on_alloc_fail",
        "fsdp_manual_registration",
        "gdp_num_chunk_states_to_recompute",
        "gradient_accumulation_fusion",
        "gradient_reduce_div_fusion",
        "gtp_expert_remat_nccl_ub",
        "gtp_remat_nccl_ub",
        "gtp_remat_reduce_scatter_with_fp32_accumulation",
        "inference_cuda_graph_all_prefills",
        "inference_cuda_graph_max_tokens",
        "inference_cuda_graph_scope",
        "inference_dynamic_batching_buffer_size_gb",
        "inference_dynamic_batching_cuda_graph_max_tokens",
        "inference_dynamic_batching_cuda_graph_mixed_prefill_count",
        "inference_dynamic_batching_cuda_graph_sizing_distribution",
        "inference_dynamic_batching_mamba_memory_ratio",
        "inference_dynamic_batching_num_cuda_graphs",
        "inference_dynamic_batching_paused_buffer_size_gb",
        "inference_dynamic_batching_unified_memory_level",
        "inference_moe_disable_fused_quant_kernels",
        "inference_shards",
        "inprocess_empty_cuda_cache",
        "kitchen_attention_backend",
        "load_main_params_from_ckpt",
        "log_device_memory_used",
        "log_memory_interval",
        "log_memory_to_tensorboard",
        "log_num_zeros_in_grad",
        "log_params_norm",
        "logits_save_dtype",
        "mamba_inference_conv_states_dtype",
        "mamba_inference_ssm_states_dtype",
        "mamba_training_ssm_states_dtype",
        "masked_softmax_fusion",
        "megatron_fsdp_enable_fine_grained_param_gather",
        "megatron_fsdp_version",
        "memory_snapshot_path",
        "mhc_recompute_layer_num",
        "min_offloaded_tensor_size",
        "mla_down_proj_fusion",
        "moe_combine_bwd_dtype",
        "moe_dispatch_fwd_dtype",
        "moe_pad_experts_for_cuda_graph_inference",
        "moe_paged_stash_buffer_size_factor_cpu",
        "moe_paged_stash_buffer_size_factor_cuda",
        "moe_paged_stash_page_size",
        "moe_permute_fusion",
        "moe_permute_fusion_into_hybridep",
        "moe_router_dtype",
        "moe_router_fusion",
        "moe_router_padding_for_fp8",
        "moe_router_padding_for_quantization",
        "moe_router_quantile_balancing_ema",
        "muon_coefficient_type",
        "muon_extra_scale_factor",
        "muon_fp32_matmul_prec",
        "muon_momentum",
        "muon_nesterov",
        "muon_num_ns_steps",
        "muon_scale_mode",
        "muon_split_qkv",
        "muon_tp_mode",
        "muon_use_nesterov",
        "muon_use_syrk",
        "num_layers_at_end_in_bf16",
        "num_layers_at_start_in_bf16",
        "object_storage_cache_path",
        "offload_modules",
        "overlap_param_gather_with_optimizer_step",
        "override_opt_param_scheduler",
        "pin_cpu_grads",
        "pin_cpu_params",
        "record_memory_history",
        "relative_attention_num_buckets",
        "reuse_grad_buf_for_mxfp8_param_ag",
        "rl_inference_model_unified_memory_level",
        "rl_kv_cache_management_mode",
        "rl_offload_inference_model_weights_when_idle",
        "rl_offload_kv_cache_during_training",
        "rl_offload_optimizer_during_inference",
        "rl_persist_cuda_graphs",
        "rl_remove_kv_cache_during_training",
        "rl_reset_cuda_graphs",
        "rl_submission_granularity",
        "rl_training_cuda_graphs",
        "save_dgrads_interval",
        "save_params_interval",
        "save_wgrads_interval",
        "strict_fsdp_dtensor_load",
        "symmetric_ar_type",
        "tp_comm_bulk_dgrad",
        "tp_comm_bulk_wgrad",
        "tp_comm_overlap_rs_dgrad",
        "use_checkpoint_opt_param_scheduler",
        "use_layer_wise_param_layout",
        "use_torch_optimizer_for_cpu_offload",
        "wgrad_deferral_limit",
    }
)
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
