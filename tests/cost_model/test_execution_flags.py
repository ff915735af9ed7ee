"""From flags to bytes, and a place for every argument of Megatron that looks like memory."""

from __future__ import annotations

import re

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model import memory_flags as table
from nest_megatron.cost_model.execution_flags import execution_traits, time_notes
from nest_megatron.cost_model.memory_flags import memory_flags, not_modelled
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.parser import VERSIONS, load_arguments

_LOOKS_LIKE_MEMORY = re.compile(
    "dtype|fp8|fp4|fp16|bf16|fp32|offload|precision|memory|recompute|checkpoint_activ|optimizer"
    "|grad|buffer|fsdp|shard|param|cache|quant|ddp|bucket|fusion|nccl_ub|symmetric|master"
    "|remainder|muon|cuda_graph|transpose|stash|capacity|attention_backend|transformer_impl"
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
_PLACES = (table.PRICED, OF_THE_LAYOUT, table.NOT_MODELLED, NO_EFFECT)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_argument_that_looks_like_memory_has_one_place(version: str) -> None:
    names = {each.dest for each in load_arguments(version)}
    names = {name for name in names if _LOOKS_LIKE_MEMORY.search(name)}
    assert len(names) > 150
    places = {name: sum(name in place for place in _PLACES) for name in names}
    assert {name: count for name, count in places.items() if count != 1} == {}


def traits(precision: str = "bf16", **flags: object) -> ExecutionTraits:
    return execution_traits(memory_flags(flags), Precision(precision))


def test_a_job_without_such_flags_is_the_default() -> None:
    assert traits() == traits(bf16=True, optimizer="adam") == ExecutionTraits()


@pytest.mark.parametrize(
    ("precision", "flags", "width"),
    [
        ("bf16", {}, 4),
        ("bf16", {"grad_reduce_in_bf16": True}, 2),
        ("bf16", {"main_grads_dtype": "bf16", "use_precision_aware_optimizer": True}, 2),
        ("bf16", {"main_grads_dtype": "fp32", "use_precision_aware_optimizer": True}, 4),
        ("fp16", {}, 2),
        ("fp16", {"accumulate_allreduce_grads_in_fp32": True}, 4),
        ("fp8", {"grad_reduce_in_bf16": True}, 2),
        ("fp8", {"params_dtype": "fp32"}, 4),
        ("fp32", {"grad_reduce_in_bf16": True}, 4),
    ],
)
def test_width_of_gradients(precision: str, flags: dict[str, object], width: int) -> None:
    """As ``validate_args`` decides ``accumulate_allreduce_grads_in_fp32``."""
    assert traits(precision, **flags).gradient_bytes == width


_AWARE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("precision", "flags", "states"),
    [
        ("bf16", {}, 12),
        ("fp32", {}, 8),
        ("bf16", {"optimizer": "sgd"}, 8),
        ("bf16", {"optimizer": "sgd", "sgd_momentum": 0.0}, 4),
        ("fp32", {"optimizer": "sgd"}, 4),
        ("bf16", {"optimizer": "lion"}, 8),
        ("bf16", _AWARE, 2 + 4 + 4),
        ("bf16", {**_AWARE, "store_param_remainders": False}, 4 + 4 + 4),
        ("bf16", {**_AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 2 + 2 + 2),
        ("bf16", {**_AWARE, "main_params_dtype": "fp16", "exp_avg_dtype": "fp8"}, 2 + 1 + 4),
        ("fp16", _AWARE, 4 + 4 + 4),
        ("fp8", {**_AWARE, "fp8_recipe": "mxfp8"}, 4 + 4 + 4),
        ("fp8", {**_AWARE, "fp8_param_gather": True}, 4 + 4 + 4),
        ("bf16", {**_AWARE, "optimizer_cpu_offload": True}, 0),
        (
            "bf16",
            {**_AWARE, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25},
            9,
        ),
        # dtypes without the precision-aware optimizer are refused by Megatron, and change nothing
        ("bf16", {"exp_avg_dtype": "bf16"}, 12),
    ],
)
def test_states_of_a_parameter(precision: str, flags: dict[str, object], states: float) -> None:
    assert traits(precision, **flags).optimizer_bytes == states


def test_muon_has_one_momentum_for_matrices() -> None:
    alone, shared = traits(optimizer="muon"), traits(optimizer="dist_muon")
    assert (alone.matrix_optimizer_bytes, alone.optimizer_bytes) == (8, 12)
    assert not alone.layer_wise_optimizer
    assert shared.layer_wise_optimizer
    assert traits(optimizer="muon", use_distributed_optimizer=True).layer_wise_optimizer
    assert traits(optimizer="muon", muon_scalar_optimizer="lion").optimizer_bytes == 8


def test_fp8_weights_and_what_is_gathered() -> None:
    flags = {"fp8_param_gather": True}
    assert traits("fp8", **flags).fp8_gather
    mxfp8 = traits("fp8", fp8_recipe="mxfp8", **flags)
    assert mxfp8.fp8_weights
    assert not mxfp8.fp8_gather
    assert not traits("bf16", **flags).fp8_weights


@pytest.mark.parametrize(
    ("precision", "flags", "num"),
    [
        ("bf16", {}, 6),
        ("bf16", {"cross_entropy_loss_fusion": True}, 10),
        ("bf16", {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, 2),
        ("bf16", {"cross_entropy_fusion_impl": "te"}, 6),
        ("fp32", {}, 8),
    ],
)
def test_memory_of_a_logit(precision: str, flags: dict[str, object], num: int) -> None:
    assert traits(precision, **flags).loss_bytes == num


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        ("bf16", {"attention_backend": "unfused"}),
        ("bf16", {"transformer_impl": "local"}),
        ("fp32", {}),
    ],
)
def test_attention_that_keeps_its_scores(precision: str, flags: dict[str, object]) -> None:
    assert not traits(precision, **flags).flash_attention
    assert traits("bf16", attention_backend="flash").flash_attention


