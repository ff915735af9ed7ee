"""Megatron's own calculator of micro batches steps through a whole run under a plan."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest

from nest_megatron.layout.batch_schedule import read_schedule
from tests.megatron_lm.functional import home

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not home(), reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]
SEQ_LENGTH, SAMPLES = 512, 60_000


@pytest.fixture(scope="module")
def calculators() -> ModuleType:
    checkout = home()
    assert checkout is not None
    path = checkout / "megatron/core/num_microbatches_calculator.py"
    spec = importlib.util.spec_from_file_location("calculators", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calculator(module: ModuleType, stated: dict[str, Any], last: int, samples: int) -> Any:
    rank, together = 1, {"micro_batch_size": samples, "data_parallel_size": 1}
    common = {"decrease_batch_size_if_needed": False, "rank": rank, **together}
    if ramp := stated.get("rampup_batch_size"):
        names = ("start_global_batch_size", "batch_size_increment", "ramup_samples")
        own = dict(zip(names, ramp, strict=True))
        kind = module.RampupBatchsizeNumMicroBatchesCalculator
        return kind(global_batch_size=last, **own, **common)
    steps = stated["step_batch_size_schedule"]
    kind = module.StepBatchsizeNumMicroBatchesCalculator
    return kind(schedule=steps, seq_length=SEQ_LENGTH, **common)


def step_through(own: Any, consumed: Iterable[int]) -> None:
    for samples in consumed:
        own.update(samples, consistency_check=True)


@pytest.mark.parametrize(
    ("stated", "last"),
    [
        ({"rampup_batch_size": [16, 16, 30_000]}, 128),
        ({"rampup_batch_size": [12, 20, 7_001]}, 72),
        ({"step_batch_size_schedule": "0:48 2M:96 20M:144"}, 144),
    ],
)
def test_a_run_is_stepped_through(
    calculators: ModuleType, stated: dict[str, Any], last: int
) -> None:
    if "rampup_batch_size" in stated and not hasattr(
        calculators, "RampupBatchsizeNumMicroBatchesCalculator"
    ):
        pytest.skip("this release has no ramp")
    if "step_batch_size_schedule" in stated and not hasattr(
        calculators, "StepBatchsizeNumMicroBatchesCalculator"
    ):
        pytest.skip("this release has no schedule of steps")
    found = read_schedule(stated.get, last=last, seq_length=SEQ_LENGTH, samples=SAMPLES)
    assert found is not None
    own = calculator(calculators, stated, last, found.batch_unit)
    consumed, steps = 0, dict.fromkeys(found.sizes, 0)
    while consumed < SAMPLES:
        own.update(consumed, consistency_check=True)
        steps[own.get_current_global_batch_size()] += 1
        consumed += own.get_current_global_batch_size()
    for part in found.parts:
        assert part.samples is not None
        assert steps[part.global_batch_size] == pytest.approx(
            part.samples / part.global_batch_size, abs=1.01
        )
    twice = calculator(calculators, stated, last, 2 * found.batch_unit)
    starts = [sum(each.samples or 0 for each in found.parts[:k]) for k in range(len(found.parts))]
    with pytest.raises(AssertionError, match="not divisible"):
        step_through(twice, [start + (start > 0) for start in starts])
