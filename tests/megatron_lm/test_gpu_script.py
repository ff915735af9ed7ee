"""The jobs of ``benchmarks/gpu/run.sh`` on Megatron-LM itself, small and without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nest_megatron.history import store as history
from tests.cli.runs import ROOT
from tests.megatron_lm.training import HOME, environment

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]
_SMALL = "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2"
_EXPERTS = (
    "--num-experts 8 --moe-ffn-hidden-size 96 --moe-router-topk 2 --qk-layernorm "
    "--moe-token-dispatcher-type alltoall"
)
_ON_CPU = (
    "--no-bias-swiglu-fusion --no-rope-fusion --no-bias-dropout-fusion "
    "--distributed-backend gloo --use-cpu-initialization"
)


def test_its_jobs_train_and_are_recorded(tmp_path: Path) -> None:
    folder = ROOT / "benchmarks" / "gpu"
    jobs = yaml.safe_load((folder / "jobs.yaml").read_text(encoding="utf-8"))
    jobs["models"] = {"llama": f"{_SMALL} --vocab-size 511"}
    jobs["models"]["qwen"] = f"{jobs['models']['llama']} {_EXPERTS}"
    jobs["flags"] = jobs["flags"].replace("2048", "64")
    jobs["local"] += f" {_ON_CPU}"
    jobs["nest"] = ["nest.cluster=dgx_h100"]
    names = ("llama-4-mb1", "llama-4-mb4-selective", "qwen-4-mb4-full")
    jobs["work"] = [entry for entry in jobs["work"] if entry.get("job") in names]
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump(jobs), encoding="utf-8")
    out = tmp_path / "out"
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", str(folder / "run.sh"), "measure", str(out), "500"],
        env=environment(
            PATH=path,
            NEST_GPU_JOBS=str(tmp_path / "jobs.yaml"),
            NEST_GPU_CARRIED=str(tmp_path / "carried"),
        ),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    told = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    trained = [entry for entry in told if "job" in entry]
    assert [entry["code"] for entry in trained] == [0, 0, 0], (done.stdout, trained)
    runs = {run.id: run for run in history.read(out / "runs.jsonl")}
    for entry in trained:
        (run,) = entry["runs"]
        measured = runs[run].measured
        assert measured is not None
        assert len(measured.step_times_s) == 8
        words = entry["flags"].split()
        assert runs[run].grid.micro_batch_size == int(words[1])
        asked = words[words.index("--recompute-granularity") + 1] if len(words) > 2 else "none"
        assert (runs[run].grid.recompute.granularity or "none") == asked
