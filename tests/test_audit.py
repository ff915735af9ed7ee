"""The audit of a site: whole lines whoever writes, and what its reader makes of any file."""

from __future__ import annotations

import dataclasses
import gzip
import json
import multiprocessing
import os
import stat
import threading
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from nest_megatron import files
from nest_megatron.config import defaults
from nest_megatron.config import policy as policies
from nest_megatron.errors import INTERRUPTED, NestError, UserInputError
from nest_megatron.files import append_line
from nest_megatron.history.records import FlagChange, Launch, Outcome
from nest_megatron.history.store import line_of, read, read_audit
from nest_megatron.integrations import run_record as audit
from nest_megatron.layout.policy import PolicyError, PolicyFile
from nest_megatron.minisign import Reason, SignatureError
from nest_megatron.planner.pinned_job import refusal
from nest_megatron.planner.pins import ChangedPinError
from nest_megatron.report.runs import outcome_words
from tests.cli.runs import ROOT, interrupted, run
from tests.history.runs import run_record

STARTED = run_record(
    outcome=Outcome.STARTED,
    end=None,
    measured=None,
    launch=Launch(
        mode="pinned",
        signer="87C09460C7CF688F",
        changes=(FlagChange(name="micro_batch_size", before="4", after="1"),),
    ),
)


