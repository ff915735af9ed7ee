"""``+nest=auto`` behind a script of Megatron-Bridge as it is; the framework is a stand-in."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nest_megatron.history import store
from nest_megatron.history.records import Outcome
from tests.cli.runs import ROOT, environment

OVERRIDES = """
def process_config_with_overrides(config, config_filepath=None, cli_overrides=None):
    for word in cli_overrides or []:
        name, _, value = word.lstrip("+").partition("=")
        part, _, field = name.partition(".")
        if hasattr(config, part):  # other keys are passed over, as the framework does
            setattr(getattr(config, part), field, int(value))
    return config
"""
TRAIN = """
import megatron.training  # as Megatron-Bridge does since 0.4


def train_step(number):
    return number


def train():
    return [train_step(number) for number in range(6)]
"""
PRETRAIN = """
import os
from megatron.bridge.training.train import train


def pretrain(config):
    print("a batch of", config.train.global_batch_size)
    train()
    if "NEST_TEST_FAILS" in os.environ:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
"""
AUTO = ("+nest=auto", "nest.cluster=dgx_h100")
SCRIPT = """
import os
import sys
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
from tests import catalogue
from tests.integrations.frameworks import bridge_config

cfg = bridge_config(catalogue.model("llama3_8b"))
cfg = process_config_with_overrides(cfg, cli_overrides=sys.argv[1:])
cfg.train.global_batch_size *= int(os.environ.get("NEST_TEST_REPLICAS", "1"))
if os.environ.get("NEST_TEST_STARTS") == "again":  # as run_recipe.py does for its variables
    os.environ["NEST_TEST_STARTS"] = "once"
    os.execv(sys.executable, [sys.executable, "-m", "nest_megatron", *sys.argv])
print("trains with TP", cfg.model.tensor_model_parallel_size)
pretrain(cfg)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    package = tmp_path / "megatron" / "bridge" / "training" / "utils"
    package.mkdir(parents=True)
    (package / "omegaconf_utils.py").write_text(OVERRIDES, encoding="utf-8")
    (tmp_path / "megatron" / "training").mkdir()
    (tmp_path / "megatron" / "training" / "__init__.py").touch()
    (package.parent / "train.py").write_text(TRAIN, encoding="utf-8")
    (package.parent / "pretrain.py").write_text(PRETRAIN, encoding="utf-8")
    path = tmp_path / "run_recipe.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def run(script: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    paths = f"{script.parent}:{ROOT}"
    return subprocess.run(
        [sys.executable, "-m", "nest_megatron", str(script), *words],
        capture_output=True,
        text=True,
        env={**environment(), "PYTHONPATH": paths, **more},
        check=False,
    )


