"""The work of each kind of unit in closed form, for the fused (Transformer Engine) implementation.

All figures are for one rank and one micro batch, activations in 2-byte numbers. Tensor shapes
follow megatron-core's modules with Transformer Engine: norms are fused into the projection after
them where Megatron's layer spec does so, attention is flash attention (no score matrix is kept),
activation functions keep their input only, dropout is off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nest_megatron.model.graph import (
    Group,
    LayerCollective,
    LayerGraph,
    Operator,
    OperatorKind,
    Part,
)
from nest_megatron.model.parameters import last_layer_kind
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import LayerKind, ModelFamily, TransformerSpec

ACT = 2  # bytes of an activation element
FP32 = 4


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A stretch of a layer: its operators, its collectives and what it keeps."""

    operators: tuple[Operator, ...] = ()
    collectives: tuple[LayerCollective, ...] = ()
    saved: tuple[tuple[Part, float], ...] = ()

    def __add__(self, other: _Pieces) -> _Pieces:
        return _Pieces(
            self.operators + other.operators,
            self.collectives + other.collectives,
            self.saved + other.saved,
        )


def layer_graph(spec: TransformerSpec, kind: LayerKind, shard: LayerShard) -> LayerGraph:
    """The work of one unit.

    Args:
        kind: which unit; ``MTP`` is all its layers together.
        shard: how the layer is divided.

    Returns:
        Operators, collectives and kept bytes of one rank for one micro batch.
    """
    if kind is LayerKind.EMBEDDING:
        return embedding_graph(spec, shard)
    if kind is LayerKind.HEAD:
        return head_graph(spec, shard)
    if kind is LayerKind.MTP:
        return around_mtp_graph(spec, shard) + spec.num_mtp_layers * decoder_layer_graph(
            spec, last_layer_kind(spec), shard
        )
    return decoder_layer_graph(spec, kind, shard)


def attention_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """The first half of a decoder layer: norm, self-attention, residual."""
    pieces = (_latent_attention if spec.multi_latent_attention else _attention)(spec, shard)
    return LayerGraph(
        operators=pieces.operators,
        collectives=pieces.collectives,
        input_bytes=shard.tokens_between_blocks(spec) * spec.hidden_size * ACT,
        saved_bytes=pieces.saved,
        working_bytes=0.0,
    )


def feed_forward_graph(spec: TransformerSpec, kind: LayerKind, shard: LayerShard) -> LayerGraph:
    """The second half of a decoder layer: norm, MLP or experts, residual."""
    pieces = (_moe if kind is LayerKind.MOE else _mlp)(spec, shard)
    return LayerGraph(
        operators=pieces.operators,
        collectives=pieces.collectives,
        input_bytes=0.0,
        saved_bytes=pieces.saved,
        working_bytes=_working_bytes(spec, kind, shard),
    )


def decoder_layer_graph(spec: TransformerSpec, kind: LayerKind, shard: LayerShard) -> LayerGraph:
    """A whole decoder layer."""
    return attention_graph(spec, shard) + feed_forward_graph(spec, kind, shard)


def _working_bytes(spec: TransformerSpec, kind: LayerKind, shard: LayerShard) -> float:
    """Gradients alive at the widest point of a layer's backward pass, and the gathered input."""
    widest = spec.ffn_hidden_size / shard.tensor_model_parallel_size
    tokens = shard.tokens(spec)
    if kind is LayerKind.MOE:
        widest = spec.expert_ffn_hidden_size / shard.expert_tensor_parallel_size
        tokens = shard.tokens_between_blocks(spec) * spec.moe_router_topk
        tokens *= shard.expert_tensor_parallel_size
    gates = 2 if spec.gated_linear_unit else 1
    gradients = tokens * widest * (gates + 1) * ACT
    return gradients + 2 * tokens * spec.hidden_size * ACT


