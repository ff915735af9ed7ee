"""Rounds of virtual stages of a size that the user states, against the passes as Megatron runs."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.rulebook.schedule import allows_interleaving
from nest_megatron.layout.stage_layout import uniform_partition
from tests import catalogue

P, V = 4, 4


@pytest.mark.parametrize(("microbatches", "group"), [(5, 5), (10, 5), (6, 6), (8, 8), (16, 8)])
def test_the_price_lies_close_to_its_rounds(microbatches: int, group: int) -> None:
    """All micro batches' work, and a bubble that rounds of another size hardly change."""
    spec = catalogue.model("llama3_8b")
    dims = ParallelDims(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=P,
        virtual_pipeline_model_parallel_size=V,
    )
    traits = ExecutionTraits(microbatch_group_size_per_vp_stage=group)
    settings = CostSettings(traits=traits)

    def step(size: int, settings: CostSettings) -> tuple[float, int]:
        model = CostModel(spec, catalogue.cluster("dgx_h100", 8), settings)
        grid = PartialLayout(
            dims=dims, global_batch_size=size, micro_batch_size=1, sequence_parallel=True
        )
        found = estimate(model, grid.with_stages(uniform_partition(spec, P, V)))
        assert sum(found.terms.values()) == pytest.approx(found.iteration_time_s, rel=1e-6)
        return found.iteration_time_s, max(each.peak_memory_bytes for each in found.stages)

    plain = dataclasses.replace(settings, traits=ExecutionTraits())
    (few, _), (many, _) = (step(size, plain) for size in (4 * P, 5 * P))
    a_microbatch = (many - few) / P
    expected = few + (microbatches - 4 * P) * a_microbatch
    found, peak = step(microbatches, settings)
    assert expected <= found * 1.001
    assert found <= expected * 1.12
    whole = microbatches - microbatches % P
    assert peak > step(whole, plain)[1]


@pytest.mark.parametrize(
    ("microbatches", "group", "whole", "allowed"),
    [
        (5, 0, False, False),
        (5, 5, False, True),
        (10, 5, False, True),
        (9, 5, False, True),  # the last round holds 4
        (9, 5, True, False),
        (8, 5, False, False),
        (4, 5, False, False),
        (8, 3, False, False),
    ],
)
def test_rounds_that_megatron_takes(
    microbatches: int, group: int, whole: bool, allowed: bool
) -> None:
    assert allows_interleaving(P, 2, microbatches, group, whole=whole) is allowed
    assert allows_interleaving(P, 1, microbatches, group, whole=whole)


def test_fewer_micro_batches_than_ranks_are_refused() -> None:
    dims = ParallelDims(pipeline_model_parallel_size=P, virtual_pipeline_model_parallel_size=V)
    grid = PartialLayout(
        dims=dims, global_batch_size=P - 1, micro_batch_size=1, sequence_parallel=False
    )
    spec = catalogue.model("llama3_8b")
    model = CostModel(spec, catalogue.cluster("dgx_h100", 8), CostSettings())
    with pytest.raises(UserInputError, match="for each of the 4 pipeline ranks"):
        estimate(model, grid.with_stages(uniform_partition(spec, P, V)))
