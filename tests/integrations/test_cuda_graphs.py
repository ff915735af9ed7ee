"""Recomputation beside CUDA graphs, in every launcher; megatron-core itself is asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nest_megatron.integrations import megatron_bridge, nemo
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.layout.cuda_graphs import cuda_graphs
from nest_megatron.layout.recompute import NO_RECOMPUTE, RecomputeGranularity
from nest_megatron.report.failure import NothingFitsError
from nest_megatron.solver.space import recompute_settings
from tests import catalogue
from tests.integrations.frameworks import bridge_config, nemo_recipe
from tests.integrations.test_read import BASE
from tests.layout.test_cuda_graphs import goes_with

LOCAL = {"cuda_graph_impl": "local", "cuda_graph_scope": "full"}
CASES = [
    LOCAL,
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
    {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]},
    {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,moe_router"},
    {"enable_cuda_graph": True},
    {"external_cuda_graph": True, "cuda_graph_scope": ["attn"]},
]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("model", ["llama3_8b", "mixtral_8x7b"])
@pytest.mark.parametrize("fields", CASES)
def test_megatron_core_takes_every_recompute_setting_that_is_left(
    fields: dict[str, Any], model: str, dropout: float
) -> None:

    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    spec = dataclasses.replace(
        catalogue.model(model), attention_dropout=dropout, hidden_dropout=dropout
    )
    if not spec.is_moe and "moe_router" in str(fields):
        pytest.skip("megatron-core refuses such a scope of a dense model by itself")
    graphs = cuda_graphs(fields)
    assert graphs is not None
    settings = [
        each
        for each in recompute_settings(spec, 2, flash_attention=False)
        if goes_with(graphs, spec, each)
    ]
    full = [each for each in settings if each.granularity is RecomputeGranularity.FULL]
    assert bool(full) == ("full_iteration" in str(fields))
    for each in settings:
        config.TransformerConfig(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            num_attention_heads=spec.num_attention_heads,
            attention_dropout=dropout,
            hidden_dropout=dropout,
            num_moe_experts=spec.num_experts,
            moe_grouped_gemm=spec.is_moe,
            add_bias_linear=False,
            moe_token_dispatcher_type="alltoall",
            recompute_granularity=None if each == NO_RECOMPUTE else each.granularity,
            recompute_method=each.method,
            recompute_num_layers=each.num_layers,
            recompute_modules=list(map(str, each.modules)) or None,
            bf16=True,
            **fields,
        )


ALONE = [
    "parallel.tensor_model_parallel_size=1",
    "parallel.pipeline_model_parallel_size=1",
    "parallel.context_parallel_size=1",
]


@pytest.mark.parametrize("fields", [{}, LOCAL])
def test_recipes_recompute_no_whole_layer_beside_graphs(fields: dict[str, Any]) -> None:
    """A job that fits with whole layers recomputed alone does not fit beside graphs."""
    spec = catalogue.model("llama3_8b")
    recipe, cfg = nemo_recipe(spec, num_nodes=1), bridge_config(spec)
    recipe.data.seq_length = cfg.dataset.seq_length = 16_384
    for config in (recipe.model.config, cfg.model):
        for name, value in fields.items():
            setattr(config, name, value)

    def planned() -> None:
        plan, _ = nemo.auto_recipe(
            recipe, cluster="dgx_h100", overrides=ALONE, vocab_size=spec.vocab_size
        )
        assert plan.arguments["recompute_granularity"] == "full"
        size = "cluster.num_gpus=8"
        plan, _ = megatron_bridge.auto_recipe(
            cfg, cluster="dgx_h100", overrides=[*ALONE, size], environment={}
        )
        assert plan.arguments["recompute_granularity"] == "full"

    if not fields:
        planned()
        return
    for auto, job, more in (
        (nemo.auto_recipe, recipe, {"vocab_size": spec.vocab_size}),
        (megatron_bridge.auto_recipe, cfg, {"environment": {}}),
    ):
        overrides = [*ALONE] if job is recipe else [*ALONE, "cluster.num_gpus=8"]
        with pytest.raises(NothingFitsError):
            auto(job, cluster="dgx_h100", overrides=overrides, **more)


def test_megatrons_own_flags_say_the_same() -> None:
    job = read_job(read_command(f"{BASE} --cuda-graph-impl local"))
    assert job.graphs is not None
    assert job.graphs.impl != "full_iteration"
    job = read_job(read_command(BASE))
    assert job.graphs is None
