"""Megatron's own script, tuned over two ranks of this machine."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nest_megatron.parallel import plan_file
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


def tune(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nest_megatron", "tune", *words, "--json"],
        cwd=HOME,
        env=environment(),
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
    assert plan.placement.num_gpus == 2
    assert not (tmp_path / "checkpoints").exists()
