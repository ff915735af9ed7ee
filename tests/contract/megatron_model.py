"""Ask megatron-core itself: does it accept a plan, make our groups, and build our stages?"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.parallel.dims import ParallelDims, RankOrder
from nest_megatron.parallel.layout import layout_string
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.rank_order import GroupKind, group_of_rank
from nest_megatron.parallel.recompute import NO_RECOMPUTE, Recompute, RecomputeGranularity
from nest_megatron.parallel.rules import launched_expert_tensor_size
from tests.contract.megatron_shims import (
    DuplicatedLinear,
    fake_process_group,
    meta_megatron,
    torch,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltChunk:
    """One virtual stage as megatron-core built it, on one of its ranks.

    Args:
        dense_parameters: parameters that the dense data-parallel group reduces.
        expert_parameters: parameters of routed experts.
        layer_numbers: Megatron's numbers of the transformer layers (from 1).
    """

    dense_parameters: int
    expert_parameters: int
    layer_numbers: tuple[int, ...]
    num_mtp_layers: int
    has_embedding: bool
    has_head: bool


def transformer_config(
    spec: TransformerSpec,
    dims: ParallelDims,
    partition: StagePartition | None,
    *,
    sequence_parallel: bool,
    recompute: Recompute = NO_RECOMPUTE,
    **changes: Any,
) -> Any:
    """The ``TransformerConfig`` that Megatron's arguments would become for this plan.

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
    if spec.multi_latent_attention:
        fields |= {
            name: getattr(spec, name)
            for name in (
                "q_lora_rank",
                "kv_lora_rank",
                "qk_head_dim",
                "qk_pos_emb_head_dim",
                "v_head_dim",
            )
        }
    return (MLATransformerConfig if spec.multi_latent_attention else TransformerConfig)(**fields)


def megatron_groups(
    spec: TransformerSpec, dims: ParallelDims, rank: int
) -> dict[GroupKind, tuple[int, ...]]:
    """Groups of one rank as megatron-core makes them."""
    from megatron.core import parallel_state as state

    getters = {
        GroupKind.TP: state.get_tensor_model_parallel_group,
        GroupKind.CP: state.get_context_parallel_group,
        GroupKind.DP: state.get_data_parallel_group,
        GroupKind.DP_CP: lambda: state.get_data_parallel_group(with_context_parallel=True),
        GroupKind.PP: state.get_pipeline_model_parallel_group,
        GroupKind.MP: state.get_model_parallel_group,
        GroupKind.TP_CP: state.get_tensor_and_context_parallel_group,
        GroupKind.TP_DP: state.get_tensor_and_data_parallel_group,
        GroupKind.TP_DP_CP: lambda: state.get_tensor_and_data_parallel_group(
            with_context_parallel=True
        ),
        GroupKind.EMBEDDING: lambda: state.get_embedding_group(check_initialized=False),
    }
    if spec.num_experts is not None:
        getters |= {
            GroupKind.ETP: state.get_expert_tensor_parallel_group,
            GroupKind.EP: state.get_expert_model_parallel_group,
            GroupKind.EDP: state.get_expert_data_parallel_group,
            GroupKind.ETP_EP: state.get_expert_tensor_and_model_parallel_group,
            GroupKind.ETP_EP_PP: state.get_expert_tensor_model_pipeline_parallel_group,
        }
    with _rank(spec, dims, rank):
        ranks = torch.distributed.get_process_group_ranks
        groups = {kind: getter() for kind, getter in getters.items()}
        return {kind: tuple(ranks(g)) if g is not None else () for kind, g in groups.items()}


def check_groups(spec: TransformerSpec, dims: ParallelDims, ranks: Iterable[int]) -> None:
    """Assert that our rank order makes Megatron's groups for some ranks."""
    for rank in ranks:
        for kind, group in megatron_groups(spec, dims, rank).items():
            assert group_of_rank(dims, kind, rank) == group, (kind, rank)


def build_stages(
    spec: TransformerSpec,
    dims: ParallelDims,
    partition: StagePartition | None,
    *,
    sequence_parallel: bool,
    stages: Iterable[int] | None = None,
) -> list[list[BuiltChunk]]:
    """Build every virtual stage of every pipeline rank on the meta device.

    Context parallelism does not change parameters and needs Transformer Engine, so the models are
    built without it, and with the fewest replicas that hold one copy of the experts.
    """
    small = _smallest(spec, dims)
    chosen = range(dims.pipeline_model_parallel_size) if stages is None else stages
    with meta_megatron():
        config = transformer_config(spec, small, partition, sequence_parallel=sequence_parallel)
        return [_build_rank(spec, small, config, stage) for stage in chosen]


