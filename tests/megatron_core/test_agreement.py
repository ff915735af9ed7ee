"""The closed forms of the local layers against what megatron-core's own modules do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from nest_megatron.layout.recompute import RecomputeModule, selective_recompute
from nest_megatron.megatron_core.layers import extract_layer
from nest_megatron.model.graph import Group, LayerCollective, Part
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import layer_graph
from nest_megatron.model.operators.ends import around_mtp_graph
from nest_megatron.model.parameters import layer_parameters, unit_parameters
from nest_megatron.model.shard import LayerShard
from tests import catalogue
from tests.megatron_core.local_layers import local_layer

pytestmark = pytest.mark.megatron_lm

FLOPS = 0.01
SAVED = 0.02

#: Multi-head with learned positions and biases; grouped-query; query and key norms; experts; latent
#: attention with shared experts; activations that stay unfused.
MODELS = (
    "gpt3_175b",
    "llama3_8b",
    "llama3_70b",
    "qwen3_32b",
    "nemotron4_340b",
    "gemma_7b",
    "mixtral_8x7b",
    "qwen3_30b_a3b",
    "grok1_314b",
    "deepseek_v3",
)


def _shards(name: str, kind: LayerKind) -> Iterator[LayerShard]:
    spec = catalogue.model(name)
    for tp in (1, 2, 8):
        if spec.query_groups < tp and not spec.multi_latent_attention:
            continue
        for sp in {False, tp > 1}:
            if kind is LayerKind.MOE and tp > 1 and not sp:
                continue  # megatron-core refuses to train experts so
            for flash in (True, False):
                yield LayerShard(
                    tensor_model_parallel_size=tp,
                    sequence_parallel=sp,
                    flash_attention=flash,
                    expert_model_parallel_size=_experts(name, kind),
                )


def _experts(name: str, kind: LayerKind) -> int:
    """Expert ranks that leave a few experts on each."""
    experts = catalogue.model(name).num_experts or 0
    return max(1, experts // 4) if kind is LayerKind.MOE else 1


def _kinds(name: str) -> list[LayerKind]:
    layers = {LayerKind.DENSE, LayerKind.MOE}
    return sorted(layers.intersection(catalogue.model(name).layer_kinds()))


CASES = [
    (name, kind, shard) for name in MODELS for kind in _kinds(name) for shard in _shards(name, kind)
]


def _label(case: tuple[str, LayerKind, LayerShard]) -> str:
    name, kind, shard = case
    words = [name, kind.value, f"tp{shard.tensor_model_parallel_size}"]
    words += ["sp"] * shard.sequence_parallel + ["unfused"] * (not shard.flash_attention)
    return "-".join(words)


@pytest.mark.parametrize("case", CASES, ids=_label)
def test_closed_form_is_what_the_modules_do(case: tuple[str, LayerKind, LayerShard]) -> None:
    name, kind, shard = case
    spec = catalogue.model(name)
    seen, formula = extract_layer(spec, kind, shard, recompute=()), local_layer(spec, kind, shard)
    assert seen.parameters == formula.parameters
    backward = sum(op.backward_flops for op in seen.graph.operators)
    assert seen.graph.flops() == pytest.approx(formula.flops, rel=FLOPS)
    assert backward == pytest.approx(formula.backward_flops, rel=FLOPS)
    kept = formula.total_saved_bytes()
    assert seen.graph.total_saved_bytes() == pytest.approx(kept, rel=SAVED)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (4, True)])
@pytest.mark.parametrize("kind", [LayerKind.ENCODER, LayerKind.CROSS])
def test_layers_of_two_stacks_are_those_of_the_closed_form(
    kind: LayerKind, tp: int, sp: bool, flash: bool
) -> None:
    spec = catalogue.model("t5_220m")
    shard = LayerShard(
        tensor_model_parallel_size=tp,
        sequence_parallel=sp,
        flash_attention=flash,
        micro_batch_size=4,
    )
    seen, formula = extract_layer(spec, kind, shard, recompute=()), layer_graph(spec, kind, shard)
    assert seen.parameters == layer_parameters(spec, kind, tp, 1, 1)
    backward = [sum(op.backward_flops for op in g.operators) for g in (seen.graph, formula)]
    assert seen.graph.flops() == pytest.approx(formula.flops(), rel=FLOPS)
    assert backward[0] == pytest.approx(backward[1], rel=FLOPS)
    kept = formula.total_saved_bytes()
    assert seen.graph.total_saved_bytes() == pytest.approx(kept, rel=SAVED)
    calls = _traffic(formula.collectives, Group.TENSOR) if tp > 1 else []
    assert not calls or _traffic(seen.graph.collectives, Group.TENSOR) == calls


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (4, 1), (4, 2), (2, 4), (8, 1)])
def test_experts_are_divided_as_the_closed_form_says(ep: int, etp: int) -> None:
    spec = catalogue.model("mixtral_8x7b")
    shard = LayerShard(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        micro_batch_size=2,
    )
    seen = extract_layer(spec, LayerKind.MOE, shard, recompute=())
    formula = local_layer(spec, LayerKind.MOE, shard)
    assert seen.parameters == formula.parameters
    assert seen.graph.flops() == pytest.approx(formula.flops, rel=FLOPS)
    kept = formula.total_saved_bytes()
    assert seen.graph.total_saved_bytes() == pytest.approx(kept, rel=SAVED)


def _traffic(calls: tuple[LayerCollective, ...], group: Group) -> list[tuple[str, bool, float]]:
    """Kind, direction and bytes of a group's calls; those of a few bytes for each token apart."""
    small = max(call.message_bytes for call in calls) / 100
    return sorted(
        (call.kind, call.backward, call.message_bytes)
        for call in calls
        if call.group is group and call.message_bytes > small
        for _ in range(call.num_calls)
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["gpt3_175b", "llama3_70b"])
def test_tensor_parallel_traffic_is_that_of_the_closed_form(
    name: str, sequence_parallel: bool
) -> None:
    spec = catalogue.model(name)
    shard = LayerShard(tensor_model_parallel_size=8, sequence_parallel=sequence_parallel)
    seen = extract_layer(spec, LayerKind.DENSE, shard, recompute=()).graph
    formula = layer_graph(spec, LayerKind.DENSE, shard)
    assert seen.collectives
    assert _traffic(seen.collectives, Group.TENSOR) == _traffic(formula.collectives, Group.TENSOR)