def gemm(
    name: str, part: Part, rows: float, inner: float, columns: float, *, fp8: bool = True
) -> Operator:
    """A product of ``rows x inner`` activations with an ``inner x columns`` weight."""
    flops = 2.0 * rows * inner * columns
    activations = rows * (inner + columns) * ACT
    weight = inner * columns
    return Operator(
        name=name,
        part=part,
        kind=OperatorKind.GEMM,
        flops=flops,
        bytes_moved=activations + weight * ACT,
        backward_flops=2 * flops,
        backward_bytes_moved=2 * activations + weight * (ACT + 2 * FP32),
        fp8=fp8,
    )


def streaming(
    name: str, part: Part, num_bytes: float, *, backward: float = 2.0, kernels: int = 1
) -> Operator:
    """A memory-bound kernel that moves ``num_bytes`` forward and ``backward`` times that back."""
    return Operator(
        name=name,
        part=part,
        kind=OperatorKind.MEMORY_BOUND,
        bytes_moved=num_bytes,
        backward_bytes_moved=backward * num_bytes,
        num_kernels=kernels,
    )


def _gathered_block(
    spec: TransformerSpec, shard: LayerShard, part_in: Part, part_out: Part, first: str, last: str
) -> Iterator[LayerCollective]:
    """Tensor-parallel collectives around a column-parallel and a row-parallel projection.

    With sequence parallelism: all-gather in, reduce-scatter out, and their mirror images backward,
    where the input is gathered again for the weight gradient under the data gradient of ``first``
    and the scatter runs under its weight gradient
    (``LinearWithGradAccumulationAndAsyncCommunication``).
    Without: all-reduce forward behind ``last``, all-reduce backward under the weight gradient.
    """
    if shard.tensor_model_parallel_size == 1:
        return
    size = shard.tokens(spec) * spec.hidden_size * ACT
    tensor = Group.TENSOR
    if not shard.sequence_parallel:
        yield LayerCollective(
            name=f"{last}.all_reduce",
            part=part_out,
            kind="all_reduce",
            group=tensor,
            message_bytes=size,
        )
        yield LayerCollective(
            name=f"{first}.all_reduce",
            part=part_in,
            kind="all_reduce",
            group=tensor,
            message_bytes=size,
            backward=True,
            hidden_under=first,
        )
        return
    for name, part, kind, backward, under in (
        (f"{first}.gather", part_in, "all_gather", False, ""),
        (f"{last}.scatter", part_out, "reduce_scatter", False, ""),
        (f"{last}.gather", part_out, "all_gather", True, ""),
        (f"{first}.regather", part_in, "all_gather", True, first),
        (f"{first}.scatter", part_in, "reduce_scatter", True, first),
    ):
        yield LayerCollective(
            name=name,
            part=part,
            kind=kind,
            group=tensor,
            message_bytes=size,
            backward=backward,
            hidden_under=under,
        )


def _attention_span(spec: TransformerSpec) -> float:
    """Keys that a query attends to on average over the layers."""
    full = spec.seq_length if spec.family is ModelFamily.BERT else spec.seq_length / 2
    if spec.window_size is None:
        return full
    narrow = min(full, float(spec.window_size))
    skip = spec.window_attn_skip_freq
    return narrow if not skip else (narrow * (skip - 1) + full) / skip


def _core_attention(
    spec: TransformerSpec, shard: LayerShard, query_dim: int, value_dim: int, kv_heads: float
) -> _Pieces:
    """Flash attention, and the ring exchange of keys and values under context parallelism.

    The backward pass computes the scores again: five products to the forward pass's two.
    """
    tokens = shard.tokens(spec)
    heads = spec.num_attention_heads / shard.tensor_model_parallel_size
    span = _attention_span(spec)
    flops = 2.0 * tokens * span * heads * (query_dim + value_dim)
    query_bytes = tokens * heads * (query_dim + value_dim) * ACT
    kv_bytes = tokens * kv_heads * (query_dim + value_dim) * ACT
    operator = Operator(
        name="core_attention",
        part=Part.CORE_ATTENTION,
        kind=OperatorKind.ATTENTION,
        flops=flops,
        bytes_moved=query_bytes + kv_bytes,
        backward_flops=2.5 * flops,
        backward_bytes_moved=2 * (query_bytes + kv_bytes),
        num_kernels=max(1, shard.context_parallel_size),
    )
    steps = shard.context_parallel_size - 1
    ring = (
        ()
        if not steps
        else tuple(
            LayerCollective(
                name="kv_ring",
                part=Part.CORE_ATTENTION,
                kind="send_recv",
                group=Group.CONTEXT,
                message_bytes=kv_bytes * (2 if backward else 1),
                backward=backward,
                hidden_under="core_attention",
                num_calls=steps,
            )
            for backward in (False, True)
        )
    )
    statistics = tokens * heads * FP32
    return _Pieces((operator,), ring, ((Part.CORE_ATTENTION, statistics),))


