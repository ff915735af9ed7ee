"""Scripts behind ``--``: priced, kept and refused as commands are.

``scripts/`` holds launchers cut down from published ones: ``two_branches.sh`` of
Pai-Megatron-Patch (examples/qwen3/run_mcore_qwen3.sh), ``slurm_skill.sh`` of Megatron-LM
(skills/run-on-slurm).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.api.jobs import estimate_typed
from nest_megatron.cli.tuning import TuneOptions
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.integrations import dry_run as dry
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import kept_command
from tests.cli.runs import run

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
SCRIPTS = Path(__file__).with_name("scripts")
CLUSTER = "cluster=dgx_h100"
JOB = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 "
    "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --bf16 "
    "--micro-batch-size 1 --global-batch-size 64 --tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model someorg/some-tokenizer"
)


@pytest.mark.parametrize(
    ("words", "variables", "layout"),
    [
        (
            ("two_branches.sh", "dlc", "A3B", "1", "64", "1", "2", "8"),
            {"WORLD_SIZE": "2", "RANK": "0", "KUBERNETES_CONTAINER_RESOURCE_GPU": "8"},
            {"world": 16, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 8},
        ),
        (
            ("two_branches.sh", "dsw", "8B", "1", "64", "2", "1", "1"),
            {},
            {"world": 8, "tensor_model_parallel_size": 2},
        ),
        (("slurm_skill.sh",), {}, {"world": 64, "tensor_model_parallel_size": 2}),
    ],
)
def test_a_published_launcher_has_its_own_size(
    words: tuple[str, ...],
    variables: dict[str, str],
    layout: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(SCRIPTS)
    plan = run("estimate", CLUSTER, "--json", "--", "bash", *words).json()
    dims = plan["layout"]["dims"]
    assert plan["cluster"]["num_gpus"] == layout.pop("world")
    assert {name: dims[name] for name in layout} == layout


def test_settings_win_over_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"rm -rf old\n{JOB}\n")
    behind = ("--", "bash", str(script), "--json")
    done = run("estimate", CLUSTER, *behind)
    assert done.code == 2
    assert done.err.startswith("error: --vocab-size")  # no JSON: the last word is the script's
    assert "Programs that were not run: rm (line 1)" in done.err
    done = run("estimate", CLUSTER, "model.vocab_size=131072", *behind)
    assert done.code == 0
    assert "Programs that were not run: rm (line 1)" in " ".join(done.out.split())


def test_a_script_has_one_place(tmp_path: Path) -> None:
    done = run("plan", CLUSTER, "--from", "NNODES=2 bash train.sh 8")
    assert done.code == 2
    assert "Put `-- NNODES=2 bash train.sh 8` behind all other words" in done.err
    assert "Put `-- bash train.sh`" in run("plan", CLUSTER, "--from", "train.sh").err
    done = run("plan", CLUSTER, "--from", JOB, "--", "bash", "train.sh")
    assert done.code == 2
    assert "Leave one of the two out" in done.err
    assert "no such file" in run("plan", CLUSTER, "--", "bash", str(tmp_path / "train.sh")).err


def test_a_command_may_stand_behind_the_dashes() -> None:
    done = run("estimate", CLUSTER, "--", "python", "train.py")
    assert done.err.startswith("error: command = train.py: it has no flags")
    done = run("estimate", CLUSTER, "model.vocab_size=131072", "--", *JOB.split())
    assert done.code == 0
    assert "on 8 x H100" in done.out


def test_a_script_of_several_plans_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "job.slurm"
    srun = JOB.replace("torchrun --nproc-per-node 8", "srun python")
    script.write_text(f"#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=8\n{srun}\n")
    runs = []
    original = dry.dry_run
    monkeypatch.setattr(
        "nest_megatron.integrations.dry_run.dry_run",
        lambda *words: runs.append(words) or original(*words),
    )
    words = ("sbatch", str(script))
    settings = (CLUSTER, "model.vocab_size=131072")
    composed = compose(parse(settings))
    command = kept_command(TypedCommand(text=words, version="0.16"), composed)
    assert kept_command(command, composed).text == command.text
    assert estimate_typed(command, composed).layout.num_gpus == 16
    options: dict[str, Any] = dict.fromkeys(TuneOptions.__dataclass_fields__)
    options |= {"launcher": "auto", "launcher_options": (), "run_timeout_minutes": 1.0}
    options |= {"overrides": settings, "from_command": words, "free": "all"}
    asked = TuneOptions(**options).request()
    assert asked.command.startswith("SLURM_NNODES=2 SLURM_NTASKS_PER_NODE=8 srun python")
    assert len(runs) == 2
