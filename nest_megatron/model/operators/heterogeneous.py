"""A linear layer in the place of attention or of an MLP, as heterogeneous models have some.

Tensor-parallel ranks gather its columns; with sequence parallelism it does not run
(``linear_replacements`` of the rulebook).

Source: ``megatron.core.transformer.heterogeneous.linear_replacements``.
"""

from __future__ import annotations

from nest_megatron.model.graph import LayerCollective, LayerGraph, Part
from nest_megatron.model.operators.common import column_parallel, dropout_mask, gemm, streaming
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec


def linear_for_attention_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Norm, a projection of the hidden size to itself, residual; its input is the layer's."""
    graph = _linear(spec, shard, Part.INPUT_NORM, Part.PROJECTION)
    return graph + LayerGraph(operators=(), input_bytes=shard.hidden_bytes(spec))


def linear_for_mlp_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """The same behind attention, whose output the residual keeps."""
    graph = _linear(spec, shard, Part.MLP_NORM, Part.MLP)
    return graph + LayerGraph(
        operators=(), saved_bytes=((Part.RESIDUAL, shard.hidden_bytes(spec)),)
    )


def _linear(spec: TransformerSpec, shard: LayerShard, norm: Part, part: Part) -> LayerGraph:
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    hidden, hidden_bytes = spec.hidden_size, shard.hidden_bytes(spec)
    whole = tokens * hidden * shard.activation_bytes
    name, columns = f"{part}_linear", hidden / shard.tensor_model_parallel_size
    gathered = LayerCollective(f"{name}.columns", part, "all_gather", whole)
    return LayerGraph(
        operators=(
            streaming(f"{name}_norm", norm, 2 * hidden_bytes),
            gemm(shard, name, part, tokens, hidden, columns),
            streaming(f"{name}_residual", Part.RESIDUAL, 3 * hidden_bytes, backward=0.67),
        ),
        collectives=(
            *column_parallel(shard, part, name, whole),
            *((gathered,) if shard.tensor_model_parallel_size > 1 else ()),
        ),
        saved_bytes=(
            (norm, local * hidden * shard.input_bytes),
            dropout_mask(spec, local),
        ),
        working_bytes=3 * whole,
    )
