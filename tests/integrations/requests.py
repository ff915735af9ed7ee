"""Launch requests: sound ones, and for every rule one that breaks it."""

from __future__ import annotations

import dataclasses
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.layout.cuda_graphs import CudaGraphs
from nest_megatron.layout.dims import ParallelDims, RankOrder
from nest_megatron.layout.plan import MEGATRON_LM
from nest_megatron.layout.recompute import (
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.layout.rulebook import RULES
from nest_megatron.layout.rulebook.facts import Facts, LaunchRequest, release_number
from nest_megatron.layout.stage_layout import StagePartition, parse_layout, uniform_partition
from nest_megatron.layout.zero import DataParallelSharding, ZeroStage
from nest_megatron.model.encoder import Adapters, EncoderSpec
from nest_megatron.model.execution import (
    ContextTraffic,
    Execution,
    FlexBackend,
    GraphImpl,
    TokenDispatcher,
)
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.model.variant import ModelVariant
from tests.contract.hand_models import BERT, DEEPSEEK, GPT_OSS, LLAMA, MIXTRAL, NEMOTRON, T5
from tests.integrations.refused_options import ROWS, options_of

SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}

SEES_IMAGES = dataclasses.replace(
    LLAMA,
    vision=EncoderSpec(
        num_layers=24,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_attention_heads=16,
        num_patches=576,
        num_projected_tokens=576,
        patch_features=588,
        projector_ffn_hidden_size=8192,
    ),
)

HYBRID = dataclasses.replace(LLAMA, num_layers=8, hybrid_layer_pattern="M-M*-M-M")
LINEAR = dataclasses.replace(
    LLAMA, experimental_attention_variant="gated_delta_net", linear_attention_freq=4
)


def dims(**sizes: Any) -> ParallelDims:
    return ParallelDims(**{SHORT.get(name, name): value for name, value in sizes.items()})


def request(spec: TransformerSpec = LLAMA, grid: ParallelDims | None = None, **changes: Any) -> Any:
    grid = grid or dims()
    pp = grid.pipeline_model_parallel_size
    if "partition" not in changes and pp > 1:
        changes["partition"] = uniform_partition(
            spec, pp, grid.virtual_pipeline_model_parallel_size
        )
    defaults: dict[str, Any] = {
        "micro_batch_size": 1,
        "global_batch_size": 16 * grid.data_parallel_size,
        "sequence_parallel": grid.tensor_model_parallel_size > 1,
    }
    return LaunchRequest(spec=spec, dims=grid, **(defaults | changes))


def selective(*modules: RecomputeModule) -> Recompute:
    return Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=modules)


def uniform(num_layers: int) -> Recompute:
    return Recompute(
        granularity=RecomputeGranularity.FULL,
        method=RecomputeMethod.UNIFORM,
        num_layers=num_layers,
    )


def changed(spec: TransformerSpec, **changes: Any) -> TransformerSpec:
    return dataclasses.replace(spec, **changes)


SECOND = RankOrder.TP_CP_EP_PP_DP
MTP_FIRST = StagePartition(boundaries=(0, 60, 62, 63, 64), pipeline_model_parallel_size=2)
FP8 = Precision.FP8

OVERLAP = {"overlap_moe_expert_parallel_comm": True}
DEEPEP = {
    "moe_token_dispatcher_type": TokenDispatcher.FLEX,
    "moe_flex_dispatcher_backend": FlexBackend.DEEPEP,
}
A2A_P2P = {
    "cp_comm_type": ContextTraffic.A2A_P2P,
    "hierarchical_context_parallel_sizes": (2, 2),
}


def carried(
    spec: TransformerSpec = LLAMA,
    grid: ParallelDims | None = None,
    changes: dict[str, Any] | None = None,
    **execution: Any,
) -> Any:
    """A request whose layers are carried out in a way of their own."""
    return request(spec, grid, execution=Execution(**execution), **(changes or {}))


