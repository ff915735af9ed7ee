"""An encoder of images and its projector, as blocks of the embedding's unit."""

from __future__ import annotations

import dataclasses

from nest_megatron.model.encoder import EncoderSpec
from nest_megatron.model.graph import LayerGraph, Part
from nest_megatron.model.operators.attention import attention_graph
from nest_megatron.model.operators.common import column_parallel, gemm, row_parallel, streaming
from nest_megatron.model.operators.feed_forward import mlp_graph
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec


def encoder_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Patch embedding and layers over the images of a micro batch.

    Frozen, it has a forward pass only, and keeps nothing.

    Source: ``megatron.core.models.vision.clip_vit_model.CLIPViTModel``.
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
    layers = vision.num_layers * (attention_graph(inner, own) + mlp_graph(inner, own))
    graph = embedding + layers
    return _forward_only(graph) if vision.frozen else graph


def projector_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """An MLP with a norm that makes the language model's tokens of the encoder's.

    Source: ``megatron.core.models.vision.multimodal_projector.MultimodalProjector``.
    """
    vision, inner, own = _parts(spec, shard)
    act, gates = own.activation_bytes, 2 if spec.gated_linear_unit else 1
    tokens = own.micro_batch_size * vision.num_projected_tokens
    ffn = vision.projector_ffn_hidden_size / own.tensor_model_parallel_size
    taken, given = tokens * inner.hidden_size, tokens * spec.hidden_size
    part = Part.EMBEDDING
    return LayerGraph(
        operators=(
            streaming("projector_norm", part, 2 * taken * act),
            gemm(own, "projector_fc1", part, tokens, inner.hidden_size, gates * ffn),
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
        micro_batch_size=shard.micro_batch_size * spec.vision.num_images,
    )
    return spec.vision, spec.encoder, own


def _forward_only(graph: LayerGraph) -> LayerGraph:
    operators = tuple(
        dataclasses.replace(op, backward_flops=0.0, backward_bytes_moved=0.0, frozen=True)
        for op in graph.operators
    )
    calls = tuple(call for call in graph.collectives if not call.backward)
    return LayerGraph(operators=operators, collectives=calls)
