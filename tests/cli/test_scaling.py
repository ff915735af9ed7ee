"""``plan --for-gpus``: how a job scales, and which numbers of GPUs are worth it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nest_megatron
from nest_megatron.errors import UserInputError
from nest_megatron.report.plan_rows import pareto_front
from tests.cli.runs import run

JOB = (
    *("plan", "model=llama3_8b", "cluster=dgx_h100", "train.global_batch_size=96"),
    *("search.num_alternatives=0", "search.max_pipeline_model_parallel_size=1"),
    "search.max_context_parallel_size=1",
)
POINTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=12)


@given(POINTS)
def test_the_front_is_what_nothing_dominates(points: list[tuple[int, int, int]]) -> None:
    front = pareto_front(points)
    kept = [point for point, best in zip(points, front, strict=True) if best]
    for point, best in zip(points, front, strict=True):
        below = [o for o in kept if o != point and all(map(int.__le__, o, point))]
        assert bool(below) is not best


def test_each_number_has_its_plan_or_its_reason() -> None:
    done = run(*JOB, "--for-gpus", "8..24:4", "cost.gpu_hour=2", "--json")
    assert done.code == 0, done.err
    rows = done.json()["rows"]
    assert [row["cluster.num_gpus"] for row in rows] == [8, 12, 16, 20, 24]
    eight, twelve, sixteen, *_, last = rows
    assert "whole nodes" in twelve["told"]
    assert not twelve["is_pareto_optimal"]
    assert eight["scaling_efficiency"] == 1
    for row in (eight, sixteen, last):
        share = row["tokens_per_s_per_gpu"] / eight["tokens_per_s_per_gpu"]
        assert row["scaling_efficiency"] == share
        hours = row["iteration_time_s"] * row["num_gpus"] / 3600
        assert row["tokens_per_dollar"] == pytest.approx(96 * 8192 / (2 * hours))
    planned = [row for row in rows if row["status"] == "ok"]
    for row in planned:
        others = [
            o
            for o in planned
            if o["num_gpus"] <= row["num_gpus"]
            and o["iteration_time_s"] <= row["iteration_time_s"]
            and o is not row
        ]
        assert row["is_pareto_optimal"] is not bool(others)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--for-gpus", "8..4"), "goes up"),
        (("--for-gpus", "0"), "at least 1"),
        (("--for-gpus", "many"), "64..4096, which doubles"),
        (("--for-gpus", "8..16", "cluster.num_gpus=8"), "--for-gpus says it"),
        (("--for-gpus", "8..16", "-m"), "--multirun"),
        (("--for-gpus", "8..16", "--for-nodes", "1..2"), "--for-gpus"),
        (("--for-gpus", "8..16", "--from", "pretrain_gpt.py"), "--from"),
    ],
)
def test_what_means_other_jobs_is_refused(words: tuple[str, ...], told: str) -> None:
    done = run(*JOB, *words)
    assert (done.code, told in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("sizes", "told"), [("9..10:1", "whole nodes"), ("100000000", "it is implausible")]
)
def test_nothing_that_can_be_planned_is_an_error(sizes: str, told: str) -> None:
    done = run(*JOB, "--for-gpus", sizes)
    assert done.code == 2
    assert told in " ".join(done.out.split())


@pytest.mark.slow
def test_the_python_api_plans_the_same() -> None:
    limits = {"max_pipeline_model_parallel_size": 1, "max_context_parallel_size": 1}
    found = nest_megatron.plan_for_gpus(
        model="llama3_8b",
        cluster="dgx_h100",
        gpus=range(8, 25, 4),
        global_batch_size=96,
        num_alternatives=0,
        search=limits,
    )
    assert sorted(found.plans()) == [8, 16, 24]
    printed = run(*JOB, "--for-gpus", "8..24:4", "--json").json()["rows"]
    mine = found.to_dict()["rows"]
    for name in ("iteration_time_s", "scaling_efficiency", "is_pareto_optimal", "told"):
        assert [row[name] for row in mine] == [row[name] for row in printed]
    with pytest.raises(UserInputError, match="whole nodes"):
        nest_megatron.plan_for_gpus(model="llama3_8b", cluster="dgx_h100", gpus=[9, 10])
    with pytest.raises(UserInputError, match="at least 1"):
        nest_megatron.plan_for_gpus(model="llama3_8b", cluster="dgx_h100", gpus=[])
