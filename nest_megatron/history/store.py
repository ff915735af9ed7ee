"""Where records of runs are kept: one file of a site, to which lines are appended.

A record is a line of JSON. Lines are appended under a lock, each in one write; a run has one when
it starts and one for each thing that becomes known of it, and the lines together are its record.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from nest_megatron.errors import UserInputError, nearest
from nest_megatron.files import expanded, warn_once
from nest_megatron.history.records import SCHEMA, Outcome, RunRecord
from nest_megatron.plain import Source, from_plain, to_plain

#: Names the file, or a folder for it; jobs of a site share one on a shared disk.
VARIABLE = "NEST_MEGATRON_HISTORY"
_NAME = "runs.jsonl"
#: An append takes milliseconds; a training job does not wait longer for one that hangs.
LOCK_TIMEOUT_S = 10.0
#: Later versions write more fields, which are passed over.
_LATER = Source(is_foreign=True)


def history_file() -> Path:
    """The file of records; it need not exist."""
    asked = os.environ.get(VARIABLE)
    if asked:
        path = expanded(Path(asked), VARIABLE)
        return path / _NAME if asked.endswith(os.sep) or path.is_dir() else path
    from platformdirs import user_data_path

    return user_data_path("nest-megatron") / _NAME


def append(record: RunRecord, path: Path | None = None) -> Path:
    """Add a line to the file of records; safe for many ranks and jobs at once.

    Returns:
        The file.

    Raises:
        UserInputError: if it cannot be locked or written to.
    """
    from filelock import FileLock, Timeout

    path = path or history_file()
    line = json.dumps(to_plain(record), separators=(",", ":"), ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S, mode=0o666):
            _write_line(path, line.encode("utf-8", errors="backslashreplace"))
    except Timeout as error:
        limit = f"another process has held its lock for {LOCK_TIMEOUT_S:g} s"
        raise _unusable(path, limit) from error
    except (OSError, NotImplementedError) as error:  # a disk without locks
        reason = getattr(error, "strerror", None) or str(error)
        raise _unusable(path, f"it cannot be written to: {reason}") from error
    return path


def _write_line(path: Path, line: bytes) -> None:
    """Append a line, on a line of its own where a writer before was killed within its own."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        while line:  # a write may be short, on a full disk
            line = line[os.write(descriptor, line) :]
    finally:
        os.close(descriptor)


def read(path: Path | None = None) -> tuple[RunRecord, ...]:
    """Every run of the file, by when it started; lines that cannot be read are told of.

    Raises:
        UserInputError: if the file is there and cannot be read.
    """
    path = path or history_file()
    runs: dict[str, RunRecord] = {}
    for record in _records(path):
        before = runs.get(record.id)
        runs[record.id] = record if before is None else before.followed_by(record)
    return tuple(sorted(runs.values(), key=lambda run: datetime.fromisoformat(run.start)))


def _records(path: Path) -> Iterator[RunRecord]:
    broken: list[str] = []
    newer = 0
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if isinstance(fields, dict) and fields.get("schema", 0) > SCHEMA:
                newer += 1
                continue
            record = from_plain(RunRecord, fields, f"line {number}:", _LATER)
            if datetime.fromisoformat(record.start).tzinfo is None:
                raise ValueError(record.start)
        except (ValueError, TypeError, RecursionError):
            broken.append(str(number))
            continue
        yield record
    if broken:
        few = ", ".join(broken[:5]) + (", ..." if len(broken) > 5 else "")
        warn_once(f"{path}: no whole record on line {few}, which is passed over.")
    if newer:
        warn_once(f"{path}: {newer} records of a later nest-megatron are passed over.")


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of the file, one at a time: a site's history outgrows other files."""
    if path.exists() and not path.is_file():
        raise _unusable(path, "it is no regular file")
    try:
        with path.open("rb") as stream:
            yield from stream
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(path, f"it cannot be read: {error.strerror or error}") from error


def selected(
    records: Iterable[RunRecord],
    *,
    model: str | None = None,
    since: datetime | None = None,
    plan: str | None = None,
    outcome: Outcome | None = None,
) -> tuple[RunRecord, ...]:
    """The records with a model, a start at or after a moment, a plan's checksum or an outcome."""
    return tuple(
        each
        for each in records
        if model in (None, each.job.model)
        and (since is None or datetime.fromisoformat(each.start) >= since)
        and plan in (None, each.plan)
        and outcome in (None, each.outcome)
    )


def find(records: Iterable[RunRecord], run: str) -> RunRecord:
    """The record of a run, by its id or the start of it.

    Raises:
        UserInputError: if none has it, or several have.
    """
    known = {each.id: each for each in records}
    with contextlib.suppress(KeyError):
        return known[run]
    found = [name for name in known if run and name.startswith(run)]
    if len(found) == 1:
        return known[found[0]]
    limit = "there is no such run" if not found else f"{len(found)} runs begin so"
    fix = nearest(run, found or known) if known else "The history is empty."
    raise UserInputError("run", value=run, limit=limit, fix=fix)


def _unusable(path: Path, limit: str) -> UserInputError:
    fix = f"Name a file on a disk that you may write to with {VARIABLE}."
    return UserInputError("history", value=str(path), limit=limit, fix=fix)
