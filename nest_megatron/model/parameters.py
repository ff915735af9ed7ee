"""Parameters that one rank holds, unit by unit, in closed form.

Every figure is the count that megatron-core itself builds (``tests/contract`` builds each pipeline
stage of many plans on the meta device and compares).
"""

from __future__ import annotations

from dataclasses import replace

from nest_megatron.model.block_parameters import (
    ParameterCount,
    block_parameters,
    encoder_of,
    mlp,
    norm,
)
from nest_megatron.model.encoder import EncoderSpec
from nest_megatron.model.graph import Part
from nest_megatron.model.layer_pattern import HYBRID_SYMBOLS, LayerBlock, LayerKind
from nest_megatron.model.operators import adapted_products, block_graph
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.model.variant import Bias


def layer_parameters(
    spec: TransformerSpec, kind: LayerKind, tp: int, ep: int, etp: int
) -> ParameterCount:
    """One decoder layer of a kind."""
    blocks = (block_parameters(spec, block, tp, ep, etp) for block in kind.blocks)
    return sum(blocks, ParameterCount())


def _embedding(spec: TransformerSpec, tp: int) -> int:
    """Word, position and token-type embeddings on one tensor-parallel rank."""
    words = spec.padded_vocab_size(tp) // tp
    rows = words
    if spec.position_embedding_type == "learned_absolute":
        rows += spec.max_position_embeddings or spec.seq_length
    hidden, narrow = spec.hidden_size, spec.variant.embedding_size
    count = (rows + (2 if spec.family is ModelFamily.BERT else 0)) * hidden
    if narrow:
        count += narrow * hidden - words * (hidden - narrow)
    return count + (norm(spec, hidden) if spec.variant.embedding_norm else 0)


def _norm_is_of_last_layer(spec: TransformerSpec) -> bool:
    return spec.num_mtp_layers > 0 and not spec.hybrid_layer_pattern


def _images(spec: TransformerSpec, vision: EncoderSpec, tp: int) -> ParameterCount:
    """An encoder of images with its projectors."""
    encoder, merge = _encoder(encoder_of(spec), vision, tp), vision.spatial_merge_size
    projector = _mergers(spec, vision, merge) if merge else _projector(spec, vision, tp)
    frozen = vision.frozen * encoder + vision.projector_frozen * projector
    return ParameterCount(encoder + projector, frozen_dense=frozen)


def _encoder(inner: TransformerSpec, vision: EncoderSpec, tp: int) -> int:
    """An encoder's patch embedding, positions and class tokens, whole, and its layers.

    Source: ``megatron.core.models.vision.clip_vit_model.CLIPViTModel``: no norm at the end, and
    where there is one in front, no bias in the patch embedding. transformers'
    ``Qwen2_5_VisionTransformerPretrainedModel`` and ``Qwen3VLVisionModel``: rotations or learned
    positions, no norm at either end.
    """
    hidden, shards = vision.hidden_size, tp if vision.is_split else 1
    rows = vision.patch_features + vision.num_positions + vision.num_class_tokens
    bias = hidden if vision.patch_bias else 0
    ends = rows * hidden + (norm(inner, hidden) if vision.norm_before else bias)
    return ends + vision.num_layers * layer_parameters(inner, LayerKind.DENSE, shards, 1, 1).dense


def _projector(spec: TransformerSpec, vision: EncoderSpec, tp: int) -> int:
    """Norm and two layers behind an encoder.

    Source: ``megatron.core.models.vision.multimodal_projector.MultimodalProjector``.
    """
    shards = tp if vision.is_split else 1
    ffn, gates = vision.projector_ffn_hidden_size // shards, spec.num_gates
    count = norm(spec, vision.hidden_size) + (gates * vision.hidden_size + spec.hidden_size) * ffn
    return count + (gates * ffn + spec.hidden_size if spec.add_bias_linear else 0)


