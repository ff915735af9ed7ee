"""The first half of a decoder layer: norm, self-attention (grouped-query or latent), residual."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from nest_megatron.errors import UnplannableModelError
from nest_megatron.model.execution import ContextTraffic
from nest_megatron.model.graph import (
    Group,
    LayerCollective,
    LayerGraph,
    Operator,
    OperatorKind,
    Part,
)
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.operators.common import (
    FP32,
    column_parallel,
    dropout_mask,
    gathered_block,
    gemm,
    offloaded_attention,
    residual_sum,
    row_parallel,
    streaming,
)
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import ModelFamily, TransformerSpec

#: Name of the copy to a graph's inputs, which is launched beside the graph.
GRAPH_INPUTS = "graph_inputs"
#: Tensors of the size of a layer's input that a graph holds beside what the layer keeps anyway, for
#: each micro batch in flight: its input, and what it hands on. Not measured: an estimate that makes
#: 2 to 6 GB of layers of 8 B and 70 B models, where NVIDIA's guide says a few, and above 10 with
#: pipelines (Megatron-Bridge, docs/performance-guide.md @51885cf).
_TENSORS = 2
#: With the router in it a graph hands on the residual beside the normed tokens.
_OF_ROUTER = 1


def attention_graph(
    spec: TransformerSpec, shard: LayerShard, block: LayerBlock = LayerBlock.ATTENTION
) -> LayerGraph:
    """The first half of a decoder layer: norm, self-attention, residual.

    Raises:
        UnplannableModelError: for sparse attention of a hybrid model.
    """
    if "D" in spec.hybrid_layer_pattern:
        raise UnplannableModelError(
            f"model {spec.name}: hybrid_layer_pattern",
            "D",
            "its work is not known",
            "nest-megatron models counts its parameters.",
        )
    layer = _latent_attention if spec.multi_latent_attention else _attention
    graph = layer(spec, shard, _attention_span(spec, shard, block))
    graph = dataclasses.replace(graph, input_bytes=shard.hidden_bytes(spec))
    return offloaded_attention(with_graph_inputs(graph, shard), spec, shard)


def with_graph_inputs(
    graph: LayerGraph, shard: LayerShard, module: str | None = None
) -> LayerGraph:
    """A layer with what a CUDA graph adds, if it holds the layer's ``module`` (or any).

    A graph has addresses of its own: inputs and gradients are copied there before a replay
    (``make_graphed_callables`` of Transformer Engine), one set for each layer and micro batch in
    flight (``TECudaGraphHelper._get_sample_arguments`` of megatron-core).
    """
    size, scope = graph.input_bytes, shard.execution.scope_of_layer_graphs
    if scope is None or (module is not None and scope and module not in scope):
        return graph
    return graph + LayerGraph(
        operators=(streaming(GRAPH_INPUTS, Part.RESIDUAL, 2 * size, backward=1.0),),
        saved_bytes=((Part.RESIDUAL, (_TENSORS + _OF_ROUTER * ("moe_router" in scope)) * size),),
    )


def _attention_span(spec: TransformerSpec, shard: LayerShard, block: LayerBlock) -> float:
    """Keys that a query attends to on average over the sequence.

    In a window the first tokens see fewer than it holds; chunks are causal each by itself. Packed
    sequences count as if all were as long as the one that a token stands in on average, which in
    full attention is exact.
    """
    length = shard.attended_tokens or spec.seq_length
    full = length if spec.family is ModelFamily.BERT else length / 2
    if block is LayerBlock.WINDOW_ATTENTION and spec.window_size is not None:
        window = min(length, spec.window_size)
        return window - window * window / (2 * length)
    if block is LayerBlock.CHUNKED_ATTENTION and spec.attention_chunk_size is not None:
        return min(length, spec.attention_chunk_size) / 2
    return full


def core_attention(
    spec: TransformerSpec,
    shard: LayerShard,
    span: float,
    query_dim: int,
    value_dim: int,
    kv_heads: float,
    keys: int | None = None,
) -> LayerGraph:
    """Attention over ``span`` keys a query, and what context-parallel ranks send each other for it.

    There are as many keys as queries, if not ``keys`` a sequence.

    Flash attention saves no scores and recomputes them in the backward pass: five GEMMs to
    the forward pass's two.
    """
    if shard.keeps_scores(spec):
        return _unfused_attention(spec, shard, query_dim, value_dim, keys or spec.seq_length)
    act, tokens = shard.activation_bytes, shard.tokens(spec)
    heads = spec.num_attention_heads / shard.tensor_model_parallel_size
    scores = tokens * span * heads
    flops = 2.0 * scores * (query_dim + value_dim)
    query_bytes = tokens * heads * (query_dim + value_dim) * act
    key_tokens = tokens * (keys or spec.seq_length) / spec.seq_length
    kv_bytes = key_tokens * kv_heads * (query_dim + value_dim) * act
    operator = Operator(
        name="core_attention",
        part=Part.CORE_ATTENTION,
        kind=OperatorKind.ATTENTION,
        flops=flops,
        bytes_moved=query_bytes + kv_bytes,
        backward_flops=2.5 * flops,
        backward_bytes_moved=2 * (query_bytes + kv_bytes),
        num_kernels=shard.context_parallel_size // _heads_group(shard),  # blocks of keys
        parallel_rows=tokens * heads,
        exponentials=scores,
        has_weight=False,
    )
    return LayerGraph(
        operators=(operator,),
        collectives=tuple(_context_traffic(shard, query_bytes, kv_bytes)),
        saved_bytes=((Part.CORE_ATTENTION, tokens * heads * FP32),),
    )


def _heads_group(shard: LayerShard) -> int:
    """Context-parallel ranks that exchange heads: in ``a2a+p2p`` the first hierarchical size."""
    how, sizes = shard.execution.cp_comm_type, shard.execution.hierarchical_context_parallel_sizes
    if how is ContextTraffic.A2A:
        return shard.context_parallel_size
    return sizes[0] if how is ContextTraffic.A2A_P2P and sizes else 1


def _context_traffic(
    shard: LayerShard, query_bytes: float, kv_bytes: float
) -> Iterator[LayerCollective]:
    """What context-parallel ranks send each other (Transformer Engine's ``AttnFuncWithCP*``).

    A ring passes keys and values on under the attention of the block before, and their gradients
    beside them on the way back. ``all_gather`` collects keys and values first and scatters their
    gradients; ``a2a`` exchanges sequence for heads before the attention and back after it; with
    ``a2a+p2p`` neighbours exchange heads, and rings pass on what a group of them holds.
    """
    size, how = shard.context_parallel_size, shard.execution.cp_comm_type
    if size == 1:
        return
    exchanged = _heads_group(shard)
    rounds = 1 if how is ContextTraffic.ALL_GATHER else size // exchanged
    for backward in (False, True):
        call = functools.partial(
            LayerCollective, part=Part.CORE_ATTENTION, group=Group.CONTEXT, backward=backward
        )
        if exchanged > 1:
            within = exchanged if exchanged < size else 0
            num_bytes = query_bytes + kv_bytes
            yield call("heads", kind="all_to_all", message_bytes=num_bytes, within=within)
        if how is ContextTraffic.ALL_GATHER:
            yield call("kv", kind="all_gather", message_bytes=kv_bytes * size)
            if backward:
                yield call("kv_grad", kind="reduce_scatter", message_bytes=kv_bytes * size)
        if rounds > 1:
            yield call(
                "kv_ring",
                kind="send_recv",
                message_bytes=kv_bytes * (2 if backward else 1),
                hidden_under="core_attention",
                num_calls=rounds - 1,
                across=exchanged if exchanged > 1 else 0,
            )


def _unfused_attention(
    spec: TransformerSpec, shard: LayerShard, query_dim: int, value_dim: int, keys: int
) -> LayerGraph:
    """Attention as two batched GEMMs around a softmax, the whole square of scores in memory.

    Forward, a score is written by the first GEMM, read and written by the fused scale, mask and
    softmax, and read by the second; dropout reads and writes it again with a byte of mask. The
    backward pass makes two gradients for each GEMM and goes through dropout and softmax once.
    Saved for it: probabilities, and with dropout the mask and the dropped-out probabilities (the
    five bytes a score of arXiv 2205.05198, section 4.1). PyTorch's softmax keeps its own output in
    32 bits, beside what is cast for the second GEMM, and its gradient is as wide.
    """
    act, part, tokens = shard.activation_bytes, Part.CORE_ATTENTION, shard.tokens(spec)
    heads = spec.num_attention_heads / shard.tensor_model_parallel_size
    both = (1 + keys / spec.seq_length) / 2  # queries and outputs, keys and values
    vectors = tokens * both * heads * (query_dim + value_dim) * act
    scores = tokens * heads * keys
    dropout = spec.attention_dropout > 0
    flops = 2.0 * scores * (query_dim + value_dim)
    gemms = Operator(
        name="core_attention",
        part=part,
        kind=OperatorKind.GEMM,
        flops=flops,
        bytes_moved=2 * scores * act + 2 * vectors,
        backward_flops=2 * flops,
        backward_bytes_moved=4 * scores * act + 4 * vectors,
        num_kernels=2,
        aligned=query_dim % 8 == 0 and value_dim % 8 == 0,
        has_weight=False,
    )
    # Softmax: one read and one write; backward two reads and one write. Dropout: the same with the
    # mask's byte, backward one read and one write.
    moved = scores * (2 * act + (2 * act + 1 if dropout else 0))
    back = scores * (3 * act + (2 * act + 1 if dropout else 0))
    kernels = 2 + dropout
    matrices = heads * shard.micro_batch_size
    if not _softmax_is_fused(spec, matrices, keys):
        moved += scores * (2 * act + 8 * FP32)
        back += scores * (2 * act + 6 * FP32)
        kernels += 8
    operators = [gemms, streaming("softmax", part, moved, backward=back / moved, kernels=kernels)]
    if _softmax_is_fused(spec, matrices, keys, most=_ENGINE_KEYS):
        saved, working = scores * (2 * act + 1 if dropout else act), 0.0
    else:
        saved, working = scores * (FP32 + act + dropout), scores * (2 * FP32 + act)
    if spec.variant.attn_logit_softcapping is not None:  # a division, a tanh kept, a product
        operators.insert(1, streaming("softcap", part, scores * 6 * act, backward=7 / 6, kernels=3))
        saved += scores * act
    return LayerGraph(
        operators=tuple(operators), saved_bytes=((part, saved),), working_bytes=working
    )


#: Most keys whose softmax one kernel takes: Megatron's, and Transformer Engine's.
_MEGATRON_KEYS, _ENGINE_KEYS = 4096, 16_383


def _softmax_is_fused(
    spec: TransformerSpec, matrices: float, keys: int, most: int = _MEGATRON_KEYS
) -> bool:
    """Whether one kernel scales, masks and takes the softmax of so many matrices of scores.

    Else PyTorch's own do, in 32 bits: a cast, the scaling, the mask, its filling, the softmax and a
    cast back (``FusedScaleMaskSoftmax.is_kernel_available``, ``forward_torch_softmax``).
    """
    return matrices % 4 == 0 and spec.seq_length % 4 == 0 and 16 < keys <= most


def _attention(spec: TransformerSpec, shard: LayerShard, span: float) -> LayerGraph:
    """Grouped-query self-attention with its input norm."""
    act, (taken, made) = shard.activation_bytes, shard.attention_bytes
    tp = shard.tensor_model_parallel_size
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    hidden, head_dim = spec.hidden_size, spec.head_dim
    heads = spec.num_attention_heads / tp
    kv_heads = max(spec.query_groups / tp, 1.0)
    query, key_value = heads * head_dim, 2 * kv_heads * head_dim
    gated = spec.attention_output_gate
    width = ((1 + gated) * spec.num_attention_heads + 2 * spec.query_groups) * head_dim
    rotated, hidden_bytes = tokens * (query + key_value / 2) * act, shard.hidden_bytes(spec)
    operators = [
        streaming("input_norm", Part.INPUT_NORM, 2 * hidden_bytes),
        gemm(shard, "qkv", Part.QKV, tokens, hidden, width / tp),
        streaming("rotary", Part.QKV, 2 * rotated, backward=1.0),
        gemm(shard, "projection", Part.PROJECTION, tokens, query, hidden),
        residual_sum("residual", hidden_bytes),
    ]
    saved = [
        (Part.INPUT_NORM, local * hidden * shard.input_bytes),
        (Part.QKV, tokens * (query + key_value) * taken),
        (Part.PROJECTION, tokens * query * (made + shard.cast_bytes)),
        dropout_mask(spec, local),
    ]
    if spec.qk_layernorm or spec.qk_l2_norm:
        operators.append(streaming("qk_norm", Part.QKV, 2 * rotated))
        saved.append((Part.QKV, rotated))
    if gated:  # laid out for itself, then multiplied on; the projection's input is another tensor
        gate_bytes = tokens * query * act
        operators.append(streaming("output_gate", Part.PROJECTION, 5 * gate_bytes, kernels=2))
        saved += [(Part.QKV, gate_bytes), (Part.PROJECTION, gate_bytes)]
    collectives = list(gathered_block(spec, shard, Part.QKV, Part.PROJECTION, "qkv", "projection"))
    if spec.query_groups < tp:  # a query group is shared by several tensor ranks
        size = tokens * width * act
        collectives += [
            LayerCollective("qkv.groups", Part.QKV, "all_gather", size),
            LayerCollective("qkv.groups", Part.QKV, "reduce_scatter", size, backward=True),
        ]
    around = LayerGraph(
        operators=tuple(operators), collectives=tuple(collectives), saved_bytes=tuple(saved)
    )
    return around + core_attention(spec, shard, span, head_dim, head_dim, kv_heads)


def _latent_attention(spec: TransformerSpec, shard: LayerShard, span: float) -> LayerGraph:
    """Multi-latent attention: low-rank down projections, then up projections split by heads."""
    act, hidden = shard.activation_bytes, spec.hidden_size
    taken, made = shard.attention_bytes
    heads = spec.num_attention_heads / shard.tensor_model_parallel_size
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    query_dim = spec.qk_head_dim + spec.qk_pos_emb_head_dim
    latent = (spec.q_lora_rank or 0) + spec.kv_lora_rank + spec.qk_pos_emb_head_dim
    query, key, value = heads * query_dim, heads * query_dim, heads * spec.v_head_dim
    key_value_up, hidden_bytes = heads * spec.qk_head_dim + value, shard.hidden_bytes(spec)
    operators = [
        streaming("input_norm", Part.INPUT_NORM, 2 * hidden_bytes),
        gemm(shard, "mla_down", Part.MLA_DOWN, local, hidden, latent),
        streaming("latent_norm", Part.MLA_DOWN, 2 * local * latent * act),
        gemm(shard, "query_up", Part.MLA_UP, tokens, spec.q_lora_rank or hidden, query),
        gemm(shard, "kv_up", Part.MLA_UP, tokens, spec.kv_lora_rank, key_value_up),
        streaming("rotary", Part.MLA_UP, 2 * tokens * (query + key) * act, backward=1.0),
        gemm(shard, "projection", Part.PROJECTION, tokens, value, hidden),
        residual_sum("residual", hidden_bytes),
    ]
    saved = (
        (Part.INPUT_NORM, local * hidden * shard.input_bytes),
        (Part.MLA_DOWN, local * latent * (act + shard.input_bytes)),
        (Part.MLA_UP, tokens * (query + key + value) * taken),
        (Part.PROJECTION, tokens * value * (made + shard.cast_bytes)),
        dropout_mask(spec, local),
    )
    collectives = tuple(_latent_traffic(spec, shard))
    around = LayerGraph(operators=tuple(operators), collectives=collectives, saved_bytes=saved)
    if spec.experimental_attention_variant == "dsa":
        return around + _sparse_attention(spec, shard)
    return around + core_attention(spec, shard, span, query_dim, spec.v_head_dim, heads)


def _sparse_attention(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Latent attention behind the top-k of its indexer, as PyTorch runs it.

    Heads share one key, as wide as the latent and its positions; scores outside the top-k are
    masked, not left out. The indexer, whole on every tensor-parallel rank, scores all keys in 32
    bits for each of its heads: written, passed through ReLU, weighed, summed, and made again in the
    backward pass (``FusedDSAIndexerLoss``), which keeps its inputs and the indices of 8 bytes.

    Source: 0.20 ``experimental_attention_variant/dsa.py``, ``dsa_kernel_backend`` none.
    """
    assert spec.dsa_indexer_n_heads is not None
    assert spec.dsa_indexer_head_dim is not None
    assert spec.dsa_indexer_topk is not None
    heads, width = spec.dsa_indexer_n_heads, spec.dsa_indexer_head_dim
    tokens, keys, part = shard.tokens(spec), spec.seq_length, Part.CORE_ATTENTION
    scores, act = tokens * keys * heads, shard.activation_bytes
    flops = 2.0 * scores * width
    indexer = (
        gemm(
            shard,
            "indexer_query",
            part,
            tokens,
            spec.q_lora_rank or spec.hidden_size,
            heads * width,
        ),
        gemm(shard, "indexer_key", part, tokens, spec.hidden_size, width),
        gemm(shard, "indexer_weights", part, tokens, spec.hidden_size, heads),
        Operator(
            name="indexer_scores",
            part=part,
            kind=OperatorKind.GEMM,
            flops=flops,
            bytes_moved=6 * scores * FP32,
            backward_flops=3 * flops,
            backward_bytes_moved=12 * scores * FP32,
            num_kernels=5,
            has_weight=False,
        ),
    )
    inputs = tokens * (heads * width + width + heads) * act
    indices = tokens * min(spec.dsa_indexer_topk, keys) * 8
    chosen = LayerGraph(operators=indexer, saved_bytes=((part, inputs + indices),))
    key_dim = spec.kv_lora_rank + spec.qk_pos_emb_head_dim
    return chosen + _unfused_attention(spec, shard, key_dim, spec.kv_lora_rank, keys)


def _latent_traffic(spec: TransformerSpec, shard: LayerShard) -> Iterator[LayerCollective]:
    """Tensor-parallel traffic of latent attention: the latents are gathered, not hidden states.

    Every rank has the whole down projections and uses them on its own tokens; the up projections
    take the latents of all tokens, and rotation the positions beside them.
    """
    size, part = shard.tokens(spec) * shard.activation_bytes, Part.MLA_UP
    yield from row_parallel(shard, Part.PROJECTION, "projection", size * spec.hidden_size)
    query_in = spec.q_lora_rank or spec.hidden_size
    yield from column_parallel(shard, part, "query_up", size * query_in)
    yield from column_parallel(shard, part, "kv_up", size * spec.kv_lora_rank)
    if shard.sequence_parallel and shard.tensor_model_parallel_size > 1:
        positions = size * spec.qk_pos_emb_head_dim
        yield LayerCollective("positions.gather", part, "all_gather", positions)
