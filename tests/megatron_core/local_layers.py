"""Decoder layers of ``--transformer-impl local`` in closed form: parameters, FLOPs, activations.

These are megatron-core's plain torch layers, with attention either fused (no scores are kept) or in
two GEMMs. ``extract`` reads the same figures from the modules themselves, and
``test_agreement.py`` holds the two together, so that a release which changes a
layer is noticed. Jobs run with Transformer Engine, whose form is ``model/operators``: the two are
never fitted to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nest_megatron.model.block_parameters import ParameterCount
from nest_megatron.model.graph import Part
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.operators.common import ACT, FP32
from nest_megatron.model.parameters import layer_parameters
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec

_INDEX = 8  # bytes of an index into tokens or experts
_FLAG = 1

#: Activations that megatron-core fuses with their gate, and with an expert's weight as well.
_FUSED_GATES = {"silu", "quick_gelu", "gelu"}
_FUSED_WEIGHTS = {"silu", "quick_gelu"}

Kept = Iterator[tuple[Part, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLayer:
    """One decoder layer on one rank for one micro batch.

    Args:
        saved_bytes: kept for the backward pass by part, each storage once, without the input.
    """

    parameters: ParameterCount
    flops: float
    backward_flops: float
    input_bytes: float
    saved_bytes: tuple[tuple[Part, float], ...]

    def total_saved_bytes(self) -> float:
        """Bytes of saved activations without recomputation, the layer's input included."""
        return self.input_bytes + sum(num for _, num in self.saved_bytes)


def local_layer(spec: TransformerSpec, kind: LayerKind, shard: LayerShard) -> LocalLayer:
    """A decoder layer of the local implementation.

    Args:
        kind: ``DENSE`` or ``MOE``.
    """
    graph = layer_graph(spec, kind, shard)
    less = _duplicated_flops(spec, shard)
    attention = _latent_attention if spec.multi_latent_attention else local_attention
    feed_forward = _experts if kind is LayerKind.MOE else _mlp
    return LocalLayer(
        parameters=_parameters(spec, kind, shard),
        flops=graph.flops() - less,
        backward_flops=sum(op.backward_flops for op in graph.operators) - 2 * less,
        input_bytes=shard.tokens_between_blocks(spec) * spec.hidden_size * ACT,
        saved_bytes=(*attention(spec, shard), *feed_forward(spec, shard)),
    )


def _latent_width(spec: TransformerSpec) -> int:
    """Columns of the down projections of latent attention."""
    return (spec.q_lora_rank or 0) + spec.kv_lora_rank + spec.qk_pos_emb_head_dim


