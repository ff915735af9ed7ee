"""How the work of a block differs where a model differs from Megatron-LM's own layers.

Closed forms by the rules of the other operators, for layers that no framework measured here builds:
a norm is a streaming kernel that keeps its input, a cap one over what it caps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from nest_megatron.model.graph import LayerCollective, LayerGraph, Operator, Part
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.operators.common import FP32, gemm, streaming
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.model.variant import NormPlacement

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
        graph = _beside_attention(graph, spec, shard)
    if spec.variant.norm_placement is NormPlacement.SANDWICH:
        graph += _norm_behind(spec, shard)
    if spec.variant.qk_norm_full_width and block.mixes_tokens and spec.qk_layernorm:
        graph += _qk_sums(spec, shard)
    return graph


def _beside_attention(graph: LayerGraph, spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """An MLP that reads what attention reads: its output joins attention's before both are summed.

    It keeps no residual of its own, and adds to the one sum of the layer. With a shared norm its
    input is attention's.
    """
    hidden_bytes = shard.hidden_bytes(spec)
    shared = spec.variant.norm_placement is NormPlacement.SHARED
    dropped = {"mlp_residual", *(["mlp_norm"] if shared else [])}
    silent = {"fc2", *(["fc1"] if shared else [])}
    saved = [(Part.RESIDUAL, -hidden_bytes)]
    if shared:
        saved.append((Part.MLP_NORM, -graph.saved_by_part()[Part.MLP_NORM]))
    return dataclasses.replace(
        graph,
        operators=(
            *_without(graph.operators, dropped),
            streaming("mlp_residual", Part.RESIDUAL, hidden_bytes, backward=0.0),
        ),
        collectives=_silent(graph.collectives, silent),
        saved_bytes=(*graph.saved_bytes, *saved),
    )


def _without(operators: tuple[Operator, ...], names: Collection[str]) -> tuple[Operator, ...]:
    return tuple(each for each in operators if each.name not in names)


def _silent(
    collectives: tuple[LayerCollective, ...], projections: Collection[str]
) -> tuple[LayerCollective, ...]:
    """The traffic but for that of some projections, which is attention's too."""
    return tuple(each for each in collectives if each.name.split(".")[0] not in projections)


def _norm_behind(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """A norm of what a block puts out, before the residual."""
    size = shard.hidden_bytes(spec)
    return LayerGraph(
        operators=(streaming("norm_behind", Part.RESIDUAL, 2 * size),),
        saved_bytes=((Part.RESIDUAL, size),),
    )


def _qk_sums(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Sums of squares of queries and keys over all heads, which tensor ranks divide."""
    if shard.tensor_model_parallel_size == 1:
        return LayerGraph(operators=())
    size = 2 * shard.tokens(spec) * FP32
    calls = (
        LayerCollective("qk_norm", Part.QKV, "all_reduce", size, backward=backward)
        for backward in (False, True)
    )
    return LayerGraph(operators=(), collectives=tuple(calls))


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
        local, hidden = shard.tokens_between_blocks(spec), spec.hidden_size
        operators = [
            *(each for each in operators if each.name != "output_layer"),
            gemm(shard, "project_out", Part.HEAD, local, hidden, narrow, fp8=False),
            gemm(shard, "output_layer", Part.HEAD, tokens, narrow, vocab, fp8=False),
        ]
    if variant.final_logit_softcapping is not None:  # a scaling and a tanh, whose output is kept
        logits = tokens * vocab * shard.activation_bytes
        operators.append(streaming("softcap", Part.HEAD, 4 * logits, backward=1.25, kernels=3))
        working += logits
    return dataclasses.replace(graph, operators=tuple(operators), working_bytes=working)
