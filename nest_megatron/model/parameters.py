"""Parameters that one rank holds, unit by unit, in closed form.

Every figure is the count that megatron-core itself builds (``tests/contract`` builds each pipeline
stage of many plans on the meta device and compares).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nest_megatron.model.graph import Part
from nest_megatron.model.layer_pattern import HYBRID_SYMBOLS, LayerBlock, LayerKind
from nest_megatron.model.operators import adapted_products, block_graph
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.model.unmodelled import lightning_parameters, mamba1_parameters
from nest_megatron.model.variant import Bias, NormParameters, NormPlacement

#: Taps of the convolution in a Mamba layer: the default of ``MambaMixer``.
CONV_WIDTH = 4


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of one rank.

    Args:
        dense: those replicated over the dense data-parallel group.
        expert: those of routed experts, replicated over the expert data-parallel group.
        frozen_dense, frozen_expert: those of them that are not trained.
    """

    dense: int = 0
    expert: int = 0
    frozen_dense: int = 0
    frozen_expert: int = 0

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(
            self.dense + other.dense,
            self.expert + other.expert,
            self.frozen_dense + other.frozen_dense,
            self.frozen_expert + other.frozen_expert,
        )

    def over(self, count: int) -> ParameterCount:
        """The mean of so many parts, rounded down."""
        each = (self.dense, self.expert, self.frozen_dense, self.frozen_expert)
        return ParameterCount(*(number // count for number in each))

    @property
    def trained(self) -> ParameterCount:
        """Those that have gradients and optimizer states."""
        return ParameterCount(self.dense - self.frozen_dense, self.expert - self.frozen_expert)

    @property
    def frozen(self) -> ParameterCount:
        """Those that have none."""
        return ParameterCount(self.frozen_dense, self.frozen_expert)

    @property
    def total(self) -> int:
        """Dense and expert parameters together."""
        return self.dense + self.expert


def _norm(spec: TransformerSpec, width: int) -> int:
    """Weight of a norm over ``width`` channels, and its bias for LayerNorm."""
    learned = spec.variant.norm_parameters
    if learned is NormParameters.NONE:
        return 0
    has_bias = spec.normalization == "LayerNorm" and learned is NormParameters.ALL
    return 2 * width if has_bias else width


def _norms_around(spec: TransformerSpec, *, of_mlp: bool) -> int:
    """The norms of one block: before it, behind it, both, or none where attention's serves."""
    shared = spec.variant.norm_placement is NormPlacement.SHARED and of_mlp
    shared = shared or (spec.variant.parallel_mixers and not of_mlp)  # Mamba's serves attention
    both = spec.variant.norm_placement is NormPlacement.SANDWICH
    return (0 if shared else 2 if both else 1) * _norm(spec, spec.hidden_size)


def _qk_norms(spec: TransformerSpec, tp: int) -> int:
    """Norms of queries and keys; those over the full width have weights alone."""
    if not spec.qk_layernorm:
        return 0
    if spec.variant.qk_norm_full_width:
        return (spec.num_attention_heads + spec.query_groups) * spec.head_dim // tp
    return 2 * _norm(spec, spec.head_dim)


def _attention(spec: TransformerSpec, tp: int) -> int:
    """Self-attention with its input norm, on one tensor-parallel rank.

    Source: ``megatron.core.transformer.attention.SelfAttention``; with fewer query groups than
    tensor ranks the joint projection is still split evenly.
    """
    if spec.multi_latent_attention:
        return _latent_attention(spec, tp)
    hidden, head_dim = spec.hidden_size, spec.head_dim
    query = spec.num_attention_heads * head_dim
    joint = ((1 + spec.attention_output_gate) * query + 2 * spec.query_groups * head_dim) // tp
    count = _norms_around(spec, of_mlp=False) + hidden * joint + query // tp * hidden
    if spec.add_bias_linear or spec.add_qkv_bias:
        count += joint
    if spec.add_bias_linear or spec.variant.has_bias(Bias.PROJECTION):
        count += hidden
    count += _qk_norms(spec, tp)
    if spec.softmax_type == "learnable":
        count += spec.num_attention_heads // tp
    return count


def _cross_attention(spec: TransformerSpec, tp: int) -> int:
    """Attention to an encoder's output with its norm, on one tensor-parallel rank.

    Source: ``megatron.core.transformer.attention.CrossAttention``.
    """
    hidden, width = spec.hidden_size, spec.num_attention_heads * spec.head_dim // tp
    count = _norm(spec, hidden) + 4 * hidden * width
    return count + (3 * width + hidden if spec.add_bias_linear else 0)


def _latent_attention(spec: TransformerSpec, tp: int) -> int:
    """Multi-latent attention with its input norm, on one tensor-parallel rank.

    Source: ``megatron.core.transformer.multi_latent_attention.MLASelfAttention``: the down
    projections are whole on every rank, the up projections are split by heads.
    """
    hidden, heads, latent = spec.hidden_size, spec.num_attention_heads, spec.kv_lora_rank
    query_dim = spec.qk_head_dim + spec.qk_pos_emb_head_dim
    query_rank = spec.q_lora_rank or 0
    down = query_rank + latent + spec.qk_pos_emb_head_dim
    count = _norms_around(spec, of_mlp=False) + hidden * down
    if spec.variant.has_bias(Bias.LATENT_DOWN):
        count += down
    if spec.variant.has_bias(Bias.PROJECTION):
        count += hidden
    count += (query_rank or hidden) * heads * query_dim // tp
    if spec.qk_layernorm:
        count += _norm(spec, latent) + _norm(spec, query_rank)
    count += latent * heads * (spec.qk_head_dim + spec.v_head_dim) // tp
    return count + heads * spec.v_head_dim // tp * hidden


def _mamba(spec: TransformerSpec, tp: int) -> int:
    """A Mamba-2 layer with its input norm, on one tensor-parallel rank.

    Source: ``megatron.core.ssm.mamba_mixer.MambaMixer``: heads and groups are split; of each head
    there are ``dt_bias``, ``A_log`` and ``D``, and the convolution has a bias.
    """
    if spec.variant.mamba_version == 1:
        return _norm(spec, spec.hidden_size) + mamba1_parameters(spec) // tp
    hidden, heads = spec.hidden_size, spec.num_mamba_heads // tp
    inner = heads * spec.mamba_head_dim
    mixed = inner + 2 * spec.mamba_num_groups // tp * spec.mamba_state_dim
    projections = hidden * (inner + mixed + heads) + inner * hidden
    variant = spec.variant
    count = _norm(spec, hidden) + projections + 3 * heads
    count += mixed * (variant.mamba_conv_kernel + variant.mamba_conv_bias)
    count += inner * variant.mamba_gated_norm + hidden * variant.has_bias(Bias.MAMBA_OUT)
    return count + (inner + mixed + heads) * variant.has_bias(Bias.MAMBA_IN)


def _gated_delta_net(spec: TransformerSpec, tp: int) -> int:
    """A gated delta net with its input norm, on one tensor-parallel rank.

    Source: ``megatron.core.ssm.gated_delta_net.GatedDeltaNet``: of each value head there are
    ``dt_bias`` and ``A_log``, the convolution has no bias, and the output norm is over one head.
    """
    hidden, heads = spec.hidden_size, spec.linear_num_value_heads // tp
    value = heads * spec.linear_value_head_dim
    mixed = 2 * spec.linear_num_key_heads // tp * spec.linear_key_head_dim + value
    projections = hidden * (mixed + value + 2 * heads) + value * hidden
    count = _norm(spec, hidden) + projections + spec.linear_conv_kernel_dim * mixed
    return count + 2 * heads + _norm(spec, spec.linear_value_head_dim)


def _mlp(spec: TransformerSpec, ffn: int, tp: int, width: int | None = None) -> int:
    """Two projections of an MLP of inner size ``ffn`` split over ``tp`` ranks, without a norm.

    Args:
        width: of the tokens, if not the hidden size.
    """
    hidden = width or spec.hidden_size
    inner = ffn * (2 if spec.gated_linear_unit else 1) // tp
    count = hidden * inner + ffn // tp * hidden
    has_bias = spec.add_bias_linear or spec.variant.has_bias(Bias.MLP)
    return count + (inner + hidden if has_bias else 0)


def _experts(spec: TransformerSpec, tp: int, ep: int, etp: int) -> ParameterCount:
    """Router, routed and shared experts with their norm.

    Source: ``megatron.core.transformer.moe``; the router is whole on every rank, and the bias that
    balances experts without a loss is a buffer, not a parameter.
    """
    hidden, experts = spec.hidden_size, spec.num_experts
    assert experts is not None
    variant = spec.variant
    router = hidden + (spec.add_bias_linear or variant.has_bias(Bias.ROUTER))
    dense = _norms_around(spec, of_mlp=True) + experts * router
    dense += experts * variant.has_bias(Bias.EXPERT_BIAS)
    if spec.moe_shared_expert_intermediate_size:
        dense += _mlp(spec, spec.moe_shared_expert_intermediate_size, tp)
        dense += hidden * spec.moe_shared_expert_gate
    if spec.moe_latent_size:
        dense += 2 * hidden * spec.routed_size
        dense += (hidden + spec.routed_size) * spec.add_bias_linear
    each = _mlp(spec, spec.expert_ffn_hidden_size, etp, spec.routed_size)
    return ParameterCount(dense, experts // ep * each)


def _block_parameters(
    spec: TransformerSpec, block: LayerBlock, tp: int, ep: int, etp: int
) -> ParameterCount:
    """One block of a decoder layer."""
    if block is LayerBlock.EXPERTS:
        return _experts(spec, tp, ep, etp)
    if block is LayerBlock.GATED_DELTA_NET and spec.variant.lightning_attention:
        return ParameterCount(_norm(spec, spec.hidden_size) + lightning_parameters(spec) // tp)
    if block is LayerBlock.GATED_DELTA_NET:
        return ParameterCount(_gated_delta_net(spec, tp))
    if block is LayerBlock.MAMBA:
        return ParameterCount(_mamba(spec, tp))
    if block in (LayerBlock.DENSE, LayerBlock.ENCODER_DENSE):
        around = _norms_around(spec, of_mlp=True)
        return ParameterCount(around + _mlp(spec, spec.ffn_hidden_size, tp))
    if block is LayerBlock.CROSS_ATTENTION:
        return ParameterCount(_cross_attention(spec, tp))
    return ParameterCount(_attention(spec, tp))


def layer_parameters(
    spec: TransformerSpec, kind: LayerKind, tp: int, ep: int, etp: int
) -> ParameterCount:
    """One decoder layer of the given kind."""
    blocks = (_block_parameters(spec, block, tp, ep, etp) for block in kind.blocks)
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
    return count + (_norm(spec, hidden) if spec.variant.embedding_norm else 0)


def _norm_is_of_last_layer(spec: TransformerSpec) -> bool:
    return spec.num_mtp_layers > 0 and not spec.hybrid_layer_pattern


def _images(spec: TransformerSpec, tp: int) -> ParameterCount:
    """An encoder of images with its projector, which is trained."""
    assert spec.vision is not None
    encoder = _vision(spec, tp)
    return ParameterCount(
        encoder + _projector(spec, tp), frozen_dense=encoder if spec.vision.frozen else 0
    )


def _vision(spec: TransformerSpec, tp: int) -> int:
    """An encoder's patch embedding, positions and class tokens, whole, and its layers.

    Source: ``megatron.core.models.vision.clip_vit_model.CLIPViTModel``: no norm at the end, and
    where there is one in front, no bias in the patch embedding.
    """
    vision, inner = spec.vision, spec.encoder
    assert vision is not None
    hidden, shards = vision.hidden_size, tp if vision.is_split else 1
    rows = vision.patch_features + vision.num_tokens + vision.num_class_tokens
    ends = rows * hidden + (_norm(inner, hidden) if vision.norm_before else hidden)
    layer = layer_parameters(inner, LayerKind.DENSE, shards, 1, 1)
    return ends + vision.num_layers * layer.dense


def _projector(spec: TransformerSpec, tp: int) -> int:
    """Norm and two layers behind an encoder.

    Source: ``megatron.core.models.vision.multimodal_projector.MultimodalProjector``.
    """
    vision = spec.vision
    assert vision is not None
    shards = tp if vision.is_split else 1
    ffn, gates = vision.projector_ffn_hidden_size // shards, 2 if spec.gated_linear_unit else 1
    count = _norm(spec, vision.hidden_size) + (gates * vision.hidden_size + spec.hidden_size) * ffn
    return count + (gates * ffn + spec.hidden_size if spec.add_bias_linear else 0)


def _head(spec: TransformerSpec, tp: int, *, holds_embedding: bool) -> int:
    """Final norm and output layer; ``holds_embedding`` if this rank also has the word embedding.

    With tied weights the output layer costs nothing there, and one more copy elsewhere. With MTP
    the final norm goes with the last decoder layer instead (``TransformerBlock``), but in a hybrid
    model, whose MTP layers lie on the last stage (``HybridStack``).
    """
    hidden, vocab = spec.hidden_size, spec.padded_vocab_size(tp)
    narrow = spec.variant.embedding_size
    has_norm = spec.variant.final_norm and not _norm_is_of_last_layer(spec)
    count = _norm(spec, hidden) if has_norm else 0
    count += narrow * hidden if narrow else 0
    if spec.untie_embeddings_and_output_weights or not holds_embedding:
        count += vocab // tp * (narrow or hidden)
    if spec.variant.has_bias(Bias.OUTPUT_LAYER):
        count += vocab // tp
    if spec.family is ModelFamily.T5:  # the encoder's final norm, and T5LMHead's bias
        count += _norm(spec, hidden)
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
    around = 3 * _norm(spec, hidden) + 2 * hidden * hidden // tp
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
            return found if spec.vision is None else found + _images(spec, tp)
        if kind is LayerKind.HEAD:
            return ParameterCount(_head(spec, tp, holds_embedding=single_stage))
        if kind is LayerKind.MTP:
            return _mtp(spec, tp, ep, etp, holds_embedding=single_stage)
        return layer_parameters(spec, kind, tp, ep, etp)

    kinds = spec.layer_kinds()
    by_kind = {kind: of_kind(kind) for kind in dict.fromkeys(kinds)}
    counts = [by_kind[kind] for kind in kinds]
    if _norm_is_of_last_layer(spec):
        counts[spec.num_layers] += ParameterCount(_norm(spec, spec.hidden_size))
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
    assert spec.adapters is not None
    shard = LayerShard(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    counts = {False: 0, True: 0}
    for block in spec.unit_blocks(kind):
        for each in adapted_products(block_graph(spec, block, shard), spec, shard):
            counts[each.operator.part is Part.EXPERTS] += each.parameters(spec.adapters)
    return ParameterCount(counts[False], counts[True])


def total_parameters(spec: TransformerSpec) -> int:
    """Parameters of the whole model, unsharded, vocabulary padded as for one rank."""
    return sum(count.total for count in unit_parameters(spec, 1, 1, 1, single_stage=True))


def model_parameters(spec: TransformerSpec) -> int:
    """Parameters of the published model: the vocabulary as it is, without MTP layers."""
    return total_parameters(_published(spec))


def _published(spec: TransformerSpec) -> TransformerSpec:
    layers = spec.hybrid_layer_pattern.partition("/")[0]
    return dataclasses.replace(
        spec, vocab_is_padded=True, mtp_num_layers=None, hybrid_layer_pattern=layers
    )


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
    each = _mlp(spec, spec.expert_ffn_hidden_size, 1, spec.routed_size)
    return total - layers * idle * each


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
    encoder = None if spec.encoder_num_layers is None else 1
    is_linear, has_experts = LayerBlock.GATED_DELTA_NET in has, LayerBlock.EXPERTS in has
    sparse = spec.experimental_attention_variant if LayerBlock.ATTENTION in has else None
    chunked, slides = LayerBlock.CHUNKED_ATTENTION in has, LayerBlock.WINDOW_ATTENTION in has
    is_hybrid = bool(spec.hybrid_layer_pattern) and len(inner.blocks) == 1
    hybrid = _hybrid_layer(spec, inner, kind) if is_hybrid else ""
    return dataclasses.replace(
        spec,
        num_layers=1,
        encoder_num_layers=encoder,
        num_experts=spec.num_experts if has_experts else None,
        moe_layer_pattern=(1,) if has_experts and not hybrid else (),
        mtp_num_layers=1 if kind is LayerKind.MTP else None,
        window_size=spec.window_size if slides else None,
        window_attn_skip_freq=None,
        attention_chunk_size=spec.attention_chunk_size if chunked else None,
        no_rope_freq=None,
        experimental_attention_variant="gated_delta_net" if is_linear and not hybrid else sparse,
        linear_attention_freq=(1,) if is_linear and not hybrid else None,
        hybrid_layer_pattern=hybrid,
    )


def _hybrid_layer(spec: TransformerSpec, inner: LayerKind, kind: LayerKind) -> str:
    """The pattern of one layer, by the symbol that the model has for it."""
    symbols = (s for s in spec.hybrid_layer_pattern if HYBRID_SYMBOLS.get(s) is inner)
    symbol = next(symbols, "*")
    return f"{symbol}/{symbol}" if kind is LayerKind.MTP else symbol
