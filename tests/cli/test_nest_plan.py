"""``nest-megatron nest plan``: what it prints, and what it refuses."""

from __future__ import annotations

import pytest

from tests.cli.runs import SMALL, run

TINY = ("nest", "plan", *SMALL, "model.num_layers=4", "train.global_batch_size=32")


def test_as_json() -> None:
    found = run(*TINY, "--json").json()
    stages = found["stages"]
    assert found["pipeline_model_parallel_size"] == len(stages)
    assert found["search"]["backend"] in ("kernel", "reference")
    slowest = max(stage["time_s"] for stage in stages)
    steps = found["num_microbatches"] + len(stages) - 1
    assert found["step_s"] == pytest.approx(slowest * steps + found["sync_s"])
    assert all(stage["memory_bytes"] <= found["capacity_bytes"] for stage in stages)
    assert found["choices"]["schedule"] == "1f1b"


def test_the_table() -> None:
    done = run(*TINY, "research.schedule=gpipe", "research.memory=paper")
    assert done.code == 0
    assert "Step " in done.out
    assert "embedding to " in done.out
    assert "ruled out by bounds" in done.out
    assert max(map(len, done.out.splitlines()[:8])) <= 80


def test_stages_of_several_strategies() -> None:
    done = run(*TINY, "research.strategy_per_stage=true", "search.max_micro_batch_size=1")
    assert done.code == 0
    assert "replicas" in done.out


def test_either_backend_and_limits() -> None:
    limits = ("search.max_data_parallel_size=2", "search.max_pipeline_model_parallel_size=2")
    few = (*limits, "parallel.tensor_model_parallel_size=2", "search.max_micro_batch_size=1")
    plans = [
        run(*TINY, *few, f"search.backend={b}", "--json").json() for b in ("kernel", "reference")
    ]
    assert [plan.pop("search")["backend"] for plan in plans] == ["kernel", "reference"]
    assert plans[0] == plans[1]
    assert plans[0]["data_parallel_size"] <= 2
    assert plans[0]["pipeline_model_parallel_size"] <= 2


def test_nothing_fits() -> None:
    small = ("cluster.accelerator.memory_bytes=4000000000", "research.zero=false")
    done = run(*TINY, *small)
    assert done.code == 1
    assert "alone lacks" in done.out
    found = run(*TINY, *small, "--json")
    assert found.code == 1
    assert found.json()["no_plan"]["missing_bytes"] > 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("research.zro=false", "research.zero"),
        ("research.memory=our", "one of paper, ours"),
        ("research.optimizer=sgd", "Add research.memory=paper."),
        ("research.schedule=interleaved", "one of 1f1b, gpipe"),
        ("parallel.zero_stage=1", "the recurrence does not know it"),
        ("parallel.tensor_model_parallel_size=3", "no strategy fits"),
        ("parallel.pipeline_model_parallel_size=0", "it must be at least 1"),
        ("search.max_seconds=5", "the recurrence does not know it"),
        ("out=plan.yaml", "the recurrence does not know it"),
        ("search.backend=fast", "one of kernel, reference"),
        ("train.global_batch_size=0", "it must be at least 1"),
    ],
)
def test_mistakes(wrong: str, said: str) -> None:
    done = run(*TINY, wrong)
    assert done.code == 2
    assert said in done.err
