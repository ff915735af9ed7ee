"""The folder of a tuning: who holds it, what was requested, every run and how it ended.

``journal.jsonl`` has a line of JSON for what was requested, then one whenever a run starts and one
when it ends; lines are only ever appended, so that what a killed program knew is read again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nest_megatron.documents import parse_json
from nest_megatron.errors import NestError, UserInputError
from nest_megatron.files import append_line, read_text, require_folder, warn_once, write_text
from nest_megatron.history.records import Outcome, RunRecord
from nest_megatron.history.store import read
from nest_megatron.plain import Name, from_plain, frozen, to_plain
from nest_megatron.profile.clock import OUT_OF_MEMORY
from nest_megatron.units import Bytes, Seconds, format_duration
from nest_megatron.version import __version__


class State(Name):
    """How far a run is. ``repeated``: it was killed with this program before it recorded a step."""

    STARTED = "started"
    MEASURED = "measured"
    FAILED = "failed"
    REPEATED = "repeated"


class Failure(Name):
    """Why a run failed."""

    OUT_OF_MEMORY = "out_of_memory"
    NCCL = "nccl"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    OTHER = "other"


_STOPS = "stops before training"
#: What the last lines of a run's output say of its end, where its record does not.
_SIGNS = {
    Failure.OUT_OF_MEMORY: rf"{OUT_OF_MEMORY.pattern}|OutOfMemoryError|MemoryError|std::bad_alloc"
    r"|not enough memory",
    Failure.NCCL: r"NCCL error|nccl(System|Internal|Unhandled\w*|Remote)Error"
    r"|Watchdog caught collective|DistBackendError|connectFullMesh failed"
    r"|Connection closed by peer",
    Failure.REFUSED: r"error: (unrecognized arguments|argument|the following arguments)"
    rf"|AssertionError|{_STOPS}",
}
_SILENT = "it ended without a record of its steps: is nest-megatron installed where it runs?"
_TAIL_BYTES = 64 * 2**10
#: Lines that say that something went wrong elsewhere.
_CONSEQUENCES = re.compile(r"^(W|E)\d{4} |ChildFailedError|SignalException|^\s*$|^[=\-_]+$")


class Ended(NamedTuple):
    """How a launched command ended; ``code`` is ``None`` where time ended it."""

    code: int | None
    seconds: Seconds


@frozen
class Trial:
    """A run of a plan.

    Args:
        number: from 1 on; its files are in the folder ``run-NUMBER``.
        plan: checksum of the plan.
        layout: the plan in few words.
        predicted_s: its step as predicted without runs.
        seconds: of the whole run, its start included.
        step_s: median of the watched steps.
        peak_memory_bytes, peak_allocated_bytes: the highest of all ranks, and of tensors alone.
        reason: the line that says why it failed.
    """

    number: int
    plan: str
    layout: str
    predicted_s: Seconds
    state: State
    seconds: Seconds | None = None
    step_s: Seconds | None = None
    peak_memory_bytes: Bytes | None = None
    peak_allocated_bytes: Bytes | None = None
    failure: Failure | None = None
    reason: str | None = None

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"run-{self.number}"

    @property
    def counts(self) -> bool:
        """Whether it is one of the runs of the budget."""
        return self.state is not State.REPEATED


def record_of(history: Path) -> RunRecord | None:
    """What the one run of a file has recorded, if anything."""
    return next(iter(read(history)), None)


def judged(trial: Trial, record: RunRecord | None, ended: Ended, output: Path) -> Trial:
    """A run that has ended, from what it recorded and from the last lines that it printed."""
    known = dataclasses.replace(trial, seconds=ended.seconds)
    if record and record.measured and record.outcome is Outcome.FINISHED:
        return measured(known, record)
    if record and record.outcome is Outcome.OUT_OF_MEMORY:
        failure, reason = Failure.OUT_OF_MEMORY, record.error
    elif ended.code is None:
        failure, reason = Failure.TIMEOUT, f"it was ended after {format_duration(ended.seconds)}"
    elif ended.code == 0:
        failure, reason = Failure.OTHER, _SILENT
    else:
        failure, reason = _failure(last_lines(output))
        if record and record.error is not None:
            reason = record.error
            if failure is Failure.NCCL:  # where one rank ends, the others lose its connections
                failure, _ = _failure([record.error])
        reason = reason or f"exit code {ended.code}"
    return dataclasses.replace(known, state=State.FAILED, failure=failure, reason=reason)


def measured(trial: Trial, record: RunRecord) -> Trial:
    """A run whose steps were measured."""
    assert record.measured is not None
    peaks = [peak for peak in record.measured.peak_memory_bytes if peak is not None]
    return dataclasses.replace(
        trial,
        state=State.MEASURED,
        step_s=record.measured.step_s,
        peak_memory_bytes=max(peaks, default=None),
        peak_allocated_bytes=record.measured.highest_allocated_bytes,
    )


def in_history(record: RunRecord, trial: Trial) -> RunRecord:
    """The record of a run that has ended, for the site's history."""
    known = dataclasses.replace(record, trial=True)
    if record.outcome is not Outcome.STARTED or trial.failure is None:
        return known
    ended = {Failure.OUT_OF_MEMORY: Outcome.OUT_OF_MEMORY, Failure.TIMEOUT: Outcome.KILLED}
    outcome = ended.get(trial.failure, Outcome.FAILED)
    return dataclasses.replace(known, outcome=outcome, error=trial.reason)


