"""What Megatron-FSDP holds whole, and what it sends for each micro batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.execution_flags import execution_traits
from nest_megatron.cost_model.fsdp_memory import RankParameters, unsharded_bytes
from nest_megatron.cost_model.memory import static_bytes
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.cost_model.unit_cost import ReplicaCost
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.block_parameters import ParameterCount
from tests import catalogue

BILLION = 10**9


def settings(**traits: object) -> CostSettings:
    return CostSettings(traits=ExecutionTraits(**traits))


def whole(
    layer: int,
    held: int | None = None,
    *,
    zero: ZeroStage = ZeroStage.WEIGHTS,
    precision: Precision = Precision.BF16,
    replicas: int = 64,
    frozen: bool = False,
    **traits: object,
) -> float:
    """Of dense layers of one size, in 1e9 bytes."""
    count = ParameterCount(layer, frozen_dense=layer * frozen)
    everything = held or 100 * layer
    rank = RankParameters(
        (replicas, 1),
        ParameterCount(everything, frozen_dense=everything * frozen),
        count,
        dataclasses.replace(settings(**traits), precision=precision),
    )
    return unsharded_bytes(count, rank, zero, in_layer=True) / BILLION


def test_a_large_layer_and_the_next_are_gathered_and_four_wait_with_gradients() -> None:
    """Two layers are a communication unit; three may wait while the fourth is made."""
    assert whole(BILLION) == 2 * 2 + 4 * 4


def test_small_layers_fill_a_communication_unit_of_a_billion() -> None:
    layer = BILLION // 5
    assert whole(layer) == pytest.approx(0.2 * (1 + 3) * 2 + 0.2 * (5 + 2) * 4)


def test_no_more_than_the_model_is_whole() -> None:
    assert whole(BILLION // 5, held=BILLION // 2) == 0.5 * (2 + 4)


def test_flags_limit_what_is_whole() -> None:
    assert whole(BILLION, fsdp_double_buffer=True) == 2 * (2 + 4)
    assert whole(BILLION // 5, communication_unit_size=BILLION // 5) == pytest.approx(
        0.2 * (1 + 1) * 2 + 0.2 * (1 + 2) * 4
    )
    assert whole(BILLION, frozen=True) == 2 * 2


def test_gradients_of_zero_2_wait_in_buckets_whatever_the_layers_are() -> None:
    """And double buffers are of FSDP units, which it has none of."""
    zero = ZeroStage.GRADIENTS
    waiting = pytest.approx((1 + 2 * 0.064) * 4)  # a bucket of 1e6 for each of 64 replicas
    assert whole(BILLION // 5, zero=zero) == waiting
    assert whole(3 * BILLION, zero=zero) == waiting
    assert whole(BILLION, zero=zero, fsdp_double_buffer=True) == waiting
    assert whole(BILLION, zero=zero, ddp_bucket_size=BILLION // 10) == pytest.approx(1.2 * 4)
    small = whole(BILLION, zero=zero, communication_unit_size=10**8, replicas=8)
    assert small == pytest.approx(0.18 * 4)  # buckets of 40e6 at least
    assert whole(BILLION, zero=ZeroStage.OPTIMIZER) == whole(BILLION, zero=ZeroStage.NONE) == 0


def test_the_head_finds_the_first_layers_gathered_ahead() -> None:
    """Its bucket comes before theirs; double buffers stay as they are."""
    layer = BILLION // 5
    count, head = ParameterCount(layer), ParameterCount(BILLION)
    held = ParameterCount(100 * layer)
    ranks = (
        RankParameters((64, 1), held, count, settings(**traits))
        for traits in ({}, {"fsdp_double_buffer": True})
    )
    found = [unsharded_bytes(head, rank, ZeroStage.WEIGHTS, in_layer=False) for rank in ranks]
    assert found == [3 * layer * 2 + BILLION * 4, 2 * layer * (2 + 4) + BILLION * 4]


def test_what_one_rank_has_alone_is_never_there_twice() -> None:
    """Experts spread over all ranks have no replicas: their buffers are not divided."""
    dense, expert = BILLION // 10, 4 * BILLION // 10
    layer = ParameterCount(dense, expert)
    held = ParameterCount(100 * dense, 100 * expert)
    alone, shared = (
        unsharded_bytes(
            layer,
            RankParameters((64, expert_replicas), held, layer, settings()),
            ZeroStage.WEIGHTS,
            in_layer=True,
        )
        for expert_replicas in (1, 2)
    )
    assert alone == 2 * dense * 2 + 4 * dense * 4  # one layer ahead is 0.5e9, two are 1e9
    assert shared == 2 * layer.total * 2 + 4 * layer.total * 4


def test_fp8_weights_travel_in_their_width_and_are_transposed_by_layers() -> None:
    fp8: dict[str, Any] = {"precision": Precision.FP8}
    assert whole(BILLION, **fp8, fp8_weights=True) == 2 * 1 + 4 * 4 + 1
    kept = whole(BILLION, **fp8, fp8_weights=True, keep_fp8_transpose_cache=True)
    assert kept == 2 * 1 + 4 * 4  # those of all layers are counted with what stays
    assert whole(BILLION, **fp8) == 2 * 2 + 4 * 4 + 2 * 1  # the layer's own copies


def test_a_reduction_of_another_width_has_a_buffer_of_its_own() -> None:
    """``megatron_fsdp_grad_comm_dtype`` of 0.20."""
    assert whole(BILLION, fsdp_reduce_bytes=2) == 2 * 2 + 4 * 2
    zero_2 = whole(BILLION, zero=ZeroStage.GRADIENTS, fsdp_reduce_bytes=2)
    assert zero_2 == pytest.approx((1 + 2 * 0.064) * 2)
    for zero in (ZeroStage.NONE, ZeroStage.OPTIMIZER):
        assert whole(BILLION, zero=zero, fsdp_reduce_bytes=2) == pytest.approx(1.064 * 2)
        assert whole(BILLION, zero=zero, fsdp_reduce_bytes=4) == 0


def test_fsdp2_has_two_layers_of_weights_and_gradients_of_two() -> None:
    """Those of the layer at work as autograd makes them, the last one's to be reduced."""
    assert whole(BILLION, torch_fsdp2=True) == 2 * 2 + 2 + 4
    assert whole(BILLION, torch_fsdp2=True, gradient_bytes=2) == 2 * 2 + 2 + 2
    assert whole(BILLION, torch_fsdp2=True, frozen=True) == 2 * 2
    assert whole(BILLION, zero=ZeroStage.GRADIENTS, torch_fsdp2=True) == 0


