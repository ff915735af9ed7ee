"""A module of the user's own as a chain: figures to the digit, edges, blocks, saved activations."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.megatron_core.chain import extract_chain
from nest_megatron.model.graph import ChainGraph, OperatorKind, TensorShape
from nest_megatron.plain import to_plain
from tests.megatron_core.modules import Attention, Layer, LlamaLike, torch

nn = torch.nn
TOKENS = TensorShape(sizes=(2, 64), dtype="int64")


def mlp() -> ChainGraph:
    """Three rows through 8 -> 16 -> 4 in float32."""
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return extract_chain(layers, [TensorShape(sizes=(3, 8))])


def test_an_mlp_to_the_digit() -> None:
    graph = mlp()
    first, relu, second = graph.operators
    assert [op.target for op in graph.operators] == ["aten.addmm", "aten.relu", "aten.addmm"]
    assert [op.module for op in graph.operators] == ["0", "1", "2"]
    assert [op.kind for op in graph.operators] == [
        OperatorKind.GEMM,
        OperatorKind.MEMORY_BOUND,
        OperatorKind.GEMM,
    ]
    assert (first.flops, relu.flops, second.flops) == (2 * 3 * 8 * 16, 0, 2 * 3 * 16 * 4)
    assert first.bytes_moved == 4 * (3 * 8 + 8 * 16 + 16 + 3 * 16)
    assert relu.bytes_moved == 4 * (3 * 16 + 3 * 16)
    assert second.bytes_moved == 4 * (3 * 16 + 16 * 4 + 4 + 3 * 4)
    assert (first.parameters, second.parameters) == (8 * 16 + 16, 16 * 4 + 4)
    assert graph.flops() == 1152
    assert graph.parameters() == 212
    assert graph.input_bytes == 4 * 3 * 8


def test_edges_carry_what_is_read() -> None:
    graph = mlp()
    names = [op.name for op in graph.operators]
    edges = [(edge.source, edge.target, edge.num_bytes) for edge in graph.edges]
    assert edges == [
        ("input_0", names[0], 4 * 3 * 8),
        (names[0], names[1], 4 * 3 * 16),
        (names[1], names[2], 4 * 3 * 16),
    ]


def test_each_storage_is_kept_once() -> None:
    """The first product keeps its input; ReLU's output serves ReLU and the second product."""
    graph = mlp()
    assert [block.saved_bytes for block in graph.blocks] == [4 * 3 * 8, 4 * 3 * 16, 0]
    assert [op.saved_bytes for op in graph.operators] == [0, 4 * 3 * 16, 0]
    assert graph.saved_bytes() == 4 * (3 * 8 + 3 * 16)


def test_a_frozen_model_keeps_nothing() -> None:
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).requires_grad_(requires_grad=False)
    assert extract_chain(layers, [TensorShape(sizes=(3, 8))]).saved_bytes() == 0


def test_kept_bytes_are_those_that_autograd_really_keeps() -> None:
    """Against a real run with real tensors."""
    model, tokens = LlamaLike(num_layers=2), torch.randint(0, 100, (2, 64))
    kept: dict[int, object] = {}

    def keep(tensor: object) -> object:
        kept[tensor.untyped_storage()._cdata] = tensor  # type: ignore[attr-defined]
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(tokens)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    real = sum(
        tensor.untyped_storage().nbytes()  # type: ignore[attr-defined]
        for storage, tensor in kept.items()
        if storage not in weights
    )
    assert out.shape == (2, 64, 100)
    assert extract_chain(model, [TOKENS]).saved_bytes() == real


def test_flops_are_those_of_a_real_run() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = LlamaLike(num_layers=2, fused=False)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, 100, (2, 64)))
    assert extract_chain(model, [TOKENS]).flops() == counter.get_total_flops()


def test_repeated_layers_are_blocks_of_one_kind() -> None:
    graph = extract_chain(LlamaLike(num_layers=4), [TOKENS])
    names = [block.name for block in graph.blocks]
    assert names == ["embed", *(f"layers.{i}" for i in range(4)), "norm", "head"]
    assert graph.kinds() == {"Embedding": 1, "Layer": 4, "RMSNorm": 1, "Linear": 1}
    assert [len(run) for run in graph.runs()] == [1, 4, 1, 1]
    layers = graph.blocks[1:5]
    assert len({(b.flops, b.bytes_moved, b.parameters, b.saved_bytes) for b in layers}) == 1
    stream = 2 * 64 * 32 * 4
    assert [block.cut_bytes for block in graph.blocks] == [*[stream] * 6, 0]
    assert sum(block.parameters for block in graph.blocks) == graph.parameters()


