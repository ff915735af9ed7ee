"""One run of one plan: what it was, how it ended, what it measured."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.files import MAX_BYTES, read_bytes
from nest_megatron.history.records import Outcome, RunRecord
from nest_megatron.history.store import read
from nest_megatron.names import Name
from nest_megatron.profile.clock import OUT_OF_MEMORY
from nest_megatron.units import Bytes, Seconds


class State(Name):
    """How far a run is. ``repeated``: it was killed with this program before it told anything."""

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


#: What the last lines of a run's output say of its end, where its record does not.
_SIGNS = (
    (
        Failure.OUT_OF_MEMORY,
        rf"{OUT_OF_MEMORY.pattern}|OutOfMemoryError|MemoryError|std::bad_alloc|not enough memory",
    ),
    (
        Failure.NCCL,
        r"NCCL error|nccl(System|Internal|Unhandled\w*|Remote)Error|Watchdog caught collective"
        r"|DistBackendError|connectFullMesh failed|Connection closed by peer",
    ),
    (
        Failure.REFUSED,
        r"error: (unrecognized arguments|argument|the following arguments)|AssertionError"
        r"|stops before training",
    ),
)
_SILENT = "it ended without a record of its steps: is nest-megatron installed where it runs?"
_TAIL_BYTES = 64 * 2**10
#: Lines that say that something went wrong elsewhere.
_CONSEQUENCES = re.compile(r"^(W|E)\d{4} |ChildFailedError|SignalException|^\s*$|^[=\-_]+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a launched command ended; ``code`` is ``None`` where time ended it."""

    code: int | None
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
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
    if record is not None and record.measured is not None and record.outcome is Outcome.FINISHED:
        return measured(known, record)
    lines = last_lines(output)
    if record is not None and record.outcome is Outcome.OUT_OF_MEMORY:
        failure, reason = Failure.OUT_OF_MEMORY, record.error
    elif ended.code is None:
        failure, reason = Failure.TIMEOUT, f"it was ended after {ended.seconds / 60:.0f} minutes"
    elif ended.code == 0:
        failure, reason = Failure.OTHER, _SILENT
    else:
        failure, reason = _failure(lines)
        if record is not None and record.error is not None:
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
    told = dataclasses.replace(record, trial=True)
    if record.outcome is not Outcome.STARTED or trial.failure is None:
        return told
    ended = {Failure.OUT_OF_MEMORY: Outcome.OUT_OF_MEMORY, Failure.TIMEOUT: Outcome.KILLED}
    outcome = ended.get(trial.failure, Outcome.FAILED)
    return dataclasses.replace(told, outcome=outcome, error=trial.reason)


def last_lines(output: Path) -> list[str]:
    """The last lines that a run printed."""
    if not output.is_file():
        return []
    text = read_bytes(output, "output", most=MAX_BYTES, whole=False)[-_TAIL_BYTES:]
    return text.decode("utf-8", errors="replace").splitlines()


def _failure(lines: Iterable[str]) -> tuple[Failure, str | None]:
    """The class of a failure, and the line that tells it.

    >>> _failure(["[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried ..."])[0]
    <Failure.OUT_OF_MEMORY: 'out_of_memory'>
    """
    told = [line.strip() for line in lines if not _CONSEQUENCES.search(line)]
    for failure, sign in _SIGNS:
        found = next((line for line in told if re.search(sign, line, re.IGNORECASE)), None)
        if found is not None:
            return failure, found[:300]
    errors = [line for line in told if re.search(r"\w(Error|Exception)\b|^error: ", line)]
    said = errors or told
    return Failure.OTHER, said[-1][:300] if said else None
