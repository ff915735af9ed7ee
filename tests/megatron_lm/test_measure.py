"""``nest.profile.mode=measure`` on Megatron-LM's own script: it measures, trains, and remembers.

Set ``MEGATRON_LM_HOME`` to a Megatron-LM checkout (core_v0.16.1 or main at 0.20).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nest_megatron.layout import plan_file
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.profile import store
from nest_megatron.profile.records import LayerProfile
from tests.megatron_lm.training import (
    DENSE,
    EXPERTS,
    HOME,
    ON_CPU,
    TRAINING,
    Trained,
    alone,
    run,
    torchrun,
)

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]

MEASURE = ["+nest=auto", "nest.cluster=dgx_h100", "nest.profile.mode=measure", "nest.watch=2"]


def launch(folder: Path, ranks: int, model: list[str], *words: str) -> Trained:
    """A launched job with a profile store of its own."""
    arguments = [*model, *TRAINING, *ON_CPU, *MEASURE, *words]
    store_of_its_own = {store.FOLDER_VARIABLE: str(folder / "profiles")}
    if ranks == 1:
        return run([], arguments, **alone(), **store_of_its_own)
    return run(torchrun(ranks), arguments, **store_of_its_own)


def the_profile(folder: Path) -> LayerProfile:
    (path,) = (folder / "profiles").glob("*.yaml")
    return store.read(path)


def test_two_ranks_measure_train_and_remember(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    words = ("nest.free=all", f"nest.out={path}")
    first = launch(tmp_path, 2, DENSE, *words)
    assert first.code == 0, first.out[-3000:]
    assert len(first.losses) == 3
    assert "to measure, in 2 processes" in first.out
    assert "in 2 processes on the CPU" in " ".join(first.out.split())
    profile = the_profile(tmp_path)
    assert profile.machine.is_cpu
    assert {timing.block for timing in profile.timings} == {
        LayerBlock.ATTENTION,
        LayerBlock.DENSE,
        LayerBlock.EMBEDDING,
        LayerBlock.HEAD,
    }
    assert plan_file.read(path).provenance.profile.startswith(f"{profile.name}: ")

    second = launch(tmp_path, 2, DENSE, *words)
    assert second.code == 0, second.out[-3000:]
    assert len(second.losses) == 3
    assert "to measure, in" not in second.out
    assert "Nothing was measured" in second.out
    assert the_profile(tmp_path) == profile


def test_experts_are_measured_in_one_process(tmp_path: Path) -> None:
    trained = launch(tmp_path, 1, EXPERTS)
    assert trained.code == 0, trained.out[-3000:]
    assert len(trained.losses) == 3
    assert "to measure, in 1 process," in trained.out
    assert LayerBlock.EXPERTS in {timing.block for timing in the_profile(tmp_path).timings}


def test_layers_that_cannot_be_built_end_all_ranks_with_the_reason(tmp_path: Path) -> None:
    trained = launch(tmp_path, 2, [*DENSE, "--spec", "no_such_module", "layer"])
    assert trained.code == 1
    assert "no block of this job's layers could be timed" in trained.out
    assert "initializing torch distributed" not in trained.out
    assert not list((tmp_path / "profiles").glob("*.yaml"))


def test_a_child_that_dies_ends_all_ranks_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the child imports a layer's description before there is a plan."""
    code = "import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos._exit(3)\n"
    (tmp_path / "deadly.py").write_text(code, encoding="utf-8")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    trained = launch(tmp_path, 2, [*DENSE, "--spec", "deadly", "layer"])
    assert trained.code == 1
    assert "the process that measures ended with code 3" in trained.out
    assert "last words" in trained.out
    assert "initializing torch distributed" not in trained.out


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_s_layers_are_measured_without_training(tmp_path: Path, ranks: int) -> None:
    """``python -m nest_megatron.profile --from pretrain_gpt.py FLAGS``, alone and on two ranks."""
    module = ["-m", "nest_megatron.profile", "--from"]
    launcher = module if ranks == 1 else [*torchrun(ranks), *module]
    words = [*DENSE, *TRAINING, *ON_CPU, "nest.cluster=dgx_h100", f"nest.out={tmp_path / 'p.yaml'}"]
    here = alone() if ranks == 1 else {}
    profiles = {store.FOLDER_VARIABLE: str(tmp_path / "profiles")}
    done = run(launcher, words, **here, **profiles)
    assert done.code == 0, done.out[-3000:]
    assert not done.losses
    profile = the_profile(tmp_path)
    assert {timing.block for timing in profile.timings} == {
        LayerBlock.ATTENTION,
        LayerBlock.DENSE,
        LayerBlock.EMBEDDING,
        LayerBlock.HEAD,
    }
    planned = plan_file.read(tmp_path / "p.yaml")
    assert planned.provenance.profile.startswith(f"{profile.name}: ")
