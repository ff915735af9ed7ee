"""CUDA graphs in every spelling, and what may stand beside them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import read_request
from nest_megatron.layout.cuda_graphs import CudaGraphs, cuda_graphs, kept_modules
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.recompute import (
    FULL_RECOMPUTE,
    Recompute,
    RecomputeModule,
    selective_recompute,
)
from nest_megatron.layout.rulebook import check
from nest_megatron.layout.rulebook.facts import LaunchRequest
from nest_megatron.model.execution import Execution, GraphImpl
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.solver.grids import GridSpace
from tests.contract.hand_models import LLAMA
from tests.solver.jobs import families
from tests.test_conflict import COMMAND

DROPS = dataclasses.replace(LLAMA, hidden_dropout=0.1, attention_dropout=0.1)


@pytest.mark.parametrize(
    ("values", "impl", "modules"),
    [
        ({"enable_cuda_graph": True}, "local", set()),
        ({"external_cuda_graph": True}, "transformer_engine", set()),
        (
            {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
            "full_iteration",
            (),
        ),
        ({"cuda_graph_impl": "full_iteration"}, "full_iteration", set()),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, "local", set()),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "moe_router"]},
            "transformer_engine",
            {"attn", "moe_router"},
        ),
    ],
)
def test_every_spelling_is_read(values: dict[str, Any], impl: str, modules: set[str]) -> None:
    found = cuda_graphs(values)
    assert found is not None
    assert (found.impl, found.scope) == (impl, frozenset(modules))
    assert cuda_graphs({"cuda_graph_impl": "none"}) is None


@pytest.mark.parametrize(
    ("spec", "graphs", "modules"),
    [
        (LLAMA, CudaGraphs(impl="local"), set()),
        (DROPS, CudaGraphs(impl="local"), {"core_attn", "mlp", "moe"}),
        (DROPS, CudaGraphs(impl="local", scope=frozenset({"attn"})), {"core_attn"}),
        (LLAMA, CudaGraphs(impl="local", jitters=True), {"moe"}),
        (
            LLAMA,
            CudaGraphs(impl="transformer_engine", scope=frozenset({"attn", "moe_router"})),
            {"moe"},
        ),
    ],
)
def test_what_may_not_be_computed_again(
    spec: TransformerSpec, graphs: CudaGraphs, modules: set[str]
) -> None:
    assert {module.value for module in kept_modules(spec, captured(graphs), graphs)} == modules
    for module in RecomputeModule:
        setting = selective_recompute([module])
        assert goes_with(graphs, spec, setting) == (module.value not in modules)
    assert not goes_with(graphs, spec, FULL_RECOMPUTE)
    assert goes_with(CudaGraphs(impl="full_iteration"), spec, FULL_RECOMPUTE)


def captured(graphs: CudaGraphs) -> Execution:
    """What a job's graphs capture, as layers are carried out."""
    return Execution(
        cuda_graph_impl=GraphImpl(graphs.impl), cuda_graph_scope=tuple(sorted(graphs.scope))
    )


def goes_with(graphs: CudaGraphs, spec: TransformerSpec, recompute: Recompute) -> bool:
    """Whether a launch may have graphs and what is recomputed together."""
    asked = LaunchRequest(
        spec=spec,
        dims=ParallelDims(),
        micro_batch_size=1,
        global_batch_size=1,
        recompute=recompute,
        execution=captured(graphs),
        cuda_graphs=graphs,
    )
    return not {"cuda_graph_recompute", "cuda_graph_full_recompute"}.intersection(
        rule.id for rule, _ in check(asked)
    )


def test_a_search_keeps_to_them() -> None:
    composed = compose(parse(["cluster=dgx_h100"]))
    flags = "--global-batch-size 64 --cuda-graph-impl local --num-experts 8 --disable-bias-linear"
    expert_sizes = {}
    for version in ("0.16", "0.20"):
        _, request = read_request(TypedCommand(text=COMMAND + flags, version=version), composed)
        grids = GridSpace(request.cost_model(), request.global_batch_size, request.space)
        tried = {kind for grid in families(grids) for kind in grids.recompute_settings(grid)}
        assert tried
        assert all(kind.method is None for kind in tried)
        modules = {module for kind in tried for module in kind.modules}
        assert not modules & {RecomputeModule.MLP, RecomputeModule.MOE}  # hidden dropout is 0.1
        expert_sizes[version] = {grid.dims.expert_model_parallel_size for grid in families(grids)}
    assert expert_sizes["0.16"] == {1}
    assert max(expert_sizes["0.20"]) == 8
    job = read_job(read_command(COMMAND + "--global-batch-size 64"))
    assert job.graphs is None