def _mergers(spec: TransformerSpec, vision: EncoderSpec, merge: int) -> int:
    """Norm and two layers that make a token of the patches of a square, whole on every rank.

    Source: transformers' ``Qwen2_5_VLPatchMerger`` and ``Qwen3VLVisionPatchMerger``, of which those
    of deepstack have their norm behind the merge.
    """
    inner, wide = encoder_of(spec), vision.hidden_size * merge**2
    ffn = vision.projector_ffn_hidden_size
    layers = (wide + 1) * ffn + (ffn + 1) * spec.hidden_size
    deepstack = vision.deepstack_layers * (norm(inner, wide) + layers)
    return norm(inner, vision.hidden_size) + layers + deepstack


def _head(spec: TransformerSpec, tp: int, *, holds_embedding: bool) -> int:
    """Final norm and output layer; ``holds_embedding`` if this rank also has the word embedding.

    With tied weights the output layer costs nothing there, and one more copy elsewhere. With MTP
    the final norm goes with the last decoder layer instead (``TransformerBlock``), but in a hybrid
    model, whose MTP layers lie on the last stage (``HybridStack``).
    """
    hidden, vocab = spec.hidden_size, spec.padded_vocab_size(tp)
    narrow = spec.variant.embedding_size
    has_norm = spec.variant.final_norm and not _norm_is_of_last_layer(spec)
    count = norm(spec, hidden) if has_norm else 0
    count += narrow * hidden if narrow else 0
    if spec.untie_embeddings_and_output_weights or not holds_embedding:
        count += vocab // tp * (narrow or hidden)
    if spec.variant.has_bias(Bias.OUTPUT_LAYER):
        count += vocab // tp
    if spec.family is ModelFamily.T5:  # the encoder's final norm, and T5LMHead's bias
        count += norm(spec, hidden)
        count += 0 if spec.untie_embeddings_and_output_weights else vocab // tp
    if spec.family is ModelFamily.BERT:
        masked_head = hidden * hidden + hidden + 2 * hidden + vocab // tp
        pooler_and_binary_head = hidden * hidden + hidden + 2 * hidden + 2
        count += masked_head + pooler_and_binary_head
    return count


def _mtp(
    spec: TransformerSpec, tp: int, ep: int, etp: int, *, holds_embedding: bool
) -> ParameterCount:
    """All multi-token-prediction layers, with a copy of the embedding unless the rank has it.

    Source: ``megatron.core.transformer.multi_token_prediction.MultiTokenPredictionLayer``: two
    norms, a projection of twice the width, the layers of one depth, a norm.
    """
    hidden, count = spec.hidden_size, spec.num_mtp_layers
    layers = (layer_parameters(spec, kind, tp, ep, etp) for kind in spec.mtp_layer_kinds)
    inside = sum(layers, ParameterCount())
    around = 3 * norm(spec, hidden) + 2 * hidden * hidden // tp
    copy = 0 if holds_embedding else _embedding(spec, tp)
    return ParameterCount(count * (inside.dense + around) + copy, count * inside.expert)


def unit_parameters(
    spec: TransformerSpec, tp: int, ep: int, etp: int, *, single_stage: bool
) -> tuple[ParameterCount, ...]:
    """Parameters of every unit of the layer sequence on one rank.

    Args:
        single_stage: the whole model lies on one pipeline rank, so that tied or repeated weights
            exist once.

    Returns:
        One count for each entry of ``spec.layer_kinds()``.
    """

    def of_kind(kind: LayerKind) -> ParameterCount:
        if kind is LayerKind.EMBEDDING:
            found = ParameterCount(_embedding(spec, tp))
            return found if spec.vision is None else found + _images(spec, spec.vision, tp)
        if kind is LayerKind.HEAD:
            return ParameterCount(_head(spec, tp, holds_embedding=single_stage))
        if kind is LayerKind.MTP:
            return _mtp(spec, tp, ep, etp, holds_embedding=single_stage)
        return layer_parameters(spec, kind, tp, ep, etp)

    kinds = spec.layer_kinds()
    by_kind = {kind: of_kind(kind) for kind in dict.fromkeys(kinds)}
    counts = [by_kind[kind] for kind in kinds]
    if _norm_is_of_last_layer(spec):
        counts[spec.num_layers] += ParameterCount(norm(spec, spec.hidden_size))
    if spec.adapters is None:
        return tuple(counts)
    added = {kind: _adapter_parameters(spec, kind, tp, ep, etp) for kind in by_kind}
    return tuple(
        added[kind] + ParameterCount(count.dense, count.expert, count.dense, count.expert)
        for kind, count in zip(kinds, counts, strict=True)
    )