def test_fsdp2_may_keep_what_it_gathered() -> None:
    """``--torch-fsdp2-no-reshard-after-forward``: weights stay, and travel once."""
    kept: dict[str, Any] = {"torch_fsdp2": True, "reshard_after_forward": False}
    assert whole(BILLION, **kept) == 4
    assert whole(BILLION, **kept, gradient_bytes=2) == 2
    resharded, stays = (
        static_bytes(ZeroStage.WEIGHTS, 64, settings(**traits), in_layer=True).weights
        for traits in ({"torch_fsdp2": True}, kept)
    )
    assert stays == resharded + 2
    _, layer, _ = held(ZeroStage.WEIGHTS, **kept)
    _, again, _ = held(ZeroStage.WEIGHTS, torch_fsdp2=True)
    assert layer.shard_forward_s == again.shard_forward_s
    assert layer.shard_backward_s == pytest.approx(again.shard_backward_s - again.shard_forward_s)


def test_what_is_in_no_layer_stays_gathered() -> None:
    inside, outside = (
        static_bytes(ZeroStage.WEIGHTS, 64, settings(), in_layer=inside).weights
        for inside in (True, False)
    )
    assert outside == inside + 2


def held(zero: ZeroStage, **traits: object) -> list[ReplicaCost]:
    """Of llama3_8b's embedding, layers and head."""
    cluster = catalogue.cluster("dgx_h100", 64)
    model = CostModel(catalogue.model("llama3_8b"), cluster, settings(**traits))
    return list(model.replica_costs(ParallelDims(data_parallel_size=64), zero))


def test_layers_travel_with_every_micro_batch_and_the_rest_once_a_step() -> None:
    embedding, layer, head = held(ZeroStage.WEIGHTS)
    for outside in (embedding, head):
        assert outside.shard_forward_s == 0
        assert outside.gather_s > 0
        assert outside.shard_backward_s > 0  # its gradients are reduced with the others
    assert layer.gather_s == layer.reduce_s == 0
    assert layer.shard_backward_s > 2 * layer.shard_forward_s > 0  # float32 gradients


