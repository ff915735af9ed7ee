"""What carries a layer's work out, read from flags and priced."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.cost_model import block_times
from nest_megatron.cost_model.execution_flags import execution_of
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.model.execution import (
    PLAIN,
    ContextTraffic,
    Execution,
    FlexBackend,
    GraphImpl,
    TokenDispatcher,
)
from nest_megatron.model.graph import LayerGraph
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from tests import catalogue

HYBRIDEP = Execution(
    moe_token_dispatcher_type=TokenDispatcher.FLEX, moe_flex_dispatcher_backend=FlexBackend.HYBRIDEP
)


def _layer(execution: Execution, settings: CostSettings | None = None, **degrees: int) -> float:
    """Seconds of one layer with experts, forward and backward, on 64 H100."""
    model = CostModel(
        catalogue.model("deepseek_v3"),
        catalogue.cluster("dgx_h100", num_gpus=64),
        settings or CostSettings(ep_overlap=0.7, tp_overlap=0.7, host_kernel_s=0.0),
    )
    sizes = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 64, **degrees}
    inner = sizes["tensor_model_parallel_size"] * sizes.get("context_parallel_size", 1)
    dims = ParallelDims(data_parallel_size=64 // inner, **sizes)
    grid = PartialLayout(
        dims=dims,
        global_batch_size=64,
        micro_batch_size=1,
        sequence_parallel=sizes["tensor_model_parallel_size"] > 1,
        execution=execution,
    )
    times = model.unit_time(LayerKind.MOE, model.places(dims), model.shard(grid))
    return times.whole_forward.total + times.backward.total


@pytest.mark.parametrize(
    "faster",
    [
        HYBRIDEP,
        Execution(moe_permute_fusion=True),
        Execution(moe_router_fusion=True),
        Execution(overlap_moe_expert_parallel_comm=True),
        Execution(moe_shared_expert_overlap=True),
    ],
    ids=str,
)
def test_each_choice_for_experts_saves_time(faster: Execution) -> None:
    assert _layer(faster) < _layer(PLAIN)


def test_user_buffers_hide_tensor_traffic_only_when_asked_for() -> None:
    degrees = {"tensor_model_parallel_size": 8, "expert_model_parallel_size": 8}
    assert _layer(Execution(tp_comm_overlap=True), **degrees) < _layer(PLAIN, **degrees)
    settings = CostSettings(tp_overlap=0.0, host_kernel_s=0.0)
    other = CostSettings(tp_overlap=0.9, host_kernel_s=0.0)
    assert _layer(PLAIN, settings, **degrees) == _layer(PLAIN, other, **degrees)


def test_graphs_save_the_host_s_time() -> None:
    slow_host = CostSettings(host_kernel_s=1e-2)
    whole = Execution(cuda_graph_impl=GraphImpl.FULL_ITERATION)
    some = Execution(cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE, cuda_graph_scope=("attn",))
    assert _layer(whole, slow_host) < _layer(some, slow_host) < _layer(PLAIN, slow_host)


def test_imbalance_cannot_act_without_expert_parallelism() -> None:
    uneven = CostSettings(expert_imbalance=2.0, host_kernel_s=0.0)
    even = CostSettings(host_kernel_s=0.0)
    one = {"expert_model_parallel_size": 1}
    assert _layer(PLAIN, uneven, **one) == _layer(PLAIN, even, **one)
    assert _layer(PLAIN, uneven) > _layer(PLAIN, even)


@pytest.mark.parametrize("traffic", list(ContextTraffic))
def test_context_traffic_is_priced(traffic: ContextTraffic) -> None:
    sizes = (4, 2) if traffic is ContextTraffic.A2A_P2P else ()
    execution = Execution(cp_comm_type=traffic, hierarchical_context_parallel_sizes=sizes)
    assert _layer(execution, context_parallel_size=8) > 0


def test_flags_of_both_releases() -> None:
    old = execution_of({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"})
    new = execution_of({"cuda_graph_impl": "full_iteration"})
    assert old == new == Execution(cuda_graph_impl=GraphImpl.FULL_ITERATION)
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    assert execution_of(flex) == HYBRIDEP
    assert execution_of({"cp_comm_type": ["a2a"]}).cp_comm_type is ContextTraffic.A2A


def test_contradictions_are_refused() -> None:
    with pytest.raises(UserInputError, match="dispatcher is alltoall"):
        dataclasses.replace(PLAIN, moe_flex_dispatcher_backend=FlexBackend.DEEPEP)
    with pytest.raises(UserInputError, match="delay_wgrad_compute"):
        Execution(delay_wgrad_compute=True)
    with pytest.raises(UserInputError, match=r"cp-comm-type.*it must be one of"):
        execution_of({"cp_comm_type": "ring"})


def test_a_graph_is_priced_once_for_all_that_only_hides_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Searched with them, overlaps multiply candidates and no operators."""
    made = []
    whole = block_times.block_graph

    def counted(spec: TransformerSpec, block: LayerBlock, shard: LayerShard) -> LayerGraph:
        made.append(block)
        return whole(spec, block, shard)

    monkeypatch.setattr(block_times, "block_graph", counted)
    settings = CostSettings(ep_overlap=0.7)
    cluster = catalogue.cluster("dgx_h100", num_gpus=64)
    model = CostModel(catalogue.model("deepseek_v3"), cluster, settings)
    dims = ParallelDims(data_parallel_size=64, expert_model_parallel_size=8)
    plain = PartialLayout(
        dims=dims, global_batch_size=64, micro_batch_size=1, sequence_parallel=False
    )
    times = set()
    for execution in (
        PLAIN,
        Execution(moe_shared_expert_overlap=True),
        Execution(overlap_moe_expert_parallel_comm=True),
    ):
        grid = dataclasses.replace(plain, execution=execution)
        unit = model.unit_time(LayerKind.MOE, model.places(dims), model.shard(grid))
        times.add(unit.backward.total)
    assert sorted(made) == [LayerBlock.ATTENTION, LayerBlock.EXPERTS]
    assert len(times) == 3
