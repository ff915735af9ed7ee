"""The recurrence against brute force, and the kernel against its reference."""

from __future__ import annotations

from array import array

import pytest

from nest_megatron.research.nest_dp.records import UNREACHABLE, tables_of
from nest_megatron.research.nest_dp.search import best_pipeline, filled, has_kernel
from tests.research.nest_dp.brute_force import least_total
from tests.research.nest_dp.problems import random_problem

needs_kernel = pytest.mark.skipif(not has_kernel(), reason="the kernel is not built")
BACKENDS = [False, pytest.param(True, marks=needs_kernel)]


@pytest.mark.parametrize("compiled", BACKENDS)
def test_no_plan_is_faster(compiled: bool) -> None:
    answered = 0
    for seed in range(250):
        problem = random_problem(seed)
        found, least = best_pipeline(problem, compiled=compiled), least_total(problem)
        assert (found and found.total) == least, seed
        answered += least is not None
    assert 100 < answered < 250


@needs_kernel
def test_the_kernel_is_the_reference() -> None:
    for seed in range(1000, 1120):
        problem = random_problem(seed, most_nodes=6, most_devices=9)
        t = tables_of(problem)
        for cap, sync_cap in ((UNREACHABLE, UNREACHABLE), (40, UNREACHABLE), (60, 20)):
            caps = array("q", [cap] * (t.most_stages + 1))
            kernel, reference = (
                filled(t, caps, sync_cap, compiled=compiled) for compiled in (True, False)
            )
            assert kernel == reference, seed
        assert best_pipeline(problem, compiled=True) == best_pipeline(problem, compiled=False)
