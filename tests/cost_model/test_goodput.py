"""What failures and checkpoints leave of a job's time."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from nest_megatron.cost_model.goodput import Reliability, best_interval, goodput
from nest_megatron.errors import UserInputError
from nest_megatron.layout import plan_file
from tests.cli.runs import run

JOB = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=64")


def simulated_share(reliability: Reliability, work_s: float, mtbf_s: float) -> float:
    """The share of kept steps in a long job that fails at random."""
    draw, clock, kept = random.Random(1), 0.0, 0.0
    segment = work_s + reliability.checkpoint_s
    for _ in range(4000):
        need = segment
        while (failure := draw.expovariate(1 / mtbf_s)) < need:
            clock += failure
            need = reliability.restart_s + segment
        clock += need
        kept += work_s
    return kept / clock


@pytest.mark.parametrize("interval", [5, 50, 400])
def test_the_share_is_that_of_a_job_that_fails_at_random(interval: int) -> None:
    asked = Reliability(mtbf_hours=64 * 2.0, checkpoint_s=40, restart_s=0, save_interval=interval)
    found = goodput(asked, step_s=10.0, num_gpus=64)
    assert found.mtbf_s == 7200
    assert found.share == pytest.approx(simulated_share(asked, 10.0 * interval, 7200), abs=0.02)


def test_no_other_interval_is_better() -> None:
    asked = Reliability(mtbf_hours=50_000)
    best = goodput(asked, step_s=8.0, num_gpus=8192)
    for steps in range(max(1, best.save_interval - 30), best.save_interval + 30):
        other = Reliability(mtbf_hours=50_000, save_interval=steps)
        assert goodput(other, step_s=8.0, num_gpus=8192).share <= best.share + 1e-5
    assert best_interval(60, 1e9) == pytest.approx(math.sqrt(2 * 60 * 1e9), rel=1e-3)


def test_more_gpus_fail_more_often() -> None:
    asked = Reliability(mtbf_hours=50_000)
    shares = [goodput(asked, step_s=8.0, num_gpus=n).share for n in (8, 512, 16_384, 10**6)]
    assert shares == sorted(shares, reverse=True)
    assert 0.99 < shares[0] < 1
    assert goodput(Reliability(mtbf_hours=1e-6), step_s=1e3, num_gpus=8).share == 0.0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mtbf_hours": 0.0}, "reliability.mtbf_hours"),
        ({"mtbf_hours": math.nan}, "reliability.mtbf_hours"),
        ({"mtbf_hours": math.inf}, "reliability.mtbf_hours"),
        ({"mtbf_hours": 5.0, "checkpoint_s": -1.0}, "reliability.checkpoint_s"),
        ({"mtbf_hours": 5.0, "restart_s": math.inf}, "reliability.restart_s"),
        ({"mtbf_hours": 5.0, "save_interval": 0}, "reliability.save_interval"),
    ],
)
def test_bad_values_are_named(settings: dict[str, float], named: str) -> None:
    with pytest.raises(UserInputError, match=named):
        Reliability(**settings)  # type: ignore[arg-type]


def test_the_report_and_the_plan_file_say_it(tmp_path: Path) -> None:
    out, page = tmp_path / "plan.yaml", tmp_path / "plan.html"
    asked = (*JOB, "reliability.mtbf_hours=50000", "reliability.save_interval=500")
    done = run("plan", *asked, f"out={out}")
    assert "Goodput" in done.out
    found = plan_file.read(out).goodput
    assert found is not None
    assert (found.save_interval, found.checkpoint_s, found.restart_s) == (500, 60, 600)
    assert f"{100 * found.share:.1f} %" in done.out
    explained = run("explain", str(out), "--html", str(page)).out
    assert "every 500 steps" in " ".join(explained.split())
    assert "Goodput" in page.read_text(encoding="utf-8")
    told = json.loads(run("estimate", *asked, "--json").out)["goodput"]
    assert 0 < told["share"] < 1


def test_nothing_is_said_without_a_mean_time_between_failures(tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    done = run("plan", *JOB, f"out={out}")
    assert "Goodput" not in done.out
    assert "goodput" not in out.read_text(encoding="utf-8")
    refused = run("plan", *JOB, "reliability.save_interval=500")
    assert refused.code == 2
    assert "reliability.mtbf_hours" in refused.err


def test_the_interval_of_a_command_counts(tmp_path: Path) -> None:
    command = (
        "torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
        "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --bf16 "
        "--micro-batch-size 1 --global-batch-size 512 --vocab-size 32000 --save ckpt "
        "--save-interval 250"
    )
    asked = (
        "plan",
        "--from",
        command,
        "cluster=dgx_h100",
        "reliability.mtbf_hours=50000",
        "--json",
    )
    assert run(*asked).json()["goodput"]["save_interval"] == 250
