"""The plans that ship are sound: they read back, keep Megatron's rules, and are what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.integrations.megatron_lm import rules
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, launch_request
from nest_megatron.parallel import plan_file
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner import plan
from nest_megatron.planner.pins import read_pinned
from recipes import make

RECIPES = sorted((Path(__file__).resolve().parent.parent / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 3


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_the_plan_of_today(path: Path) -> None:
    recipe = plan_file.read(path)
    assert rules.check(launch_request(recipe)) == ()
    staged = recipe.parallel.pipeline_model_parallel_size > 1
    assert ("--pipeline-model-parallel-layout" in recipe.launch[LAUNCHER].argv) == staged
    composed = compose(
        parse(
            [
                f"model={recipe.model.name}",
                f"cluster={recipe.cluster.name}",
                f"cluster.num_gpus={recipe.cluster.num_gpus}",
                f"train.global_batch_size={recipe.train.global_batch_size}",
            ]
        )
    )
    again = plan(request_of(composed, choose_execution=True))
    assert isinstance(again, ParallelPlan)
    assert again.parallel == recipe.parallel
    assert again.predicted == recipe.predicted
    assert again.alternatives == recipe.alternatives


@pytest.mark.parametrize("job", make.JOBS, ids=lambda job: job.model)
def test_a_script_is_of_its_pinned_plans(job: make.Job) -> None:
    for cluster in make.CLUSTERS:  # it differs in the plan that is named alone
        pinned = read_pinned(job.plan_path(cluster))
        assert pinned.pin.megatron_lm == make.RELEASE
        assert rules.check(launch_request(pinned.plan)) == ()
        assert job.script.read_text(encoding="utf-8") == make.script_text(job, pinned.plan)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", make.CLUSTERS)
@pytest.mark.parametrize("job", make.JOBS, ids=lambda job: job.model)
def test_a_pinned_plan_is_that_of_today(job: make.Job, cluster: str) -> None:
    path = job.plan_path(cluster)
    assert make.is_current(path, job.planned(cluster)), f"run python recipes/make.py {job.model}"
