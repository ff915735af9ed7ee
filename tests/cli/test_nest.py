"""``nest-megatron nest``: what it prints and writes, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.runs import ROOT, run

DATA = ROOT / "tests" / "research" / "nest_artifact" / "data"
LLAMA2 = str(DATA / "llama2_64.json")
RESULT = str(DATA / "llama2_64.result.json")


def test_solve_as_json_and_into_a_file(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    found = run("nest", "solve", LLAMA2, "--out", str(out), "--json").json()
    assert found["time_per_batch"] == 997064.6954908473
    assert found["degrees"]["pipeline_model_parallel_size"] == len(found["stages"]) == 8
    assert found["degrees"]["data_parallel_size"] == 8
    assert 0 < found["search_seconds"] < 60
    again = run("nest", "evaluate", LLAMA2, str(out), "--json").json()
    assert again["time_per_batch"] == again["given_time_per_batch"] == found["time_per_batch"]
    assert again["stages"] == found["stages"]


def test_tables() -> None:
    solved = run("nest", "solve", LLAMA2)
    assert solved.code == 0
    assert "Time per batch 997064.6955" in solved.out
    assert "64 of 64 devices" in solved.out
    assert "27 to 31" in solved.out
    assert max(map(len, solved.out.splitlines())) <= 80
    priced = run("nest", "evaluate", LLAMA2, RESULT)
    assert "this is 1 times that" in priced.out


def test_a_baseline_under_either_rule() -> None:
    given = ("nest", "evaluate", LLAMA2, "--baseline", "Manual")
    printed = json.loads(Path(RESULT).read_text(encoding="utf-8"))["output"]["baselineResults"]
    assert run(*given, "--json").json()["time_per_batch"] == printed["Manual"]
    order = ("--without", "baselines_last_stage_first")
    assert run(*given, *order, "--json").json()["time_per_batch"] == 997064.6954908473
    assert "Off: baselines_last_stage_first" in run(*given, *order).out


def test_a_plan_that_cannot_run(tmp_path: Path) -> None:
    text = '{"p": 4, "d": 32, "t": 1, "num_transformer_layers": 32}'
    (tmp_path / "mine.json").write_text(text, encoding="utf-8")
    done = run("nest", "evaluate", LLAMA2, str(tmp_path / "mine.json"))
    assert done.code == 1
    assert "128 devices, and there are 64" in done.out
    plain = run("nest", "evaluate", LLAMA2, str(tmp_path / "mine.json"), "--json").json()
    assert plain["time_per_batch"] is None
    assert len(plain["refusals"]) > 1


def test_an_instance_without_a_plan(tmp_path: Path) -> None:
    document = json.loads(Path(LLAMA2).read_text(encoding="utf-8"))
    document["maxMemoryPerDevice"] = 2**30
    path = tmp_path / "small.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    done = run("nest", "solve", str(path))
    assert done.code == 1
    assert "No plan: node" in done.out
    assert run("nest", "solve", str(path), "--json").json()["no_plan"]["missing_bytes"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("solve", "absent.json"), "it cannot be read"),
        (("solve", LLAMA2, "--without", "sync"), "has no such switch"),
        (("evaluate", LLAMA2), "Give either a file or --baseline NAME."),
        (
            ("evaluate", LLAMA2, RESULT, "--baseline", "Manual"),
            "Give either a file or --baseline NAME.",
        ),
        (("evaluate", LLAMA2, "--baseline", "manual"), "Did you mean Manual?"),
    ],
)
def test_bad_input(words: tuple[str, ...], message: str) -> None:
    done = run("nest", *words)
    assert done.code == 2
    assert message in done.err
