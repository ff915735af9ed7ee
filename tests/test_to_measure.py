"""Which profile tells plans apart: the shapes, the nodes, and what it costs."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.shortlist import LAYERS, NETWORK
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.planner.to_measure import profile_s, profiles, tasks_between
from tests import catalogue


def model_of(name: str = "llama3_8b", num_gpus: int = 16) -> CostModel:
    return CostModel(catalogue.model(name), catalogue.cluster("dgx_h100", num_gpus), CostSettings())


def grid(tp: int, dp: int) -> PartialLayout:
    dims = ParallelDims(tensor_model_parallel_size=tp, data_parallel_size=dp)
    return PartialLayout(
        dims=dims, global_batch_size=32, micro_batch_size=1, sequence_parallel=tp > 1
    )


def test_layers_need_one_gpu_and_traffic_the_nodes_that_it_crosses() -> None:
    layouts = [grid(2, 8), grid(4, 4)]
    layers, inside, across = profiles(model_of(), layouts, layouts)
    assert (layers.mechanisms, layers.num_nodes) == (LAYERS, 0)
    assert layers.num_shapes == len(tasks_between(model_of(), layouts)) > 0
    assert (inside.num_nodes, across.num_nodes) == (1, 2)
    assert Mechanism.TENSOR in inside.mechanisms
    assert Mechanism.REPLICAS not in inside.mechanisms
    assert across.mechanisms == NETWORK


def test_one_node_suffices_where_nothing_leaves_it() -> None:
    layouts = [grid(2, 4), grid(4, 2)]
    found = list(profiles(model_of(num_gpus=8), layouts, layouts))
    assert [each.num_nodes for each in found] == [0, 1]
    assert found[1].mechanisms == NETWORK


def test_layouts_with_the_same_shapes_and_formats_that_are_not_timed_have_no_profile() -> None:
    same, model = [grid(2, 8), grid(2, 4)], model_of()
    assert tasks_between(model, same) == ()
    fp8 = dataclasses.replace(model.settings, precision=Precision.FP8)
    other = CostModel(model.spec, model.cluster, fp8)
    assert tasks_between(other, [grid(2, 8), grid(4, 4)]) == ()


def test_the_time_is_that_of_what_is_timed() -> None:
    model = model_of()
    tasks = tasks_between(model, [grid(2, 8), grid(4, 4)])
    start, half, whole = (profile_s(model, part) for part in ((), tasks[::2], tasks))
    assert start < half < whole
    parts = [profile_s(model, [task]) - start for task in tasks]
    assert whole - start == pytest.approx(sum(parts))