@pytest.fixture(autouse=True)
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy of this test alone that names an audit."""
    files.warn_once.cache_clear()
    path = tmp_path / "policy.yaml"
    monkeypatch.setattr(defaults, "SYSTEM_FOLDER", tmp_path / "etc")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(policies.VARIABLE, str(path))
    monkeypatch.setenv("COLUMNS", "200")
    return write(path, file=str(tmp_path / "audit.jsonl"))


def write(path: Path, **rules: Any) -> Path:
    path.write_text(yaml.safe_dump({"audit": rules}))
    return path


def test_a_launch_is_one_record_whatever_becomes_of_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit.audit_launch(STARTED)
    audit.audit_outcome(dataclasses.replace(STARTED, measured=run_record().measured))
    audit.audit_outcome(
        dataclasses.replace(STARTED, outcome=Outcome.FINISHED, end=run_record().end)
    )
    assert len(path.read_bytes().splitlines()) == 3
    assert read(path) == (run_record(launch=STARTED.launch),)
    assert stat.S_IMODE(path.stat().st_mode) == 0o622


def test_a_forged_end_changes_nothing_of_how_it_began(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit.audit_launch(STARTED)
    forged = Launch(mode="pinned", signer="0000000000000000", changes=())
    audit.audit_outcome(run_record(plan="ffffffffffffffff", launch=forged))
    audit.audit_outcome(run_record(user="eve"))
    mine, other = sorted(read(path), key=lambda each: each.user)
    assert (mine.plan, mine.launch) == (STARTED.plan, STARTED.launch)
    assert other.user == "eve"


def _append_many(path: str, writer: int) -> None:
    hosts = tuple(f"host-{n}" for n in range(2_000))  # far above PIPE_BUF
    for number in range(20):
        append_line(Path(path), line_of(run_record(id=f"{writer}-{number}", hosts=hosts)))
        if writer == 0 and number == 10:  # as logrotate does
            Path(path).rename(f"{path}.1")


def test_two_jobs_and_a_rotation_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=_append_many, args=(str(path), n)) for n in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
        assert job.exitcode == 0
    rotated = path.with_name("audit.jsonl.1")
    packed = path.with_name("audit.jsonl.1.gz")
    packed.write_bytes(gzip.compress(rotated.read_bytes()))
    assert len({each.id for each in read(path, packed)}) == 40


def test_a_line_that_was_cut_short_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "audit.jsonl"
    audit.audit_launch(STARTED)
    with monkeypatch.context() as full:
        real = os.write
        full.setattr(os, "write", lambda descriptor, line: real(descriptor, line[:20]))
        audit.audit_launch(run_record(id="half"))
    assert "No space left on device" in capsys.readouterr().out
    audit.audit_launch(run_record(id="next"))
    assert {each.id for each in read(path)} == {STARTED.id, "next"}
    assert "no whole record on line 2" in capsys.readouterr().err


def test_a_file_that_users_may_write_to_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    audit.audit_launch(STARTED)
    real = os.open

    def without_reading(name: Any, flags: int, *more: Any) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real(name, flags, *more)

    monkeypatch.setattr(os, "open", without_reading)
    append_line(path, line_of(run_record(id="next")))
    monkeypatch.undo()
    assert {each.id for each in read(path)} == {STARTED.id, "next"}


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("where", ["gone/audit.jsonl", "pipe", "folder"])
def test_what_cannot_be_written_is_said_or_ends_the_launch(
    policy: Path, tmp_path: Path, where: str, required: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    write(policy, file=str(tmp_path / where), required=required)
    if required:
        with pytest.raises(PolicyError, match=r"audit\.required") as refused:
            audit.audit_launch(STARTED)
        assert f"{policy}:" in refused.value.limit
    else:
        audit.audit_launch(STARTED)
        assert f"not in the audit {tmp_path / where}" in capsys.readouterr().out


def test_a_disk_that_does_not_answer_stops_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(audit, "append_line", lambda *_, **__: answered.wait())
    monkeypatch.setattr(audit, "_WRITE_S", 0.1)
    audit.audit_launch(STARTED)
    answered.set()
    assert "its disk has not answered for 0.1 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "rules",
    [
        {"file": "audit.jsonl"},
        {"mode": 0o622},
        {"file": "/a", "mode": 622},
        {"file": "/a", "mode": 0},
        {"file": "/a", "needed": True},
    ],
)
def test_an_audit_that_is_not_understood_ends_everything(
    policy: Path, rules: dict[str, Any]
) -> None:
    write(policy, **rules)
    refused = run("audit")
    assert refused.code == 2
    assert str(policy) in refused.err.replace("\n       ", " ")


@pytest.fixture
def audited(tmp_path: Path) -> Path:
    """The audit of two users: a finished launch, and one that nothing is known of since."""
    audit.audit_launch(STARTED)
    audit.audit_outcome(run_record(launch=STARTED.launch))
    later = {"id": "ffff0000", "start": "2026-11-25T12:00:00+00:00", "plan": "ffff456789abcdef"}
    audit.audit_launch(dataclasses.replace(STARTED, user="bob", launch=None, **later))
    return tmp_path / "audit.jsonl"


@pytest.mark.usefixtures("audited")
def test_who_ran_what_beside_its_prediction() -> None:
    done = run("audit")
    assert done.code == 0
    first, second = (line for line in done.out.splitlines() if "llama3_8b" in line)
    for word in ("ada", "1234", "0123456789abcdef", "87C09460C7CF688F", "2.000 s", "+7.5 %"):
        assert word in first
    assert "no end recorded" in second
    assert "running" not in second
    assert "bob" in second
    told = run("audit", "--run", STARTED.id).out
    assert "signed with key 87C09460C7CF688F" in told
    assert "4 -> 1" in told


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--user", "bob"), ["ffff0000"]),
        (("--since", "2026-11-24"), ["ffff0000"]),
        (("--plan", "0123"), [STARTED.id]),
        (("--run", "0123"), [STARTED.id]),
        (("--user", "eve"), []),
    ],
)
def test_launches_are_chosen_by_what_they_are(
    audited: Path, words: tuple[str, ...], found: list[str]
) -> None:
    document = run("audit", str(audited), *words, "--json").json()
    assert [each["id"] for each in document["runs"]] == found
    assert run("audit", *words).code == 0


@pytest.mark.parametrize(
    ("later_s", "said"),
    [
        (30, "no end recorded, started less than 2 min ago"),
        (7_200, "no end recorded, started 2.0 h ago"),
        (-60, "no end recorded"),  # the clocks of hosts differ
    ],
)
def test_a_killed_launch_has_no_end(later_s: int, said: str) -> None:
    now = datetime.fromisoformat(STARTED.start) + timedelta(seconds=later_s)
    assert outcome_words(STARTED, now) == said
    assert outcome_words(run_record(), now) == "finished"


@pytest.mark.usefixtures("audited")
def test_programs_learn_how_long_no_end_was_recorded() -> None:
    first, second = run("audit", "--json").json()["runs"]
    assert first["without_end_s"] is None
    assert second["without_end_s"] >= 0


def refuse(**launch: Any) -> None:
    """A rule does not allow a launch."""
    with audit.auditing_refusals(**{"mode": "auto", "plan_file": None, "num_ranks": 16, **launch}):
        raise PolicyFile(path="/etc/policy.yaml", lines={"launch.pinned_only": 4}).broken(
            "launch.pinned_only", "+nest", "auto", "only pinned plans are launched here"
        )


def test_a_refused_launch_is_written_down_with_its_rule(audited: Path) -> None:
    with pytest.raises(PolicyError):
        refuse()
    assert len(read(audited)) == 2
    _, (refused,) = read_audit(audited)
    assert (refused.rule, refused.exit_code, refused.num_ranks) == ("launch.pinned_only", 16, 16)
    assert "/etc/policy.yaml:4" in refused.reason
    told = run("audit")
    assert told.code == 0
    assert "Refused before they began" in told.out
    assert "launch.pinned_only" in told.out
    one = run("audit", "--run", refused.id).out
    assert "only pinned plans are launched here" in one
    assert "llama3_8b" not in one
    document = run("audit", "--json").json()
    assert [each["outcome"] for each in document["refused"]] == ["refused"]
    assert run("audit", "--user", "nobody", "--json").json()["refused"] == []
    assert run("audit", "--plan", "0123", "--json").json()["refused"] == []


@pytest.mark.parametrize(
    ("error", "rule"),
    [
        (
            SignatureError(Reason.WRONG, value="x", limit="it is wrong", fix="Sign."),
            "launch.signers",
        ),
        (ChangedPinError("plan", value="x", limit="changed", fix="Pin."), "nest.plan"),
        (refusal([]), "nest.on_mismatch"),
        (UserInputError("nest.cluster", value="x", limit="there is none", fix="Name one."), None),
    ],
)
def test_what_no_rule_refuses_is_no_refusal(
    error: NestError, rule: str | None, tmp_path: Path
) -> None:
    with pytest.raises(type(error)), audit.auditing_refusals("pinned", "/plans/a.yaml", 8):
        raise error
    path = tmp_path / "audit.jsonl"
    found = read_audit(path)[1] if path.exists() else ()
    assert [(each.rule, each.plan_file) for each in found] == [(rule, "/plans/a.yaml")][
        : bool(rule)
    ]


def test_a_refusal_that_cannot_be_written_is_told_and_ends_the_launch_alike(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(policy, file=str(tmp_path), required=True)
    with pytest.raises(PolicyError, match="pinned_only"):
        refuse()
    assert f"this refusal is not in the audit {tmp_path}" in capsys.readouterr().out


def test_ctrl_c_while_an_audit_is_read(audited: Path, tmp_path: Path) -> None:
    slow = (
        "import time; from nest_megatron.history import store\n"
        "store.read_audit = lambda *paths: time.sleep(3600)"
    )
    at = "nest_megatron.history.store:read_audit"
    done = interrupted(at, "audit", str(audited), cwd=tmp_path, prepare=slow)
    assert (done.code, done.out) == (INTERRUPTED, "")
    assert done.err.strip() == "Interrupted."


def test_any_file_is_read_or_named(audited: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile.jsonl"
    fields = json.loads(line_of(run_record(id="evil\x1b[2J", user="\x1b]0;x\x07")))
    none = {**fields, "measured": {**fields["measured"], "step_times_s": [], "warm_up": 0}}
    zero = {**fields, "predicted": {**fields["predicted"], "step_s": 0.0}}
    lines = [fields, none, zero, {}, [], "x"]
    hostile.write_text("\n".join(map(json.dumps, lines)) + '\n{"schema": 1, "id": "torn')
    done = run("audit", str(audited), str(hostile))
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "evil?[2J" in done.out
    assert "no whole record on line 2, 3, 4, 5, 6, ..." in done.err

    packed = tmp_path / "audit.jsonl.2.gz"
    packed.write_bytes(gzip.compress(audited.read_bytes())[:-9])
    done = run("audit", str(packed))
    assert done.code == 0
    assert "is damaged behind line" in done.err
    assert run("audit", str(tmp_path / "none.jsonl")).code == 2
    folder = run("audit", str(tmp_path))
    assert folder.code == 2
    assert folder.err.startswith(f"error: audit = {tmp_path}: it is no regular file")
    assert "HISTORY" not in folder.err
    (tmp_path / "empty.jsonl").touch()
    assert run("audit", str(tmp_path / "empty.jsonl")).out.startswith("There is no launch in")


def test_a_line_longer_than_any_record_is_passed_over(
    audited: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nest_megatron.history.store.MAX_BYTES", 5_000)
    with audited.open("ab") as stream:
        stream.write(b"x" * 12_000 + b"\n" + line_of(run_record(id="next")))
    done = run("audit", str(audited))
    assert "no whole record on line 4," in done.err
    assert "next" in done.out


def test_without_an_audit_a_file_is_asked_for(policy: Path) -> None:
    policy.write_text("{}")
    refused = run("audit")
    assert refused.code == 2
    assert "no policy here names an audit" in refused.err


def test_the_example_names_an_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(policies.VARIABLE, str(ROOT / "recipes" / "slurm" / "policy.yaml"))
    ((_, rules),) = audit.audits()
    assert rules.required
    assert rules.mode == 0o622
