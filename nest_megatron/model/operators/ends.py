"""The units around the decoder layers: embedding, multi-token prediction, head."""

from __future__ import annotations

from collections.abc import Iterator

from nest_megatron.model.graph import Group, LayerCollective, LayerGraph, Part
from nest_megatron.model.operators.common import (
    FP32,
    column_parallel,
    dispatch_buffer_bytes,
    gemm,
    streaming,
    tensor_gather,
)
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import ModelFamily, TransformerSpec


def embedding_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Vocabulary-parallel lookup; each rank's rows are summed over the tensor group."""
    tokens = shard.tokens(spec)
    size = tokens * spec.hidden_size * shard.activation_bytes
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
        saved_bytes=_sent_bytes(spec, shard),
        working_bytes=2 * size,
    )


def _sent_bytes(spec: TransformerSpec, shard: LayerShard) -> tuple[tuple[Part, float], ...]:
    """What the first stage keeps of each micro batch that it sent on.

    Every stage keeps as much; the first, with the most micro batches in flight, is the fullest.
    """
    if not shard.keeps_stage_outputs:
        return ()
    size = shard.tokens_between_blocks(spec) * spec.hidden_size * shard.activation_bytes
    return ((Part.EMBEDDING, size),)


def head_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Final norm, output layer and cross entropy in float32, once for each predicted token.

    The loss is worked out backwards right after its forward pass, so its logits are working memory.
    Megatron's own cross entropy keeps one float32 softmax, made in place, and beside it the 16-bit
    logits (forward) or their 16-bit gradient (backward): 6 bytes. Each predicted token further on
    (MTP) keeps one more softmax.
    """
    act = shard.activation_bytes
    tp = shard.tensor_model_parallel_size
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    depth = 1 + spec.num_mtp_layers
    vocab = spec.padded_vocab_size(tp) / tp
    hidden_bytes = local * spec.hidden_size * act
    logits = tokens * vocab
    operators = [
        streaming("final_norm", Part.HEAD, 2 * hidden_bytes),
        gemm(shard, "output_layer", Part.HEAD, depth * tokens, spec.hidden_size, vocab, fp8=False),
        streaming(
            "cross_entropy",
            Part.HEAD,
            depth * logits * (act + 4 * FP32),
            backward=0.5,
            kernels=8,
        ),
    ]
    if spec.family is ModelFamily.BERT:
        operators.append(
            gemm(shard, "lm_head", Part.HEAD, local, spec.hidden_size, spec.hidden_size)
        )
    collectives = []
    if tp > 1:
        collectives = _head_collectives(spec, shard, depth)
    return LayerGraph(
        operators=tuple(operators),
        collectives=tuple(collectives),
        input_bytes=depth * hidden_bytes,
        saved_bytes=((Part.HEAD, depth * hidden_bytes),),
        working_bytes=_loss_working_bytes(spec, shard, vocab),
    )


def _loss_working_bytes(spec: TransformerSpec, shard: LayerShard, vocab: float) -> float:
    """Memory of the logits, of one chunk of tokens at a time where the loss works in chunks.

    Chunks leave the gradient of the head's input behind, which is whole.
    """
    act, depth = shard.activation_bytes, 1 + spec.num_mtp_layers
    tokens, chunk = shard.tokens(spec), shard.loss_chunk_tokens
    each = depth * (shard.loss_bytes - act) + act
    beside = dispatch_buffer_bytes(spec, shard)
    if not chunk or chunk >= tokens:
        return tokens * vocab * each + beside
    return chunk * vocab * each + tokens * spec.hidden_size * act + beside


def _head_collectives(
    spec: TransformerSpec, shard: LayerShard, depth: int
) -> list[LayerCollective]:
    tokens = depth * shard.tokens(spec)
    size = tokens * spec.hidden_size * shard.activation_bytes

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
    hidden_bytes = shard.tokens_between_blocks(spec) * hidden * shard.activation_bytes
    width = hidden / shard.tensor_model_parallel_size
    operators = (
        streaming("mtp_norms", Part.MTP, 6 * hidden_bytes, kernels=3),
        gemm(shard, "eh_proj", Part.MTP, tokens, 2 * hidden, width),
    )
    return spec.num_mtp_layers * LayerGraph(
        operators=operators,
        collectives=tuple(_mtp_traffic(spec, shard)),
        input_bytes=0.0,
        saved_bytes=((Part.MTP, 5 * hidden_bytes),),
        working_bytes=0.0,
    )


def _mtp_traffic(spec: TransformerSpec, shard: LayerShard) -> Iterator[LayerCollective]:
    """Tensor-parallel traffic of the projection: its output is gathered whole on every rank.

    Source: ``MultiTokenPredictionLayer._concat_embeddings``.
    """
    size = shard.tokens(spec) * spec.hidden_size * shard.activation_bytes
    yield from column_parallel(shard, Part.MTP, "eh_proj", 2 * size)
    yield from tensor_gather(shard, Part.MTP, "mtp.gather", size)
    if shard.sequence_parallel:  # where each rank took its own tokens of it
        yield from tensor_gather(shard, Part.MTP, "mtp.regather", size, backward=True)
