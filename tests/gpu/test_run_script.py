"""``benchmarks/gpu/run.sh`` from its first line to its page, on a GPU that stands in."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from nest_megatron.history import store as history
from nest_megatron.history.records import Measured, Outcome
from tests.cli.runs import ROOT, environment
from tests.gpu.stand_in import H100
from tests.launch.faults.stub import make_stub

FOLDER = ROOT / "benchmarks" / "gpu"
_MODEL = (
    "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 "
    "--vocab-size 511"
)


def small_jobs(folder: Path) -> Path:
    """The script's own file of jobs, with a small model in place of its models."""
    jobs = yaml.safe_load((FOLDER / "jobs.yaml").read_text(encoding="utf-8"))
    model = folder / "small.yaml"
    shape = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4}
    shape |= {"num_query_groups": 2, "num_layers": 2, "seq_length": 2048, "vocab_size": 512}
    model.write_text(yaml.safe_dump({"name": "small", **shape}), encoding="utf-8")
    jobs["models"] = dict.fromkeys(jobs["models"], _MODEL)
    engine = [entry for entry in jobs["work"] if entry.get("transformer_engine")]
    plain = [entry for entry in jobs["work"] if entry not in engine]
    first = next(entry for entry in plain if "profile" in entry)
    trained = [entry for entry in plain if "job" in entry]
    few = {**first, "profile": str(model), "seconds": 8}
    jobs["work"] = [few, *trained[:2], engine[0]]
    out = folder / "jobs.yaml"
    out.write_text(yaml.safe_dump(jobs), encoding="utf-8")
    return out


def on_a_gpu(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The script as it is typed, on a machine that has one GPU and a checkout of Megatron-LM."""
    paths = (ROOT / "tests" / "gpu" / "host", ROOT)
    variables = {
        "NEST_TEST_GPUS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "MEGATRON_LM_HOME": str(folder / "megatron"),
        "NEST_GPU_CARRIED": str(folder / "carried"),
        "OMP_NUM_THREADS": "1",
        **more,
    }
    return subprocess.run(
        ["bash", str(FOLDER / "run.sh"), *words],
        capture_output=True,
        text=True,
        env={**environment(), **variables},
        timeout=1200,
        check=False,
    )


def with_measured_steps(out: Path) -> None:
    """Runs as they are where a GPU trains: the stand-in's job takes no step."""
    runs = {run.id: run for run in history.read(out / "runs.jsonl")}
    path = out / "runs.jsonl"
    for number, run in enumerate(runs.values()):
        measured = Measured(
            step_times_s=(2.0 + number, 1.0 + number),
            warm_up=1,
            busy_s=(None,),
            peak_memory_bytes=(2 << 30,),
            peak_allocated_bytes=((1 + number) << 30,),
        )
        ended = dataclasses.replace(run, outcome=Outcome.FINISHED, measured=measured)
        history.append(ended, path)


def test_everything_is_measured_kept_and_shown(tmp_path: Path) -> None:
    make_stub(tmp_path / "megatron")
    out = tmp_path / "out"
    done = on_a_gpu(tmp_path, "measure", str(out), "500", NEST_GPU_JOBS=str(small_jobs(tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (out / "results.jsonl").read_text(encoding="utf-8").splitlines()
    first, *entries = map(json.loads, lines)
    assert first["facts"]["machine"]["device_name"] == H100
    assert set(first["facts"]["bytes"]) == {
        "others",
        "context",
        "workspace",
        "matrix_product",
        "nccl",
    }
    profile, *jobs, last = entries
    assert (out / profile["file"]).exists()
    assert [job["job"] for job in jobs] == ["llama-4-mb1", "llama-4-mb1-full"]
    assert all(job["code"] == 0 and len(job["runs"]) == 1 for job in jobs), jobs
    assert last["skipped"] == "transformer_engine is not installed"
    assert "TRAINS: rank 0" in (out / "log.txt").read_text(encoding="utf-8")
    with_measured_steps(out)
    page, results = tmp_path / "gpu.md", tmp_path / "results"
    done = on_a_gpu(
        tmp_path,
        "page",
        str(out),
        "--page",
        str(page),
        "--results",
        str(results),
        NEST_TEST_GPUS="0",
    )
    assert done.returncode == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    assert f"## {H100}" in text
    assert "| llama-4-mb1 | 1000.0 ms | -" in text
    assert "rank correlation" in text
    assert "| attention | 1 | " in text
    (kept,) = results.iterdir()
    assert {path.name for path in kept.iterdir()} >= {
        "results.jsonl",
        "runs.jsonl",
        profile["file"],
    }


def test_what_time_leaves_out_is_named(tmp_path: Path) -> None:
    make_stub(tmp_path / "megatron")
    out = tmp_path / "out"
    on_a_gpu(tmp_path, "measure", str(out), "5", NEST_GPU_JOBS=str(small_jobs(tmp_path)))
    told = (out / "results.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    assert {json.loads(line)["skipped"] for line in told[:-1]} == {"too little time is left"}


def test_what_is_carried_is_installed_once(tmp_path: Path) -> None:
    """Transformer Engine comes in several loads, which are parts of one archive."""
    make_stub(tmp_path / "megatron")
    carried, called = tmp_path / "carried", tmp_path / "called"
    wheels, engine = carried / "base" / "wheels", tmp_path / "wheels"
    wheels.mkdir(parents=True)
    engine.mkdir()
    (wheels / "ours.whl").touch()
    (engine / "engine.whl").write_bytes(bytes(4096))
    archive = tmp_path / "engine.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(engine, "wheels")
    content = archive.read_bytes()
    for number, part in enumerate((content[:2048], content[2048:]), start=1):
        (carried / f"engine-{number}").mkdir()
        (carried / f"engine-{number}" / "part").write_bytes(part)
    programs = tmp_path / "programs"
    programs.mkdir()
    python = f'[ "$2" = pip ] && echo "$@" >>{called} || exec {sys.executable} "$@"'
    (programs / "python3").write_text(f"#!/bin/sh\n{python}\n", encoding="utf-8")
    (programs / "python3").chmod(0o755)
    path = os.pathsep.join((str(programs), os.environ["PATH"]))
    for _ in range(2):
        on_a_gpu(
            *(tmp_path, "measure", str(tmp_path / "out"), "1", "--engine"),
            PATH=path,
            NEST_GPU_JOBS=str(small_jobs(tmp_path)),
        )
    first, second = called.read_text(encoding="utf-8").splitlines()
    assert first.endswith(f" {wheels / 'ours.whl'}")
    assert second.endswith(f" {carried / 'wheels' / 'engine.whl'}")
    assert (carried / "wheels" / "engine.whl").stat().st_size == 4096


def test_the_page_says_that_nothing_has_run(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    done = on_a_gpu(
        tmp_path, "page", "--page", str(page), "--results", str(tmp_path), NEST_TEST_GPUS="0"
    )
    assert done.returncode == 0, done.stderr
    assert "Not run yet: no GPU has run it." in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [(), ("measures",)])
def test_other_words_say_how_it_is_used(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = on_a_gpu(tmp_path, *words)
    assert done.returncode == 2
    assert "run.sh prepare MEGATRON_LM" in done.stderr