def _attention(spec: TransformerSpec, shard: LayerShard) -> _Pieces:
    """Grouped-query self-attention with its input norm."""
    tp = shard.tensor_model_parallel_size
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    hidden, head_dim = spec.hidden_size, spec.head_dim
    heads = spec.num_attention_heads / tp
    kv_heads = max(spec.query_groups / tp, 1.0)
    query, key_value = heads * head_dim, 2 * kv_heads * head_dim
    joint = (spec.num_attention_heads + 2 * spec.query_groups) * head_dim / tp
    operators = [
        streaming("input_norm", Part.INPUT_NORM, 2 * local * hidden * ACT),
        gemm("qkv", Part.QKV, tokens, hidden, joint),
        streaming("rotary", Part.QKV, 2 * tokens * (query + key_value / 2) * ACT, backward=1.0),
        gemm("projection", Part.PROJECTION, tokens, query, hidden),
        streaming("residual", Part.RESIDUAL, 3 * local * hidden * ACT, backward=0.67),
    ]
    saved = [
        (Part.INPUT_NORM, local * hidden * ACT),
        (Part.QKV, tokens * (query + key_value) * ACT),
        (Part.PROJECTION, tokens * query * ACT),
    ]
    if spec.qk_layernorm:
        width = tokens * (query + key_value / 2) * ACT
        operators.append(streaming("qk_norm", Part.QKV, 2 * width))
        saved.append((Part.QKV, width))
    collectives = list(_gathered_block(spec, shard, Part.QKV, Part.PROJECTION, "qkv", "projection"))
    if spec.query_groups < tp:
        collectives += _split_group_gather(spec, tokens)
    pieces = _Pieces(tuple(operators), tuple(collectives), tuple(saved))
    return pieces + _core_attention(spec, shard, head_dim, head_dim, kv_heads)


def _split_group_gather(spec: TransformerSpec, tokens: float) -> list[LayerCollective]:
    """Gather of the joint projection when a query group is shared by several tensor ranks."""
    width = (spec.num_attention_heads + 2 * spec.query_groups) * spec.head_dim
    return [
        LayerCollective(
            name="qkv.groups",
            part=Part.QKV,
            kind="reduce_scatter" if backward else "all_gather",
            group=Group.TENSOR,
            message_bytes=tokens * width * ACT,
            backward=backward,
        )
        for backward in (False, True)
    ]