def _parameters(spec: TransformerSpec, kind: LayerKind, shard: LayerShard) -> ParameterCount:
    """As with Transformer Engine, but for latent attention's down projections: they are divided."""
    tp = shard.tensor_model_parallel_size
    ep, etp = shard.expert_model_parallel_size, shard.expert_tensor_parallel_size
    count = layer_parameters(spec, kind, tp, ep, etp)
    if not spec.multi_latent_attention:
        return count
    down = spec.hidden_size * _latent_width(spec)
    return ParameterCount(count.dense - down + down // tp, count.expert)


def _duplicated_flops(spec: TransformerSpec, shard: LayerShard) -> float:
    """Work on latent attention's down projections that only Transformer Engine's ranks repeat."""
    tp = shard.tensor_model_parallel_size
    if not spec.multi_latent_attention or shard.sequence_parallel:
        return 0.0
    down = 2.0 * shard.tokens(spec) * spec.hidden_size * _latent_width(spec)
    return down * (1 - 1 / tp)


def _norm(spec: TransformerSpec, shard: LayerShard) -> float:
    """A figure of each row."""
    return shard.tokens_between_blocks(spec) * FP32


def _rotary(spec: TransformerSpec, shard: LayerShard, width: float) -> float:
    """Cosines and sines of the angles, made anew for queries and for keys."""
    if spec.position_embedding_type != "rope":
        return 0.0
    return 4 * shard.tokens(spec) / shard.micro_batch_size * width * ACT


def local_attention(spec: TransformerSpec, shard: LayerShard) -> Kept:
    """Grouped-query attention.

    Values are a view of the joint projection's output, which is kept as a whole for their sake;
    rotated queries and keys are tensors of their own.
    """
    tp, tokens = shard.tensor_model_parallel_size, shard.tokens(spec)
    heads, groups = spec.num_attention_heads / tp, spec.query_groups / tp
    query, key = (tokens * n * spec.head_dim * ACT for n in (heads, groups))
    joint = query + 2 * key
    is_grouped = spec.query_groups < spec.num_attention_heads
    is_made_anew = spec.position_embedding_type == "rope" or spec.qk_layernorm
    # queries of several groups lie apart in the joint output, so that putting them together copies
    is_copied = is_made_anew or (is_grouped and groups > 1)
    yield Part.INPUT_NORM, _norm(spec, shard)
    yield Part.QKV, shard.tokens_between_blocks(spec) * spec.hidden_size * ACT
    yield Part.QKV, _rotary(spec, shard, int(spec.head_dim * spec.rotary_percent))
    if spec.qk_layernorm:
        yield Part.QKV, tokens * (heads + groups) * FP32
        yield Part.QKV, query if is_grouped and groups > 1 else 0.0
    own_query, own_key = query if is_copied else 0.0, key if is_made_anew else 0.0
    if shard.flash_attention:
        yield Part.CORE_ATTENTION, own_query + own_key + joint
        yield from _fused_core(tokens, heads, spec.head_dim)
        return
    if is_grouped:  # keys and values are repeated for each query head
        own_key = 2 * query
        joint = joint if spec.qk_layernorm or not is_copied else 0.0
    yield Part.CORE_ATTENTION, own_query + own_key + joint
    yield from _unfused_core(spec, tokens, heads, spec.head_dim)


def _latent_attention(spec: TransformerSpec, shard: LayerShard) -> Kept:
    """Multi-latent attention; its down projections are divided, gathered, and scattered again."""
    tp = shard.tensor_model_parallel_size
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    heads, latent = spec.num_attention_heads / tp, spec.kv_lora_rank
    yield Part.INPUT_NORM, _norm(spec, shard)
    yield Part.MLA_DOWN, local * spec.hidden_size * ACT
    if spec.q_lora_rank is not None:
        yield Part.MLA_DOWN, tokens * spec.q_lora_rank * ACT + _norm(spec, shard)
        yield Part.MLA_UP, local * spec.q_lora_rank * ACT
    # a scattered share is a copy; without one the norm keeps the positions beside it as well
    is_scattered = tp > 1 and shard.sequence_parallel
    beside = latent if is_scattered else latent + spec.qk_pos_emb_head_dim
    yield Part.MLA_DOWN, local * beside * ACT + _norm(spec, shard)
    yield Part.MLA_UP, local * latent * ACT
    yield Part.MLA_UP, _rotary(spec, shard, spec.qk_pos_emb_head_dim)
    width = spec.qk_head_dim + spec.qk_pos_emb_head_dim
    yield Part.CORE_ATTENTION, tokens * heads * (2 * width + spec.v_head_dim) * ACT
    if shard.flash_attention:
        yield from _fused_core(tokens, heads, spec.v_head_dim)
    else:
        yield from _unfused_core(spec, tokens, heads, spec.v_head_dim)


def _fused_core(tokens: float, heads: float, value_width: int) -> Kept:
    """The output, which the projection keeps as well, and one figure for each query row."""
    yield Part.CORE_ATTENTION, tokens * heads * (value_width * ACT + FP32)


def _unfused_core(spec: TransformerSpec, tokens: float, heads: float, value_width: int) -> Kept:
    """Probabilities, with dropout its mask and their dropped-out form, and the output."""
    scores = tokens * heads * spec.seq_length
    dropout = spec.attention_dropout > 0
    yield Part.CORE_ATTENTION, scores * (2 * ACT + _FLAG if dropout else ACT)
    yield Part.PROJECTION, tokens * heads * value_width * ACT


def _residual(spec: TransformerSpec, shard: LayerShard) -> float:
    """The masks of the two dropouts before a residual."""
    local = shard.tokens_between_blocks(spec)
    return 2 * local * spec.hidden_size * _FLAG if spec.hidden_dropout > 0 else 0.0


def _second_norm(spec: TransformerSpec, shard: LayerShard) -> Kept:
    """The norm's input and its output, which what comes after keeps."""
    hidden = shard.tokens_between_blocks(spec) * spec.hidden_size * ACT
    yield Part.RESIDUAL, _residual(spec, shard)
    yield Part.MLP_NORM, 2 * hidden + _norm(spec, shard)


def _mlp(spec: TransformerSpec, shard: LayerShard) -> Kept:
    ffn = spec.ffn_hidden_size / shard.tensor_model_parallel_size
    yield from _second_norm(spec, shard)
    yield Part.MLP, shard.tokens(spec) * _activation_widths(spec) * ffn * ACT


def _activation_widths(spec: TransformerSpec, *, weighted: bool = False) -> int:
    """Tensors of the inner size that an activation and the projection after it keep.

    Fused, an activation keeps its input. A gate that is not fused keeps both of its factors too,
    and an expert's weight that is not fused keeps what it is multiplied with.

    Args:
        weighted: the output of an expert is multiplied with the router's weight.
    """
    fused = _FUSED_WEIGHTS if weighted else _FUSED_GATES
    if not spec.gated_linear_unit:
        return 3 if weighted else 2
    if spec.activation in fused:
        return 3
    return 6 if weighted else 5


def _experts(spec: TransformerSpec, shard: LayerShard) -> Kept:
    """Routed experts one after the other, each on its share of the tokens."""
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    num_experts, topk = spec.num_experts or 0, spec.moe_router_topk
    yield from _second_norm(spec, shard)
    chosen = local * topk
    if spec.moe_router_enable_expert_bias:  # sigmoid scores of all experts
        yield Part.ROUTER, local * num_experts * (FP32 + ACT) + chosen * (_INDEX + ACT)
    else:
        yield Part.ROUTER, chosen * (_INDEX + FP32)
    yield Part.DISPATCH, local * num_experts * (_FLAG + ACT) + chosen * _INDEX
    etp = shard.expert_tensor_parallel_size
    received, ffn = chosen * etp, spec.expert_ffn_hidden_size / etp
    widths = _activation_widths(spec, weighted=True)
    yield Part.EXPERTS, received * spec.hidden_size * ACT
    yield Part.EXPERT_ACTIVATION, received * (widths * ffn + 1) * ACT
    shared = spec.moe_shared_expert_intermediate_size
    if shared:
        width = shared / shard.tensor_model_parallel_size
        yield Part.SHARED_EXPERTS, tokens * _activation_widths(spec) * width * ACT
