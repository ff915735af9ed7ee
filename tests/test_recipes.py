"""The plans that ship are sound: they read back, keep Megatron's rules, and are what they say."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, launch_request
from nest_megatron.integrations.megatron_lm.other_layout import PlannedJob
from nest_megatron.layout import plan_file, rulebook
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.stage_layout import is_uniform
from nest_megatron.planner import plan
from nest_megatron.planner.layouts import pricing
from nest_megatron.planner.pins import read_pinned
from nest_megatron.solver.space import SearchSpace
from recipes import make
from tests import catalogue

RECIPES = sorted((Path(__file__).resolve().parent.parent / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 3


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_the_plan_of_today(path: Path) -> None:
    recipe = plan_file.read(path)
    assert not tuple(rulebook.check(launch_request(recipe)))
    is_even = is_uniform(recipe.model, recipe.layout.partition)
    assert ("--pipeline-model-parallel-layout" in recipe.launch[LAUNCHER].argv) is not is_even
    composed = compose(
        parse(
            [
                f"model={recipe.model.name}",
                f"cluster={recipe.cluster.name}",
                f"cluster.num_gpus={recipe.cluster.num_gpus}",
                f"train.global_batch_size={recipe.layout.global_batch_size}",
            ]
        )
    )
    again = plan(request_of(composed, choose_execution=True))
    assert isinstance(again, ParallelPlan)
    assert again.layout == recipe.layout
    assert again.predicted == recipe.predicted
    assert again.alternatives == recipe.alternatives


ALL = [
    pytest.param(recipe, cluster, id=f"{recipe.framework}-{recipe.name}-{cluster}")
    for job in make.jobs()
    for recipe in job.recipes()
    for cluster in make.CLUSTERS
]
every_plan = pytest.mark.parametrize(("recipe", "cluster"), ALL)
scripts = pytest.mark.parametrize(
    "job", [job for job in make.jobs() if not job.reason], ids=lambda job: job.model
)


read = functools.cache(read_pinned)


@every_plan
def test_a_pinned_plan_is_whole_and_for_its_job(recipe: make.Recipe, cluster: str) -> None:
    pinned = read(recipe.path(cluster))  # refuses one of which a byte has changed
    plan, job = pinned.plan, recipe.job
    assert plan.cluster.name == cluster
    assert plan.model.name == job.model or recipe.framework != make.LM
    assert plan.layout.global_batch_size == job.global_batch_size
    assert plan.layout.num_gpus == job.num_gpus[cluster]
    assert plan.provenance.settings["target"] == recipe.target
    assert plan.predicted.fits
    assert plan.search.certificate in make.FINISHED  # time has cut no search
    assert pinned.pin.megatron_lm == (job.release if recipe.framework == make.LM else None)


@scripts
def test_a_script_is_of_its_pinned_plans(job: make.Job) -> None:
    recipe = next(job.recipes())
    plans = {cluster: read(recipe.path(cluster)).plan for cluster in make.CLUSTERS}
    text = job.script.read_text(encoding="utf-8")
    assert text == make.script_text(job, plans)
    for each in plans.values():
        assert not tuple(rulebook.check(launch_request(each, version=job.release)))
        assert make.job_argv(job, each) == make.job_argv(job, plans["dgx_h100"])


def test_there_is_no_other_file() -> None:
    plans = {recipe.path(cluster) for recipe, cluster in (param.values for param in ALL)}
    assert plans == {*make.ROOT.glob("*/plans/*")}
    written = {job.script for job in make.jobs() if not job.reason}
    assert written == {*(make.ROOT / make.LM).glob("*.sh")}


def test_the_readme_names_what_there_is_and_why_others_are_not() -> None:
    assert (make.ROOT / "README.md").read_text(encoding="utf-8") == make.readme_text()


def test_every_family_of_the_catalogue_is_named() -> None:
    named = [name for job in make.jobs() for name in (job.model, *job.covers)]
    named += [name for names in make.OTHERS.values() for name in names]
    assert [name for name in catalogue.names("model") if not name.startswith(tuple(named))] == []


def test_a_wrong_word_starts_nothing() -> None:
    script = make.ROOT / make.LM / "mixtral_8x7b.sh"
    done = subprocess.run(["bash", script, "dgx_h10"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage: bash mixtral_8x7b.sh dgx_h100|gb200_nvl72" in done.stderr
    with pytest.raises(UserInputError, match="mixtral_8x7b"):
        make.main(["mixtral_8x7"])


@every_plan
def test_a_pinned_plan_is_priced_so_today(recipe: make.Recipe, cluster: str) -> None:
    plan = read(recipe.path(cluster)).plan
    job = PlannedJob(plan, None)
    today, pinned = pricing(job.request(SearchSpace()))(job.own).predicted, plan.predicted
    assert (today.iteration_time_s, today.peak_memory_bytes) == (
        pinned.iteration_time_s,
        pinned.peak_memory_bytes,
    ), f"run python recipes/make.py --framework {recipe.framework} {recipe.job.model}"


def test_virtual_stages_of_a_hybrid_model_are_priced_by_the_rules_of_their_release() -> None:
    """Megatron-LM 0.16.1 has none, 0.20 has."""
    plan = read(make.ROOT / make.LM / "plans" / "nemotron_h_56b_gb200_nvl72.yaml").plan
    job = PlannedJob(plan, None)
    assert plan.arguments["virtual_pipeline_model_parallel_size"] > 1
    assert job.versus(job.own).plan.predicted.iteration_time_s == plan.predicted.iteration_time_s


#: One of each kind, planned in seconds: dense, experts, hybrid, two stacks, an encoder. All of them
#: are priced again by a test above, and those of frameworks planned again beside the frameworks.
PLANNED = ("phi4_14b", "moonlight_16b_a3b", "mamba2_hybrid_8b", "t5_11b", "bert_large")


@pytest.mark.slow
@pytest.mark.parametrize("model", PLANNED)
def test_a_pinned_plan_is_that_of_today(model: str) -> None:
    job = next(job for job in make.jobs() if job.model == model)
    recipe = next(job.recipes())
    for cluster in make.CLUSTERS:
        path = recipe.path(cluster)
        current = make.is_current(path, recipe.planned(cluster))
        assert current, f"{path.name}: run python recipes/make.py {job.model}"
