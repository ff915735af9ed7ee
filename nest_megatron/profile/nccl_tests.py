"""Reads the text that nccl-tests print: all_reduce_perf and its sisters.

A log holds, for each run, the ranks (``#  Rank  0 Group  0 Pid  1 on host device ...``), a table
whose head names its columns, and a foot (``# Out of bounds values``). Releases differ in the
columns, so rows are read by the head. A row is checked against the ranks, its element count, its
time and its bandwidths; nothing in a table is skipped in silence.

The ``size`` column is the larger of a rank's two buffers: the whole tensor of all five collectives,
as ``cluster.communication`` means ``message_bytes`` (``all_gather_perf -b 8M`` on 8 ranks
gathers 1 MiB from each and prints 8 MiB). Times are those out of place, the mean of the iterations.

Source: NVIDIA/nccl-tests 2.19.6 ``src/common.cu``, ``src/util.cu`` (2.9.0 for the older head).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.errors import ProfileError
from nest_megatron.profile.nccl_tests_row import (
    NOISE,
    Columns,
    Row,
    RowError,
    columns_of,
    read_row,
)
from nest_megatron.profile.network import CollectiveSample

_KINDS = {
    "allreduce": CollectiveKind.ALL_REDUCE,
    "allgather": CollectiveKind.ALL_GATHER,
    "reducescatter": CollectiveKind.REDUCE_SCATTER,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "sendrecv": CollectiveKind.SEND_RECV,
}
#: What mpirun --tag-output and srun --label put before each line.
_TAG = re.compile(r"^.*?\[\d+,\d+\]<(stdout|stderr)>:\s?|^\s*\d+:\s")
_STARTING = re.compile(r"#\s*Collective test starting:\s*(\S+)")
_ITERATIONS = re.compile(
    r"#\s*nThread.*?(?<!warmup )\biters:\s*(\d{1,18})(?:\s+agg iters:\s*(\d{1,18}))?"
)
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,18})\s+(?:Group\s+(\d{1,18})\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+"
)
_VERSION = re.compile(r"#\s*nccl-tests version (\S+).*nccl-library=(\d{1,18})|NCCL version (\S+)")
_HEAD = re.compile(r"#\s+size\s+count\s+type\b")
_UNITS = re.compile(r"#\s+\(B\)")
_FOOT = re.compile(r"#\s*Out of bounds values\s*:\s*(\d{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What logs hold.

    Args:
        versions: of nccl-tests and NCCL, where they are printed.
        notes: rows that say nothing of the network, one sentence each.
    """

    samples: tuple[CollectiveSample, ...]
    versions: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _Run:
    """State of one run while its lines go by."""

    kind: CollectiveKind | None
    iterations: int = 1
    ranks: dict[int, tuple[str, str]] = field(default_factory=dict)
    columns: Columns | None = None
    head_line: int = 0
    rows: int = 0


def read_logs(logs: Iterable[tuple[str, str]], kind: CollectiveKind | None = None) -> Reading:
    """Read several logs.

    Args:
        logs: name and text of each.
        kind: of runs that do not print their name; from the file's name if not given.

    Raises:
        ProfileError: naming the file, the line and what was expected there.
    """
    readings = [read_log(text, name, kind) for name, text in logs]
    return Reading(
        samples=tuple(each for reading in readings for each in reading.samples),
        versions={k: v for reading in readings for k, v in reading.versions.items()},
        notes=tuple(each for reading in readings for each in reading.notes),
    )


def read_log(text: str, name: str, kind: CollectiveKind | None = None) -> Reading:
    """Read one log, of one run or of several after each other; see ``read_logs``."""
    return _Log(name, kind or kind_named(Path(name).name)).read(text)


def kind_named(text: str) -> CollectiveKind | None:
    """The collective that a program's or a file's name speaks of.

    >>> kind_named("all_reduce_perf_mpi").value, kind_named("8gpu.log")
    ('all_reduce', None)
    """
    letters = "".join(c for c in text.lower() if c.isalpha())
    found = {kind for word, kind in _KINDS.items() if word in letters}
    return found.pop() if len(found) == 1 else None


