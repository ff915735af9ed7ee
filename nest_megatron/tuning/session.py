"""The folder of a tuning: who holds it, what was requested, and every run so far.

``journal.jsonl`` has a line of JSON for what was requested, then one whenever a run starts and one
when it ends; lines are only ever appended, so that what a killed program knew is read again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nest_megatron.documents import parse_json
from nest_megatron.errors import UserInputError
from nest_megatron.files import append_line, read_text, require_folder, warn_once, write_text
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.tuning.trial import Trial
from nest_megatron.units import Seconds
from nest_megatron.version import __version__

_JOURNAL, _LOCK, _HOLDER = "journal.jsonl", "lock", "held_by"
_POLL_S = 0.2
_OPTION = "--resume"


@dataclass(frozen=True, slots=True, kw_only=True)
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
        (self.folder / trial.folder).mkdir(exist_ok=True)
        self._trials[trial.number] = trial
        _append(self.folder, to_plain(trial))


@contextlib.contextmanager
def new_session(folder: Path, request: TuneRequest) -> Iterator[Session]:
    """Begin a tuning in a folder of its own.

    Raises:
        UserInputError: if the folder has one, or another process holds it.
    """
    require_folder(folder, "--out")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserInputError(
            "--out", str(folder), f"it cannot be made: {error.strerror or error}", "Name another."
        ) from error
    with _held(folder):
        if any(path.name not in (_LOCK, _HOLDER) for path in folder.iterdir()):
            raise UserInputError(
                "--out",
                str(folder),
                "there are files in it",
                f"Name another folder, or go on with --resume {folder}.",
            )
        _append(folder, to_plain(request))
        yield Session(folder, request, {})


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
            fix="Check the path.",
        )
    with _held(folder):
        request, trials = _read(journal)
        if request.nest_megatron_version != __version__:
            began = request.nest_megatron_version
            raise UserInputError(
                _OPTION,
                str(folder),
                f"nest-megatron {began} began it, and this is {__version__}",
                "Begin anew: predictions of two versions are not compared.",
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
        raise UserInputError(_OPTION, str(journal), limit="it is empty", fix="Begin anew.")
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