def last_lines(output: Path) -> list[str]:
    """The last lines that a run printed."""
    if not output.is_file():
        return []
    with output.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return stream.read().decode(errors="replace").splitlines()


def _failure(lines: Iterable[str]) -> tuple[Failure, str | None]:
    """The class of a failure, and the line that tells it.

    >>> _failure(["[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried ..."])[0]
    <Failure.OUT_OF_MEMORY: 'out_of_memory'>
    """
    shown = [line.strip() for line in lines if not _CONSEQUENCES.search(line)]
    for failure, sign in _SIGNS.items():
        at = next((k for k, line in enumerate(shown) if re.search(sign, line, re.IGNORECASE)), None)
        if at is not None:
            ends = shown[at:] if _STOPS in shown[at] else ()  # our error stands behind this line
            ours = (re.search(r"\berror: (.+?)\.?$", line) for line in ends)
            reason = next((error[1] for error in ours if error), shown[at])
            return failure, reason[:300]
    said = [line for line in shown if re.search(r"\w(Error|Exception)\b|^error: ", line)] or shown
    return Failure.OTHER, said[-1][:300] if said else None


_JOURNAL, _LOCK, _HOLDER = "journal.jsonl", "lock", "held_by"
_POLL_S = 0.2
_OPTION = "--resume"


@frozen
class TuneRequest:
    """What a tuning was started with; a resumed one goes on with it.

    Args:
        command: the user's command, word for word.
        overrides: settings, ``key=value``.
        budget: the most runs.
        iterations: steps that are watched of each.
        folder: where it was started; paths of the command are relative to it.
    """

    command: str
    overrides: tuple[str, ...]
    config_dir: str | None
    free: str
    megatron_version: str | None
    budget: int
    iterations: int
    run_timeout_s: Seconds
    launcher: str
    launcher_options: tuple[str, ...]
    folder: str
    nest_megatron_version: str = __version__


