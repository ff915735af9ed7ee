"""A decoder layer's work, traced, against the closed forms that the planner uses."""

from __future__ import annotations

from typing import Any

import pytest

from nest_megatron.megatron_core.chain import extract_chain
from nest_megatron.model.graph import ChainBlock, ChainGraph, OperatorKind, TensorShape
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from tests.megatron_core.modules import Layer, torch

SPEC = TransformerSpec(
    name="small",
    num_layers=3,
    hidden_size=256,
    ffn_hidden_size=640,
    num_attention_heads=8,
    num_query_groups=2,
    seq_length=128,
    vocab_size=1000,
)
BATCH = 2


def agree(graph: ChainGraph, block: ChainBlock) -> None:
    """Products to the digit; attention is traced in full and priced by its causal half."""
    ours = layer_graph(SPEC, LayerKind.DENSE, LayerShard(micro_batch_size=BATCH)).operators
    traced = graph.within(block)

    def total(operators: Any, kind: OperatorKind) -> float:
        return sum(op.flops for op in operators if op.kind is kind)

    assert total(traced, OperatorKind.GEMM) == total(ours, OperatorKind.GEMM)
    full = total(traced, OperatorKind.ATTENTION)
    assert full == 2 * total(ours, OperatorKind.ATTENTION) > 0


def test_a_layer_written_by_hand() -> None:
    layer = Layer(256, 8, 2, 640)
    graph = extract_chain(torch.nn.Sequential(layer, layer), [TensorShape(sizes=(BATCH, 128, 256))])
    assert [block.name for block in graph.blocks] == ["0", "0#2"]  # one layer, called twice
    for block in graph.blocks:
        agree(graph, block)


def hugging_face() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


def test_llama_of_hugging_face() -> None:
    transformers = hugging_face()
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1000,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    graph = extract_chain(model, [TensorShape(sizes=(BATCH, 128), dtype="int64")])
    layers = [block for block in graph.blocks if block.name.startswith("model.layers.")]
    assert [block.name for block in layers] == [f"model.layers.{i}" for i in range(3)]
    assert {block.kind for block in layers} == {"LlamaDecoderLayer"}
    assert graph.parameters() == sum(p.numel() for p in model.parameters())
    for block in layers:
        agree(graph, block)


def test_bert_of_hugging_face() -> None:
    transformers = hugging_face()
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=4))
    graph = extract_chain(model, [TensorShape(sizes=(BATCH, 128), dtype="int64")])
    assert graph.kinds()["BertLayer"] == 4
    assert graph.parameters() == sum(p.numel() for p in model.parameters())
    tokens, hidden = BATCH * 128, 768
    block = next(block for block in graph.blocks if block.kind == "BertLayer")
    assert block.flops == 2 * tokens * 12 * hidden**2 + 4 * BATCH * 128**2 * hidden