#: One request at least for every field of ``Execution``.
CARRIED = {
    "flex": carried(MIXTRAL, dims(tp=2, pp=4, dp=4, ep=8), **DEEPEP),
    "hybridep": carried(
        DEEPSEEK,
        dims(tp=2, dp=32, ep=64),
        **(DEEPEP | {"moe_flex_dispatcher_backend": FlexBackend.HYBRIDEP}),
    ),
    "allgather": carried(
        MIXTRAL, dims(dp=2, ep=2), moe_token_dispatcher_type=TokenDispatcher.ALLGATHER
    ),
    "router fusion": carried(MIXTRAL, dims(dp=2, ep=2), moe_router_fusion=True),
    "shared experts beside tokens": carried(
        DEEPSEEK, dims(tp=2, dp=32, ep=64), moe_shared_expert_overlap=True
    ),
    "shared experts beside flex": carried(
        DEEPSEEK,
        dims(tp=2, dp=32, ep=64),
        {"version": "0.20"},
        moe_shared_expert_overlap=True,
        **DEEPEP,
    ),
    "experts overlap": carried(MIXTRAL, dims(pp=2, vpp=4, dp=4, ep=4), **OVERLAP),
    "experts overlap without a pipeline": carried(MIXTRAL, dims(dp=4, ep=4), **OVERLAP),
    "user buffers": carried(grid=dims(tp=4, dp=2), tp_comm_overlap=True),
    "heads": carried(grid=dims(cp=4), cp_comm_type=ContextTraffic.A2A),
    "gathered": carried(grid=dims(cp=4), cp_comm_type=ContextTraffic.ALL_GATHER),
    "heads and rings": carried(grid=dims(cp=4), **A2A_P2P),
    "graphs of layers": carried(
        grid=dims(pp=2, dp=2), cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE
    ),
    "graphs of attention": carried(
        MIXTRAL,
        dims(dp=4, ep=4),
        cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE,
        cuda_graph_scope=("attn", "moe_router"),
    ),
    "offloaded layers": carried(grid=dims(dp=2), cpu_offloading_num_layers=10),
    "offloaded modules": carried(
        MIXTRAL, dims(pp=2, dp=4, ep=4), offload_modules=("core_attn", "attn_proj", "expert_fc1")
    ),
}

SOUND = {
    "one rank": request(),
    "llama": request(grid=dims(tp=8, pp=4, dp=2, cp=2)),
    "llama virtual": request(grid=dims(tp=8, pp=4, vpp=5, dp=2)),
    "llama second order": request(grid=dims(tp=2, pp=4, cp=2, dp=2, rank_order=SECOND)),
    "uneven stages": request(
        grid=dims(tp=8, pp=4), partition=parse_layout("Et*19|(t*20|)*2t*21L", LLAMA, 4)
    ),
    "more ranks than groups": request(grid=dims(tp=16)),
    "fsdp": request(grid=dims(tp=2, dp=4), zero=ZeroStage.WEIGHTS),
    "fewer micro batches than ranks": request(grid=dims(pp=8), global_batch_size=2),
    "mixtral": request(MIXTRAL, dims(tp=2, pp=4, dp=4, ep=8)),
    "mixtral without ep": request(MIXTRAL, dims(tp=2, dp=2, etp=2)),
    "deepseek": request(DEEPSEEK, dims(tp=2, dp=32, ep=64)),
    "deepseek in even virtual stages": request(
        changed(DEEPSEEK, num_layers=64, moe_layer_pattern=(0,) * 3 + (1,) * 61),
        dims(pp=4, vpp=2, dp=8, ep=8),
    ),
    "deepseek in uneven virtual stages": request(
        DEEPSEEK,
        dims(pp=4, vpp=2, dp=8, ep=8),
        partition=parse_layout("Et*7|(t*8|)*6t*6mL", DEEPSEEK, 4),
    ),
    "gpt-oss": request(GPT_OSS, dims(tp=2, dp=4, ep=4)),
    "nemotron": request(NEMOTRON, dims(tp=8)),
    "bert": request(BERT, dims(tp=4, pp=2)),
    "uniform one": request(grid=dims(pp=4), recompute=uniform(1)),
    "whole experts on tensor ranks": request(MIXTRAL, dims(tp=2, dp=2), version="0.19"),
    "uniform on 0.20": request(grid=dims(pp=4), recompute=uniform(3), version="0.20"),
    "fp8": request(grid=dims(tp=8), precision=FP8),
    **CARRIED,
}