class Session:
    """A tuning's folder, held by this process."""

    def __init__(self, folder: Path, request: TuneRequest, trials: Mapping[int, Trial]) -> None:
        self.folder, self.request = folder, request
        self._trials = dict(trials)

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Every run, as far as it is known, by number."""
        return tuple(self._trials[number] for number in sorted(self._trials))

    def path(self, trial: Trial, name: str) -> Path:
        """A file of a run."""
        return self.folder / trial.folder / name

    def note(self, trial: Trial) -> None:
        """Append what is known of a run now."""
        self._trials[trial.number] = trial
        _append(self.folder, to_plain(trial))


@contextlib.contextmanager
def new_session(folder: Path, request: TuneRequest) -> Iterator[Session]:
    """Begin a tuning in a new folder.

    Raises:
        UserInputError: if the folder has one, or another process holds it.
    """
    require_folder(folder, "--out")
    is_new = not folder.exists()
    folder.mkdir(exist_ok=True)
    with _held(folder):
        if {path.name for path in folder.iterdir()} - {_LOCK, _HOLDER}:
            raise UserInputError(
                "--out",
                str(folder),
                "there are files in it",
                f"Name another folder, or go on with --resume {folder}.",
            )
        _append(folder, to_plain(request))
        session = Session(folder, request, {})
        try:
            yield session
        except NestError:
            if not session.trials:  # there is nothing to go on with
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                if is_new:
                    folder.rmdir()
            raise


@contextlib.contextmanager
def resumed_session(folder: Path) -> Iterator[Session]:
    """Go on with the tuning of a folder.

    Raises:
        UserInputError: if there is none, another process holds it, or another version began it.
    """
    journal = folder / _JOURNAL
    if not journal.is_file():
        raise UserInputError(
            _OPTION,
            str(folder),
            f"it holds no tuning (there is no {_JOURNAL})",
            "Check the path.",
        )
    with _held(folder):
        request, trials = _read(journal)
        if request.nest_megatron_version != __version__:
            began = request.nest_megatron_version
            raise UserInputError(
                _OPTION,
                str(folder),
                f"nest-megatron {began} began it, and this is {__version__}",
                "Begin again: predictions of two versions are not compared.",
            )
        yield Session(folder, request, trials)


def _read(journal: Path) -> tuple[TuneRequest, dict[int, Trial]]:
    """What a journal says, without lines that were cut off as their writer was killed."""
    documents = []
    for number, line in enumerate(read_text(journal, _OPTION).split("\n"), 1):
        try:
            documents += [parse_json(line, _OPTION)] if line else []
        except ValueError:
            warn_once(f"{journal}: line {number} is cut off, and is passed over.")
    if not documents:
        raise UserInputError(_OPTION, str(journal), "it is empty", "Begin again.")
    trials = (from_plain(Trial, each, "journal:") for each in documents[1:])
    return from_plain(TuneRequest, documents[0], "journal:"), {
        trial.number: trial for trial in trials
    }


def _append(folder: Path, document: Mapping[str, Any]) -> None:
    """Append a line, and wait until it is on the disk."""
    path = folder / _JOURNAL
    append_line(path, json.dumps(document, separators=(",", ":")).encode() + b"\n")
    with path.open("ab") as stream:
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold a folder, and leave word of who does.

    Raises:
        UserInputError: if another process does, naming it.
    """
    path = folder / _HOLDER
    with open_locked(folder / _LOCK) as lock:
        if lock is None:
            holder = read_text(path, "tune").strip() if path.is_file() else "an unknown process"
            raise UserInputError(
                "tune",
                str(folder),
                f"{holder} tunes in it",
                "Wait for its end, end it, or name another folder.",
            )
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        write_text(path, f"process {os.getpid()} on {socket.gethostname()}, since {when},\n")
        yield


@contextlib.contextmanager
def open_locked(path: Path, timeout_s: Seconds = 0.0) -> Iterator[int | None]:
    """A file that this process alone has locked, its descriptor; ``None`` if it stays another's.

    A child process that inherits the descriptor holds the lock, too, until its end.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    until_s = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until_s:
                    time.sleep(_POLL_S)
                    continue
                yield None
            else:
                yield descriptor
            return
    finally:
        os.close(descriptor)
