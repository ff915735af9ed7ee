"""Heterogeneous layers against those of megatron-core's own builder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")


from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.rulebook import is_legal_grid
from nest_megatron.megatron_core.layers import extract_layer
from nest_megatron.megatron_core.stage import transformer_config
from nest_megatron.model.block_parameters import sized
from nest_megatron.model.graph import LayerCollective
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.operators import block_graph, layer_graph
from nest_megatron.model.parameters import layer_parameters
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from tests.megatron_core.local_layers import local_attention

pytestmark = pytest.mark.megatron_lm

FLOPS = 0.01
SAVED = 0.02
_TEXTS = (
    "attention[4]+dense[2816]",
    "attention[8]+dense[5632]",
    "attention[2]",
    "dense[1024]",
    "linear_for_attention+dense[2816]",
    "attention[4]+linear_for_mlp",
    "linear_for_attention",
    "linear_for_mlp",
    "linear_for_attention+linear_for_mlp",
    "no_op",
)


KINDS = tuple(map(LayerKind, _TEXTS))


def _model(kind: LayerKind) -> TransformerSpec:
    return TransformerSpec(
        name="heterogeneous",
        num_layers=1,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_attention_heads=8,
        num_query_groups=8,
        seq_length=2048,
        vocab_size=1024,
        heterogeneous_layers=(kind,),
    )


def _saved_bytes(spec: TransformerSpec, kind: LayerKind, shard: LayerShard) -> float:
    """With the local layers' attention, which keeps other tensors than Transformer Engine's."""
    saved = layer_graph(spec, kind, shard).total_saved_bytes()
    for block in kind.blocks:
        if block.base is LayerBlock.ATTENTION:
            fused = block_graph(spec, block, shard)
            saved -= fused.total_saved_bytes() - fused.input_bytes
            saved += sum(num for _, num in local_attention(sized(spec, block), shard))
    return saved


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_those_that_megatron_builds(kind: LayerKind, tp: int) -> None:
    spec = _model(kind)
    shard = LayerShard(tensor_model_parallel_size=tp, micro_batch_size=2)
    seen, formula = extract_layer(spec, kind, shard, recompute=()), layer_graph(spec, kind, shard)
    assert seen.parameters == layer_parameters(spec, kind, tp, 1, 1)
    assert seen.graph.flops() == pytest.approx(formula.flops(), rel=FLOPS)
    backward = [sum(op.backward_flops for op in g.operators) for g in (seen.graph, formula)]
    assert backward[0] == pytest.approx(backward[1], rel=FLOPS)
    calls = [_traffic(graph.collectives) for graph in (seen.graph, formula)]
    assert calls[0] == calls[1]
    if kind is LayerKind.NO_OP:  # it hands on its input, which the layer before counts
        assert sum(num for _, num in seen.graph.saved_bytes) == 0
        assert formula.total_saved_bytes() == 0
    else:
        assert seen.graph.input_bytes == formula.input_bytes
        saved = _saved_bytes(spec, kind, shard)
        assert seen.graph.total_saved_bytes() == pytest.approx(saved, rel=SAVED)


def _traffic(calls: Iterable[LayerCollective]) -> list[tuple[str, bool, float]]:
    return sorted((call.kind, call.backward, call.message_bytes) for call in calls)


@pytest.mark.parametrize("kind", [LayerKind("linear_for_attention"), LayerKind("linear_for_mlp")])
def test_linear_layers_do_not_run_with_sequence_parallelism(kind: LayerKind) -> None:
    shard = LayerShard(tensor_model_parallel_size=2, sequence_parallel=True)
    with pytest.raises(RuntimeError, match="broadcast"):
        extract_layer(_model(kind), kind, shard, recompute=())
    dims = ParallelDims(tensor_model_parallel_size=2)
    assert not is_legal_grid(_model(kind), dims, sequence_parallel=True)
    assert is_legal_grid(_model(kind), dims, sequence_parallel=False)


def test_layers_are_not_built_for_virtual_stages() -> None:
    """No framework says which virtual stage it builds."""
    from megatron.core.models.gpt.heterogeneous import heterogeneous_layer_specs as specs

    spec = dataclasses.replace(_model(KINDS[0]), num_layers=4, heterogeneous_layers=4 * KINDS[:1])
    dims = ParallelDims(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    config = transformer_config(spec, dims, sequence_parallel=False)
    with pytest.raises(AssertionError, match="vp_stage"):
        specs.get_gpt_heterogeneous_layer_spec(config, pp_rank=0)
    assert not is_legal_grid(spec, dims, sequence_parallel=False)
