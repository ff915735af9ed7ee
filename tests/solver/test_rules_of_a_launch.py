"""Every candidate of a search passes the rules that its launch is held to."""

from __future__ import annotations

import dataclasses
import random
from itertools import islice
from typing import Any

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.layout.cuda_graphs import CudaGraphs
from nest_megatron.layout.recompute import RecomputeModule, selective_recompute
from nest_megatron.layout.rulebook import RULES
from nest_megatron.layout.rulebook.execution import (
    allows_execution,
    decisive_modules,
)
from nest_megatron.layout.rulebook.facts import violations
from nest_megatron.layout.rulebook.search import is_searched
from nest_megatron.model.execution import PLAIN, Execution, GraphImpl
from nest_megatron.solver.executions import has_graphs, kind_of, launch_request
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.space import SearchSpace
from tests import catalogue
from tests.solver.jobs import families, small_spec
from tests.solver.test_executions import FREE, GRAPHS, OFFLOADED

LOCAL = Execution(cuda_graph_impl=GraphImpl.LOCAL)
JOBS: list[dict[str, Any]] = [
    {"executions": FREE},
    {"executions": GRAPHS},
    {"executions": {**OFFLOADED, **GRAPHS}},
    {"execution": LOCAL, "cuda_graphs": CudaGraphs(impl="local")},
    {"transformer_impl": "local"},
    {"recompute": selective_recompute([RecomputeModule.CORE_ATTN]), "executions": GRAPHS},
]


def grids_of(seed: int, asked: dict[str, Any]) -> GridSpace:
    rng = random.Random(seed)
    spec = dataclasses.replace(
        small_spec(rng),
        attention_dropout=rng.choice([0.0, 0.1]),
        hidden_dropout=rng.choice([0.0, 0.1]),
    )
    precision = rng.choice([Precision.BF16, Precision.FP8])
    local = asked.get("transformer_impl") == "local"
    traits = ExecutionTraits(flash_attention=not local)
    settings = CostSettings(precision=Precision.BF16 if local else precision, traits=traits)
    space = SearchSpace(
        limits={"micro_batch_size": 1, "virtual_pipeline_model_parallel_size": 2},
        version=rng.choice(["0.16", "0.20"]),
        **asked,
    )
    return GridSpace(CostModel(spec, catalogue.cluster("dgx_h100", 4), settings), 8, space)


@pytest.mark.parametrize("asked", JOBS, ids=range(len(JOBS)))
@pytest.mark.parametrize("seed", range(6))
def test_every_candidate_passes_them(seed: int, asked: dict[str, Any]) -> None:
    grids = grids_of(seed, asked)
    rng = random.Random(seed)
    for family in islice(families(grids), None, None, rng.choice([3, 5, 7])):
        for recompute in grids.recompute_settings(family):
            grid = dataclasses.replace(family, recompute=recompute)
            request = launch_request(grids.model, grids.space, grid)
            assert not list(violations(request.facts, filter(is_searched, RULES)))


@pytest.mark.parametrize("seed", range(6))
def test_one_setting_stands_for_its_like(seed: int) -> None:
    """What a way allows of one recomputation it allows of all that ``kind_of`` takes for it."""
    grids = grids_of(seed, {"executions": {**FREE, **GRAPHS}})
    decisive = decisive_modules(grids.model.spec, graphs=has_graphs(grids.space))
    rng = random.Random(seed)
    for family in islice(families(grids), 0, None, 11):
        for way in {PLAIN, family.execution, *grids.executions.possible(family)}:
            for _ in range(10):
                modules = rng.sample(list(RecomputeModule), rng.randint(1, 4))
                setting = selective_recompute(modules)
                answers = {
                    allows_execution(
                        launch_request(
                            grids.model,
                            grids.space,
                            dataclasses.replace(family, recompute=each, execution=way),
                        )
                    )
                    for each in (setting, kind_of(setting, decisive))
                }
                assert len(answers) == 1