def _build_rank(spec: TransformerSpec, dims: ParallelDims, config: Any, stage: int) -> Any:
    pipeline = group_of_rank(dims, GroupKind.PP, 0)
    with _rank(spec, dims, pipeline[stage]):
        vpp = dims.virtual_pipeline_model_parallel_size
        virtual = range(vpp) if vpp > 1 else (None,)
        return [_summary(spec, dims, _build(spec, dims, config, vp)) for vp in virtual]


def _build(spec: TransformerSpec, dims: ParallelDims, config: Any, vp_stage: int | None) -> Any:
    from megatron.core import parallel_state as state

    common = {
        "config": config,
        "vocab_size": spec.padded_vocab_size(dims.tensor_model_parallel_size),
        "max_sequence_length": spec.max_position_embeddings or spec.seq_length,
        "pre_process": state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        "share_embeddings_and_output_weights": not spec.untie_embeddings_and_output_weights,
        "position_embedding_type": spec.position_embedding_type,
        "rotary_percent": spec.rotary_percent,
        "vp_stage": vp_stage,
    }
    return _bert(common) if spec.family is ModelFamily.BERT else _gpt(spec, config, common)


def _bert(common: dict[str, Any]) -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(num_tokentypes=2, transformer_layer_spec=bert_layer_local_spec, **common)


def _gpt(spec: TransformerSpec, config: Any, common: dict[str, Any]) -> Any:
    """As ``gpt_builders.gpt_builder`` does, with the local layers."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    options = {"use_transformer_engine": False, "normalization": spec.normalization}
    vp_stage = common["vp_stage"]
    block = specs.get_gpt_decoder_block_spec(config, vp_stage=vp_stage, **options)
    mtp = None
    if spec.num_mtp_layers:
        last = specs.get_gpt_decoder_layer_specs(config, vp_stage=vp_stage, **options)[-1]
        mtp = specs.get_gpt_mtp_block_spec(
            config, last, use_transformer_engine=False, vp_stage=vp_stage
        )
    layers = [*block.layer_specs, *(mtp.layer_specs if mtp else [])]
    if spec.multi_latent_attention:
        for layer in layers:
            inner = getattr(layer.submodules, "transformer_layer", None) or layer
            attention = inner.submodules.self_attention.submodules
            attention.linear_kv_down_proj = DuplicatedLinear
            if spec.q_lora_rank is not None:
                attention.linear_q_down_proj = DuplicatedLinear
    return GPTModel(transformer_layer_spec=block, mtp_block_spec=mtp, **common)


def _summary(spec: TransformerSpec, dims: ParallelDims, model: Any) -> BuiltChunk:
    dense = experts = 0
    for name, parameter in model.named_parameters():
        is_expert = ".mlp.experts." in name
        if dims.expert_model_parallel_size > 1:
            assert is_expert == (not getattr(parameter, "allreduce", True)), name
        experts += parameter.numel() * is_expert
        dense += parameter.numel() * (not is_expert)
    layers = (model.encoder if spec.family is ModelFamily.BERT else model.decoder).layers
    mtp = getattr(model, "mtp", None)
    return BuiltChunk(
        dense_parameters=dense,
        expert_parameters=experts,
        layer_numbers=tuple(layer.layer_number for layer in layers),
        num_mtp_layers=0 if mtp is None else len(mtp.layers),
        has_embedding=model.pre_process,
        has_head=model.post_process,
    )


@contextlib.contextmanager
def _rank(spec: TransformerSpec, dims: ParallelDims, rank: int) -> Iterator[None]:
    from megatron.core import parallel_state

    vpp = dims.virtual_pipeline_model_parallel_size
    with fake_process_group(dims.world_size, rank):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=dims.tensor_model_parallel_size,
            pipeline_model_parallel_size=dims.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            context_parallel_size=dims.context_parallel_size,
            expert_model_parallel_size=dims.expert_model_parallel_size,
            expert_tensor_parallel_size=launched_expert_tensor_size(spec, dims),
            order=dims.rank_order.value,
            create_gloo_process_groups=False,
        )
        yield


def _smallest(spec: TransformerSpec, dims: ParallelDims) -> ParallelDims:
    """The same shards with fewer replicas and without context parallelism."""
    tp = dims.tensor_model_parallel_size
    needed = launched_expert_tensor_size(spec, dims) or tp
    if spec.num_experts is None:
        return dataclasses.replace(dims, context_parallel_size=1, data_parallel_size=1)
    stage = needed * dims.expert_model_parallel_size
    data = next(n for n in range(1, stage + 1) if tp * n % stage == 0)
    # Other orders need as many dense as expert replicas; no weight's shape depends on the order.
    return dataclasses.replace(
        dims,
        context_parallel_size=1,
        data_parallel_size=data,
        rank_order=RankOrder.TP_CP_EP_DP_PP,
    )


def _shape_fields(spec: TransformerSpec) -> dict[str, Any]:
    from megatron.core.activations import quick_gelu, squared_relu

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
