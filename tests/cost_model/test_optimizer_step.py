"""The optimizer's time: of its memory traffic, or as a profile timed it."""

from __future__ import annotations

import pytest

from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.unit_cost import optimizer_step
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.profile.records import Timing
from tests import catalogue
from tests.estimates import estimate_plan
from tests.profile.profiles import profile, timing

SPEC = catalogue.model("llama3_8b")
CLUSTER = catalogue.cluster("dgx_h100", 8)
SETTINGS = CostSettings()


def times(*timings: Timing, imported: bool = False) -> LayerTimes:
    return LayerTimes(spec=SPEC, profiles=(profile(timings, imported=imported),))


def optimizer_s(found: LayerTimes | None, zero: ZeroStage) -> float:
    dims = ParallelDims(tensor_model_parallel_size=4, data_parallel_size=2)
    grid = PartialLayout(
        dims=dims, global_batch_size=8, micro_batch_size=1, sequence_parallel=True, zero=zero
    )
    whole = StagePartition(boundaries=(0, len(SPEC.layer_kinds())), pipeline_model_parallel_size=1)
    plan = estimate_plan(SPEC, CLUSTER, SETTINGS, grid.with_stages(whole), found)
    return plan.predicted.terms["optimizer"]


def test_of_its_memory_traffic_where_nothing_was_timed() -> None:
    accelerator = CLUSTER.accelerator
    rate = accelerator.memory_bandwidth_bytes_per_s * accelerator.memory_efficiency
    assert optimizer_step(accelerator, SETTINGS, None) == pytest.approx(30.0 / rate)
    untimed = times(timing(optimizer_s=0.0))
    assert optimizer_step(accelerator, SETTINGS, untimed) == pytest.approx(30.0 / rate)


def test_timed_blocks_count_by_their_parameters() -> None:
    small = timing(LayerBlock.ATTENTION, optimizer_s=1e-3, parameters=1_000)
    large = timing(LayerBlock.DENSE, optimizer_s=1e-2, parameters=10_999_000)
    step = optimizer_step(CLUSTER.accelerator, SETTINGS, times(small, large))
    assert step == pytest.approx(1e-9, rel=1e-6)


def test_what_was_measured_here_wins_over_what_was_imported() -> None:
    here, there = timing(optimizer_s=1e-3), timing(optimizer_s=5e-3)
    both = LayerTimes(
        spec=SPEC,
        profiles=(profile([there], name="there", imported=True), profile([here], name="here")),
    )
    assert both.optimizer_step() == pytest.approx(1e-9)
    assert times(there, imported=True).optimizer_step() == pytest.approx(5e-9)


def test_a_plan_takes_the_timed_step_and_zero_divides_it() -> None:
    timed = times(timing(optimizer_s=3e-3))  # 3 ns a parameter
    whole = optimizer_s(timed, ZeroStage.NONE)
    assert whole == pytest.approx(8.03e9 / 4 * 3e-9, rel=0.01)
    assert optimizer_s(timed, ZeroStage.OPTIMIZER) == pytest.approx(whole / 2, rel=1e-6)