def test_layers_that_differ_are_other_kinds() -> None:
    model = LlamaLike(num_layers=3)
    model.layers[1] = Layer(32, 4, 2, 128)
    graph = extract_chain(model, [TOKENS])
    assert [block.kind for block in graph.blocks[1:4]] == ["Layer.1", "Layer.2", "Layer.1"]


def test_what_a_model_does_between_its_parts_is_a_block() -> None:
    class Scaled(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.second(self.first(x * 2) * 3) * 4

    graph = extract_chain(Scaled(), [TensorShape(sizes=(1, 8))])
    names = [block.name for block in graph.blocks]
    assert names == ["(model)", "first", "(model)#2", "second", "(model)#3"]


def test_a_shared_weight_counts_once() -> None:
    model = LlamaLike(num_layers=1)
    model.head.weight = model.embed.weight
    assert extract_chain(model, [TOKENS]).parameters() == sum(p.numel() for p in model.parameters())


def test_attention_stays_one_operator_under_dropout() -> None:
    for dropout in (0.0, 0.1):
        graph = extract_chain(
            Attention(32, 4, 4, dropout=dropout), [TensorShape(sizes=(2, 64, 32))]
        )
        kinds = [op.kind for op in graph.operators]
        assert kinds.count(OperatorKind.ATTENTION) == 1
        assert 64 * 64 not in {op.output_bytes / (2 * 4 * 4) for op in graph.operators}


def test_attention_inside_a_module_of_torch_stays_fused() -> None:
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    graph = extract_chain(model, [TensorShape(sizes=(2, 64, 32))])
    kinds = [op.kind for op in graph.operators]
    assert kinds.count(OperatorKind.ATTENTION) == 1
    assert not any("bernoulli" in op.target for op in graph.operators)


def test_values_of_another_size_than_keys_are_attended_to_in_one_operator() -> None:
    class Latent(nn.Module):  # type: ignore[misc]
        def forward(self, x):  # type: ignore[no-untyped-def]
            attend = nn.functional.scaled_dot_product_attention
            return attend(x, x, x[..., :32], is_causal=True, scale=0.1)

    graph = extract_chain(Latent(), [TensorShape(sizes=(2, 4, 64, 48))])
    assert [op.kind for op in graph.operators] == [OperatorKind.ATTENTION]
    assert graph.flops() == 2 * 2 * 4 * 64 * 64 * (48 + 32)


def test_dropout_is_one_operator_and_keeps_a_byte_an_element() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    graph = extract_chain(model, [TensorShape(sizes=(3, 8))])
    assert graph.operators[1].target == "aten.native_dropout"
    assert graph.blocks[1].saved_bytes == 3 * 8
    assert len(extract_chain(model.eval(), [TensorShape(sizes=(3, 8))]).operators) == 1


def test_70_billion_parameters_need_no_memory() -> None:
    with torch.device("meta"):
        layers = [Layer(8192, 64, 8, 28672) for _ in range(80)]
        model = nn.Sequential(*layers).to(torch.bfloat16)
    graph = extract_chain(model, [TensorShape(sizes=(1, 4096, 8192), dtype="bfloat16")])
    assert graph.kinds() == {"Layer": 80}
    assert graph.parameters() == sum(p.numel() for p in model.parameters()) > 68e9
    assert all(parameter.is_meta for parameter in model.parameters())


def test_an_update_in_place_is_an_operator() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    graph = extract_chain(model, [TensorShape(sizes=(3, 8))])
    assert [op.target for op in graph.operators] == ["aten.addmm", "aten.relu_", "aten.addmm"]
    assert [e.source for e in graph.edges][1:] == [op.name for op in graph.operators[:2]]


def test_views_are_no_operators() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    graph = extract_chain(model, [TensorShape(sizes=(3, 4, 3))])
    assert [op.target for op in graph.operators] == ["aten.addmm"]
    assert graph.edges[0].source == "input_0"


def test_inputs_by_name() -> None:
    model = nn.Bilinear(4, 5, 6)
    shapes = [
        TensorShape(sizes=(3, 5), keyword="input2"),
        TensorShape(sizes=(3, 4), keyword="input1"),
    ]
    assert extract_chain(model, shapes).parameters() == 4 * 5 * 6 + 6


def test_the_module_is_left_as_it_was() -> None:
    model = LlamaLike(num_layers=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    extract_chain(model, [TOKENS])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_record_is_plain_data() -> None:
    graph = mlp()
    plain = to_plain(graph)
    assert plain["operators"][0]["kind"] == "gemm"
    assert dataclasses.replace(graph) == graph


def test_bad_sizes_and_types_are_refused() -> None:
    with pytest.raises(UserInputError, match="at least 1"):
        TensorShape(sizes=(0, 3))
    with pytest.raises(UserInputError, match="bfloat16"):
        extract_chain(nn.Identity(), [TensorShape(sizes=(1,), dtype="bflot16")])
