"""The units around the decoder layers: encoder of images, embedding, MTP, head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nest_megatron.model.block_parameters import decoder_of, encoder_of
from nest_megatron.model.encoder import EncoderSpec
from nest_megatron.model.graph import LayerCollective, LayerGraph, Part
from nest_megatron.model.operators.adapters import frozen_operator
from nest_megatron.model.operators.attention import attention_graph
from nest_megatron.model.operators.common import (
    FP32,
    column_parallel,
    dispatch_buffer_bytes,
    gemm,
    row_parallel,
    streaming,
)
from nest_megatron.model.operators.feed_forward import mlp_graph
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import ModelFamily, TransformerSpec

#: Share of the cross entropy's traffic that is in the forward pass: 38 of 52, 22 of 28, 6 of 10.
_FORWARD_LOSS = 2 / 3


def embedding_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Vocabulary-parallel lookup; each rank's rows are summed over the tensor group.

    A T5-like model looks up the tokens of both stacks.
    """
    tokens = shard.tokens(spec)
    if spec.family is ModelFamily.T5:
        tokens += shard.tokens(decoder_of(spec))
    size = tokens * spec.hidden_size * shard.activation_bytes
    # Every stage keeps what it sent on; the first, with the most micro batches in flight, the most.
    sent = ((Part.EMBEDDING, shard.hidden_bytes(spec)),) if shard.keeps_stage_outputs else ()
    return LayerGraph(
        operators=(streaming("lookup", Part.EMBEDDING, 2 * size, kernels=3),),
        collectives=tuple(row_parallel(shard, Part.EMBEDDING, "embedding", size)),
        input_bytes=tokens * 8,
        saved_bytes=sent,
        working_bytes=2 * size,
    )


def head_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Final norm, output layer and cross entropy in float32, once for each predicted token.

    The loss is worked out backwards right after its forward pass, so its logits are working memory.
    Megatron's own cross entropy keeps one float32 softmax, made in place, and beside it the 16-bit
    logits (forward) or their 16-bit gradient (backward): 6 bytes. Each predicted token further on
    (MTP) keeps one more softmax. A T5-like model has the encoder's final norm beside the decoder's.
    """
    if spec.family is ModelFamily.T5:  # the norm keeps its output for all layers that attend to it
        encoder = encoder_of(spec)
        size, local = shard.hidden_bytes(encoder), shard.tokens_between_blocks(encoder)
        return head_graph(decoder_of(spec), shard) + LayerGraph(
            operators=(streaming("encoder_norm", Part.HEAD, 2 * size),),
            saved_bytes=((Part.HEAD, size + local * encoder.hidden_size * shard.input_bytes),),
        )
    hidden = spec.hidden_size
    tp, depth = shard.tensor_model_parallel_size, 1 + spec.num_mtp_layers
    tokens, vocab = shard.tokens(spec), spec.padded_vocab_size(tp) / tp
    hidden_bytes, logits = shard.hidden_bytes(spec), tokens * vocab
    loss_traffic = depth * logits * shard.loss_traffic_bytes * _FORWARD_LOSS
    operators = [
        streaming("final_norm", Part.HEAD, 2 * hidden_bytes),
        gemm(shard, "output_layer", Part.HEAD, depth * tokens, hidden, vocab, fp8=False),
        streaming("cross_entropy", Part.HEAD, loss_traffic, backward=0.5, kernels=8),
    ]
    if spec.family is ModelFamily.BERT:
        local = shard.tokens_between_blocks(spec)
        operators.append(gemm(shard, "lm_head", Part.HEAD, local, hidden, hidden))
    predicted, collectives = depth * tokens, list[LayerCollective]()
    if tp > 1:
        for i in range(3):  # largest logit, predicted logit, sum
            name = f"loss.{i}"
            collectives.append(LayerCollective(name, Part.HEAD, "all_reduce", predicted * FP32))
    size = predicted * hidden * shard.activation_bytes
    return LayerGraph(
        operators=tuple(operators),
        collectives=(*collectives, *column_parallel(shard, Part.HEAD, "output_layer", size)),
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


def around_mtp_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """What MTP layers do besides their decoder layer: embed the shifted tokens, norm, project."""
    hidden, hidden_bytes = spec.hidden_size, shard.hidden_bytes(spec)
    width = hidden / shard.tensor_model_parallel_size
    operators = (
        streaming("mtp_norms", Part.MTP, 6 * hidden_bytes, kernels=3),
        gemm(shard, "eh_proj", Part.MTP, shard.tokens(spec), 2 * hidden, width),
    )
    return spec.num_mtp_layers * LayerGraph(
        operators=operators,
        collectives=tuple(_mtp_traffic(spec, shard)),
        saved_bytes=((Part.MTP, 5 * hidden_bytes),),
    )


def _mtp_traffic(spec: TransformerSpec, shard: LayerShard) -> Iterator[LayerCollective]:
    """Tensor-parallel traffic of the projection: its output is gathered whole on every rank.

    Source: ``MultiTokenPredictionLayer._concat_embeddings``.
    """
    if shard.tensor_model_parallel_size == 1:
        return
    size = shard.tokens(spec) * spec.hidden_size * shard.activation_bytes
    yield from column_parallel(shard, Part.MTP, "eh_proj", 2 * size)
    yield LayerCollective("mtp.gather", Part.MTP, "all_gather", size)
    if shard.sequence_parallel:  # where each rank took its own tokens of it
        yield LayerCollective("mtp.regather", Part.MTP, "all_gather", size, backward=True)


def encoder_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Patch embedding and layers over the images of a micro batch.

    Frozen, it has a forward pass only, and keeps nothing.

    Source: ``megatron.core.models.vision.clip_vit_model.CLIPViTModel``; transformers' encoders of
    Qwen-VL are priced by the same operators.
    """
    vision, inner, own = _parts(spec, shard)
    tokens, hidden_bytes = own.tokens(inner), own.hidden_bytes(inner)
    patches = tokens * vision.num_patches / vision.num_tokens
    embedding = LayerGraph(
        operators=(
            gemm(
                own,
                "patches",
                Part.EMBEDDING,
                patches,
                vision.patch_features,
                inner.hidden_size,
                fp8=False,
            ),
            streaming("positions", Part.EMBEDDING, 3 * hidden_bytes, kernels=3),
        ),
        saved_bytes=(
            (Part.EMBEDDING, patches * vision.patch_features * own.activation_bytes),
            (Part.EMBEDDING, hidden_bytes if vision.norm_before else 0.0),
        ),
    )
    graph = embedding + _attention(vision, inner, own) + vision.num_layers * mlp_graph(inner, own)
    return _forward_only(graph) if vision.frozen else graph