@pytest.mark.parametrize(("ep", "etp"), [(8, 1), (4, 2)])
def test_expert_traffic_is_that_of_the_closed_form(ep: int, etp: int) -> None:
    spec = catalogue.model("mixtral_8x7b")
    shard = LayerShard(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    seen = extract_layer(spec, LayerKind.MOE, shard, recompute=()).graph
    formula = layer_graph(spec, LayerKind.MOE, shard)
    for group in (Group.EXPERT, Group.EXPERT_TENSOR):
        calls = _traffic(formula.collectives, group)
        assert _traffic(seen.collectives, group) == calls
        assert calls or etp == 1


@pytest.mark.parametrize("kind", [LayerKind.EMBEDDING, LayerKind.HEAD, LayerKind.MTP])
def test_other_units_have_the_closed_form_s_parameters(kind: LayerKind) -> None:
    spec = catalogue.model("deepseek_v3")
    shard = LayerShard(expert_model_parallel_size=64)
    counts = unit_parameters(spec, 1, 64, 1, single_stage=True)
    seen = extract_layer(spec, kind, shard).parameters
    wanted = counts[spec.layer_kinds().index(kind)]
    # with MTP the norm before the head is the last decoder layer's
    norm = spec.hidden_size if kind is LayerKind.HEAD else 0
    assert (seen.dense - norm, seen.expert) == (wanted.dense, wanted.expert)


def test_recomputed_modules_keep_less_and_work_again() -> None:
    """Each setting is measured; where all of a layer is done again, its input alone is kept."""
    spec = catalogue.model("deepseek_v3")
    shard = LayerShard(expert_model_parallel_size=64, flash_attention=False)
    seen = extract_layer(spec, LayerKind.MOE, shard)
    whole = seen.graph.total_saved_bytes()
    for label, again in seen.recompute.items():
        assert again.saved_bytes < whole, label
        assert again.recomputed_bytes_moved > 0, label
    full = seen.recompute["full uniform 1"]
    assert full.saved_bytes == pytest.approx(seen.graph.input_bytes, rel=SAVED)
    assert full.recomputed_flops == pytest.approx(seen.graph.flops())
    core = seen.recompute[selective_recompute([RecomputeModule.CORE_ATTN]).label()]
    attention = 4 * spec.seq_length**2 * spec.num_attention_heads * (192 + 128) / 2
    assert core.recomputed_flops == pytest.approx(attention)


def test_multi_token_prediction_s_traffic_is_that_of_the_closed_form() -> None:
    spec = catalogue.model("deepseek_v3")
    shard = LayerShard(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=64
    )
    seen = extract_layer(spec, LayerKind.MTP, shard).graph
    formula = around_mtp_graph(spec, shard)
    own = tuple(call for call in seen.collectives if call.part is Part.MTP)
    assert _traffic(own, Group.TENSOR) == _traffic(formula.collectives, Group.TENSOR)


@pytest.mark.parametrize("name", ["llama3_70b", "deepseek_v3"])
def test_what_runs_beside_a_product_is_that_of_the_closed_form(name: str) -> None:
    """Traffic of a column-parallel projection's backward pass is not waited for at once."""
    shard = LayerShard(tensor_model_parallel_size=2, sequence_parallel=True)
    graph = extract_layer(catalogue.model(name), LayerKind.DENSE, shard, recompute=()).graph
    for call in graph.collectives:
        if "linear_fc1" in call.name and call.backward:
            assert call.hidden_under == "mlp.linear_fc1", call
        if "linear_fc2" in call.name:
            assert not call.hidden_under, call


@pytest.mark.parametrize("name", ["llama3_8b", "deepseek_v3"])
def test_context_parallelism_is_that_of_the_closed_form(name: str) -> None:
    spec = catalogue.model(name)
    shard = LayerShard(
        tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=4
    )
    seen = extract_layer(spec, LayerKind.DENSE, shard, recompute=())
    formula, fused = (
        local_layer(spec, LayerKind.DENSE, shard),
        layer_graph(spec, LayerKind.DENSE, shard),
    )
    assert seen.graph.flops() == pytest.approx(formula.flops, rel=FLOPS)
    kept = formula.total_saved_bytes()
    assert seen.graph.total_saved_bytes() == pytest.approx(kept, rel=SAVED)
    ring = _traffic(fused.collectives, Group.CONTEXT)
    assert ring
    assert _traffic(seen.graph.collectives, Group.CONTEXT) == ring
    assert all(c.hidden_under for c in seen.graph.collectives if c.group is Group.CONTEXT)
