"""The recipes of this repository run as they are, and frameworks take their pinned plans."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import runpy
from pathlib import Path
from types import ModuleType

import pytest

from recipes import make

FRAMEWORKS = {"nemo": "nemo_run", "nemo_run": "nemo", "megatron_bridge": "megatron.bridge"}
EXAMPLES = sorted({*make.ROOT.glob("*/*.py")} - {*make.ROOT.glob("*/pretrain.py")})

pytestmark = pytest.mark.nemo
if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)


def require(folder: str) -> None:
    """Skip without the framework of a folder; stand in for what this machine lacks."""
    if importlib.util.find_spec(FRAMEWORKS[folder]) is None:
        pytest.skip(f"{FRAMEWORKS[folder]} is not installed (.ci/nemo and .ci/bridge install them)")
    if folder == "megatron_bridge":
        from tests.nemo import substitutes

        substitutes.install()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_runs(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    require(path.parent.name)
    runpy.run_path(str(path), run_name="__main__")
    assert "this job runs as" in capfd.readouterr().out


def pinned(framework: str) -> pytest.MarkDecorator:
    """Every pinned plan of a framework's recipes."""
    found = [each for job in make.jobs() for each in job.recipes() if each.framework == framework]
    cases = [
        pytest.param(recipe, cluster, id=f"{recipe.name}-{cluster}")
        for recipe in found
        for cluster in make.CLUSTERS
    ]
    return pytest.mark.parametrize(("recipe", "cluster"), cases)


def check_current(recipe: make.Recipe, cluster: str) -> None:
    """The plan that ships is what the planner finds for the framework's own configuration."""
    path = recipe.path(cluster)
    current = make.is_current(path, recipe.planned_as_made(cluster))
    command = f"recipes/make.py --framework {recipe.framework} {recipe.job.model}"
    assert current, f"{path.name}: run python {command}"


def pretrain(folder: str) -> ModuleType:
    """The script of a folder that applies its pinned plans."""
    require(folder)
    path = make.ROOT / folder / "pretrain.py"
    spec = importlib.util.spec_from_file_location(f"{folder}_pretrain", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pinned(make.NEMO)
def test_nemo_takes_a_pinned_plan(recipe: make.Recipe, cluster: str) -> None:
    task, plan, _ = pretrain(make.NEMO).planned(recipe.name, cluster)
    from tests.nemo import recipes

    recipes.validate(task)
    strategy = task.trainer.strategy
    for field in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        assert getattr(strategy, field) == plan.arguments[field]
    assert task.trainer.num_nodes * task.trainer.devices == plan.layout.num_gpus
    check_current(recipe, cluster)


@pinned(make.BRIDGE)
def test_bridge_takes_a_pinned_plan(recipe: make.Recipe, cluster: str) -> None:
    module = pretrain(make.BRIDGE)
    release = importlib.metadata.version("megatron-bridge")
    if not release.startswith("0.6"):
        pytest.skip(f"Megatron-Bridge {release} is installed, and the plans are for 0.6")
    from tests.nemo import bridge

    cfg, plan, _ = bridge.built(lambda: module.planned(recipe.name, cluster))
    trained = bridge.validate(cfg, plan.layout.num_gpus)
    for field in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        assert getattr(trained.model, field) == plan.arguments[field]
    bridge.built(check_current, recipe=recipe, cluster=cluster)