def _latent_attention(spec: TransformerSpec, shard: LayerShard) -> _Pieces:
    """Multi-latent attention: low-rank down projections, then up projections split by heads."""
    tp = shard.tensor_model_parallel_size
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    hidden, heads = spec.hidden_size, spec.num_attention_heads / tp
    query_dim = spec.qk_head_dim + spec.qk_pos_emb_head_dim
    query_rank = spec.q_lora_rank
    kv_down = spec.kv_lora_rank + spec.qk_pos_emb_head_dim
    latent = (query_rank or 0) + kv_down
    query_in = query_rank or hidden
    query, key, value = heads * query_dim, heads * query_dim, heads * spec.v_head_dim
    operators = [
        streaming("input_norm", Part.INPUT_NORM, 2 * local * hidden * ACT),
        gemm("mla_down", Part.MLA_DOWN, local, hidden, latent),
        streaming("latent_norm", Part.MLA_DOWN, 2 * local * latent * ACT),
        gemm("query_up", Part.MLA_UP, tokens, query_in, query),
        gemm(
            "kv_up",
            Part.MLA_UP,
            tokens,
            spec.kv_lora_rank,
            heads * (spec.qk_head_dim + spec.v_head_dim),
        ),
        streaming("rotary", Part.MLA_UP, 2 * tokens * (query + key) * ACT, backward=1.0),
        gemm("projection", Part.PROJECTION, tokens, value, hidden),
        streaming("residual", Part.RESIDUAL, 3 * local * hidden * ACT, backward=0.67),
    ]
    saved = (
        (Part.INPUT_NORM, local * hidden * ACT),
        (Part.MLA_DOWN, 2 * local * latent * ACT),
        (Part.MLA_UP, tokens * (query + key + value) * ACT),
        (Part.PROJECTION, tokens * value * ACT),
    )
    collectives = tuple(
        _gathered_block(spec, shard, Part.MLA_UP, Part.PROJECTION, "query_up", "projection")
    )
    pieces = _Pieces(tuple(operators), collectives, saved)
    return pieces + _core_attention(spec, shard, query_dim, spec.v_head_dim, heads)


def _mlp_operators(
    spec: TransformerSpec, part: Part, prefix: str, tokens: float, ffn: float
) -> tuple[Operator, ...]:
    gates = 2 if spec.gated_linear_unit else 1
    return (
        gemm(f"{prefix}fc1", part, tokens, spec.hidden_size, gates * ffn),
        streaming(f"{prefix}activation", part, tokens * (gates + 1) * ffn * ACT, backward=1.67),
        gemm(f"{prefix}fc2", part, tokens, ffn, spec.hidden_size),
    )


def _mlp(spec: TransformerSpec, shard: LayerShard) -> _Pieces:
    """Dense MLP with its norm."""
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    ffn = spec.ffn_hidden_size / shard.tensor_model_parallel_size
    hidden_bytes = local * spec.hidden_size * ACT
    gates = 2 if spec.gated_linear_unit else 1
    operators = (
        streaming("mlp_norm", Part.MLP_NORM, 2 * hidden_bytes),
        *_mlp_operators(spec, Part.MLP, "", tokens, ffn),
        streaming("mlp_residual", Part.RESIDUAL, 3 * hidden_bytes, backward=0.67),
    )
    saved = (
        (Part.RESIDUAL, hidden_bytes),
        (Part.MLP_NORM, hidden_bytes),
        (Part.MLP, tokens * (gates + 1) * ffn * ACT),
    )
    collectives = tuple(_gathered_block(spec, shard, Part.MLP, Part.MLP, "fc1", "fc2"))
    return _Pieces(operators, collectives, saved)


def _moe(spec: TransformerSpec, shard: LayerShard) -> _Pieces:
    """Routed experts behind an all-to-all, with the shared expert if there is one.

    Routing is taken as balanced; an imbalance factor belongs to the cost model.
    """
    local = shard.tokens_between_blocks(spec)
    hidden_bytes = local * spec.hidden_size * ACT
    pieces = _Pieces(
        (
            streaming("mlp_norm", Part.MLP_NORM, 2 * hidden_bytes),
            streaming("mlp_residual", Part.RESIDUAL, 3 * hidden_bytes, backward=0.67),
        ),
        (),
        ((Part.RESIDUAL, hidden_bytes), (Part.MLP_NORM, hidden_bytes)),
    )
    pieces += _router(spec, local) + _experts(spec, shard) + _dispatch(spec, shard)
    if spec.moe_shared_expert_intermediate_size:
        pieces += _shared_experts(spec, shard)
    return pieces


def _router(spec: TransformerSpec, local: float) -> _Pieces:
    experts = spec.num_experts or 0
    scores = local * experts * FP32
    operators = (
        gemm("router", Part.ROUTER, local, spec.hidden_size, experts, fp8=False),
        streaming("top_k", Part.ROUTER, 4 * scores, kernels=6),
    )
    return _Pieces(operators, (), ((Part.ROUTER, 2 * scores + local * experts),))


