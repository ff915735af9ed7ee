"""What Megatron-FSDP holds whole, and what it sends for each micro batch."""

from __future__ import annotations

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.execution_flags import execution_traits
from nest_megatron.cost_model.memory import static_bytes, unsharded_bytes
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.cost_model.unit_cost import ReplicaCost
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.zero import ZeroStage
from tests import catalogue

BILLION = 10**9


def settings(**traits: object) -> CostSettings:
    return CostSettings(traits=ExecutionTraits(**traits))


def whole(layer: int, held: int | None = None, **traits: object) -> float:
    return unsharded_bytes(layer, ZeroStage.WEIGHTS, settings(**traits), held) / BILLION


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
    assert whole(BILLION, torch_fsdp2=True) == 2 * 2 + 4
    frozen = unsharded_bytes(BILLION, ZeroStage.WEIGHTS, settings(), frozen=True)
    assert frozen == 2 * 2 * BILLION


def test_zero_2_keeps_weights_and_has_whole_gradients() -> None:
    found = unsharded_bytes(BILLION, ZeroStage.GRADIENTS, settings())
    assert found == 4 * 4 * BILLION
    assert unsharded_bytes(BILLION, ZeroStage.OPTIMIZER, settings()) == 0


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
