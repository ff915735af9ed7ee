"""``research`` and ``validation`` are optional: without their folders, plans are made as before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.imports import PACKAGE, ROOT
from tests.launch.faults.stub import make_stub

OPTIONAL = ("research", "validation")
JOB = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8", "search.num_alternatives=1")
#: An editable installation would find the folders that the copy lacks.
NO_CHECKOUT = """\
import sys
sys.meta_path = [each for each in sys.meta_path if "editable" not in each.__module__]
"""
FLAGS = [
    *("--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "16"),
    *("--seq-length", "1024", "--max-position-embeddings", "1024", "--micro-batch-size", "1"),
    *("--global-batch-size", "64", "--bf16", "--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "32000", "--lr", "1e-4", "--train-iters", "10"),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as it installs, without the optional folders."""
    folder = tmp_path_factory.mktemp("copy")
    left_out = shutil.ignore_patterns("__pycache__", *OPTIONAL)
    shutil.copytree(PACKAGE, folder / "nest_megatron", ignore=left_out)
    for name in ("hydra_configs", "recipes"):
        shutil.copytree(ROOT / name, folder / "nest_megatron" / name)
    (folder / "sitecustomize.py").write_text(NO_CHECKOUT, encoding="utf-8")
    return folder


def run(copy: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), **variables},
        check=False,
        timeout=600,
    )


def command(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(copy, "-m", "nest_megatron", *words)


def test_the_copy_is_what_runs(copy: Path) -> None:
    code = "import nest_megatron.planner as p; print(p.__file__)"
    assert run(copy, "-c", code).stdout.startswith(str(copy))
    for name in OPTIONAL:
        assert "No module named" in run(copy, "-c", f"import nest_megatron.{name}").stderr


def test_plan_explain_and_pin(copy: Path) -> None:
    planned = command(copy, "plan", *JOB, "out=plan.yaml")
    assert planned.returncode == 0, planned.stderr
    explained = command(copy, "explain", "plan.yaml", "--html", "plan.html")
    assert explained.returncode == 0, explained.stderr
    assert "torchrun" in explained.stdout
    pinned = command(copy, "pin", "plan.yaml", "--out", "pinned.yaml")
    assert pinned.returncode == 0, pinned.stderr


def test_estimate(copy: Path) -> None:
    words = ("parallel.tensor_model_parallel_size=8", "train.global_batch_size=8")
    done = command(copy, "estimate", *JOB, *words)
    assert done.returncode == 0, done.stderr
    assert "  Step  " in done.stdout


def test_a_job_is_planned_before_it_starts(copy: Path, tmp_path: Path) -> None:
    script = make_stub(tmp_path) / "pretrain_gpt.py"
    nest = ("+nest=auto", "nest.cluster=dgx_h100", "nest.dry_run=true")
    done = run(
        copy,
        *("-m", "nest_megatron", str(script), *FLAGS, *nest),
        PYTHONPATH=f"{copy}{os.pathsep}{tmp_path}",
        **{"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"},
    )
    assert done.returncode == 0, done.stderr
    assert "nest: this job runs as" in done.stdout
    assert "nest: dry run; nothing was started." in done.stdout


def test_the_python_api(copy: Path) -> None:
    code = (
        "import nest_megatron as n; p = n.plan(model='llama3_8b', cluster='dgx_h100', num_gpus=8,"
        " num_alternatives=0); print(len(str(p.explain())) > 1000)"
    )
    done = run(copy, "-c", code)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize(("name", "package"), [("compare", "research"), ("validate", "validation")])
def test_a_command_that_is_left_out_says_so(copy: Path, name: str, package: str) -> None:
    assert f"  {name} " not in command(copy, "--help").stdout
    done = command(copy, name, *JOB)
    assert done.returncode == 2
    assert f"{name} needs nest_megatron.{package}" in done.stderr


def test_what_a_checkout_alone_has_is_said(copy: Path) -> None:
    done = command(copy, "calibrate", "runs.csv")
    assert done.returncode == 2
    assert "tools.calibration.command is part of a checkout of nest-megatron" in done.stderr
