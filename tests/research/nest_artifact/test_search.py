"""The search against brute force, and the kernel against its reference."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron.research.nest_artifact.price import (
    AS_ARTIFACT,
    SWITCHES,
    ArtifactRule,
    Instance,
    price,
)
from nest_megatron.research.nest_artifact.search import (
    ArtifactSolution,
    NoSolution,
    boundary_table,
    deepest,
    has_kernel,
    solve,
)
from tests.research.nest_artifact.brute_force import least_time
from tests.research.nest_artifact.instances import instances, recorded

needs_kernel = pytest.mark.skipif(not has_kernel(), reason="the kernel is not built")
rules = st.builds(ArtifactRule, **{name: st.booleans() for name in SWITCHES})
BACKENDS = [False, pytest.param(True, marks=needs_kernel)]


@pytest.mark.parametrize("compiled", BACKENDS)
@settings(max_examples=150, deadline=None)
@given(instance=instances(), rule=rules)
def test_no_plan_is_faster(compiled: bool, instance: Instance, rule: ArtifactRule) -> None:
    found, least = solve(instance, rule, compiled=compiled), least_time(instance, rule)
    if least is None:
        assert isinstance(found, NoSolution)
        return
    assert isinstance(found, ArtifactSolution)
    assert found.price.time_per_batch == least
    assert price(instance, found.placement, rule) == found.price


@needs_kernel
@settings(max_examples=300, deadline=None)
@given(instance=instances(most_layers=9), rule=rules, most=st.sampled_from([math.inf, 60.0, 90.0]))
def test_the_kernel_is_the_reference(instance: Instance, rule: ArtifactRule, most: float) -> None:
    for tp in instance.chains:
        if deepest(instance, tp):
            kernel, reference = (
                boundary_table(instance, tp, rule, most_weight_bytes=most, compiled=compiled)
                for compiled in (True, False)
            )
            assert kernel == reference


@needs_kernel
@pytest.mark.parametrize("name", ["llama2_64", "bertlarge_128", "mixtral_64", "llama3_128"])
def test_the_kernel_is_the_reference_on_recorded_instances(name: str) -> None:
    instance = recorded(name)
    assert solve(instance, compiled=True) == solve(instance, compiled=False)


def test_a_layer_that_fits_nowhere() -> None:
    instance = dataclasses.replace(recorded("llama2_64"), memory_bytes=5e9)
    found = solve(instance)
    assert isinstance(found, NoSolution)
    layer = instance.chains[1].layers[1]
    assert found.missing_bytes == 2 * layer.weight_bytes + layer.activation_bytes - 5e9
    assert "ZeRO" in found.reason


def test_too_few_devices() -> None:
    found = solve(dataclasses.replace(recorded("llama2_64"), context_parallel_size=128))
    assert isinstance(found, NoSolution)
    assert found.reason == "a stage takes 128 devices, and there are 64"
    short = dataclasses.replace(recorded("llama2_64"), context_parallel_size=64)
    found = solve(short)
    assert isinstance(found, NoSolution)
    assert "depth" in found.reason


def test_the_heaviest_stage_summed() -> None:
    rule = dataclasses.replace(AS_ARTIFACT, sync_first_stage_only=False)
    found, first = solve(recorded("llama2_64"), rule), solve(recorded("llama2_64"))
    assert isinstance(found, ArtifactSolution)
    assert isinstance(first, ArtifactSolution)
    assert found.price.sync > first.price.sync
    assert found.price.time <= price(recorded("llama2_64"), first.placement, rule).time
