"""The middle of a T5 decoder layer: norm, attention to the encoder's output, residual."""

from __future__ import annotations

from nest_megatron.model.graph import LayerGraph, Part
from nest_megatron.model.operators.attention import core_attention
from nest_megatron.model.operators.common import (
    column_parallel,
    dropout_mask,
    gathered_block,
    gemm,
    streaming,
)
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.model.stacks import decoder_of, encoder_of


def cross_attention_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Each decoder token attends to all of the encoder's.

    The encoder's output, which keys and values are made of, is one tensor for all layers: the head
    counts it. The norm stands alone, and keeps its input beside what the query's projection keeps.

    Source: ``megatron.core.transformer.attention.CrossAttention``, ``T5.t5_spec``.
    """
    act, decoder, encoder = shard.activation_bytes, decoder_of(spec), encoder_of(spec)
    hidden, head_dim = spec.hidden_size, spec.head_dim
    heads = spec.num_attention_heads / shard.tensor_model_parallel_size
    queries, keys, width = shard.tokens(decoder), shard.tokens(encoder), heads * head_dim
    local, hidden_bytes = shard.tokens_between_blocks(decoder), shard.hidden_bytes(decoder)
    context_bytes = keys * hidden * act
    around = LayerGraph(
        operators=(
            streaming("cross_norm", Part.RESIDUAL, 2 * hidden_bytes),
            gemm(shard, "cross_query", Part.QKV, queries, hidden, width),
            gemm(shard, "cross_key_value", Part.QKV, keys, hidden, 2 * width),
            gemm(shard, "cross_projection", Part.PROJECTION, queries, width, hidden),
            streaming("cross_residual", Part.RESIDUAL, 3 * hidden_bytes, backward=0.67),
        ),
        collectives=(
            *gathered_block(
                decoder, shard, Part.QKV, Part.PROJECTION, "cross_query", "cross_projection"
            ),
            *column_parallel(shard, Part.QKV, "cross_key_value", context_bytes),
        ),
        saved_bytes=(
            (Part.RESIDUAL, hidden_bytes + local * hidden * shard.input_bytes),
            (Part.QKV, (queries + 2 * keys) * width * act),
            (Part.PROJECTION, queries * width * (act + shard.cast_bytes)),
            dropout_mask(spec, local),
        ),
    )
    core = core_attention(
        decoder, shard, encoder.seq_length, head_dim, head_dim, heads, keys=encoder.seq_length
    )
    return around + core