def _attention(vision: EncoderSpec, inner: TransformerSpec, own: LayerShard) -> LayerGraph:
    """Attention of all layers, of some of them inside windows, each as a sequence of its own."""
    window = vision.window_patches
    if window is None or window >= inner.seq_length:
        return vision.num_layers * attention_graph(inner, own)
    full = vision.num_full_attention_layers or 0
    windows = own.micro_batch_size * -(-inner.seq_length // window)
    inside = attention_graph(
        replace(inner, seq_length=window),
        replace(own, micro_batch_size=windows),
    )
    return full * attention_graph(inner, own) + (vision.num_layers - full) * inside


def projector_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """An MLP with a norm that makes the language model's tokens of the encoder's.

    Source: ``megatron.core.models.vision.multimodal_projector.MultimodalProjector``; a merger of
    transformers has no gate.
    """
    vision, inner, own = _parts(spec, shard)
    merged = (vision.spatial_merge_size or 1) ** 2
    gates = 1 if vision.has_any_size else spec.num_gates
    act, width = own.activation_bytes, merged * inner.hidden_size
    tokens = own.micro_batch_size * vision.num_projected_tokens * (1 + vision.deepstack_layers)
    ffn = vision.projector_ffn_hidden_size / own.tensor_model_parallel_size
    taken, given, inside = tokens * width, tokens * spec.hidden_size, tokens * (gates + 1) * ffn
    part = Part.EMBEDDING
    graph = LayerGraph(
        operators=(
            streaming("projector_norm", part, 2 * taken * act),
            gemm(own, "projector_fc1", part, tokens, width, gates * ffn),
            streaming("projector_activation", part, inside * act),
            gemm(own, "projector_fc2", part, tokens, ffn, spec.hidden_size),
            streaming("projected", part, 2 * given * act, backward=1.0),
        ),
        collectives=(
            *row_parallel(own, part, "projector_fc2", given * act),
            *column_parallel(own, part, "projector_fc1", taken * act),
        ),
        saved_bytes=((part, taken * (act + own.input_bytes) + inside * act),),
        working_bytes=(taken + given + inside) * act,
    )
    if not vision.projector_frozen:
        return graph
    if vision.frozen:
        return _forward_only(graph)
    operators = tuple(frozen_operator(op, has_backward=True) for op in graph.operators)
    return replace(graph, operators=operators)


def _parts(
    spec: TransformerSpec, shard: LayerShard
) -> tuple[EncoderSpec, TransformerSpec, LayerShard]:
    """The encoder, its layers as a model, and how they are divided: as samples its images."""
    assert spec.vision is not None
    own = replace(
        shard,
        tensor_model_parallel_size=shard.tensor_model_parallel_size if spec.vision.is_split else 1,
        context_parallel_size=1,
        sequence_parallel=False,
        attended_tokens=None,
        micro_batch_size=shard.micro_batch_size * spec.vision.num_images,
    )
    return spec.vision, encoder_of(spec), own


def _forward_only(graph: LayerGraph) -> LayerGraph:
    operators = tuple(frozen_operator(op, has_backward=False) for op in graph.operators)
    calls = tuple(call for call in graph.collectives if not call.backward)
    return LayerGraph(operators=operators, collectives=calls)