BROKEN = {
    "permute_fusion": carried(
        MIXTRAL, changes={"transformer_impl": "local"}, moe_permute_fusion=True
    ),
    "router_fusion": carried(
        MIXTRAL, changes={"transformer_impl": "local"}, moe_router_fusion=True
    ),
    "flex_group": carried(MIXTRAL, dims(dp=2), **DEEPEP),
    "deepep_ranks": carried(DEEPSEEK, dims(dp=256, ep=256), **DEEPEP),
    "flex_release": carried(
        MIXTRAL,
        dims(dp=4, ep=4),
        {"version": "0.18"},
        **(DEEPEP | {"moe_flex_dispatcher_backend": FlexBackend.NCCLEP}),
    ),
    "expert_overlap_dispatcher": carried(MIXTRAL, dims(dp=2), **OVERLAP),
    "expert_overlap_pipeline": carried(MIXTRAL, dims(pp=2, dp=4, ep=4), **OVERLAP),
    "expert_overlap_recompute": carried(
        MIXTRAL, dims(dp=4, ep=4), {"recompute": uniform(1)}, **OVERLAP
    ),
    "expert_overlap_precision": carried(
        MIXTRAL, dims(dp=4, ep=4), {"precision": Precision.FP32}, **OVERLAP
    ),
    "expert_overlap_mtp": carried(
        changed(DEEPSEEK, mtp_num_layers=2), dims(dp=32, ep=32), **OVERLAP
    ),
    "expert_overlap_graphs": carried(
        MIXTRAL,
        dims(dp=4, ep=4),
        cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE,
        cuda_graph_scope=("attn", "mlp"),
        **OVERLAP,
    ),
    "expert_overlap_fsdp": carried(
        MIXTRAL,
        dims(dp=4, ep=4),
        {"zero": ZeroStage.OPTIMIZER, "sharding": DataParallelSharding.MEGATRON_FSDP},
        **OVERLAP,
    ),
    "delayed_wgrad": carried(
        MIXTRAL,
        dims(dp=4, ep=4),
        {"transformer_impl": "local"},
        delay_wgrad_compute=True,
        **OVERLAP,
    ),
    "shared_overlap": carried(
        DEEPSEEK,
        dims(tp=2, dp=32, ep=64),
        {"version": "0.17"},
        moe_shared_expert_overlap=True,
        **DEEPEP,
    ),
    "tensor_overlap": carried(
        grid=dims(tp=4), changes={"sequence_parallel": False}, tp_comm_overlap=True
    ),
    "context_levels": carried(grid=dims(cp=4), cp_comm_type=ContextTraffic.A2A_P2P),
    "context_sizes": carried(grid=dims(cp=8), **A2A_P2P),
    "context_heads": carried(grid=dims(tp=4, cp=4), cp_comm_type=ContextTraffic.A2A),
    "cuda_graph_full_recompute": carried(
        changes={"recompute": uniform(1)}, cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE
    ),
    "cuda_graph_recompute": carried(
        changed(LLAMA, attention_dropout=0.1),
        changes={"recompute": selective(RecomputeModule.CORE_ATTN)},
        cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE,
    ),
    "graphs_experts": carried(MIXTRAL, dims(dp=2), cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE),
    "graphs_packs": carried(
        changes={"cuda_graphs": CudaGraphs(impl="transformer_engine", packs=True)},
        cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE,
        cuda_graph_scope=("attn", "mlp"),
    ),
    "graphs_modules": carried(
        cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE, cuda_graph_scope=("attn", "mlp")
    ),
    "offloaded_layers": carried(grid=dims(pp=2), cpu_offloading_num_layers=10),
    "offloaded_modules": carried(offload_modules=("attn_proj",)),
    "cuda_graph_recomputes": carried(
        changes={"recompute": selective(RecomputeModule.MLP)},
        cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE,
    ),
    "offloaded_graphs": carried(
        cuda_graph_impl=GraphImpl.LOCAL, cuda_graph_scope=("attn",), offload_modules=("core_attn",)
    ),
    "offloaded_recomputed": carried(
        changes={"recompute": uniform(1)}, offload_modules=("core_attn",)
    ),
    "groups_over_tp": request(grid=dims(tp=16)),
    "heads_over_tp": request(grid=dims(tp=3)),
    "ffn_over_tp": request(changed(LLAMA, ffn_hidden_size=28671), dims(tp=8)),
    "mamba_over_tp_and_cp": request(changed(HYBRID, mamba_num_groups=2), dims(tp=4)),
    "mamba_groups": request(changed(HYBRID, mamba_num_groups=3)),
    "linear_over_tp_and_cp": request(changed(LINEAR, linear_num_key_heads=4), dims(tp=8)),
    "linear_replacements": request(
        changed(LLAMA, heterogeneous_layers=(LayerKind("linear_for_mlp"),) * LLAMA.num_layers),
        dims(tp=2),
    ),
    "heterogeneous_virtual_stages": request(
        changed(LLAMA, heterogeneous_layers=(LayerKind.NO_OP,) * LLAMA.num_layers),
        dims(pp=2, vpp=2),
    ),
    "adapters_over_tp": request(changed(LLAMA, adapters=Adapters(dim=6)), dims(tp=4)),
    "hybrid_latent_attention": request(changed(HYBRID, hybrid_layer_pattern="M-M+-M-M")),
    "hybrid_virtual_stages": request(HYBRID, dims(pp=2, vpp=2)),
    "hybrid_stages": request(
        HYBRID,
        dims(pp=4),
        partition=StagePartition(boundaries=(0, 3, 4, 7, 10), pipeline_model_parallel_size=4),
    ),
    "hybrid_recompute": request(HYBRID, recompute=uniform(1)),
    "vocab_over_tp": request(changed(LLAMA, vocab_size=128_252, vocab_is_padded=True), dims(tp=8)),
    "adapters_over_etp": request(
        changed(MIXTRAL, adapters=Adapters(dim=6)), dims(tp=2, dp=2, ep=1, etp=4)
    ),
    "no_experts": request(grid=dims(dp=2, ep=2)),
    "experts_over_ep": request(MIXTRAL, dims(dp=3, ep=3)),
    "expert_bias": request(GPT_OSS, dims(tp=2, dp=2, ep=2, etp=2)),
    "shared_expert_bias": request(changed(DEEPSEEK, add_bias_linear=True)),
    "expert_gradients": request(MIXTRAL, dims(tp=2, dp=2), version="0.18"),
    "sequence_pieces": request(changed(LLAMA, seq_length=8190), dims(cp=4)),
    "local_attention_under_cp": request(grid=dims(cp=2), transformer_impl="local"),
    "unfused_attention_under_cp": request(grid=dims(cp=2), fused_attention=False),
    "head_sizes_under_cp": request(changed(LLAMA, kv_channels=130), dims(cp=2)),
    "attention_under_cp": request(GPT_OSS, dims(cp=2)),
    "windows_under_cp": request(dataclasses.replace(GPT_OSS, softmax_type="vanilla"), dims(cp=2)),
    "sequence_parallel": request(sequence_parallel=True),
    "norm_under_sequence_parallel": request(grid=dims(tp=2), transformer_impl="local"),
    "layers_in_bf16": request(grid=dims(pp=4), layers_in_bf16=LLAMA.num_layers // 4 + 1),
    "rank_order": request(MIXTRAL, dims(tp=2, pp=2, dp=4, ep=8, rank_order=SECOND)),
    "two_stacks": request(T5, dims(pp=2)),
    "block_recompute": request(
        T5,
        recompute=Recompute(
            granularity=RecomputeGranularity.FULL, method=RecomputeMethod.BLOCK, num_layers=1
        ),
    ),
    "even_stages": request(grid=dims(pp=3), partition=None, even_stages=1),
    "even_groups": request(grid=dims(pp=4), even_stages=3, recompute=uniform(3)),
    "encoder": request(SEES_IMAGES, dims(pp=2, cp=2)),
    "encoder_stages": request(
        SEES_IMAGES, dims(pp=2), partition=parse_layout("Et*39|t*41L", SEES_IMAGES, 2)
    ),
    "encoder_zero": request(SEES_IMAGES, dims(dp=8), zero=ZeroStage.WEIGHTS),
    "whole_batch": request(grid=dims(dp=3), global_batch_size=16),
    "interleaving": request(grid=dims(pp=4, vpp=2), global_batch_size=6),
    "virtual_stages": request(grid=dims(vpp=2), partition=None),
    "cuda_graph_experts": carried(MIXTRAL, dims(dp=2, ep=2), cuda_graph_impl=GraphImpl.LOCAL),
    "optimizer_zero": request(
        grid=dims(tp=2, dp=4), zero=ZeroStage.OPTIMIZER, optimizer="muon", version="0.17"
    ),
    "fsdp_no_pipeline": request(grid=dims(pp=2), zero=ZeroStage.GRADIENTS),
    "experts_in_fp16": request(MIXTRAL, dims(dp=4, ep=4), precision=Precision.FP16, version="0.15"),
    "fsdp_gradients_in_bf16": request(
        LLAMA, dims(dp=4), zero=ZeroStage.GRADIENTS, gradient_bytes=2, version="0.15"
    ),
    "fsdp_experts": request(MIXTRAL, dims(dp=4, ep=4), zero=ZeroStage.GRADIENTS, version="0.15"),
    "torch_fsdp_experts": request(
        MIXTRAL,
        dims(dp=4, ep=4),
        zero=ZeroStage.WEIGHTS,
        sharding=DataParallelSharding.TORCH_FSDP2,
    ),
    "fsdp_meta_device": request(
        changed(LLAMA, position_embedding_type="learned_absolute"),
        dims(dp=8),
        zero=ZeroStage.WEIGHTS,
    ),
    "no_empty_stage": request(changed(LLAMA, num_layers=2), dims(pp=8), partition=None),
    "known_version": request(version="0.9"),
    "activation_flag": request(changed(LLAMA, activation="gelu")),
    "variant": request(changed(LLAMA, variant=ModelVariant(parallel_attention=True))),
    "position_type": request(changed(LLAMA, position_embedding_type="yarn"), version="0.17"),
    "sparse_attention": request(
        changed(
            DEEPSEEK,
            experimental_attention_variant="dsa",
            dsa_indexer_n_heads=64,
            dsa_indexer_head_dim=128,
            dsa_indexer_topk=2048,
        )
    ),
    "positions": request(changed(LLAMA, max_position_embeddings=10)),
    "bert_layers": request(changed(BERT, mtp_num_layers=1)),
    "grouped_gemm": request(MIXTRAL, transformer_impl="local", moe_grouped_gemm=True),
    "grouped_gemm_bf16": request(
        MIXTRAL, moe_grouped_gemm=True, precision=Precision.FP16, version="0.15"
    ),
    "no_partition": request(grid=dims(pp=2), partition=None),
    "partition_shape": request(grid=dims(pp=2), partition=uniform_partition(LLAMA, 4)),
    "mtp_stage": request(DEEPSEEK, dims(pp=2, vpp=2), partition=MTP_FIRST),
    "mtp_last": request(
        DEEPSEEK,
        dims(pp=4),
        partition=StagePartition(boundaries=(0, 20, 40, 63, 64), pipeline_model_parallel_size=4),
        version="0.15",
    ),
    "recompute_uniform": request(grid=dims(pp=4), recompute=uniform(3)),
    "recompute_mla_up_proj": request(recompute=selective(RecomputeModule.MLA_UP_PROJ)),
    "recompute_moe_act": request(MIXTRAL, recompute=selective(RecomputeModule.MOE_ACT)),
    "recompute_local": request(
        recompute=selective(RecomputeModule.LAYERNORM), transformer_impl="local"
    ),
    "recompute_fp8": request(precision=FP8, recompute=selective(RecomputeModule.LAYERNORM)),
    "fp8_engine": request(precision=FP8, transformer_impl="local"),
    "fp8_shapes": request(changed(LLAMA, ffn_hidden_size=28680), dims(tp=8), precision=FP8),
    "fp8_tokens": request(
        changed(LLAMA, seq_length=6000), dims(tp=2), precision=FP8, fp8_recipe="mxfp8"
    ),
    "device_recipe": request(precision=FP8, fp8_recipe="mxfp8", accelerator="H100-SXM-80GB"),
}

#: Facts that no request has, as its records refuse them or a layout has its string by construction.
IMPOSSIBLE = {
    "expert_ranks": Facts(job=request(MIXTRAL, dims(dp=2, ep=2)), world_size=3),
    "expert_ranks_of_stage": Facts(job=request(MIXTRAL, dims(dp=2, ep=2)), pp=2),
    "layout_grammar": Facts(job=request(grid=dims(pp=2)), stage_text="Et*39|t*41L"),
}


def _optioned(
    name: str,
    value: Any = True,
    spec: TransformerSpec = LLAMA,
    grid: ParallelDims | None = None,
    **changes: Any,
) -> Any:
    return request(spec, grid, options={name: value}, **changes)


_FSDP = {"zero": ZeroStage.WEIGHTS, "grid": dims(dp=4)}
#: The same for options of the job that only go with some layouts.
OPTIONED = {
    **{
        f"option_{name}": _optioned(name)
        for name in (
            "tp_comm_overlap",
            "defer_embedding_wgrad_compute",
            "overlap_p2p_comm_warmup_flush",
            "overlap_param_gather_with_optimizer_step",
            "distribute_saved_activations",
            "overlap_moe_expert_parallel_comm",
            "delay_wgrad_compute",
            "ep_overlap_early_attn_memory_release",
            "overlap_param_gather",
            "inference_batch_times_seqlen_threshold",
            "fsdp_double_buffer",
            "fsdp_manual_registration",
            "init_model_with_meta_device",
        )
    },
    **{
        f"option_{name}": _optioned(name, **_FSDP)
        for name in (
            "use_cpu_initialization",
            "check_weight_hash_across_dp_replicas_interval",
            "moe_single_grouped_weight",
            "moe_single_grouped_bias",
        )
    },
    **{
        f"option_{name}": _optioned(name, 24, grid=dims(dp=16))
        for name in (
            "eval_global_batch_size",
            "eval_micro_batch_size",
            "eval_context_parallel_size",
        )
    },
    **{
        f"option_{name}": _optioned(name, "flex", MIXTRAL, dims(dp=2))
        for name in (
            "moe_token_dispatcher_type",
            "moe_flex_dispatcher_backend",
            "moe_enable_deepep",
        )
    },
    "option_overlap_p2p_comm": _optioned("overlap_p2p_comm", False, grid=dims(pp=2, vpp=2)),
    "option_microbatch_group_size_per_vp_stage": _optioned(
        "microbatch_group_size_per_vp_stage", 3, grid=dims(pp=4, vpp=2)
    ),
    "option_inference_cuda_graph_scope": _optioned("inference_cuda_graph_scope", "layer"),
    "option_moe_expert_rank_capacity_factor": _optioned("moe_expert_rank_capacity_factor", 1.5),
    "option_hybrid_override_pattern": _optioned(
        "hybrid_override_pattern", "M-", HYBRID, version="0.20"
    ),
    "option_hierarchical_context_parallel_sizes": _optioned(
        "hierarchical_context_parallel_sizes", ["2", "2"]
    ),
    "option_cp_comm_type": _optioned("cp_comm_type", ["p2p", "a2a"], grid=dims(cp=2)),
    "option_moe_shared_expert_overlap": _optioned(
        "moe_shared_expert_overlap",
        spec=DEEPSEEK,
        recompute=selective(RecomputeModule.SHARED_EXPERTS),
    ),
    "option_cpu_offloading_num_layers": _optioned("cpu_offloading_num_layers", 2, grid=dims(pp=2)),
    "option_cpu_offloading": _optioned("cpu_offloading", grid=dims(pp=2)),
    "option_virtual_pipeline_model_parallel_size": _optioned(
        "virtual_pipeline_model_parallel_size", 3, grid=dims(pp=4, vpp=2)
    ),
    **{
        f"option_{name}": request(grid=dims(cp=2), options={name: value, "finetunes": True})
        for name, value in (("calculate_per_token_loss", False), ("average_in_collective", True))
    },
    "option_fine_grained_activation_offloading": _optioned(
        "fine_grained_activation_offloading", recompute=uniform(1)
    ),
    "option_num_distributed_optimizer_instances": _optioned(
        "num_distributed_optimizer_instances", 2, grid=dims(dp=3), zero=ZeroStage.OPTIMIZER
    ),
    "option_instances_of_fsdp": _optioned(
        "num_distributed_optimizer_instances",
        2,
        MIXTRAL,
        dims(dp=4, ep=2),
        zero=ZeroStage.WEIGHTS,
    ),
    "aware_optimizer_shards": _optioned("use_precision_aware_optimizer"),
    **{
        f"option_{name}": dataclasses.replace(
            _optioned(name, False, zero=ZeroStage.OPTIMIZER),
            options={name: False, "ckpt_format": "torch"},
        )
        for name in ("enable_gloo_process_groups", "use_gloo_process_groups")
    },
    "option_ckpt_format": _optioned("ckpt_format", "torch_dcp"),
    "optimizer_overlap": request(
        options={"optimizer": "muon", "overlap_grad_reduce": True}, version="0.17"
    ),
    **{rule: request(options=options_of(rule)) for rule in ROWS},
}

_RULES = {rule.id: rule for rule in RULES}


def _at_its_release(name: str, request: LaunchRequest) -> LaunchRequest:
    """A request at the last release that has the rule which it breaks, of a framework with it."""
    rule = _RULES[name]
    newest = max(request.version, rule.since, key=release_number)
    framework = rule.framework.partition(",")[0] or MEGATRON_LM
    return dataclasses.replace(request, version=rule.until or newest, framework=framework)


BROKEN, OPTIONED = (
    {name: _at_its_release(name, request) for name, request in requests.items()}
    for requests in (BROKEN, OPTIONED)
)