def test_types_and_enums_read_like_words() -> None:
    class Word:
        name = "unfused"

        def __str__(self) -> str:
            return "torch.bfloat16"

    assert not traits(attention_backend=Word()).flash_attention
    assert table.text("torch.bfloat16") == "bf16"


@pytest.mark.parametrize(
    "flags",
    [
        {"exp_avg_dtype": "fp12", **_AWARE},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.5},
    ],
)
def test_impossible_values_are_refused(flags: dict[str, object]) -> None:
    with pytest.raises(UserInputError, match=r"fp12|1\.5"):
        traits(**flags)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({}, ()),
        ({"cuda_graph_impl": "none", "fp4": None, "outer_dp_sharding_strategy": "no_shard"}, ()),
        ({"torch_fsdp2_reshard_after_forward": True}, ()),
        (
            {"torch_fsdp2_reshard_after_forward": False},
            ("--torch-fsdp2-no-reshard-after-forward",),
        ),
        ({"nccl_ub": True}, ("--use-nccl-ub",)),
        ({"fp4": "e2m1", "fp4_param_gather": True}, ()),
        ({"fp4_quantizer_factory": "a.b"}, ("--fp4-quantizer-factory",)),
        ({"cpu_offloading_num_layers": 4}, ("--cpu-offloading-num-layers",)),
        ({"transformer_impl": "local"}, ("--transformer-impl local",)),
        ({"optimizer": "soap"}, ("--optimizer soap",)),
    ],
)
def test_what_is_not_modelled_is_named(flags: dict[str, object], named: tuple[str, ...]) -> None:
    assert not_modelled(memory_flags(flags)) == named


@pytest.mark.parametrize(
    "flags",
    [{"optimizer_cpu_offload": True}, {"optimizer": "muon"}, {"first_last_layers_bf16": True}],
)
def test_time_that_is_not_priced_is_said(flags: dict[str, object]) -> None:
    assert len(time_notes(flags)) == 1
    assert time_notes({"optimizer": "adam"}) == ()
