"""Layers of hybrid models in closed form against what megatron-core's own modules do.

Of a Mamba layer and a gated delta net parameters, the projections' work, what is kept and the
tensor-parallel traffic are the module's; of the scan the forward products alone are counted, by a
stand-in in whole chunks.
"""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("einops", reason="einops is not installed")

from megatron.core.ssm import gated_delta_net

from nest_megatron.errors import UserInputError
from nest_megatron.layout.recompute import FULL_RECOMPUTE
from nest_megatron.megatron_core.layers import extract_layer
from nest_megatron.model.graph import Group, LayerGraph, Part
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.parameters import layer_parameters
from nest_megatron.model.shard import LayerShard
from tests import catalogue

pytestmark = pytest.mark.megatron_lm


def _traffic(graph: LayerGraph) -> list[tuple[str, bool, float]]:
    calls = (call for call in graph.collectives if call.group is Group.TENSOR)
    return sorted((call.kind, call.backward, call.message_bytes) for call in calls)


@pytest.mark.parametrize(("tp", "sp", "micro"), [(1, False, 1), (2, False, 2), (4, True, 1)])
@pytest.mark.parametrize("name", ["nemotron_h_8b", "nemotron_nano_9b_v2", "nemotron3_nano"])
def test_a_mamba_layer_is_that_of_the_closed_form(name: str, tp: int, sp: bool, micro: int) -> None:
    spec = catalogue.model(name)
    shard = LayerShard(tensor_model_parallel_size=tp, sequence_parallel=sp, micro_batch_size=micro)
    seen = extract_layer(spec, LayerKind.MAMBA, shard)
    formula = layer_graph(spec, LayerKind.MAMBA, shard)
    assert seen.parameters == layer_parameters(spec, LayerKind.MAMBA, tp, 1, 1)
    assert seen.graph.flops() == pytest.approx(formula.flops(), rel=0.01)
    kept = formula.total_saved_bytes()
    assert seen.graph.total_saved_bytes() == pytest.approx(kept, rel=0.02)
    assert _traffic(seen.graph) == _traffic(formula)


@pytest.mark.parametrize("kind", [LayerKind.ATTENTION, LayerKind.MLP, LayerKind.EXPERTS])
def test_half_a_decoder_layer_is_that_of_the_closed_form(kind: LayerKind) -> None:
    spec = catalogue.model("nemotron3_nano" if kind is LayerKind.EXPERTS else "nemotron_h_8b")
    ranks = 32 if kind is LayerKind.EXPERTS else 1
    shard = LayerShard(expert_model_parallel_size=ranks)
    seen, formula = extract_layer(spec, kind, shard, recompute=()), layer_graph(spec, kind, shard)
    assert seen.parameters == layer_parameters(spec, kind, 1, ranks, 1)
    assert seen.graph.flops() == pytest.approx(formula.flops(), rel=0.01)


@pytest.mark.parametrize(("tp", "sp", "micro"), [(1, False, 1), (2, False, 2), (4, True, 1)])
def test_a_gated_delta_net_is_that_of_the_closed_form(tp: int, sp: bool, micro: int) -> None:
    spec = catalogue.model("qwen3_next_80b_a3b")
    shard = LayerShard(tensor_model_parallel_size=tp, sequence_parallel=sp, micro_batch_size=micro)
    seen = extract_layer(spec, LayerKind.LINEAR, shard, recompute=())
    formula = layer_graph(spec, LayerKind.LINEAR, shard)
    assert seen.parameters == layer_parameters(spec, LayerKind.LINEAR, tp, 1, 1)
    assert seen.graph.flops() == pytest.approx(formula.flops(), rel=0.01)
    kept = formula.total_saved_bytes()
    if hasattr(gated_delta_net, "causal_conv1d"):
        # since 0.18 the convolution takes the projection's output as it lies, which stays whole:
        # the gate in it and its copy. The closed form has the copy alone.
        values = spec.linear_num_value_heads * spec.linear_value_head_dim / tp
        kept += shard.tokens(spec) * values * shard.activation_bytes
    assert seen.graph.total_saved_bytes() == pytest.approx(kept, rel=0.02)
    assert seen.graph.saved_by_part().keys() == {Part.SSM}
    assert _traffic(seen.graph) == _traffic(formula)


def test_a_layer_with_a_gated_delta_net_recomputes_it() -> None:
    spec, shard = catalogue.model("qwen3_next_80b_a3b"), LayerShard(expert_model_parallel_size=64)
    seen = extract_layer(spec, LayerKind.LINEAR_MOE, shard, recompute=[FULL_RECOMPUTE])
    assert seen.parameters == layer_parameters(spec, LayerKind.LINEAR_MOE, 1, 64, 1)
    full = seen.recompute[FULL_RECOMPUTE.label()]
    assert full.saved_bytes == seen.graph.input_bytes
    assert full.recomputed_flops == pytest.approx(seen.graph.flops(), rel=0.01)


def test_latent_experts_are_those_of_the_closed_form() -> None:
    spec, shard = catalogue.model("nemotron3_super"), LayerShard(expert_model_parallel_size=64)
    assert spec.moe_latent_size is not None
    seen = extract_layer(spec, LayerKind.EXPERTS, shard, recompute=())
    formula = layer_graph(spec, LayerKind.EXPERTS, shard)
    assert seen.parameters == layer_parameters(spec, LayerKind.EXPERTS, 1, 64, 1)
    assert seen.graph.flops() == pytest.approx(formula.flops(), rel=0.01)
    kept = formula.total_saved_bytes()
    assert seen.graph.total_saved_bytes() == pytest.approx(kept, rel=0.02)


def test_layers_that_are_not_built_are_refused() -> None:
    with pytest.raises(UserInputError, match="chunked and sparse attention"):
        extract_layer(catalogue.model("llama4_scout"), LayerKind.CHUNKED_MOE, LayerShard())
    shard = LayerShard(context_parallel_size=2)
    with pytest.raises(UserInputError, match="one context rank"):
        extract_layer(catalogue.model("qwen3_next_80b_a3b"), LayerKind.LINEAR, shard)
    spec = dataclasses.replace(
        catalogue.model("nemotron_h_8b"),
        num_layers=2,
        hybrid_layer_pattern="M*/M",
        mtp_num_layers=1,
    )
    with pytest.raises(UserInputError, match="MTP layers of Mamba"):
        extract_layer(spec, LayerKind.MTP, LayerShard())