def test_gradients_are_copied_and_the_first_layer_is_waited_for() -> None:
    _, layer, _ = held(ZeroStage.WEIGHTS)
    assert 0 < layer.exposed_forward_s < layer.shard_forward_s / 30
    copies = layer.exposed_backward_s - layer.exposed_forward_s
    narrow = held(ZeroStage.WEIGHTS, gradient_bytes=2)[1]
    assert 0 < narrow.exposed_backward_s - narrow.exposed_forward_s < copies


def test_instances_sum_their_gradients_once_a_step() -> None:
    """``outer_fsdp_group_grad_reduce`` waits for the last micro batch."""
    _, layer, _ = held(ZeroStage.WEIGHTS, optimizer_instances=8)
    assert layer.reduce_s > 0
    assert layer.shard_backward_s < held(ZeroStage.WEIGHTS)[1].shard_backward_s


def layer_cost(model: str, **degrees: int) -> ReplicaCost:
    """Of one of a model's layers on 64 H100."""
    dims = ParallelDims(**degrees)
    priced = CostModel(catalogue.model(model), catalogue.cluster("dgx_h100", 64), settings())
    return priced.replica_costs(dims, ZeroStage.WEIGHTS)[1]


def test_a_group_with_one_gpu_in_each_node_takes_few_channels() -> None:
    assert layer_cost("llama3_8b", data_parallel_size=64).channels == 1.0
    tensor = {"tensor_model_parallel_size": 8, "data_parallel_size": 8}
    assert layer_cost("llama3_8b", **tensor).channels == 2 / 16
    experts = {"data_parallel_size": 64, "expert_model_parallel_size": 8}
    assert 2 / 16 < layer_cost("qwen3_30b_a3b", **experts).channels < 1 / 2  # its attention: 1


def test_few_channels_slow_down_what_runs_beside_them() -> None:
    spec, cluster = catalogue.model("llama3_8b"), catalogue.cluster("dgx_h100", 64)
    grid = PartialLayout(
        dims=ParallelDims(tensor_model_parallel_size=8, data_parallel_size=8),
        global_batch_size=64,
        micro_batch_size=4,
        sequence_parallel=True,
        zero=ZeroStage.WEIGHTS,
    )
    free, slowed = (
        dataclasses.replace(settings(), overlap_slowdown=slowdown) for slowdown in (0.0, 0.12)
    )
    priced = [stage_problem(CostModel(spec, cluster, each), grid) for each in (free, slowed)]
    layers = [each.costs[each.unit_kinds[1]] for each in priced]
    without, with_traffic = (layer.forward + layer.backward for layer in layers)
    assert 1.0 < with_traffic / without < 1.0 + 0.12 * 2 / 16


def bytes_of(**flags: object) -> int:
    return execution_traits({"bf16": True, **flags}, Precision.BF16).gradient_bytes


def test_the_width_of_gradients_is_that_of_the_release() -> None:
    """0.20 names its flag in every job, 0.16.1 in none."""
    auto = {"megatron_fsdp_main_grads_dtype": "auto"}
    assert bytes_of(use_megatron_fsdp=True) == 4
    assert bytes_of(use_megatron_fsdp=True, **auto) == 2
    assert bytes_of(use_megatron_fsdp=True, megatron_fsdp_main_grads_dtype="fp32") == 4
    assert bytes_of(**auto) == 4


def test_flags_of_its_buffers_are_read() -> None:
    flags = {"fsdp_double_buffer": True, "suggested_communication_unit_size": 7, "nccl_ub": True}
    traits = execution_traits(flags, Precision.BF16)
    assert (traits.fsdp_double_buffer, traits.communication_unit_size) == (True, 7)
    assert traits.nccl_ub
    registered = execution_traits({"use_megatron_fsdp": True, "nccl_ub": True}, Precision.BF16)
    assert registered.fsdp_double_buffer
    assert not execution_traits({"nccl_ub": True}, Precision.BF16).fsdp_double_buffer
    width = {"megatron_fsdp_grad_comm_dtype": "bf16"}
    fsdp = {"bf16": True, "use_megatron_fsdp": True, **width}
    assert execution_traits(fsdp, Precision.BF16).fsdp_reduce_bytes == 2
    assert execution_traits({"bf16": True, **width}, Precision.BF16).fsdp_reduce_bytes == 0
    assert bytes_of(use_torch_fsdp2=True, accumulate_allreduce_grads_in_fp32=True) == 2
    kept = execution_traits({"torch_fsdp2_reshard_after_forward": False}, Precision.BF16)
    assert not kept.reshard_after_forward
