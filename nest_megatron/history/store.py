"""Where records of runs are kept: one file of a site, to which lines are appended.

A record is a line of JSON. Lines are appended under a lock, each in one write; a run has one when
it starts and one for each thing that becomes known of it, and the lines together are its record.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from nest_megatron.documents import parse_json
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.files import MAX_BYTES, append_line, expanded, user_folder, warn_once
from nest_megatron.history.records import REFUSED, SCHEMA, Outcome, RefusedLaunch, RunRecord
from nest_megatron.plain import Source, from_plain, to_plain

Record = TypeVar("Record", bound=RunRecord | RefusedLaunch)

#: Names the file, or a folder for it; jobs of a site share one on a shared disk.
VARIABLE = "NEST_MEGATRON_HISTORY"
_NAME = "runs.jsonl"
#: An append takes milliseconds; a training job does not wait longer for one that hangs.
LOCK_TIMEOUT_S = 10.0
#: Characters that move a terminal's cursor or change its colours.
_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), "?")
#: What is read in the place of a line that is longer than any record.
_PASSED_OVER = b"{"
#: Later versions write more fields, which are passed over.
_LATER = Source(is_foreign=True)


def history_file() -> Path:
    """The file of records; it need not exist."""
    if named := os.environ.get(VARIABLE):
        path = expanded(Path(named), VARIABLE)
        return path / _NAME if named.endswith(os.sep) or path.is_dir() else path
    return user_folder("data") / _NAME


def append(record: RunRecord, path: Path | None = None) -> Path:
    """Add a line to the file of records; safe for many ranks and jobs at once.

    Returns:
        The file.

    Raises:
        UserInputError: if it cannot be locked or written to.
    """
    from filelock import FileLock, Timeout

    path = path or history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S, mode=0o666):
            append_line(path, line_of(record))
    except Timeout as error:
        raise _unusable(
            path, f"another process has held its lock for {LOCK_TIMEOUT_S:g} s"
        ) from error
    except (OSError, NotImplementedError) as error:  # a disk without locks
        reason = getattr(error, "strerror", None) or str(error)
        raise _unusable(path, f"it cannot be written to: {reason}") from error
    return path


def line_of(record: RunRecord | RefusedLaunch) -> bytes:
    """A record as a line of a file."""
    text = json.dumps(to_plain(record), separators=(",", ":"), ensure_ascii=False)
    return f"{text}\n".encode(errors="backslashreplace")


def read(*paths: Path) -> tuple[RunRecord, ...]:
    """Every run of the files (the history if none is named), by when it started.

    Lines that cannot be read are reported; a file that is not there has none.

    Args:
        paths: also rotated ones, in any order, and compressed ones (``.gz``).

    Raises:
        UserInputError: if a file is there and cannot be read.
    """
    return read_audit(*paths or (history_file(),))[0]


def read_audit(*paths: Path) -> tuple[tuple[RunRecord, ...], tuple[RefusedLaunch, ...]]:
    """The runs of files as ``read`` has them, and the launches that were refused."""
    runs: dict[tuple[str, str, str], RunRecord] = {}
    refused = {}
    for path in paths:
        for record in _records(path):
            key = (record.id, record.user, record.start)
            if isinstance(record, RefusedLaunch):
                refused[key] = record
                continue
            before = runs.get(key)
            runs[key] = record if before is None else before.followed_by(record)
    return _by_start(runs.values()), _by_start(refused.values())


def _by_start(records: Iterable[Record]) -> tuple[Record, ...]:
    return tuple(sorted(records, key=lambda each: datetime.fromisoformat(each.start)))


def _records(path: Path) -> Iterator[RunRecord | RefusedLaunch]:
    broken = []
    newer = 0
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            fields = dict(_shown(parse_json(line.decode(), "record")))
            if fields.get("schema", 0) > SCHEMA:
                newer += 1
                continue
            kind: type[RunRecord | RefusedLaunch]
            kind = RefusedLaunch if fields.get("outcome") == REFUSED else RunRecord
            record = from_plain(kind, fields, f"line {number}:", _LATER)
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


def _shown(value: Any) -> Any:
    """Fields of a line without characters that a terminal would act on: others wrote them."""
    if isinstance(value, str):
        return value.translate(_CONTROLS)
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, dict):
        return {_shown(key): _shown(each) for key, each in value.items()}
    return value


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of the file, one at a time: a site's history outgrows other files."""
    if path.exists() and not path.is_file():
        raise _unusable(path, "it is no regular file")
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            while line := stream.readline(MAX_BYTES):
                number += 1
                is_whole = len(line) < MAX_BYTES or line.endswith(b"\n")
                yield line if is_whole else _PASSED_OVER
                while not is_whole and (rest := stream.readline(MAX_BYTES)):
                    is_whole = rest.endswith(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return
    except (EOFError, zlib.error, gzip.BadGzipFile):
        warn_once(f"{path}: its compression is damaged behind line {number}.")
    except OSError as error:
        raise _unusable(path, f"it cannot be read: {error.strerror or error}") from error


def selected(
    records: Iterable[Record],
    *,
    model: str | None = None,
    user: str | None = None,
    since: datetime | None = None,
    plan: str | None = None,
    outcome: Outcome | None = None,
) -> tuple[Record, ...]:
    """The records with a model, a user, a start at or after a moment, a plan or an outcome.

    Args:
        records: runs, or launches that were refused, which have a user and a start alone.
        plan: the checksum of a plan, or the start of it.
    """

    def is_wanted(each: RunRecord | RefusedLaunch) -> bool:
        is_named = isinstance(each, RefusedLaunch) or (
            model in (None, each.job.model)
            and each.plan.startswith(plan or "")
            and outcome in (None, each.outcome)
        )
        start = datetime.fromisoformat(each.start)
        return is_named and user in (None, each.user) and (since is None or start >= since)

    return tuple(filter(is_wanted, records))


def find(records: Iterable[Record], run: str) -> Record:
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
    fix = nearest(run, found or known) if known else "No run is recorded."
    raise UserInputError("run", run, limit, fix)


def _unusable(path: Path, limit: str) -> UserInputError:
    fix = f"Name a file on a disk that you may write to with {VARIABLE}."
    return UserInputError("history", str(path), limit, fix)