def launched(script: Path, words: Sequence[Sequence[str]], **more: str) -> list[tuple[str, int]]:
    """What each of several ranks prints, which are started by hand, and its exit code."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    more |= {"WORLD_SIZE": str(len(words)), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "nest_megatron", str(script), "+nest=auto", *own],
            env={
                **environment(**more, RANK=str(rank)),
                "PYTHONPATH": f"{script.parent}:{ROOT}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, own in enumerate(words)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    return [(text, process.returncode) for text, process in zip(said, started, strict=True)]


def test_the_script_is_planned(script: Path) -> None:
    size = ("nest.cluster=dgx_h100", "nest.cluster.num_gpus=16")
    done = run(script, "model.tensor_model_parallel_size=4", "+nest=auto", *size)
    assert done.returncode == 0, done.stderr
    assert "this job runs as" in done.stdout
    assert "trains with TP 4" in done.stdout


def test_what_the_script_changes_after_the_plan_is_put_back(script: Path) -> None:
    size = ("nest.cluster=dgx_h100", "nest.cluster.num_gpus=16", "train.global_batch_size=64")
    done = run(script, "+nest=auto", *size, NEST_TEST_REPLICAS="2")
    assert done.returncode == 0, done.stderr
    assert "a batch of 64" in done.stdout
    said = " ".join(done.stdout.split())
    assert "train.global_batch_size 128 -> 64" in said
    assert "The script changed these fields after they were planned" in said


@pytest.mark.slow
def test_ranks_that_start_python_anew_agree_anew(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    more = {"NEST_TEST_STARTS": "again", "NEST_MEGATRON_HISTORY": str(path)}
    for text, code in launched(
        script, [["nest.cluster=dgx_h100", "model.num_layers=2"]] * 2, **more
    ):
        assert code == 0, text
        assert "trains with TP" in text
    (record,) = store.read(path)
    assert record.outcome is Outcome.FINISHED


@pytest.mark.slow
def test_ranks_with_other_settings_are_named(script: Path) -> None:
    """By hand, so each has words of its own; the batch of rank 1 would be another."""
    words = [["nest.cluster=dgx_h100", f"train.global_batch_size={n}"] for n in (8, 16)]
    for text, code in launched(script, words):
        assert code != 0
        assert "train.global_batch_size: 8 on rank 0 (" in text
        assert "; 16 on rank 1 (" in text
        assert "trains" not in text


def test_a_wrong_word_ends_it(script: Path) -> None:
    done = run(script, "+nest=atuo")
    assert done.returncode != 0
    assert "auto" in done.stderr
    assert "trains" not in done.stdout


def test_advice_names_settings_as_they_are_typed(script: Path) -> None:
    done = run(script, "+nest=auto", "nest.cluster=dgx_h100", "nest.cluster.num_gpus=100000000")
    assert done.returncode == 2
    assert "add nest.checks.plausibility=off" in done.stderr


def test_the_first_steps_are_kept_beside_the_prediction(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    one = ("nest.cluster=dgx_h100", "nest.cluster.num_gpus=1", "model.num_layers=2")
    done = run(script, "+nest=auto", *one, "nest.watch=4", NEST_MEGATRON_HISTORY=str(path))
    assert done.returncode == 0, done.stderr
    assert "nest: measured over watched steps" in done.stdout
    (record,) = store.read(path)
    assert record.outcome is Outcome.FINISHED
    assert record.measured is not None
    assert len(record.measured.step_times_s) == 4
    assert record.job.framework == "Megatron-Bridge 0.6"
    unwatched = run(script, "+nest=auto", *one, "nest.watch=0", NEST_MEGATRON_HISTORY=str(path))
    assert unwatched.returncode == 0, unwatched.stderr
    assert len(store.read(path)) == 1


def test_what_ended_a_run_is_kept(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    one = ("nest.cluster=dgx_h100", "nest.cluster.num_gpus=1", "model.num_layers=2")
    fails = {"NEST_TEST_FAILS": "1", "NEST_MEGATRON_HISTORY": str(path)}
    assert run(script, "+nest=auto", *one, **fails).returncode != 0
    (record,) = store.read(path)
    assert record.outcome is Outcome.OUT_OF_MEMORY
    assert "Tried to allocate 2 GiB" in (record.error or "")


def test_an_audit_has_how_it_began_and_ended(script: Path, tmp_path: Path) -> None:
    policy, path = tmp_path / "policy.yaml", tmp_path / "audit.jsonl"
    policy.write_text(f"audit: {{file: {path}, required: true}}\n")
    size = ("nest.cluster=dgx_h100", "nest.cluster.num_gpus=16")
    done = run(script, "+nest=auto", *size, NEST_MEGATRON_POLICY=str(policy))
    assert done.returncode == 0, done.stderr
    (record,) = store.read(path)
    assert record.outcome is Outcome.FINISHED
    assert record.launch is not None
    assert record.launch.changes
    policy.write_text(f"audit: {{file: {tmp_path}, required: true}}\n")
    assert run(script, "+nest=auto", *size, NEST_MEGATRON_POLICY=str(policy)).returncode == 16


def test_an_audit_has_what_a_policy_refused(script: Path, tmp_path: Path) -> None:
    policy, path = tmp_path / "policy.yaml", tmp_path / "audit.jsonl"
    policy.write_text(f"audit: {{file: {path}}}\nlaunch: {{pinned_only: true}}\n")
    size = ("nest.cluster=dgx_h100", "nest.cluster.num_gpus=16")
    words = (script, "+nest=auto", *size)
    assert run(*words, NEST_MEGATRON_POLICY=str(policy)).returncode == 16
    runs, (refused,) = store.read_audit(path)
    assert not runs
    assert (refused.rule, refused.mode) == ("launch.pinned_only", "auto")
    run(*words, "nest.dry_run=true", NEST_MEGATRON_POLICY=str(policy))
    assert len(store.read_audit(path)[1]) == 1, "a dry run starts nothing"
