"""The work of each kind of unit in closed form, for the fused (Transformer Engine) implementation.

All figures are for one rank and one micro batch, numbers as wide as the shard says. Tensor shapes
follow megatron-core's modules with Transformer Engine: norms are fused into the projection after
them where Megatron's layer spec does so, attention is flash attention (no score matrix is kept),
activation functions keep their input only, dropout keeps one byte for each element it masks.
"""

from __future__ import annotations

from nest_megatron.model.graph import LayerGraph
from nest_megatron.model.operators.attention import attention_graph
from nest_megatron.model.operators.common import ACT
from nest_megatron.model.operators.ends import around_mtp_graph, embedding_graph, head_graph
from nest_megatron.model.operators.feed_forward import feed_forward_graph
from nest_megatron.model.parameters import last_layer_kind
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import LayerKind, TransformerSpec

__all__ = [
    "ACT",
    "around_mtp_graph",
    "attention_graph",
    "decoder_layer_graph",
    "embedding_graph",
    "feed_forward_graph",
    "head_graph",
    "layer_graph",
]


def layer_graph(spec: TransformerSpec, kind: LayerKind, shard: LayerShard) -> LayerGraph:
    """The work of one unit; ``MTP`` is all its layers together."""
    if kind is LayerKind.EMBEDDING:
        return embedding_graph(spec, shard)
    if kind is LayerKind.HEAD:
        return head_graph(spec, shard)
    if kind is LayerKind.MTP:
        return around_mtp_graph(spec, shard) + spec.num_mtp_layers * decoder_layer_graph(
            spec, last_layer_kind(spec), shard
        )
    return decoder_layer_graph(spec, kind, shard)


def decoder_layer_graph(spec: TransformerSpec, kind: LayerKind, shard: LayerShard) -> LayerGraph:
    """A whole decoder layer."""
    return attention_graph(spec, shard) + feed_forward_graph(spec, kind, shard)
