"""What CUDA graphs of layers add to a layer (``--cuda-graph-impl transformer_engine``, ``local``).

A graph reads and writes at fixed addresses: what goes in is copied there, and its buffers cannot be
used for anything else. Source: ``TECudaGraphHelper._get_sample_arguments`` of megatron-core (one
set of inputs for each layer and micro batch in flight), ``make_graphed_callables`` of Transformer
Engine (inputs and gradients are copied before a replay).
"""

from __future__ import annotations

import dataclasses

from nest_megatron.model.execution import Execution, GraphImpl
from nest_megatron.model.graph import LayerGraph, Operator, OperatorKind, Part
from nest_megatron.model.shard import LayerShard

#: Name of the copy to a graph's inputs, which is launched beside the graph.
GRAPH_INPUTS = "graph_inputs"
#: Tensors of the size of a layer's input that a graph holds beside what the layer keeps anyway, for
#: each micro batch in flight: its input, and what it hands on. Not measured: an estimate that makes
#: 2 to 6 GB of layers of 8 B and 70 B models, where NVIDIA's guide says a few, and above 10 with
#: pipelines (Megatron-Bridge, docs/performance-guide.md @51885cf).
_TENSORS = 2
#: With the router in it a graph hands on the residual beside the normed tokens.
_OF_ROUTER = 1


def captured_layer(graph: LayerGraph, shard: LayerShard) -> LayerGraph:
    """The attention half of a layer with what a graph of the layer adds to it."""
    execution = shard.execution
    if not captures_layers(execution):
        return graph
    size, router = graph.input_bytes, "moe_router" in execution.cuda_graph_scope
    copied = Operator(
        name=GRAPH_INPUTS,
        part=Part.RESIDUAL,
        kind=OperatorKind.MEMORY_BOUND,
        bytes_moved=2 * size,
        backward_bytes_moved=2 * size,
    )
    held = (_TENSORS + _OF_ROUTER * router) * size
    return dataclasses.replace(
        graph,
        operators=(*graph.operators, copied),
        saved_bytes=(*graph.saved_bytes, (Part.RESIDUAL, held)),
    )


def captures_layers(execution: Execution) -> bool:
    """Whether each layer, or some of its modules, is a graph of its own."""
    return execution.cuda_graph_impl in (GraphImpl.LOCAL, GraphImpl.TRANSFORMER_ENGINE)
