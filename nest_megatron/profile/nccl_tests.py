"""Reads the text that nccl-tests print: all_reduce_perf and its sisters.

A log holds, for each run, the ranks (``#  Rank  0 Group  0 Pid  1 on host device ...``), a table
whose head names its columns, and a foot (``# Out of bounds values``). A row is checked against the
ranks, its element count, its time and its bandwidths; nothing in a table is skipped in silence.

The ``size`` column is the larger of a rank's two buffers: the whole tensor of all five collectives
(``all_gather_perf -b 8M`` on 8 ranks gathers 1 MiB from each and prints 8 MiB). Times are those out
of place, the mean of the iterations.

Source: NVIDIA/nccl-tests 2.19.6 ``src/common.cu``, ``src/util.cu`` (2.9.0 for the older head).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.errors import ProfileError
from nest_megatron.profile.network import CollectiveSample
from nest_megatron.units import Bytes, Seconds

#: Digits of a count; one with more is none.
_MAX_DIGITS = 18
#: Lines that NCCL and launchers write between rows.
NOISE = re.compile(r"NCCL (INFO|WARN|TRACE|version|DEBUG)|^\s*-{5,}\s*$")

_COUNTED = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
)
_TYPE_BYTES = {
    **dict.fromkeys(("int8", "uint8", "char", "f8e4m3", "f8e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "int", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}
_LEADING = ("size", "count", "type", "redop", "root")
_BODY = ("time", "algbw", "busbw", "#wrong")
#: Until release 2.12; the last is the largest deviation, which the foot judges.
_OLD_BODY = (*_BODY[:3], "error")
_PER_ITERATION = ("i_min", "i_max", "i_p99", "i_cv%")
_LAST = "timestamp"
#: How far figures that belong together may lie apart, beside the rounding of what is printed.
_SHARE = 0.01


class RowError(Exception):
    """A row or a head that is not as it was expected; what was, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Columns of a table, in order; ``time`` and its followers twice, out of place and in place."""

    names: tuple[str, ...]

    @property
    def num_words(self) -> int:
        """Words of a row; a timestamp has two."""
        return len(self.names) + (self.names[-1] == _LAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size: the whole tensor, and the time out of place.

    ``spread`` is the middle half of the iterations over their median, where a table tells it.
    """

    message_bytes: Bytes
    seconds: Seconds
    spread: float | None


def columns_of(head: str) -> Columns:
    """The columns that a head names; a ``RowError`` for another kind of table.

    >>> columns_of("# size count type time algbw busbw error time algbw busbw error").num_words
    11
    """
    names = head.lstrip("# ").split()
    if "cputime" in names:
        raise RowError("it holds CPU times (-C 1), which are not those of the network")
    leading = [name for name in _LEADING if name in names]
    rest = names[len(leading) :]
    if rest and rest[-1] == _LAST:
        rest = rest[:-1]
    bodies = ([*_BODY] * 2, [*_OLD_BODY] * 2, [*_BODY, *_PER_ITERATION] * 2)
    if names[: len(leading)] != leading or rest not in bodies:
        raise RowError(
            f"a head reads: {' '.join(_LEADING)}, then twice {' '.join(_BODY)} (out of place, in "
            "place)"
        )
    return Columns(names=tuple(names))


def read_row(line: str, columns: Columns, kind: CollectiveKind, num_ranks: int) -> Row:
    """Read and check a row; a ``RowError`` says what was expected."""
    words = line.split()
    if len(words) != columns.num_words:
        raise RowError(
            f"a row has {columns.num_words} columns here ({' '.join(columns.names)}), not "
            f"{len(words)}"
        )
    at = columns.names.index("time")
    size, count = _whole(words[0], "size"), _whole(words[1], "count")
    _check_size(kind, size, count, words[2], num_ranks)
    step = (len(columns.names) - (columns.names[-1] == _LAST) - at) // 2
    for body in (words[at : at + 4], words[at + step : at + step + 4]):
        _check_body(body[:3], kind, size, num_ranks)
        wrong, column = body[3], columns.names[at + 3]  # N/A: not looked at (all-to-all in place)
        if wrong != "N/A" and _number(wrong, column) and column == "#wrong":
            raise RowError(f"{wrong} values came out wrong (#wrong): the run proves nothing")
    variation = columns.names.index("i_cv%") if step > len(_BODY) else None
    return Row(
        message_bytes=size,
        seconds=_number(words[at], "time") * 1e-6,
        # of a normal distribution, whose middle half is 1.35 standard deviations wide
        spread=None if variation is None else 0.0135 * _number(words[variation], "i_cv%"),
    )


