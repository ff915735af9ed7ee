"""Layers of hybrid models in closed form against what megatron-core's own modules do.

Of a Mamba layer parameters, the projections' work, what is kept and the tensor-parallel traffic are
the module's; of the scan the forward products alone are counted, by a stand-in in whole chunks.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("einops", reason="einops is not installed")

from nest_megatron.errors import UserInputError
from nest_megatron.megatron_core.layers import extract_layer
from nest_megatron.model.graph import Group, LayerGraph
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


def test_layers_that_are_not_built_are_refused() -> None:
    with pytest.raises(UserInputError, match="gated delta nets"):
        extract_layer(catalogue.model("qwen3_next_80b_a3b"), LayerKind.LINEAR_MOE, LayerShard())
