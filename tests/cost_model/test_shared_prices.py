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