def _check_size(
    kind: CollectiveKind, size: int, count: int, type_name: str, num_ranks: int
) -> None:
    """The size must be that of all elements: told per rank by some collectives."""
    width = _TYPE_BYTES.get(type_name)
    if width is None:
        raise RowError(f"a type is one of {', '.join(_TYPE_BYTES)}, not {type_name}")
    expected = count * width * (num_ranks if kind in _COUNTED else 1)
    if size != expected:
        raise RowError(
            f"{count} elements of {type_name} in a {kind} of {num_ranks} ranks are {expected} "
            f"bytes, not {size}"
        )


def _check_body(words: list[str], kind: CollectiveKind, size: int, num_ranks: int) -> None:
    """Time, algorithm and bus bandwidth must belong together."""
    micros, algorithm, bus = map(_number, words, _BODY)
    if size and not micros:
        raise RowError("a time is above 0")
    rate = size / (micros * 1e3) if size else 0.0
    rounding = _rounding(words[0]) / micros * rate if size else 0.0
    if abs(algorithm - rate) > _rounding(words[1]) + rounding + _SHARE * rate:
        raise RowError(f"{size} bytes in {words[0]} us are {rate:.2f} GB/s, not algbw {words[1]}")
    factor = 1.0
    if kind is not CollectiveKind.SEND_RECV:
        factor = (2 if kind is CollectiveKind.ALL_REDUCE else 1) * (num_ranks - 1) / num_ranks
    rounding = _rounding(words[2]) + factor * _rounding(words[1])
    if abs(bus - factor * algorithm) > rounding + _SHARE * bus:
        raise RowError(
            f"a {kind} of {num_ranks} ranks has busbw = {factor:.3f} algbw, not {words[2]} with "
            f"{words[1]}"
        )


def _rounding(word: str) -> float:
    """Half of the last digit that is printed.

    >>> _rounding("43.8"), _rounding("1.2e+07")
    (0.05, 500000.0)
    """
    exponent = Decimal(word).as_tuple().exponent
    assert isinstance(exponent, int), "numbers are finite"
    return 0.5 * 10.0**exponent


def _whole(word: str, name: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) <= _MAX_DIGITS):
        raise RowError(f"{name} is a whole number, not {word}")
    return int(word)