def _experts(spec: TransformerSpec, shard: LayerShard) -> _Pieces:
    """Grouped products of this rank's experts over the tokens routed to them."""
    etp = shard.expert_tensor_parallel_size
    routed = shard.tokens_between_blocks(spec) * spec.moe_router_topk * etp
    ffn = spec.expert_ffn_hidden_size / etp
    hidden = spec.hidden_size
    gates = 2 if spec.gated_linear_unit else 1
    num_local = max(1, (spec.num_experts or 1) // shard.expert_model_parallel_size)
    operators = (
        _grouped_gemm("expert_fc1", routed, hidden, gates * ffn, num_local),
        streaming(
            "expert_activation",
            Part.EXPERT_ACTIVATION,
            routed * (gates + 1) * ffn * ACT,
            backward=1.67,
        ),
        _grouped_gemm("expert_fc2", routed, ffn, hidden, num_local),
    )
    saved = (
        (Part.EXPERTS, routed * (hidden + gates * ffn) * ACT),
        (Part.EXPERT_ACTIVATION, routed * ffn * ACT),
    )
    return _Pieces(operators, (), saved)


def _grouped_gemm(
    name: str, rows: float, inner: float, columns: float, num_experts: int
) -> Operator:
    """One product for each local expert, in one grouped kernel."""
    flops = 2.0 * rows * inner * columns
    activations = rows * (inner + columns) * ACT
    weight = inner * columns * num_experts
    return Operator(
        name=name,
        part=Part.EXPERTS,
        kind=OperatorKind.GROUPED_GEMM,
        flops=flops,
        bytes_moved=activations + weight * ACT,
        backward_flops=2 * flops,
        backward_bytes_moved=2 * activations + weight * (ACT + 2 * FP32),
        fp8=True,
    )


def _dispatch(spec: TransformerSpec, shard: LayerShard) -> _Pieces:
    """Permutation and all-to-all of tokens to experts and back, gather over expert tensor ranks."""
    routed = shard.tokens_between_blocks(spec) * spec.moe_router_topk
    size = routed * spec.hidden_size * ACT
    operators = (
        streaming("permute", Part.DISPATCH, 4 * size, backward=1.0, kernels=4),
        streaming("unpermute", Part.DISPATCH, 4 * size, backward=1.0, kernels=4),
    )
    collectives: list[LayerCollective] = []
    for backward in (False, True):
        if shard.expert_model_parallel_size > 1:
            collectives.append(
                LayerCollective(
                    name="token_exchange",
                    part=Part.DISPATCH,
                    kind="all_to_all",
                    group=Group.EXPERT,
                    message_bytes=size,
                    backward=backward,
                    num_calls=2,
                )
            )
        if shard.expert_tensor_parallel_size > 1:
            gathered = size * shard.expert_tensor_parallel_size
            collectives += [
                LayerCollective(
                    name=f"expert_{kind}",
                    part=Part.DISPATCH,
                    kind=kind,
                    group=Group.EXPERT_TENSOR,
                    message_bytes=gathered,
                    backward=backward,
                )
                for kind in ("all_gather", "reduce_scatter")
            ]
    return _Pieces(operators, tuple(collectives), ())


def _shared_experts(spec: TransformerSpec, shard: LayerShard) -> _Pieces:
    ffn = (spec.moe_shared_expert_intermediate_size or 0) / shard.tensor_model_parallel_size
    tokens = shard.tokens(spec)
    part = Part.SHARED_EXPERTS
    gates = 2 if spec.gated_linear_unit else 1
    operators = _mlp_operators(spec, part, "shared_", tokens, ffn)
    collectives = tuple(_gathered_block(spec, shard, part, part, "shared_fc1", "shared_fc2"))
    return _Pieces(operators, collectives, ((part, tokens * (gates + 1) * ffn * ACT),))


def embedding_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Vocabulary-parallel lookup; each rank's rows are summed over the tensor group."""
    tokens = shard.tokens(spec)
    size = tokens * spec.hidden_size * ACT
    collectives = []
    if shard.tensor_model_parallel_size > 1:
        forward = "reduce_scatter" if shard.sequence_parallel else "all_reduce"
        collectives.append((forward, False))
        if shard.sequence_parallel:
            collectives.append(("all_gather", True))
    return LayerGraph(
        operators=(streaming("lookup", Part.EMBEDDING, 2 * size, backward=2.0, kernels=3),),
        collectives=tuple(
            LayerCollective(
                name=f"embedding.{kind}",
                part=Part.EMBEDDING,
                kind=kind,
                group=Group.TENSOR,
                message_bytes=size,
                backward=backward,
            )
            for kind, backward in collectives
        ),
        input_bytes=tokens * 8,
        saved_bytes=(),
        working_bytes=2 * size,
    )


def head_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Final norm, output layer and cross entropy in float32, once for each predicted token."""
    tp = shard.tensor_model_parallel_size
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    depth = 1 + spec.num_mtp_layers
    vocab = spec.padded_vocab_size(tp) / tp
    hidden_bytes = local * spec.hidden_size * ACT
    logits = tokens * vocab
    operators = [
        streaming("final_norm", Part.HEAD, 2 * hidden_bytes),
        gemm("output_layer", Part.HEAD, depth * tokens, spec.hidden_size, vocab, fp8=False),
        streaming(
            "cross_entropy", Part.HEAD, depth * logits * (ACT + 4 * FP32), backward=0.5, kernels=8
        ),
    ]
    if spec.family is ModelFamily.BERT:
        operators.append(gemm("lm_head", Part.HEAD, local, spec.hidden_size, spec.hidden_size))
    collectives = []
    if tp > 1:
        collectives = _head_collectives(spec, shard, depth)
    return LayerGraph(
        operators=tuple(operators),
        collectives=tuple(collectives),
        input_bytes=depth * hidden_bytes,
        saved_bytes=((Part.HEAD, depth * (hidden_bytes + logits * FP32)),),
        working_bytes=logits * (ACT + FP32),
    )


def _head_collectives(
    spec: TransformerSpec, shard: LayerShard, depth: int
) -> list[LayerCollective]:
    tokens = depth * shard.tokens(spec)
    size = tokens * spec.hidden_size * ACT

    def call(name: str, kind: str, num_bytes: float, *, backward: bool = False) -> LayerCollective:
        return LayerCollective(
            name=name,
            part=Part.HEAD,
            kind=kind,
            group=Group.TENSOR,
            message_bytes=num_bytes,
            backward=backward,
            hidden_under="output_layer" if backward else "",
        )

    calls = [call(f"loss.{i}", "all_reduce", tokens * FP32) for i in range(3)]
    if shard.sequence_parallel:
        calls.append(call("output.gather", "all_gather", size))
        calls.append(call("output.regather", "all_gather", size, backward=True))
        calls.append(call("output.scatter", "reduce_scatter", size, backward=True))
    else:
        calls.append(call("output.all_reduce", "all_reduce", size, backward=True))
    return calls


def around_mtp_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """What MTP layers do besides their decoder layer: embed the shifted tokens, norm, project."""
    tokens = shard.tokens(spec)
    hidden = spec.hidden_size
    hidden_bytes = shard.tokens_between_blocks(spec) * hidden * ACT
    width = hidden / shard.tensor_model_parallel_size
    operators = (
        streaming("mtp_norms", Part.MTP, 6 * hidden_bytes, kernels=3),
        gemm("eh_proj", Part.MTP, tokens, 2 * hidden, width),
    )
    return spec.num_mtp_layers * LayerGraph(
        operators=operators,
        collectives=(),
        input_bytes=0.0,
        saved_bytes=((Part.MTP, 5 * hidden_bytes),),
        working_bytes=0.0,
    )
