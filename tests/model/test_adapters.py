"""Adapters beside frozen weights: what they train, compute, keep and send."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nest_megatron.cost_model.memory import parameter_bytes
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.block_parameters import ParameterCount
from nest_megatron.model.encoder import Adapters, PeftScheme
from nest_megatron.model.graph import LayerGraph
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.operators import block_graph, layer_graph
from nest_megatron.model.parameters import total_parameters, unit_parameters
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from tests import catalogue

LLAMA = catalogue.model("llama3_8b")
DIVIDED = LayerShard(tensor_model_parallel_size=2, sequence_parallel=True)
_ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def tuned(spec: TransformerSpec = LLAMA, **fields: Any) -> TransformerSpec:
    return dataclasses.replace(spec, adapters=Adapters(**fields))


def layer(spec: TransformerSpec, shard: LayerShard | None = None) -> LayerGraph:
    return layer_graph(spec, LayerKind.DENSE, shard or LayerShard())


def trained(spec: TransformerSpec) -> int:
    counts = unit_parameters(spec, 1, 1, 1, single_stage=True)
    return sum(counts, ParameterCount()).trained.total


@pytest.mark.parametrize(
    ("fields", "columns"),
    [
        ({}, 32 * (4096 + 6144 + 4096 + 4096 + 4096 + 28_672 + 14_336 + 4096)),
        ({"target_modules": ("linear_qkv",), "dim": 8}, 8 * (4096 + 6144)),
        ({"target_modules": ("linear_proj",), "scheme": PeftScheme.DORA}, 32 * 8192 + 4096),
        (
            {"target_modules": ("linear_q", "linear_k", "linear_v"), "scheme": "canonical_lora"},
            32 * (3 * 4096 + 6144),
        ),
    ],
)
def test_what_is_trained_comes_on_top(fields: dict[str, Any], columns: int) -> None:
    scheme = PeftScheme(fields.pop("scheme", "lora"))
    spec = tuned(scheme=scheme, **fields)
    assert trained(spec) == 32 * columns
    assert total_parameters(spec) == total_parameters(LLAMA) + 32 * columns


def test_frozen_products_make_the_data_gradient_alone() -> None:
    plain, frozen = layer(LLAMA), layer(tuned(target_modules=("output_layer",)))
    for before, after in zip(plain.operators, frozen.operators, strict=True):
        is_product = before.flops > 0 and before.name != "core_attention"
        assert after.frozen == is_product
        assert after.backward_flops == (before.flops if is_product else before.backward_flops)
    lookup = block_graph(tuned(), LayerBlock.EMBEDDING, DIVIDED)
    assert lookup.operators[0].backward_bytes_moved == 0
    assert not any(call.backward for call in lookup.collectives)


def test_inputs_are_kept_for_adapters_alone() -> None:
    """Of the MLP: what the activation takes; what it gives, and the norm's output, for adapters."""
    tokens, hidden, ffn = LLAMA.seq_length, LLAMA.hidden_size, LLAMA.ffn_hidden_size
    plain, low = layer(LLAMA).total_saved_bytes(), 2 * tokens * 32
    inputs = 2 * tokens * (hidden + hidden + ffn)  # of qkv, fc1 and fc2; attention keeps proj's
    assert layer(tuned(target_modules=("output_layer",))).total_saved_bytes() == plain - inputs
    assert layer(tuned()).total_saved_bytes() == plain + 4 * low
    dropped = tuned(target_modules=("linear_proj",), dropout=0.1)
    expected = plain - inputs + low + tokens * hidden * (2 + 1)
    assert layer(dropped).total_saved_bytes() == expected


def test_nothing_hides_traffic_of_data_gradients() -> None:
    calls = layer(tuned(target_modules=("output_layer",)), DIVIDED).collectives
    assert "qkv.regather" not in {call.name for call in calls}
    assert {call.hidden_under for call in calls} == {""}
    assert sum(call.backward for call in calls) == 4


