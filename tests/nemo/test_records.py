"""A run of NeMo's own strategy and trainer is recorded by the callback for Lightning."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import nest_megatron
from nest_megatron.history import store as history
from nest_megatron.history.records import Outcome
from nest_megatron.layout import plan_file
from tests.cli.runs import environment

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
if importlib.util.find_spec("nemo") is None:
    pytest.skip("NeMo is not installed (.ci/nemo installs it)", allow_module_level=True)

from tests.nemo.train import FORWARD_S, OPTIMIZER_S, WATCHED

pytestmark = [pytest.mark.nemo, pytest.mark.slow]


def test_steps_of_nemo_s_strategy_are_those_of_its_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = nest_megatron.plan(
        model="llama3_8b", cluster="dgx_h100", num_gpus=1, global_batch_size=2,
        num_alternatives=0, **{"model.num_layers": 2, "train.micro_batch_size": 1},
    ).record  # fmt: skip
    plan_file.write(plan, tmp_path / "plan.yaml")
    monkeypatch.setenv(history.VARIABLE, str(tmp_path / "runs.jsonl"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.nemo.train", str(tmp_path / "plan.yaml")],
        capture_output=True,
        text=True,
        env=environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
        cwd=Path(__file__).parents[2],
        timeout=2400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (run,) = history.read()
    assert (run.outcome, run.plan) == (Outcome.FINISHED, plan_file.checksum(plan))
    assert run.measured is not None
    assert run.measured.step_times_s == (2 * FORWARD_S + OPTIMIZER_S,) * WATCHED
    assert "nest: measured over watched steps" in done.stdout