class _Log:
    """Reads one log, line by line."""

    def __init__(self, name: str, kind: CollectiveKind | None) -> None:
        self._name = name
        self._kind = kind
        self._run = _Run(kind=kind)
        self._samples: list[CollectiveSample] = []
        self._versions: dict[str, str] = {}
        self._empty = 0
        self._tables = 0

    def read(self, text: str) -> Reading:
        number = 0
        for number, raw in enumerate(text.splitlines(), start=1):
            line, is_error = _untagged(raw)
            if not is_error:
                self._take(line, number)
        self._require_closed(number)
        if not self._tables:
            raise self._wrong(
                number, "the whole file", "no table of nccl-tests is in it (# size count type ...)"
            )
        note = f"{self._name}: {self._empty} rows of no bytes tell nothing and are left out."
        return Reading(
            samples=tuple(self._samples),
            versions=self._versions,
            notes=(note,) if self._empty else (),
        )

    def _take(self, line: str, number: int) -> None:
        if line.lstrip().startswith("#"):
            self._take_comment(line.strip(), number)
        elif self._run.columns is not None:
            self._take_row(line, number)
        elif found := _VERSION.search(line):
            self._note_version(found)
        elif _looks_like_row(line):
            raise self._wrong(number, line, "a row without the head (# size count type ...) above")

    def _take_comment(self, line: str, number: int) -> None:
        if found := _STARTING.match(line):
            self._start(number, found.group(1))
        elif found := _ITERATIONS.match(line):
            self._run.iterations = int(found.group(1)) * int(found.group(2) or 1)
        elif found := _RANK.match(line):
            self._take_rank(int(found.group(1)), found.group(2) or "0", found.group(3), number)
        elif found := _VERSION.match(line):
            self._note_version(found)
        elif _HEAD.match(line):
            self._open(line, number)
        elif found := _FOOT.match(line):
            self._close(int(found.group(1)), number)

    def _start(self, number: int, program: str) -> None:
        self._require_closed(number)
        kind = kind_named(program)
        if kind is None:
            known = ", ".join(CollectiveKind)
            raise self._wrong(number, program, f"this test is none of {known}")
        self._run = _Run(kind=kind)

    def _take_rank(self, rank: int, group: str, host: str, number: int) -> None:
        self._require_closed(number)
        if rank in self._run.ranks:  # the next run of a release that does not print its name
            self._run = _Run(kind=self._kind, iterations=self._run.iterations)
        self._run.ranks[rank] = (group, host)

    def _open(self, line: str, number: int) -> None:
        self._require_closed(number)
        if not self._run.ranks:
            raise self._wrong(number, line, "which ranks ran is not said: no '#  Rank ...' above")
        if self._run.kind is None:
            raise self._wrong(
                number, line, "which collective ran is not said; give --kind, or name the file so"
            )
        try:
            self._run.columns = columns_of(line)
        except RowError as error:
            raise self._wrong(number, line, str(error)) from None
        self._run.head_line = number
        self._run.rows = 0

    def _take_row(self, line: str, number: int) -> None:
        if not line.strip() or NOISE.search(line):
            return
        run = self._run
        assert run.columns is not None
        assert run.kind is not None
        shape = self._shape(number)
        try:
            row = read_row(line, run.columns, run.kind, shape[0] * shape[1])
        except RowError as error:
            raise self._wrong(number, line, str(error)) from None
        run.rows += 1
        if row.message_bytes:
            self._samples.append(_sample(row, run, shape))
        else:
            self._empty += 1

    def _close(self, wrong: int, number: int) -> None:
        if self._run.columns is None:
            raise self._wrong(number, "# Out of bounds values", "no table is above it")
        if wrong:
            raise self._wrong(
                number, wrong, "values came out wrong: the network or its software is broken"
            )
        if not self._run.rows:
            raise self._wrong(self._run.head_line, "the table", "it has no rows")
        self._run.columns = None
        self._tables += 1

    def _require_closed(self, number: int) -> None:
        if self._run.columns is not None:
            raise self._wrong(
                number,
                f"the table from line {self._run.head_line}",
                "it ends without its foot (# Out of bounds values), so the log was cut short",
            )

    def _shape(self, number: int) -> tuple[int, int]:
        """Ranks on a host, and hosts, of the group that rank 0 is in."""
        group, _ = self._run.ranks.get(0, next(iter(self._run.ranks.values())))
        counts = Counter(host for each, host in self._run.ranks.values() if each == group)
        inside = set(counts.values())
        if len(inside) > 1:
            raise self._wrong(
                number, dict(counts), "hosts hold different numbers of ranks, or ranks are missing"
            )
        if sum(counts.values()) < 2:
            raise self._wrong(number, dict(counts), "one rank alone sends nothing")
        return inside.pop(), len(counts)

    def _note_version(self, found: re.Match[str]) -> None:
        tests, code, library = found.groups()
        if tests:
            self._versions["nccl-tests"] = tests
            self._versions["nccl"] = _version_of(int(code))
        else:
            self._versions["nccl"] = library

    def _wrong(self, number: int, value: object, limit: str) -> ProfileError:
        return ProfileError(
            f"{self._name}, line {number}",
            value=value.strip() if isinstance(value, str) else value,
            limit=limit,
            fix="Give the output of nccl-tests as it was printed, whole runs only.",
        )


def _sample(row: Row, run: _Run, shape: tuple[int, int]) -> CollectiveSample:
    assert run.kind is not None
    return CollectiveSample(
        kind=run.kind,
        num_ranks=shape[0] * shape[1],
        shape=shape,
        message_bytes=row.message_bytes,
        seconds=row.seconds,
        spread=row.spread,
        repetitions=run.iterations,
    )


def _untagged(line: str) -> tuple[str, bool]:
    """A line without its launcher's tag, and whether it went to standard error."""
    found = _TAG.match(line)
    return (line, False) if found is None else (line[found.end() :], found.group(1) == "stderr")


def _looks_like_row(line: str) -> bool:
    words = line.split()
    return len(words) >= 8 and all(word.isdecimal() for word in words[:2])


def _version_of(code: int) -> str:
    """NCCL's version from its number.

    >>> _version_of(22902), _version_of(2804)
    ('2.29.2', '2.8.4')
    """
    base = 10000 if code >= 10000 else 1000
    return f"{code // base}.{code % base // 100}.{code % 100}"
