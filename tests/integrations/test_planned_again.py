"""The plan file of a recipe states its job: planned again it is the same, the framework apart."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import nest_megatron
from nest_megatron.api.sweep import WhatIf
from nest_megatron.config.catalogue import read_cluster
from nest_megatron.config.compose import compose
from nest_megatron.config.job import Job
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import recorded_settings
from nest_megatron.errors import UserInputError
from nest_megatron.integrations import megatron_bridge, nemo
from nest_megatron.integrations.megatron_lm.planning import job_request
from nest_megatron.integrations.plan_job import RecipeJob, recorded_fields
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner import Request
from tests import catalogue
from tests.integrations import frameworks

LIMITS = {
    "search.num_alternatives": 0,
    "search.max_pipeline_model_parallel_size": 2,
    "search.max_context_parallel_size": 1,
    "search.max_virtual_pipeline_model_parallel_size": 2,
}
TYPED = [f"{key}={value}" for key, value in LIMITS.items()]
SEARCHED = ("space", "settings", "own", "global_batch_size", "not_modelled", "numeric_offers")


def mixtral(framework: str) -> Any:
    spec = catalogue.model("mixtral_8x7b")
    if framework == "nemo":
        recipe = frameworks.nemo_recipe(spec, num_nodes=4)
        recipe.trainer.strategy.tensor_model_parallel_size = 2
        return recipe
    cfg = frameworks.bridge_config(spec)
    cfg.model.tensor_model_parallel_size = 2
    return cfg


def planned(framework: str, path: Path, cluster: str = "dgx_h100", **choices: Any) -> ParallelPlan:
    overrides = [*TYPED, "cost.tp_overlap=0.25", "search.tie_percent=0.5"]
    if framework == "nemo":
        found, _ = nemo.auto_recipe(
            mixtral(framework), cluster=cluster, overrides=overrides, **choices
        )
    else:
        found, _ = megatron_bridge.auto_recipe(
            mixtral(framework),
            cluster=cluster,
            overrides=[*overrides, "cluster.num_gpus=32"],
            environment={},
            **choices,
        )
    plan_file.write(found, path)
    return plan_file.read(path)


@pytest.fixture(scope="module", params=["nemo", "bridge"])
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(framework: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(framework) / "plan.yaml"
    planned(framework, path, keep=["tensor_model_parallel_size", "moe_permute_fusion"])
    return path


def what_if(path: Path, **changes: object) -> WhatIf:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return nest_megatron.whatif(path, {"search.num_alternatives": 0, **named})


def test_planned_again_unchanged_it_is_the_same(path: Path) -> None:
    plan = plan_file.read(path)
    first, more = what_if(path, memory="141GB").variants
    assert first.row.plan is not None
    assert more.row.plan is not None
    for part in ("model", "layout", "train", "placement", "predicted", "choice"):
        assert getattr(first.row.plan, part) == getattr(plan, part), part
    assert first.kept is not None
    assert first.kept.predicted == plan.predicted
    for found in (plan, more.row.plan):
        assert found.layout.dims.tensor_model_parallel_size == 2, "what it keeps stays"
        assert not found.layout.execution.moe_permute_fusion


def test_what_is_typed_wins_over_what_was_kept(path: Path) -> None:
    _, changed = what_if(path, parallel__tensor_model_parallel_size=4).variants
    assert changed.row.plan is not None
    assert changed.row.plan.layout.dims.tensor_model_parallel_size == 4


def test_the_defaults_of_what_a_file_need_not_say_are_those_of_the_settings() -> None:
    """They stand beside ``hydra_configs/plan.yaml``, so that reading a file composes nothing."""
    assert recorded_settings(compose(parse(["model=llama3_8b", "cluster=dgx_h100"]))) == ()


def test_what_the_recipe_says_itself_is_not_changed(path: Path) -> None:
    with pytest.raises(UserInputError, match="the job says bf16"):
        what_if(path, train__precision="fp8")


def asked_again(path: Path, job: Job, cluster: str, size: int) -> tuple[Request, Request]:
    """What is searched for a job, and for that of a plan's file that records it."""
    place = [f"cluster={cluster}", f"cluster.num_gpus={size}"]
    composed = compose(parse(place))
    asked = job_request(job, read_cluster(composed), composed)
    model = ("model=mixtral_8x7b", f"target={asked.settings.target}")
    plan = plan_file.read(path)
    origin = dataclasses.replace(plan.provenance, recipe=recorded_fields(job))
    text = plan_file.dump(dataclasses.replace(plan, provenance=origin))
    said = RecipeJob(fields=plan_file.load(text).provenance.recipe)
    again = said.request(compose(parse([*model, *place])))
    return asked, again


@pytest.mark.parametrize("offloads", [False, True])
def test_what_its_options_forbid_does_not_run_today(
    framework: str, path: Path, offloads: bool
) -> None:
    recipe = mixtral(framework)
    is_nemo = framework == "nemo"
    layout = recipe.trainer.strategy if is_nemo else recipe.model
    layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size = 1, 2
    (
        recipe.model.config if is_nemo else recipe.model
    ).cpu_offloading = offloads  # not in a pipeline
    read = nemo.read_recipe if framework == "nemo" else megatron_bridge.read_recipe
    for request in asked_again(path, read(recipe), "dgx_h100", 32):
        assert (request.present is None) is offloads


@pytest.mark.parametrize("cluster", ["dgx_h100", "gb200_nvl72"])
def test_its_job_is_searched_as_that_of_the_recipe(
    framework: str, path: Path, cluster: str
) -> None:
    read = nemo.read_recipe if framework == "nemo" else megatron_bridge.read_recipe
    asked, again = asked_again(path, read(mixtral(framework)), cluster, 72)
    assert {n: getattr(again, n) for n in SEARCHED} == {n: getattr(asked, n) for n in SEARCHED}
