"""Blocks that few models have, and how work differs from that of Megatron-LM's own layers.

Closed forms by the rules of the other operators, for layers that no framework measured here builds:
a norm is a streaming kernel that keeps its input, a cap one over what it caps.
"""

from __future__ import annotations

from dataclasses import replace

from nest_megatron.model.block_parameters import decoder_of, encoder_of
from nest_megatron.model.graph import LayerCollective, LayerGraph, Part
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.operators.attention import core_attention
from nest_megatron.model.operators.common import (
    FP32,
    column_parallel,
    dropout_mask,
    gathered_block,
    gemm,
    residual_sum,
    streaming,
)
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.model.variant import NormPlacement


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
    around = LayerGraph(
        operators=(
            streaming("cross_norm", Part.RESIDUAL, 2 * hidden_bytes),
            gemm(shard, "cross_query", Part.QKV, queries, hidden, width),
            gemm(shard, "cross_key_value", Part.QKV, keys, hidden, 2 * width),
            gemm(shard, "cross_projection", Part.PROJECTION, queries, width, hidden),
            residual_sum("cross_residual", hidden_bytes),
        ),
        collectives=(
            *gathered_block(
                decoder, shard, Part.QKV, Part.PROJECTION, "cross_query", "cross_projection"
            ),
            *column_parallel(shard, Part.QKV, "cross_key_value", keys * hidden * act),
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


def linear_for_attention_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Norm, a projection of the hidden size to itself, residual; its input is the layer's."""
    graph = _linear(spec, shard, Part.INPUT_NORM, Part.PROJECTION)
    return graph + LayerGraph(input_bytes=shard.hidden_bytes(spec))


def linear_for_mlp_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """The same behind attention, whose output the residual keeps."""
    return _linear(spec, shard, Part.MLP_NORM, Part.MLP) + LayerGraph(
        saved_bytes=((Part.RESIDUAL, shard.hidden_bytes(spec)),)
    )


def _linear(spec: TransformerSpec, shard: LayerShard, norm: Part, part: Part) -> LayerGraph:
    """One linear layer, whose columns tensor-parallel ranks gather.

    With sequence parallelism it does not run (``linear_replacements`` of the rulebook). Source:
    ``megatron.core.transformer.heterogeneous.linear_replacements``.
    """
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    hidden, hidden_bytes = spec.hidden_size, shard.hidden_bytes(spec)
    whole = tokens * hidden * shard.activation_bytes
    name, columns = f"{part}_linear", hidden / shard.tensor_model_parallel_size
    collectives = list(column_parallel(shard, part, name, whole))
    if shard.tensor_model_parallel_size > 1:
        collectives.append(LayerCollective(f"{name}.columns", part, "all_gather", whole))
    return LayerGraph(
        operators=(
            streaming(f"{name}_norm", norm, 2 * hidden_bytes),
            gemm(shard, name, part, tokens, hidden, columns),
            residual_sum(f"{name}_residual", hidden_bytes),
        ),
        collectives=tuple(collectives),
        saved_bytes=(
            (norm, local * hidden * shard.input_bytes),
            dropout_mask(spec, local),
        ),
        working_bytes=3 * whole,
    )


_OF_EACH_TOKEN = (LayerBlock.DENSE, LayerBlock.EXPERTS)


def with_variant(
    graph: LayerGraph, spec: TransformerSpec, block: LayerBlock, shard: LayerShard
) -> LayerGraph:
    """The work of a block as the model's variant has it."""
    if not spec.variant.differences():
        return graph
    if block is LayerBlock.EMBEDDING:
        return graph + _embedding(spec, shard)
    if block is LayerBlock.HEAD:
        return _head(graph, spec, shard)
    if block is LayerBlock.MTP:
        return graph
    if spec.variant.parallel_attention and block in _OF_EACH_TOKEN:
        graph = _parallel_attention(graph, spec, shard)
    if spec.variant.norm_placement is NormPlacement.SANDWICH:
        size = shard.hidden_bytes(spec)
        graph += LayerGraph(
            operators=(streaming("norm_behind", Part.RESIDUAL, 2 * size),),
            saved_bytes=((Part.RESIDUAL, size),),
        )
    if spec.variant.qk_norm_full_width and block.mixes_tokens and spec.qk_layernorm:
        graph += _qk_sums(spec, shard)
    return graph


def _parallel_attention(graph: LayerGraph, spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """An MLP that reads what attention reads: its output joins attention's before both are summed.

    It keeps no residual of its own, and adds to the one sum of the layer. With a shared norm its
    input is attention's.
    """
    hidden_bytes = shard.hidden_bytes(spec)
    shared = spec.variant.norm_placement is NormPlacement.SHARED
    dropped, silent = {"mlp_residual"}, {"fc2"}
    saved = [(Part.RESIDUAL, -hidden_bytes)]
    if shared:
        dropped.add("mlp_norm")
        silent.add("fc1")
        saved.append((Part.MLP_NORM, -graph.saved_by_part()[Part.MLP_NORM]))
    return replace(
        graph,
        operators=(
            *(each for each in graph.operators if each.name not in dropped),
            streaming("mlp_residual", Part.RESIDUAL, hidden_bytes, backward=0.0),
        ),
        collectives=tuple(
            each for each in graph.collectives if each.name.split(".")[0] not in silent
        ),
        saved_bytes=(*graph.saved_bytes, *saved),
    )


def _qk_sums(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Sums of squares of queries and keys over all heads, which tensor ranks divide."""
    if shard.tensor_model_parallel_size == 1:
        return LayerGraph()
    size = 2 * shard.tokens(spec) * FP32
    calls = (
        LayerCollective("qk_norm", Part.QKV, "all_reduce", size, backward=backward)
        for backward in (False, True)
    )
    return LayerGraph(collectives=tuple(calls))


def _embedding(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """A norm behind the word embedding, or a projection of narrow rows to the hidden size."""
    operators, saved = [], 0.0
    if spec.variant.embedding_norm:
        saved += shard.hidden_bytes(spec)
        operators.append(streaming("embedding_norm", Part.EMBEDDING, 2 * saved))
    if narrow := spec.variant.embedding_size:
        local = shard.tokens_between_blocks(spec)
        saved += local * narrow * shard.activation_bytes
        operators.append(
            gemm(shard, "project_in", Part.EMBEDDING, local, narrow, spec.hidden_size, fp8=False)
        )
    return LayerGraph(operators=tuple(operators), saved_bytes=((Part.EMBEDDING, saved),))


def _head(graph: LayerGraph, spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """No final norm, a projection to narrow rows before the output layer, or capped logits."""
    variant, tp = spec.variant, shard.tensor_model_parallel_size
    vocab, tokens = spec.padded_vocab_size(tp) / tp, shard.tokens(spec)
    operators, working = list(graph.operators), graph.working_bytes
    if not variant.final_norm:
        operators = [each for each in operators if each.name != "final_norm"]
    if narrow := variant.embedding_size:
        local = shard.tokens_between_blocks(spec)
        operators = [
            *(each for each in operators if each.name != "output_layer"),
            gemm(shard, "project_out", Part.HEAD, local, spec.hidden_size, narrow, fp8=False),
            gemm(shard, "output_layer", Part.HEAD, tokens, narrow, vocab, fp8=False),
        ]
    if variant.final_logit_softcapping is not None:  # a scaling and a tanh, whose output is kept
        logits = tokens * vocab * shard.activation_bytes
        operators.append(streaming("softcap", Part.HEAD, 4 * logits, backward=1.25, kernels=3))
        working += logits
    return replace(graph, operators=tuple(operators), working_bytes=working)
