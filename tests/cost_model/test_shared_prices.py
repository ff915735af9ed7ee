"""What is priced once for many: equal chunks, and a job with other figures of its cluster."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from nest_megatron.cost_model import block_times
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import chunk_cost, chunks_of, evaluate
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.layout.recompute import Recompute, RecomputeGranularity, RecomputeMethod
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.space import SearchSpace
from tests import catalogue
from tests.report.plans import hand_plan, searched_plan

BLOCK = Recompute(granularity=RecomputeGranularity.FULL, method=RecomputeMethod.BLOCK, num_layers=2)


@pytest.mark.parametrize("recompute", [Recompute(), BLOCK])
@pytest.mark.parametrize("shape", [(4, 1), (8, 4), (64, 1)])
def test_equal_chunks_cost_what_each_costs(shape: tuple[int, int], recompute: Recompute) -> None:
    plan = hand_plan(*shape)
    grid = dataclasses.replace(plan.layout, recompute=recompute)
    problem = stage_problem(CostModel(plan.model, plan.cluster, CostSettings()), grid)
    boundaries = plan.layout.partition.boundaries
    each = [chunk_cost(problem, first, end) for first, end in pairwise(boundaries)]
    assert chunks_of(problem, boundaries) == each


def test_a_job_with_other_figures_builds_no_layer_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """And costs what it does by itself."""
    plan, settings = searched_plan(), CostSettings()
    grid, boundaries = plan.layout, plan.layout.partition.boundaries
    model = CostModel(plan.model, plan.cluster, settings)
    evaluate(stage_problem(model, grid), boundaries)
    device = dataclasses.replace(
        plan.cluster.accelerator,
        memory_bandwidth_bytes_per_s=2 * plan.cluster.accelerator.memory_bandwidth_bytes_per_s,
    )
    cluster = dataclasses.replace(plan.cluster, accelerator=device)
    for job in ((cluster, settings), (plan.cluster, CostSettings(expert_imbalance=1.5))):
        alone = stage_problem(CostModel(plan.model, *job), grid)
        with monkeypatch.context() as patch:
            patch.setattr(block_times, "block_graph", None)
            assert stage_problem(model.with_figures(*job), grid) == alone


@pytest.mark.parametrize(("name", "cluster"), [("mixtral_8x7b", "gb200_nvl72"), ("t5_11b", "b200")])
def test_a_job_on_another_number_of_gpus_costs_what_it_does_by_itself(
    name: str, cluster: str
) -> None:
    spec, settings = catalogue.model(name), CostSettings()
    of_host = catalogue.cluster(cluster, 8)
    small = CostModel(spec, of_host, settings)
    compared = 0
    for num_gpus in (8, 16, 144):
        larger = of_host.resized(num_gpus)
        alone, shared = CostModel(spec, larger, settings), small.with_figures(larger, settings)
        grids = GridSpace(alone, 4 * num_gpus, SearchSpace(limits={"micro_batch_size": 2}))
        pipelines = [grid for shard in grids.shards() for grid in grids.grids(shard)]
        for grid in pipelines[::5]:
            assert stage_problem(shared, grid) == stage_problem(alone, grid)
            compared += 1
    assert compared > 5