def _adapter_parameters(
    spec: TransformerSpec, kind: LayerKind, tp: int, ep: int, etp: int
) -> ParameterCount:
    """Adapters of a unit, by the products beside which they run.

    Experts of a rank share theirs (``ParallelLinearAdapter`` wraps the grouped product).
    """
    shard = LayerShard(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    counts = {False: 0, True: 0}
    for block in spec.unit_blocks(kind):
        for each in adapted_products(block_graph(spec, block, shard), spec, shard):
            counts[each.operator.part is Part.EXPERTS] += each.parameters
    return ParameterCount(counts[False], counts[True])


def total_parameters(spec: TransformerSpec) -> int:
    """Parameters of the whole model, unsharded, vocabulary padded as for one rank."""
    return sum(count.total for count in unit_parameters(spec, 1, 1, 1, single_stage=True))


def model_parameters(spec: TransformerSpec) -> int:
    """Parameters of the published model: the vocabulary as it is, without MTP layers."""
    return total_parameters(_published(spec))


def _published(spec: TransformerSpec) -> TransformerSpec:
    return replace(spec.without_mtp(), vocab_is_padded=True)


def active_model_parameters(spec: TransformerSpec) -> int:
    """Those of ``model_parameters`` that take part in the work on one token."""
    return active_parameters(_published(spec))


def active_parameters(spec: TransformerSpec) -> int:
    """Parameters that take part in the work on one token."""
    total = total_parameters(spec)
    if not spec.is_moe or spec.num_experts is None:
        return total
    units = map(spec.unit_blocks, spec.layer_kinds())
    layers = sum(blocks.count(LayerBlock.EXPERTS) for blocks in units)
    idle = spec.num_experts - spec.moe_router_topk
    return total - layers * idle * mlp(spec, spec.expert_ffn_hidden_size, 1, spec.routed_size)


def one_layer(spec: TransformerSpec, kind: LayerKind) -> TransformerSpec:
    """The model of one decoder layer: what the layer's extraction and profile depend on.

    Args:
        kind: of the layer; with ``MTP`` one of the last layer's kind, and one MTP layer.
    """
    if kind is LayerKind.MTP:
        inner = spec.mtp_layer_kinds[-1]
    elif kind.is_layer:
        inner = kind
    else:
        inner = LayerKind.ATTENTION if spec.hybrid_layer_pattern else LayerKind.DENSE
    has = set(inner.blocks)
    is_linear, has_experts = LayerBlock.GATED_DELTA_NET in has, LayerBlock.EXPERTS in has
    is_sparse = spec.experimental_attention_variant == "dsa" and LayerBlock.ATTENTION in has
    chunked, slides = LayerBlock.CHUNKED_ATTENTION in has, LayerBlock.WINDOW_ATTENTION in has
    hybrid = ""
    if (
        spec.hybrid_layer_pattern and len(inner.blocks) == 1
    ):  # by the symbol that the model has for it
        symbols = (s for s in spec.hybrid_layer_pattern if HYBRID_SYMBOLS.get(s) is inner)
        hybrid = next(symbols, "*")
        hybrid += f"/{hybrid}" if kind is LayerKind.MTP else ""
    linear = "gated_delta_net" if is_linear and not hybrid else None
    return replace(
        spec,
        num_layers=1,
        encoder_num_layers=None if spec.encoder_num_layers is None else 1,
        num_experts=spec.num_experts if has_experts else None,
        moe_layer_pattern=(1,) if has_experts and not hybrid else (),
        mtp_num_layers=1 if kind is LayerKind.MTP else None,
        window_size=spec.window_size if slides else None,
        window_attn_skip_freq=None,
        attention_chunk_size=spec.attention_chunk_size if chunked else None,
        no_rope_freq=None,
        experimental_attention_variant="dsa" if is_sparse else linear,
        linear_attention_freq=(1,) if linear else None,
        heterogeneous_layers=(inner,) if spec.heterogeneous_layers and kind.is_layer else (),
        hybrid_layer_pattern=hybrid,
    )
