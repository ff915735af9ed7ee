"""What only experts have: products with few rows, a wait for token counts, an exchange."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.cost_model.compute import operator_times
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.model.execution import Execution, GraphImpl
from nest_megatron.model.graph import OperatorKind
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.shard import LayerShard
from tests import catalogue

SPEC = catalogue.model("qwen3_30b_a3b")
CLUSTER = catalogue.cluster("dgx_h100", num_gpus=64)
SETTINGS = CostSettings(host_kernel_s=1e-5, count_sync_launches=20.0, alltoall_slowdown=2.0)


def grid(ep: int, **changes: object) -> PartialLayout:
    dims = ParallelDims(data_parallel_size=64, expert_model_parallel_size=ep)
    layout = PartialLayout(
        dims=dims, global_batch_size=1024, micro_batch_size=1, sequence_parallel=False
    )
    return dataclasses.replace(layout, **changes)


def model(**settings: object) -> CostModel:
    return CostModel(SPEC, CLUSTER, dataclasses.replace(SETTINGS, **settings))


def layer(costs: CostModel, where: PartialLayout) -> tuple[float, float, float]:
    """Seconds of a layer: compute forward and backward, exchange of tokens."""
    times = costs.unit_time(LayerKind.MOE, costs.places(where.dims), costs.shard(where))
    forward, backward = times.whole_forward, times.backward
    return forward.compute, backward.compute, forward.ep + backward.ep


def grouped(micro_batch_size: int) -> tuple[float, float]:
    """Seconds and FLOP of the experts' first product, forward."""
    costs = model()
    shard: LayerShard = costs.shard(grid(8, micro_batch_size=micro_batch_size))
    operators = costs._blocks.graph(LayerBlock.EXPERTS, shard).operators
    first = next(op for op in operators if op.kind is OperatorKind.GROUPED_GEMM)
    assert first.num_gemms == 16
    return operator_times(first, CLUSTER.accelerator, SETTINGS)[0], first.flops


def test_a_grouped_product_gains_from_rows_of_each_expert() -> None:
    rates = [flops / seconds for seconds, flops in map(grouped, (1, 4, 16))]
    assert rates == sorted(rates)
    assert rates[2] > 1.15 * rates[0]


def test_the_host_s_copy_of_token_counts_is_waited_for_in_a_pass_forward() -> None:
    forward, backward, _ = layer(model(), grid(8))
    without = layer(model(count_sync_launches=0.0), grid(8))
    assert forward - without[0] == pytest.approx(20 * 1e-5)
    assert backward == without[1], "the counts are there by then"


@pytest.mark.parametrize("held", ["graph of the step", "capacity"])
def test_nothing_is_copied_where_shapes_are_fixed(held: str) -> None:
    where, changes = grid(8), {}
    if held == "capacity":
        changes["traits"] = dataclasses.replace(SETTINGS.traits, pads_to_capacity=True)
    else:
        graph = Execution(cuda_graph_impl=GraphImpl.FULL_ITERATION)
        where = grid(8, execution=graph)
    with_copies = layer(model(**changes), where)
    assert with_copies == layer(model(count_sync_launches=0.0, **changes), where)


def test_the_exchange_is_slowed_down_across_nodes_alone() -> None:
    inside, across = grid(8), grid(16)
    plain = model(alltoall_slowdown=1.0)
    assert layer(model(), inside)[2] == layer(plain, inside)[2] > 0
    assert layer(model(), across)[2] == pytest.approx(2 * layer(plain, across)[2])
