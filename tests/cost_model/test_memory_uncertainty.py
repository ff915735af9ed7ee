"""The chance to run out of memory, and between what a peak lies."""

from __future__ import annotations

import dataclasses
import math

import pytest
from scipy.stats import t

from nest_megatron.cost_model.device_memory import (
    PeakError,
    all_to_all_bytes,
    allocatable_bytes,
    communicator_bytes,
    out_of_memory_probability,
    outside_bytes,
    peak_error,
    shipped_peak_errors,
)
from nest_megatron.cost_model.memory import capacity_bytes
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import PeakLimit, out_of_memory
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.stage_layout import uniform_partition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import Execution, FlexBackend, TokenDispatcher
from nest_megatron.units import GIB
from tests import catalogue

H100 = catalogue.accelerator("h100_sxm_80gb")
REPLICATED, SHARDED = (shipped_peak_errors()[name] for name in ("replicated", "sharded"))


def test_the_chance_is_that_of_the_distribution() -> None:
    for share in (0.5, 0.8, 0.95, 1.0, 1.2):
        spare = math.log(1 / share)
        apart = spare - REPLICATED.median
        expected = t.sf(apart / (REPLICATED.above if apart > 0 else REPLICATED.below), 2)
        found = out_of_memory_probability(share * 70e9, 70e9, REPLICATED)
        assert found == pytest.approx(expected, abs=1e-9)


def test_the_chance_grows_with_the_peak_and_is_certain_without_memory() -> None:
    chances = [out_of_memory_probability(peak, 70e9, SHARDED) for peak in (0, 30e9, 60e9, 1e12)]
    assert chances[0] == 0.0
    assert chances == sorted(chances)
    assert chances[-1] > 0.99
    assert out_of_memory_probability(1.0, 0, SHARDED) == 1.0


def test_jobs_that_gather_weights_are_less_certain() -> None:
    assert peak_error(ZeroStage.OPTIMIZER) is REPLICATED
    assert peak_error(ZeroStage.WEIGHTS) is SHARDED
    for spare in (0.0, 0.05, 0.1, 0.2):
        assert REPLICATED.at_most(spare) > SHARDED.at_most(spare)


def test_the_margin_asked_for_does_not_change_the_chance() -> None:
    usual = allocatable_bytes(H100, CostSettings())
    assert usual == capacity_bytes(H100, CostSettings())
    assert allocatable_bytes(H100, CostSettings(memory_margin=0.2)) == usual


def test_the_limit_on_peaks_gives_the_chance_that_was_asked_for() -> None:
    cluster = catalogue.cluster("dgx_h100", 8)
    model = CostModel(catalogue.model("llama3_8b"), cluster, CostSettings())
    dims = ParallelDims(data_parallel_size=8)
    for zero in ZeroStage:
        grid = PartialLayout(
            dims=dims, global_batch_size=8, micro_batch_size=1, sequence_parallel=False, zero=zero
        )
        layout = grid.with_stages(uniform_partition(model.spec, 1))
        for wanted in (0.5, 0.2, 0.05):
            limit = PeakLimit(model, wanted)
            peak = limit.of(grid)
            assert peak <= limit.at_most(zero) <= model.capacity_bytes
            assert out_of_memory(model, layout, peak) == pytest.approx(wanted, abs=0.03)
            assert out_of_memory(model, layout, peak) <= wanted + 1e-9


def test_each_communicator_takes_memory() -> None:
    """Context and NCCL: what a process holds beside the allocator grows with its groups."""
    replicas = communicator_bytes(ParallelDims(data_parallel_size=8))
    split = ParallelDims(
        tensor_model_parallel_size=4, pipeline_model_parallel_size=4, data_parallel_size=64
    )
    assert 0 == communicator_bytes(ParallelDims()) < replicas < communicator_bytes(split)


EXPERTS = catalogue.model("deepseek_v3")


def exchanged(ranks: int, execution: Execution, node: int = 8) -> int:
    """What exchanging the tokens of so many ranks takes, in nodes of so many GPUs."""
    grid = PartialLayout(
        dims=ParallelDims(data_parallel_size=64, expert_model_parallel_size=ranks),
        global_batch_size=64,
        micro_batch_size=1,
        sequence_parallel=False,
        execution=execution,
    )
    return all_to_all_bytes(EXPERTS, grid, (node, 64))


def test_an_all_to_all_has_buffers_for_each_peer_in_reach_of_nvlink() -> None:
    plain = Execution()
    assert exchanged(1, plain) == 0
    assert 3 * GIB < exchanged(8, plain) < 3.2 * GIB
    assert exchanged(64, plain, node=64) == 9 * exchanged(8, plain)
    # Across the network NCCL opens two channels to each peer instead of 32.
    assert exchanged(64, plain) < GIB / 2


def test_other_dispatchers_have_no_buffers_of_an_all_to_all() -> None:
    flex = TokenDispatcher.FLEX
    deepep, hybridep = (
        Execution(moe_token_dispatcher_type=flex, moe_flex_dispatcher_backend=backend)
        for backend in (FlexBackend.DEEPEP, FlexBackend.HYBRIDEP)
    )
    # get_nvl_buffer_size_hint of eight ranks, and with get_rdma_buffer_size_hint of 64.
    assert exchanged(8, deepep) == 10 * 8 * 288 * (2 * 7168 + 2048)
    assert exchanged(8, deepep) < exchanged(64, deepep) < GIB
    assert exchanged(64, hybridep) == 0
    assert exchanged(8, Execution(moe_token_dispatcher_type=TokenDispatcher.ALLGATHER)) == 0


def test_user_buffers_hold_a_micro_batch_for_each_product() -> None:
    spec = catalogue.model("llama3_70b")
    plain = PartialLayout(
        dims=ParallelDims(tensor_model_parallel_size=4, context_parallel_size=2),
        global_batch_size=8,
        micro_batch_size=2,
        sequence_parallel=True,
    )
    overlapped = dataclasses.replace(plain, execution=Execution(tp_comm_overlap=True))
    cluster = catalogue.cluster("dgx_h100", 8)
    more = outside_bytes(spec, overlapped, cluster) - outside_bytes(spec, plain, cluster)
    assert more == 10 * spec.seq_length * spec.hidden_size * 2


def test_a_job_that_takes_more_has_less_to_give_out() -> None:
    settings = CostSettings()
    usual = allocatable_bytes(H100, settings)
    assert allocatable_bytes(H100, settings, GIB) == usual
    assert usual - allocatable_bytes(H100, settings, 5 * GIB) == 3 * GIB
    roomy = CostSettings(memory_reserve_bytes=10 * GIB)
    assert allocatable_bytes(H100, roomy, 5 * GIB) == allocatable_bytes(H100, roomy)


@pytest.mark.parametrize("error", [REPLICATED, SHARDED])
def test_each_side_of_the_median_holds_half_of_the_errors(error: PeakError) -> None:
    assert error.at_most(error.median) == 0.5 == error.at_most(error.quantile(0.5))
    for share in (0.05, 0.3, 0.7, 0.95):
        assert error.at_most(error.quantile(share)) == pytest.approx(share)