def _number(word: str, name: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise RowError(f"{name} is a number of at least 0, not {word}")
    return value


_KINDS = {kind.value.replace("_", ""): kind for kind in CollectiveKind}
#: What mpirun --tag-output and srun --label put before each line.
_TAG = re.compile(r"^.*?\[\d+,\d+\]<(stdout|stderr)>:\s?|^\s*\d+:\s")
_STARTING = re.compile(r"#\s*Collective test starting:\s*(\S+)")
_ITERATIONS = re.compile(
    r"#\s*nThread.*?(?<!warmup )\biters:\s*(\d{1,18})(?:\s+agg iters:\s*(\d{1,18}))?"
)
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,18})\s+(?:Group\s+(\d{1,18})\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+"
    r"(?:\s+\[[^\]]*\]\s*(.*\S))?"
)
_VERSION = re.compile(r"#\s*nccl-tests version (\S+).*nccl-library=(\d{1,18})|NCCL version (\S+)")
_HEAD = re.compile(r"#\s+size\s+count\s+type\b")
_UNITS = re.compile(r"#\s+\(B\)")
_FOOT = re.compile(r"#\s*Out of bounds values\s*:\s*(\d{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What logs hold: samples, versions of nccl-tests and NCCL, and what tells nothing.

    Args:
        devices: names of the GPUs, each once.
    """

    devices: tuple[str, ...]
    samples: tuple[CollectiveSample, ...]
    versions: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _Run:
    """State of one run while its lines go by; ``columns`` are those of a table that is open."""

    kind: CollectiveKind | None
    iterations: int = 1
    ranks: dict[int, tuple[str, str]] = field(default_factory=dict)
    columns: Columns | None = None
    head_line: int = 0
    rows: int = 0


def read_logs(logs: Iterable[tuple[str, str]], kind: CollectiveKind | None = None) -> Reading:
    """Read several logs, each a name and a text.

    Args:
        kind: of runs that do not print their name; from the file's name if not given.

    Raises:
        ProfileError: naming the file, the line and what was expected there.
    """
    readings = [read_log(text, name, kind) for name, text in logs]
    return Reading(
        devices=tuple({name: None for reading in readings for name in reading.devices}),
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
    def __init__(self, name: str, kind: CollectiveKind | None) -> None:
        self._name = name
        self._kind = kind
        self._run = _Run(kind=kind)
        self._samples: list[CollectiveSample] = []
        self._versions: dict[str, str] = {}
        self._devices: dict[str, None] = {}
        self._empty = self._tables = self._line = 0
        self._comments = (
            (_STARTING, self._start),
            (_ITERATIONS, self._take_iterations),
            (_RANK, self._take_rank),
            (_VERSION, self._note_version),
            (_HEAD, self._open),
            (_FOOT, self._close),
        )

    def read(self, text: str) -> Reading:
        for self._line, raw in enumerate(text.splitlines(), start=1):
            line, is_error = _untagged(raw)
            if not is_error:
                self._take(line)
        self._require_closed()
        if not self._tables:
            raise self._wrong(
                "the whole file", "no table of nccl-tests is in it (# size count type ...)"
            )
        note = f"{self._name}: {self._empty} rows of no bytes tell nothing and are left out."
        return Reading(
            devices=tuple(self._devices),
            samples=tuple(self._samples),
            versions=self._versions,
            notes=(note,) if self._empty else (),
        )

    def _take(self, line: str) -> None:
        if line.lstrip().startswith("#"):
            for pattern, take in self._comments:
                if found := pattern.match(line.strip()):
                    return take(found)
        elif self._run.columns is not None:
            if line.strip() and not NOISE.search(line):
                self._take_row(line, self._run, self._run.columns)
        elif found := _VERSION.search(line):
            self._note_version(found)
        elif _looks_like_row(line):
            raise self._wrong(line, "a row without the head (# size count type ...) above")
        return None

    def _start(self, found: re.Match[str]) -> None:
        self._require_closed()
        kind = kind_named(found[1])
        if kind is None:
            raise self._wrong(found[1], f"this test is none of {', '.join(CollectiveKind)}")
        self._run = _Run(kind=kind)

    def _take_iterations(self, found: re.Match[str]) -> None:
        self._run.iterations = int(found[1]) * int(found[2] or 1)

    def _take_rank(self, found: re.Match[str]) -> None:
        self._require_closed()
        rank = int(found[1])
        if rank in self._run.ranks:  # the next run of a release that does not print its name
            self._run = _Run(kind=self._kind, iterations=self._run.iterations)
        self._run.ranks[rank] = (found[2] or "0", found[3])
        if found[4]:
            self._devices[found[4]] = None

    def _open(self, found: re.Match[str]) -> None:
        self._require_closed()
        if not self._run.ranks:
            raise self._wrong(found.string, "which ranks ran is not said: no '#  Rank ...' above")
        if self._run.kind is None:
            limit = "which collective ran is not said; give --kind, or name the file so"
            raise self._wrong(found.string, limit)
        try:
            self._run.columns = columns_of(found.string)
        except RowError as error:
            raise self._wrong(found.string, str(error)) from None
        self._run.head_line, self._run.rows = self._line, 0

    def _take_row(self, line: str, run: _Run, columns: Columns) -> None:
        shape = self._shape()
        num_ranks = shape[0] * shape[1]
        assert run.kind is not None
        try:
            row = read_row(line, columns, run.kind, num_ranks)
        except RowError as error:
            raise self._wrong(line, str(error)) from None
        run.rows += 1
        if not row.message_bytes:
            self._empty += 1
            return
        sample = CollectiveSample(
            kind=run.kind,
            num_ranks=num_ranks,
            shape=shape,
            message_bytes=row.message_bytes,
            seconds=row.seconds,
            spread=row.spread,
            repetitions=run.iterations,
        )
        self._samples.append(sample)

    def _close(self, found: re.Match[str]) -> None:
        if self._run.columns is None:
            raise self._wrong("# Out of bounds values", "no table is above it")
        if wrong := int(found[1]):
            limit = "values came out wrong: the network or its software is broken"
            raise self._wrong(wrong, limit)
        if not self._run.rows:
            self._line = self._run.head_line
            raise self._wrong("the table", "it has no rows")
        self._run.columns = None
        self._tables += 1

    def _require_closed(self) -> None:
        if self._run.columns is not None:
            raise self._wrong(
                f"the table from line {self._run.head_line}",
                "it ends without its foot (# Out of bounds values), so the log was cut short",
            )

    def _shape(self) -> tuple[int, int]:
        """Ranks on a host, and hosts, of the group that rank 0 is in."""
        group, _ = self._run.ranks.get(0, next(iter(self._run.ranks.values())))
        counts = Counter(host for each, host in self._run.ranks.values() if each == group)
        inside = set(counts.values())
        if len(inside) > 1:
            limit = "hosts hold different numbers of ranks, or ranks are missing"
            raise self._wrong(dict(counts), limit)
        if sum(counts.values()) < 2:
            raise self._wrong(dict(counts), "one rank alone sends nothing")
        return inside.pop(), len(counts)

    def _note_version(self, found: re.Match[str]) -> None:
        tests, code, library = found.groups()
        if tests:
            self._versions["nccl-tests"] = tests
            self._versions["nccl"] = _version_of(int(code))
        else:
            self._versions["nccl"] = library

    def _wrong(self, value: object, limit: str) -> ProfileError:
        return ProfileError(
            f"{self._name}, line {self._line}",
            value.strip() if isinstance(value, str) else value,
            limit,
            fix="Give the output of nccl-tests as it was printed, whole runs only.",
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
