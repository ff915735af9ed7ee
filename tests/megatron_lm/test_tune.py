"""Megatron's own script, tuned over two ranks of this machine."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nest_megatron.errors import NOTHING_FITS
from nest_megatron.history.records import Outcome
from nest_megatron.history.store import VARIABLE, read
from nest_megatron.layout import plan_file
from tests.megatron_lm.ask import checkout_version
from tests.megatron_lm.training import DENSE, HOME, ON_CPU, TRAINING, environment

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.slow,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]

CLUSTER = """\
name: this_machine
num_gpus: 2
accelerator:
  name: CPU core
  memory_bytes: 4.0e+9
  peak_flops_per_s: {bf16: 1.0e+9, fp16: 1.0e+9, fp8: 1.0e+9, fp32: 1.0e+9}
  gemm_efficiency: {bf16: 1.0, fp16: 1.0, fp8: 1.0, fp32: 1.0}
  attention_efficiency: 1.0
  memory_bandwidth_bytes_per_s: 5.0e+9
  memory_efficiency: 1.0
  kernel_floor_s: 2.0e-4
  flash_attention: false
  source: "by hand"
levels:
  - name: node
    num_devices: null
    bandwidth_bytes_per_s: 1.0e+9
    latency_s: 2.0e-4
    source: "by hand"
"""

RELEASE = ("--megatron-version", checkout_version()) if HOME else ()


def tune(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nest_megatron", "tune", *words, *RELEASE, "--json"],
        cwd=HOME,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_two_runs_and_a_plan(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    training = list(TRAINING)
    training[training.index("--train-iters") + 1] = "100000"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    saving = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "1"]
    job = shlex.join([*launcher, "pretrain_gpt.py", *DENSE, *training, *ON_CPU, *saving])
    folder, cluster = tmp_path / "runs", f"cluster={tmp_path / 'cluster.yaml'}"
    options = ("--budget", "2", "--iterations", "4", "--out", str(folder))
    done = tune("--from", job, cluster, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [run["state"] for run in found["runs"]] == ["measured", "measured"]
    assert found["chosen"]["measured_s"] > 0
    plan = plan_file.read(folder / "plan.yaml")
    assert plan.layout.num_gpus == 2
    assert not (tmp_path / "checkpoints").exists()


#: Its scores of attention take more than the limit; OpenMP's threads take none of it.
LARGE = shlex.split(
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8"
)
LIMITED = """\
import resource, runpy, sys
sys.path.insert(0, ".")
from megatron.training import training

train_step = training.train_step


def limited(*arguments, **named):
    \"\"\"A step with 192 MiB of address space to take; a new thread takes 64 of them.\"\"\"
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (192 << 20), resource.RLIM_INFINITY))
    return train_step(*arguments, **named)


training.train_step = limited
sys.argv[0] = "pretrain_gpt.py"
runpy.run_path("pretrain_gpt.py", run_name="__main__")
"""


def test_runs_out_of_memory_under_a_limit_of_the_kernel(tmp_path: Path) -> None:
    """They are told apart from other failures, not repeated, and in the site's history."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    script = tmp_path / "pretrain_limited.py"
    script.write_text(LIMITED)
    training = list(TRAINING)
    training[training.index("--train-iters") + 1] = "100000"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    job = shlex.join([*launcher, str(script), *LARGE, *training, *ON_CPU])
    folder, cluster = tmp_path / "runs", f"cluster={tmp_path / 'cluster.yaml'}"
    options = ("--budget", "2", "--iterations", "4", "--out", str(folder))
    history = tmp_path / "history.jsonl"
    done = tune("--from", job, cluster, *options, OMP_NUM_THREADS="1", **{VARIABLE: str(history)})
    assert done.returncode == NOTHING_FITS, done.stdout + done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert {run["failure"] for run in runs} == {"out_of_memory"}
    peaks = [
        plan_file.read(folder / f"run-{run['number']}" / "plan.yaml").predicted.peak_memory_bytes
        for run in runs
    ]
    assert peaks == sorted(set(peaks), reverse=True)
    kept = read(history)
    assert len(kept) == len(runs)
    assert all(run.trial for run in kept)
    assert {run.outcome for run in kept} == {Outcome.OUT_OF_MEMORY}
    assert all(run.predicted.allocatable_bytes and run.predicted.peak_terms for run in kept)
