"""The plugin that every Hydra application on the machine loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nest_megatron.config.compose import compose
from nest_megatron.integrations.hydra import register
from tests.cli.runs import environment
from tests.integrations.hydra_app.apps import AUTO, make_app, run_app

HEAVY = ("torch", "numpy", "megatron", "nest_megatron.planner", "nest_megatron.solver", "rich")


def loaded_after(code: str) -> list[str]:
    """What of the heavy modules a process has loaded."""
    tell = f"{code}\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", tell], capture_output=True, text=True, env=environment(), check=True
    )
    return done.stdout.split()


def test_discovery_loads_nothing_of_ours_but_the_resolver() -> None:
    code = """
from hydra import compose, initialize
with initialize(version_base="1.3"):
    assert compose(overrides=["+nest=auto"]).nest.mode == "auto"
"""
    assert loaded_after(code) == []


def test_our_own_configurations_have_no_group_nest() -> None:
    assert not hasattr(compose([]), "nest")


def test_the_application_s_own_group_comes_first(tmp_path: Path) -> None:
    script = make_app(
        tmp_path, auto="# @package _global_\nmodel: {tensor_model_parallel_size: 7}\n"
    )
    run = run_app(script, "+nest=auto")
    assert run.out.startswith("TRAINS 7 1 4"), run.err


def test_the_search_path_names_us(tmp_path: Path) -> None:
    run = run_app(make_app(tmp_path), "--info", "searchpath")
    assert "pkg://nest_megatron.hydra_configs.hydra_app" in run.out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("nest=auto", "Could not override 'nest'"),
        ("+nest=atuo", "Could not find 'nest/atuo'"),
        ("++nest=auto", "force-add"),
    ],
)
def test_misspelt_words_are_hydra_s_errors(tmp_path: Path, word: str, said: str) -> None:
    run = run_app(make_app(tmp_path), word)
    assert run.code == 1
    assert said in run.err


PLAIN = """
    import hydra

    @hydra.main(version_base="1.3", config_path="conf", config_name="app")
    def main(cfg):
        print("RUNS", cfg.get("nest"))

    main()
"""


@pytest.mark.parametrize(
    ("config", "word", "said"),
    [
        ("eggs: 3", "+nest=birds", "RUNS birds"),  # a new value
        ("nest: robin", "nest=birds", "RUNS birds"),  # a field of the application's own
        ("nest: {eggs: 3}", "nest.eggs=4", "RUNS {'eggs': 4}"),
    ],
)
def test_another_nest_is_not_ours(tmp_path: Path, config: str, word: str, said: str) -> None:
    run = run_app(make_app(tmp_path, config, PLAIN), word)
    assert (run.code, run.out.strip()) == (0, said), run.err


@pytest.mark.parametrize("word", ["+nest=birds", "+nest=auto"])
def test_another_group_of_that_name_is_chosen(tmp_path: Path, word: str) -> None:
    own = {"birds": "eggs: 3", "auto": "eggs: 3"}
    run = run_app(make_app(tmp_path, "trees: 2", PLAIN, **own), word)
    assert (run.code, run.out.strip()) == (0, "RUNS {'eggs': 3}"), run.err


def test_a_group_of_that_name_may_be_built_on_ours(tmp_path: Path) -> None:
    mine = "# @package _global_\ndefaults: [settings, _self_]\nnest: {cluster: dgx_h100}\n"
    script = make_app(tmp_path, "trees: 2", PLAIN, mine=mine)
    run = run_app(script, "+nest=mine", "--cfg", "job")
    assert "cluster: dgx_h100" in run.out, run.err
    assert "mode: auto" in run.out


@pytest.mark.slow
def test_another_nest_may_use_megatron(tmp_path: Path) -> None:
    """The words of a command that are not ours are not missed where Megatron's groups are made."""
    pytest.importorskip("megatron.core")
    main = PLAIN.replace(
        "print(",
        "import megatron.core.parallel_state as state; "
        "from nest_megatron.integrations.megatron_lm import hook; hook._require_plan(); print(",
    )
    run = run_app(make_app(tmp_path, "trees: 2", main), "+nest=birds")
    assert (run.code, run.out.splitlines()[-1]) == (0, "RUNS birds"), run.err


def test_the_composed_job_shows_the_plan(tmp_path: Path) -> None:
    run = run_app(make_app(tmp_path), *AUTO, "--cfg", "job", "--resolve", "--package", "model")
    shown = OmegaConf.create(run.out)
    assert shown.tensor_model_parallel_size >= 1
    assert shown.sequence_parallel in (True, False)


def test_registering_twice_is_registering_once() -> None:
    register()
    register()
    assert OmegaConf.has_resolver("nest")
