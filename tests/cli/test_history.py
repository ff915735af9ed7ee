"""``nest-megatron history``: a table, one run, an empty store, words that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nest_megatron.errors import BAD_INPUT
from nest_megatron.history import store
from nest_megatron.history.records import Outcome
from tests.cli.runs import run
from tests.history.runs import run_record


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history of two runs."""
    path = tmp_path / "runs.jsonl"
    monkeypatch.setenv(store.VARIABLE, str(path))
    monkeypatch.setenv("COLUMNS", "160")
    failed = run_record(
        id="ffff0000",
        start="2026-11-20T12:00:00+00:00",
        outcome=Outcome.OUT_OF_MEMORY,
        measured=None,
        error="rank 3 (b): OutOfMemoryError: CUDA out of memory.",
    )
    store.append(failed, path)
    store.append(run_record(warnings=("rank 3 (b): slow",)), path)
    return path


@pytest.mark.usefixtures("runs")
def test_the_table_has_a_row_for_each_run() -> None:
    done = run("history")
    assert done.code == 0
    first, second = (line for line in done.out.splitlines() if "llama3_8b" in line)
    assert "ffff0000" in first
    assert "out of memory" in first
    for word in ("0123abcd", "2026-11-23 12:00", "TP2 PP2", "2.000 s", "2.150 s", "+7.5 %"):
        assert word in second
    assert "61.0 GiB" in second


@pytest.mark.usefixtures("runs")
def test_runs_are_chosen_by_what_they_are() -> None:
    assert "ffff0000" not in run("history", "--since", "2026-11-22").out
    assert "0123abcd" not in run("history", "--outcome", "out_of_memory").out
    none = run("history", "--model", "gpt3")
    assert (none.code, none.out.split("in ")[0]) == (0, "None of the 2 runs ")


@pytest.mark.usefixtures("runs")
def test_one_run_is_shown_whole() -> None:
    out = run("history", "show", "0123").out
    for word in (
        "NVIDIA H100 80GB HBM3",
        "0123abcd: finished",
        "rank 3 (b): slow",
        "torch 2.13.0",
        "70.0 %",
        "job 1234",
    ):
        assert word in out
    assert "CUDA out of memory" in run("history", "show", "ffff0000").out


def test_a_run_on_a_cpu_is_not_called_one_on_gpus(runs: Path) -> None:
    store.append(run_record(id="cccc0000", device=None), runs)
    row = next(line for line in run("history").out.splitlines() if "cccc0000" in line)
    assert "no NVIDIA GPU" in row
    assert "h100" not in row
    assert "no NVIDIA GPU" in run("history", "show", "cccc").out


def test_runs_on_a_cpu_teach_nothing_and_it_is_said(runs: Path) -> None:
    runs.unlink()
    store.append(run_record(id="cccc0000", device=None), runs)
    done = run("calibrate", "--site")
    assert done.code == BAD_INPUT
    assert "(1 run, of which 1 on no NVIDIA GPU)" in " ".join(done.err.split())
    (row,) = (line for line in run("history").out.splitlines() if "cccc0000" in line)
    assert " ranks, no NVIDIA" in row


def test_a_program_reads_what_people_see(runs: Path) -> None:
    document = json.loads(run("history", "--json").out)
    assert document["file"] == str(runs)
    assert [each["id"] for each in document["runs"]] == ["ffff0000", "0123abcd"]
    assert document["runs"][1]["step_s"] == pytest.approx(2.15)
    assert json.loads(run("history", "show", "0123", "--json").out)["id"] == "0123abcd"


def test_an_empty_history_says_what_fills_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "none.jsonl"))
    done = run("history")
    assert done.code == 0
    assert "+nest=auto" in done.out
    assert json.loads(run("history", "--json").out)["runs"] == []


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--since", "soon"), "Give 2026-11-23"),
        (("show", "zzzz"), "there is no such run"),
        (("--outcome", "fine"), "fine"),
    ],
)
def test_wrong_words_are_refused(words: tuple[str, ...], said: str) -> None:
    done = run("history", *words)
    assert done.code == 2
    assert said in done.err
