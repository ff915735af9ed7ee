"""What a plan costs: exact arithmetic of what it predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.layout import plan_file
from nest_megatron.layout.estimate import Rates
from nest_megatron.planner.layouts import price_of_plan
from tests.cli.runs import run

JOB = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=16", "train.global_batch_size=128")
ONE = ("parallel.tensor_model_parallel_size=2", "train.micro_batch_size=1")
STEP = 128 * 8192


def estimated(*settings: str) -> dict[str, Any]:
    done = run("estimate", *JOB, *ONE, *settings, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = done.json()
    return found


def test_a_run_costs_its_gpu_hours() -> None:
    found = estimated("cost.gpu_hour=2.5", "cost.gpu_watts=1.2kW", f"train.tokens={1000 * STEP}")
    step_s, price = found["predicted"]["iteration_time_s"], found["price"]
    assert price["run_s"] == 1000 * step_s
    assert price["run_dollars"] == pytest.approx(1000 * step_s * 16 / 3600 * 2.5, rel=1e-12)
    assert price["run_mwh"] == pytest.approx(1000 * step_s * 16 / 3600 * 1200 / 1e6, rel=1e-12)
    assert price["tokens_per_dollar"] * price["run_dollars"] == pytest.approx(1000 * STEP)


def test_a_step_that_is_begun_is_paid() -> None:
    found = estimated(f"train.tokens={STEP + 1}")
    assert found["price"]["run_s"] == 2 * found["predicted"]["iteration_time_s"]
    assert found["price"]["run_dollars"] is None
    assert found["price"]["run_mwh"] is None


def test_failures_are_paid_too() -> None:
    given = ("cost.gpu_hour=2", f"train.tokens={STEP}")
    plain, failing = estimated(*given), estimated(*given, "reliability.mtbf_hours=1000")
    share = failing["goodput"]["share"]
    assert 0 < share < 1
    assert failing["price"]["run_s"] == pytest.approx(plain["price"]["run_s"] / share)
    kept = plain["price"]["tokens_per_dollar"] * share
    assert failing["price"]["tokens_per_dollar"] == pytest.approx(kept)


def test_samples_say_the_length_of_a_run() -> None:
    found = estimated("train.train_samples=256")
    assert found["price"]["run_dollars"] is None
    assert found["price"]["tokens"] == 256 * 8192
    assert found["price"]["run_s"] == 2 * found["predicted"]["iteration_time_s"]
    done = run("estimate", *JOB, *ONE, "train.train_samples=256", "train.tokens=1B")
    assert (done.code, "train.tokens" in done.err) == (2, True)


def test_a_growing_batch_costs_the_sum_of_its_parts() -> None:
    ramp = ("train.rampup_batch_size=[64,64,6400]", "target=megatron_lm_0.17")
    grows = (*ramp, "train.train_samples=25600", "cost.gpu_hour=2")
    found = estimated(*grows)
    parts = found["batches"]
    assert len(parts) == 2
    total = sum(part["steps"] * part["iteration_time_s"] for part in parts)
    assert found["price"]["run_s"] == pytest.approx(total)


def test_nothing_is_assumed_of_prices(tmp_path: Path) -> None:
    assert "price" not in estimated()
    for key in ("cost.gpu_hour", "cost.gpu_watts", "train.tokens", "train.train_samples"):
        for value in ("0", "-1"):
            assert run("estimate", *JOB, *ONE, f"{key}={value}").code == 2
    out = tmp_path / "plan.yaml"
    run("estimate", *JOB, *ONE, "cost.gpu_hour=2", f"out={out}")
    plan = plan_file.read(out)
    assert plan.price == price_of_plan(plan, Rates(gpu_hour=2.0))
    assert "for a dollar, at $2.00" in " ".join(run("explain", str(out)).out.split())


def test_rates_are_finite() -> None:
    with pytest.raises(UserInputError, match="finite"):
        Rates(gpu_hour=float("inf"))


def test_compare_has_the_price_of_each_plan() -> None:
    words = (*JOB, "cost.gpu_hour=2", "planners=[nest,manual]", "train.precision=bf16")
    rows = run("compare", *words, "--json").json()["planners"]
    for row in rows:
        expected = 3600 * row["tokens_per_s"] / 16 / 2
        assert row["price"]["tokens_per_dollar"] == pytest.approx(expected)
    assert "Tokens/$" in run("compare", *words).out
