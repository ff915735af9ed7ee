"""Layers and a chain for the tests of tables and drawings, without torch."""

from __future__ import annotations

from nest_megatron.model.graph import (
    ChainBlock,
    ChainEdge,
    ChainGraph,
    ChainOperator,
    LayerGraph,
    OperatorKind,
    TensorShape,
)
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec

SPEC = TransformerSpec(
    name="experts",
    num_layers=2,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    num_query_groups=8,
    seq_length=2048,
    vocab_size=32000,
    num_experts=8,
    moe_layer_pattern=(0, 1),
    moe_shared_expert_intermediate_size=512,
    multi_latent_attention=True,
    q_lora_rank=256,
    hidden_dropout=0.1,
)
SHARD = LayerShard(
    tensor_model_parallel_size=2,
    context_parallel_size=2,
    expert_model_parallel_size=4,
    expert_tensor_parallel_size=2,
    sequence_parallel=True,
)
KINDS = (LayerKind.EMBEDDING, LayerKind.DENSE, LayerKind.MOE, LayerKind.HEAD)


def layer(kind: LayerKind) -> LayerGraph:
    """A layer of a model with everything."""
    return layer_graph(SPEC, kind, SHARD)


def chain(num_layers: int = 3) -> ChainGraph:
    """An embedding, equal layers of two operators, and a head, with figures that are easy to read.

    Every layer does 2 GFLOP, moves 3 MB, has a million parameters and keeps 4 MiB.
    """
    operators = [_operator("embed", 0.0, OperatorKind.MEMORY_BOUND)]
    blocks = [_block("embed", "Embedding", 0, 1, 0.0)]
    for number in range(num_layers):
        first = len(operators)
        module = f"layers.{number}"
        operators.append(_operator(f"{module}.fc", 2e9, OperatorKind.GEMM))
        operators.append(_operator(f"{module}.act", 0.0, OperatorKind.MEMORY_BOUND))
        blocks.append(_block(module, "Layer", first, first + 2, 2e9))
    operators.append(_operator("head", 6e9, OperatorKind.GEMM))
    blocks.append(_block("head", "Linear", len(operators) - 1, len(operators), 6e9))
    names = [op.name for op in operators]
    edges = [
        ChainEdge(source=source, target=target, num_bytes=2.0**20)
        for source, target in zip(["input_0", *names], names, strict=False)
    ]
    return ChainGraph(
        name="Model<1>",
        inputs=(TensorShape(sizes=(1, 2048), dtype="int64"),),
        input_bytes=16384.0,
        operators=tuple(operators),
        edges=tuple(edges),
        blocks=tuple(blocks),
    )


def _operator(module: str, flops: float, kind: OperatorKind) -> ChainOperator:
    return ChainOperator(
        name=module.replace(".", "_"),
        target="aten.mm" if flops else "aten.gelu",
        module=module,
        kind=kind,
        flops=flops,
        bytes_moved=1.5e6,
        parameters=500_000,
        output_bytes=2.0**20,
        saved_bytes=2.0**20,
    )


def _block(name: str, kind: str, first: int, last: int, flops: float) -> ChainBlock:
    return ChainBlock(
        name=name,
        kind=kind,
        first=first,
        last=last,
        flops=flops,
        bytes_moved=1.5e6 * (last - first),
        parameters=500_000 * (last - first),
        saved_bytes=2.0**21 * (last - first),
        cut_bytes=2.0**20,
    )
