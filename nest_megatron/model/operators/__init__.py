"""The work of each kind of unit in closed form, for the fused (Transformer Engine) implementation.

All figures are for one rank and one micro batch, numbers as wide as the shard says. Tensor shapes
follow megatron-core's modules with Transformer Engine: norms are fused into the projection after
them where Megatron's layer spec does so, attention is flash attention (no score matrix is kept),
activation functions keep their input only, dropout keeps one byte for each element it masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from nest_megatron.model.block_parameters import decoder_of, encoder_of, sized
from nest_megatron.model.graph import LayerGraph
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.operators.adapters import adapted, adapted_products
from nest_megatron.model.operators.attention import attention_graph
from nest_megatron.model.operators.common import ACT
from nest_megatron.model.operators.ends import (
    around_mtp_graph,
    embedding_graph,
    encoder_graph,
    head_graph,
    projector_graph,
)
from nest_megatron.model.operators.feed_forward import experts_graph, mlp_graph
from nest_megatron.model.operators.mamba import gated_delta_net_graph, mamba_graph
from nest_megatron.model.operators.variant import (
    cross_attention_graph,
    linear_for_attention_graph,
    linear_for_mlp_graph,
    with_variant,
)
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec

__all__ = ["ACT", "adapted_products", "block_graph", "layer_graph"]

_GRAPHS: Mapping[LayerBlock, Callable[[TransformerSpec, LayerShard], LayerGraph]] = {
    LayerBlock.GATED_DELTA_NET: gated_delta_net_graph,
    LayerBlock.MAMBA: mamba_graph,
    LayerBlock.CROSS_ATTENTION: cross_attention_graph,
    LayerBlock.ENCODER_ATTENTION: lambda spec, shard: attention_graph(encoder_of(spec), shard),
    LayerBlock.ENCODER_DENSE: lambda spec, shard: mlp_graph(encoder_of(spec), shard),
    LayerBlock.DENSE: lambda spec, shard: mlp_graph(decoder_of(spec), shard),
    LayerBlock.LINEAR_FOR_ATTENTION: linear_for_attention_graph,
    LayerBlock.LINEAR_FOR_MLP: linear_for_mlp_graph,
    LayerBlock.EXPERTS: experts_graph,
    LayerBlock.EMBEDDING: embedding_graph,
    LayerBlock.ENCODER: encoder_graph,
    LayerBlock.PROJECTOR: projector_graph,
    LayerBlock.MTP: around_mtp_graph,
    LayerBlock.HEAD: head_graph,
}


def block_graph(spec: TransformerSpec, block: LayerBlock, shard: LayerShard) -> LayerGraph:
    """The work of a block in closed form."""
    if spec.adapters is None:
        return _trained_graph(spec, block, shard)
    graph = _trained_graph(spec, block, dataclasses.replace(shard, saved_input_bytes=0.0))
    return adapted(graph, sized(spec, block), shard, block)


def _trained_graph(spec: TransformerSpec, block: LayerBlock, shard: LayerShard) -> LayerGraph:
    spec, block = sized(spec, block), block.base
    if block in _GRAPHS:
        graph = _GRAPHS[block](spec, shard)
    else:
        graph = attention_graph(decoder_of(spec), shard, block)
    return with_variant(graph, spec, block, shard)


def layer_graph(spec: TransformerSpec, kind: LayerKind, shard: LayerShard) -> LayerGraph:
    """The work of one unit; ``MTP`` is all its layers together."""
    blocks = (block_graph(spec, block, shard) for block in spec.unit_blocks(kind))
    graph = sum(blocks, LayerGraph())
    return graph.with_input(shard.hidden_bytes(spec)) if kind.begins_with_mlp else graph
