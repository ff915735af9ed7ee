"""Terms of all ranks together: they add up to the step, and are those of the only rank there is."""

from __future__ import annotations

import pytest

from nest_megatron.cost_model.estimate import TERMS, estimate, mean_terms
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.stage_layout import StagePartition
from tests import catalogue


def job(pp: int, vpp: int = 1) -> tuple[CostModel, PartialLayout]:
    dims = ParallelDims(
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        data_parallel_size=16 // pp,
    )
    model = CostModel(
        catalogue.model("llama3_70b"), catalogue.cluster("dgx_h100", 128), CostSettings()
    )
    grid = PartialLayout(
        dims=dims, global_batch_size=128, micro_batch_size=1, sequence_parallel=True
    )
    return model, grid


@pytest.mark.parametrize(
    ("pp", "vpp", "cut"),
    [(1, 1, (0, 82)), (4, 1, (0, 8, 30, 60, 82)), (2, 2, (0, 21, 41, 61, 82))],
)
def test_they_add_up(pp: int, vpp: int, cut: tuple[int, ...]) -> None:
    model, grid = job(pp, vpp)
    partition = StagePartition(boundaries=cut, pipeline_model_parallel_size=pp)
    predicted = estimate(model, grid.with_stages(partition))
    mean = mean_terms(model, grid.with_stages(partition))
    assert tuple(mean) == TERMS
    assert sum(mean.values()) == pytest.approx(predicted.iteration_time_s)
    if pp == 1:
        assert mean == pytest.approx(predicted.terms)


def test_a_short_stage_that_ends_last_speaks_for_nobody() -> None:
    model, grid = job(4)
    partition = StagePartition(boundaries=(0, 4, 31, 58, 82), pipeline_model_parallel_size=4)
    predicted = estimate(model, grid.with_stages(partition))
    mean = mean_terms(model, grid.with_stages(partition))
    assert predicted.critical_rank == 2
    assert predicted.terms["compute"] > mean["compute"]
    assert predicted.terms["pipeline_bubble"] < mean["pipeline_bubble"]
