"""What a step waits for its slowest replica."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics

import pytest

from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.model import CostModel, expected_largest, straggler_wait
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.stage_layout import uniform_partition
from tests import catalogue

OFF = CostSettings(straggler_delay_s=0.0)


def step(num_gpus: int, settings: CostSettings, **degrees: int) -> dict[str, float]:
    """Terms of a step of GPT-3 with 64 micro batches, and the step itself as ``all``."""
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 8} | degrees
    dims = ParallelDims(data_parallel_size=num_gpus // math.prod(sizes.values()), **sizes)
    batch = 64 * dims.data_parallel_size
    grid = PartialLayout(
        dims=dims, global_batch_size=batch, micro_batch_size=1, sequence_parallel=True
    )
    spec = catalogue.model("gpt3_175b")
    model = CostModel(spec, catalogue.cluster("dgx_h100", num_gpus), settings)
    stages = uniform_partition(
        spec, dims.pipeline_model_parallel_size, 1, account_embedding=False, account_loss=False
    )
    found = estimate(model, grid.with_stages(stages))
    return {**found.terms, "all": found.iteration_time_s}


@pytest.mark.parametrize("count", [2, 8, 64, 512])
def test_the_slowest_of_many_is_the_mean_largest_draw(count: int) -> None:
    draw = random.Random(count)
    largest = [max(draw.gauss(0, 1) for _ in range(count)) for _ in range(4000)]
    assert expected_largest(count) == pytest.approx(statistics.fmean(largest), abs=0.05)


def test_one_host_waits_for_nobody() -> None:
    assert straggler_wait(0.025, 10.0, 8, 1) == 0.0
    assert step(8, CostSettings(), pipeline_model_parallel_size=1)["stragglers"] == 0.0


def test_a_step_loses_efficiency_as_its_replicas_grow() -> None:
    """Published weak scalings lose 2 to 10 % from 128 to 2,048 GPUs (dgxc-benchmarking)."""
    times = [step(gpus, CostSettings())["all"] for gpus in (128, 512, 2048, 8192, 32768)]
    assert times == sorted(times)
    assert 1.02 < times[2] / times[0] < 1.10
    assert 1.02 < times[4] / times[1] < 1.15


def test_the_term_is_off_with_one_setting_and_adds_up() -> None:
    on, off = step(2048, CostSettings()), step(2048, OFF)
    assert off["stragglers"] == 0.0 < on["stragglers"]
    assert on["all"] == pytest.approx(off["all"] + on["stragglers"], rel=1e-9)
    assert on["all"] == pytest.approx(sum(on.values()) - on["all"], rel=1e-9)


def test_it_grows_with_the_stages_that_hand_on_a_delay() -> None:
    assert straggler_wait(0.025, 10.0, 4, 64) == pytest.approx(
        2 * straggler_wait(0.025, 10.0, 1, 64)
    )
    doubled = dataclasses.replace(OFF, straggler_delay_s=0.05)
    half = dataclasses.replace(OFF, straggler_delay_s=0.025)
    assert step(512, doubled)["stragglers"] == pytest.approx(2 * step(512, half)["stragglers"])
