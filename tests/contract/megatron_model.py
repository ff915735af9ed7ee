"""Ask megatron-core itself: does it accept a plan, make our groups, and build our stages?"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nest_megatron.layout.dims import ParallelDims, RankOrder
from nest_megatron.layout.rank_order import GroupKind, group_of_rank
from nest_megatron.layout.rulebook.degrees import launched_expert_tensor_size
from nest_megatron.layout.stage_layout import StagePartition, layout_string
from nest_megatron.megatron_core.stage import as_rank, transformer_config
from nest_megatron.model.block_parameters import encoder_of
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from tests.contract.megatron_shims import DuplicatedLinear, meta_megatron, torch


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
    }
    if spec.num_experts is not None:
        getters |= {
            GroupKind.ETP: state.get_expert_tensor_parallel_group,
            GroupKind.EP: state.get_expert_model_parallel_group,
            GroupKind.EDP: state.get_expert_data_parallel_group,
        }
    with as_rank(spec, dims, rank):
        ranks = torch.distributed.get_process_group_ranks
        return {kind: tuple(ranks(getter())) for kind, getter in getters.items()}


def check_groups(spec: TransformerSpec, dims: ParallelDims, ranks: Iterable[int]) -> None:
    """Assert that our rank order makes Megatron's groups for some ranks."""
    for rank in ranks:
        for kind, group in megatron_groups(spec, dims, rank).items():
            assert group_of_rank(dims, kind, rank) == group, (kind, rank)


def config_of(
    spec: TransformerSpec, dims: ParallelDims, partition: StagePartition | None, **changes: Any
) -> Any:
    """The configuration of a model whose stages are those of a partition."""
    if dims.pipeline_model_parallel_size > 1 and partition is not None:
        changes["pipeline_model_parallel_layout"] = layout_string(spec, partition)
    return transformer_config(spec, dims, **changes)


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
        config = config_of(spec, small, partition, sequence_parallel=sequence_parallel)
        return [_build_rank(spec, small, config, stage) for stage in chosen]


def _build_rank(spec: TransformerSpec, dims: ParallelDims, config: Any, stage: int) -> Any:
    pipeline = group_of_rank(dims, GroupKind.PP, 0)
    with as_rank(spec, dims, pipeline[stage]):
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
    builders = {ModelFamily.BERT: _bert, ModelFamily.T5: _t5, ModelFamily.GPT: _gpt}
    return builders[spec.family](spec, config, common)


def _t5(spec: TransformerSpec, config: Any, common: dict[str, Any]) -> Any:
    """As ``pretrain_t5.model_provider`` does, with the local layers.

    Their final norms are Transformer Engine's, which is not installed here.
    """
    from megatron.core.models.T5 import t5_spec as specs
    from megatron.core.models.T5.t5_model import T5Model

    encoder, layers = copy.deepcopy(config), encoder_of(spec).num_layers
    encoder.num_layers = layers
    stacks = {
        "encoder": specs.get_t5_encoder_with_local_block_spec(layers),
        "decoder": specs.get_t5_decoder_with_local_block_spec(spec.num_layers),
    }
    return T5Model(
        encoder_config=encoder,
        **{
            f"transformer_{name}_layer_spec": dataclasses.replace(stack, layer_norm=specs.LNImpl)
            for name, stack in stacks.items()
        },
        **{name: value for name, value in common.items() if name != "vp_stage"},
    )


def _bert(_: TransformerSpec, __: Any, common: dict[str, Any]) -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(num_tokentypes=2, transformer_layer_spec=bert_layer_local_spec, **common)


def _gpt(spec: TransformerSpec, config: Any, common: dict[str, Any]) -> Any:
    """As ``gpt_builders.gpt_builder`` does, with the local layers."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    options = {"use_transformer_engine": False, "normalization": spec.normalization}
    vp_stage = common["vp_stage"]
    if spec.heterogeneous_layers:
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
            get_gpt_heterogeneous_layer_spec,
        )

        layers = get_gpt_heterogeneous_layer_spec(config, use_te=False)
        return GPTModel(transformer_layer_spec=layers, **common)
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
            names = ("transformer_layer", "mtp_model_layer")  # of an MTP layer: 0.16, and since
            inside = (getattr(layer.submodules, name, None) for name in names)
            attention = next(filter(None, inside), layer).submodules.self_attention.submodules
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
    stacks = [getattr(model, name, None) for name in ("encoder", "decoder")]
    before = [0, spec.encoder_num_layers or 0]  # the second stack's layers count from 1 anew
    numbers = tuple(
        first + layer.layer_number
        for first, stack in zip(before, stacks, strict=True)
        for layer in (stack.layers if stack is not None else ())
    )
    mtp = getattr(model, "mtp", None)
    return BuiltChunk(
        dense_parameters=dense,
        expert_parameters=experts,
        layer_numbers=numbers,
        num_mtp_layers=0 if mtp is None else len(mtp.layers),
        has_embedding=model.pre_process,
        has_head=model.post_process,
    )


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