@pytest.mark.parametrize(
    ("fields", "shard", "whole"),
    [
        ({}, DIVIDED, {"projection_adapter.out": 2, "fc2_adapter.out": 2}),
        (
            {},
            LayerShard(tensor_model_parallel_size=2),
            {
                "projection_adapter.out": 1,
                "fc2_adapter.out": 1,
                "qkv_adapter.input_grad": 1,
                "fc1_adapter.input_grad": 1,
            },
        ),
        ({"target_modules": ("linear_qkv",)}, DIVIDED, {}),
        ({}, LayerShard(), {}),
    ],
)
def test_adapters_traffic_of_whole_activations(
    fields: dict[str, Any], shard: LayerShard, whole: dict[str, int]
) -> None:
    size = LLAMA.seq_length * LLAMA.hidden_size * 2
    calls = [
        call.name
        for call in layer(tuned(**fields), shard).collectives
        if "_adapter" in call.name and call.message_bytes == size
    ]
    assert {name: calls.count(name) for name in calls} == whole


def test_experts_of_a_rank_share_an_adapter() -> None:
    spec = tuned(catalogue.model("mixtral_8x7b"), dim=16)
    for ep in (1, 4):
        count = unit_parameters(spec, 1, ep, 1, single_stage=True)[1]
        assert count.trained.expert == 16 * (4096 + 2 * 14_336 + 14_336 + 4096)


def test_frozen_weights_have_no_states_and_do_not_travel() -> None:
    cluster = catalogue.cluster("dgx_h100", 16)
    found = {}
    for spec in (LLAMA, tuned()):
        model = CostModel(spec, cluster, CostSettings())
        unit = model.replica_costs(ParallelDims(data_parallel_size=16), ZeroStage.OPTIMIZER)[1]
        found[spec.adapters is None] = unit
    share = found[False].static.gradients / found[True].static.gradients
    assert share < 0.02
    for name in ("reduce_s", "gather_s", "optimizer"):
        ratio = getattr(found[False], name) / getattr(found[True], name)
        assert ratio == pytest.approx(share, rel=0.01), name
    stored = parameter_bytes(ZeroStage.NONE, (8, 8), CostSettings())
    count = ParameterCount(dense=100, frozen_dense=90)
    assert stored.of_unit(LayerKind.DENSE, count) == (200, 40, 120)
    assert stored.least(count) == 360


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"dim": 0}, "peft.dim"),
        ({"dropout": 1.0}, "peft.dropout"),
        ({"dropout_position": "both"}, "peft.dropout_position"),
        ({"scheme": PeftScheme.DORA, "dropout": 0.1}, "peft.dropout"),
        ({"target_modules": ("router",)}, "router"),
        ({"target_modules": ("linear_qkv",), "scheme": PeftScheme.CANONICAL_LORA}, "linear_qkv"),
        ({"target_modules": ("linear_q",), "scheme": PeftScheme.CANONICAL_LORA}, "linear_q"),
        ({"target_modules": ("*.layers.0.*.linear_qkv",)}, "some layers alone"),
    ],
)
def test_what_is_not_priced_is_refused_by_name(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(UserInputError, match=match):
        layer(tuned(**fields))


def test_dora_has_one_weight_to_take_the_norm_of() -> None:
    spec = catalogue.model("mixtral_8x7b")
    with pytest.raises(UserInputError, match="one for each expert"):
        tuned(spec, scheme=PeftScheme.DORA)
    attention = tuned(spec, scheme=PeftScheme.DORA, target_modules=_ALL[:2])
    names = [op.name for op in layer_graph(attention, LayerKind.MOE, DIVIDED).operators]
    assert names.count("qkv_adapter_norm") == names.count("projection_adapter_magnitude") == 1


def test_an_activation_keeps_its_input_in_fp8() -> None:
    tokens, ffn = LLAMA.seq_length, LLAMA.ffn_hidden_size
    wide, narrow = layer(LLAMA), layer(LLAMA, LayerShard(fp8_activation_input=True))
    assert wide.total_saved_bytes() - narrow.total_saved_bytes() == 2 * tokens * ffn
    casts = next(op for op in narrow.operators if op.name == "activation_casts")
    assert casts.bytes_moved == casts.backward_bytes_moved == 2 * tokens * ffn * (2 + 1)
