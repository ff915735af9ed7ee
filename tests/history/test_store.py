"""The file of records: whole lines whoever writes at once, and what a reader makes of it."""

from __future__ import annotations

import json
import multiprocessing
import os
from datetime import datetime
from pathlib import Path

import pytest

from nest_megatron import files
from nest_megatron.errors import UserInputError
from nest_megatron.history import store
from nest_megatron.history.records import Outcome
from nest_megatron.plain import to_plain
from tests.history.runs import run_record


@pytest.fixture
def history(tmp_path: Path) -> Path:
    files.warn_once.cache_clear()
    return tmp_path / "runs.jsonl"


def test_what_is_appended_is_read(history: Path) -> None:
    later = run_record(id="ffff", start="2026-11-24T12:00:00+00:00")
    assert store.read(history) == ()
    store.append(later, history)
    store.append(run_record(), history)
    assert store.read(history) == (run_record(), later)


def test_lines_of_one_run_are_one_record(history: Path) -> None:
    store.append(run_record(outcome=Outcome.STARTED, measured=None, end=None), history)
    store.append(run_record(), history)
    assert store.read(history) == (run_record(),)


def _append_many(path: Path, writer: int) -> None:
    for number in range(20):
        hosts = tuple(f"host-{n}" for n in range(2_000))  # far above PIPE_BUF
        store.append(run_record(id=f"{writer}-{number}", hosts=hosts), path)


def test_writers_at_once_lose_nothing(history: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append_many, args=(history, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(store.read(history)) == 60
    assert len(history.read_bytes().splitlines()) == 60


def test_a_torn_line_costs_itself_alone(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.append(run_record(), history)
    with history.open("ab") as stream:
        stream.write(b'{"schema": 1, "id": "torn')
    assert store.read(history) == (run_record(),)
    assert "no whole record on line 2" in capsys.readouterr().err
    store.append(run_record(id="ffff"), history)
    assert [run.id for run in store.read(history)] == ["0123abcd", "ffff"]


def test_later_versions_fields_are_passed_over_and_stay(
    history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = to_plain(run_record())
    fields["weather"] = "fine"
    fields["job"]["weather"] = "fine"
    history.write_text(json.dumps(fields) + "\n" + json.dumps({"schema": 2, "id": "x"}) + "\n")
    store.append(run_record(id="ffff"), history)
    assert store.read(history)[0] == run_record()
    assert len(store.read(history)) == 2
    assert history.read_text().count("weather") == 2
    assert "1 records of a later nest-megatron" in capsys.readouterr().err


def test_a_start_without_a_zone_is_no_moment(
    history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history.write_text("\n")
    store.append(run_record(), history)
    store.append(run_record(id="ffff", start="2026-11-23T12:00:00"), history)
    assert store.read(history) == (run_record(),)
    assert "no whole record on line 3" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["[]", "{}", "1", '{"schema": "x"}', "[" * 100_000])
def test_what_is_no_record_is_told_of(
    history: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    history.write_text(line + "\n")
    assert store.read(history) == ()
    assert "no whole record on line 1" in capsys.readouterr().err


def test_the_variable_names_a_file_or_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "site.jsonl"))
    assert store.history_file() == tmp_path / "site.jsonl"
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))
    assert store.history_file() == tmp_path / "runs.jsonl"
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "new") + os.sep)
    assert store.append(run_record()) == tmp_path / "new" / "runs.jsonl"
    monkeypatch.delenv(store.VARIABLE)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert store.history_file() == tmp_path / "data" / "nest-megatron" / "runs.jsonl"


def test_a_file_that_cannot_be_written_is_an_error_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserInputError, match=store.VARIABLE):
        store.append(run_record(), tmp_path / "file" / "runs.jsonl")
    with pytest.raises(UserInputError, match="no regular file"):
        store.read(tmp_path)


def test_runs_are_selected() -> None:
    runs = (run_record(), run_record(id="ffff", plan="x", outcome=Outcome.FAILED))
    assert store.selected(runs, model="llama3_8b") == runs
    assert store.selected(runs, model="gpt3") == ()
    assert store.selected(runs, plan="x", outcome=Outcome.FAILED) == runs[1:]
    since = datetime.fromisoformat("2026-11-23T14:00:00+01:00")
    assert store.selected(runs, since=since) == ()


def test_a_run_is_found_by_the_start_of_its_id() -> None:
    runs = (run_record(), run_record(id="ffff"), run_record(id="ffaa"))
    assert store.find(runs, "012") == runs[0]
    for name, limit in (("ff", "2 runs begin so"), ("9", "no such run"), ("", "no such run")):
        with pytest.raises(UserInputError, match=limit):
            store.find(runs, name)
