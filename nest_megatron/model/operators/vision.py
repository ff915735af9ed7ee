"""An encoder of images and its projector, as blocks of the embedding's unit."""

from __future__ import annotations

import dataclasses

from nest_megatron.model.encoder import EncoderSpec
from nest_megatron.model.graph import LayerGraph, Part
from nest_megatron.model.operators.adapters import frozen_operator
from nest_megatron.model.operators.attention import attention_graph
from nest_megatron.model.operators.common import column_parallel, gemm, row_parallel, streaming
from nest_megatron.model.operators.feed_forward import mlp_graph
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.model.stacks import encoder_of


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
        dataclasses.replace(inner, seq_length=window),
        dataclasses.replace(own, micro_batch_size=windows),
    )
    return full * attention_graph(inner, own) + (vision.num_layers - full) * inside


def projector_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """An MLP with a norm that makes the language model's tokens of the encoder's.

    Source: ``megatron.core.models.vision.multimodal_projector.MultimodalProjector``; a merger of
    transformers has no gate.
    """
    vision, inner, own = _parts(spec, shard)
    merged = (vision.spatial_merge_size or 1) ** 2
    is_gated = spec.gated_linear_unit and vision.spatial_merge_size is None
    act, gates, width = own.activation_bytes, 2 if is_gated else 1, merged * inner.hidden_size
    tokens = own.micro_batch_size * vision.num_projected_tokens * (1 + vision.deepstack_layers)
    ffn = vision.projector_ffn_hidden_size / own.tensor_model_parallel_size
    taken, given = tokens * width, tokens * spec.hidden_size
    part = Part.EMBEDDING
    graph = LayerGraph(
        operators=(
            streaming("projector_norm", part, 2 * taken * act),
            gemm(own, "projector_fc1", part, tokens, width, gates * ffn),
            streaming("projector_activation", part, tokens * (gates + 1) * ffn * act),
            gemm(own, "projector_fc2", part, tokens, ffn, spec.hidden_size),
            streaming("projected", part, 2 * given * act, backward=1.0),
        ),
        collectives=(
            *row_parallel(own, part, "projector_fc2", given * act),
            *column_parallel(own, part, "projector_fc1", taken * act),
        ),
        saved_bytes=((part, taken * (act + own.input_bytes) + tokens * (gates + 1) * ffn * act),),
        working_bytes=(taken + given + tokens * (gates + 1) * ffn) * act,
    )
    if not vision.projector_frozen:
        return graph
    if vision.frozen:
        return _forward_only(graph)
    operators = tuple(frozen_operator(op, has_backward=True) for op in graph.operators)
    return dataclasses.replace(graph, operators=operators)


def _parts(
    spec: TransformerSpec, shard: LayerShard
) -> tuple[EncoderSpec, TransformerSpec, LayerShard]:
    """The encoder, its layers as a model, and how they are divided: as samples its images."""
    assert spec.vision is not None
    own = dataclasses.replace(
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
