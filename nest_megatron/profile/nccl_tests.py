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
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.errors import ProfileError
from nest_megatron.profile.network import CollectiveSample

#: Digits of a count; one with more is none.
_MAX_DIGITS = 18
#: Lines that NCCL and launchers write between rows.
_NOISE = re.compile(r"NCCL (INFO|WARN|TRACE|version|DEBUG)|^\s*-{5,}\s*$")
#: Collectives whose element count is that of one rank.
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
#: The last column of some tables; a timestamp has two words.
_LAST = "timestamp"
#: How far figures that belong together may lie apart, on top of the rounding of what is printed.
_SHARE = 0.01
_KINDS = {kind.value.replace("_", ""): kind for kind in CollectiveKind}
#: What mpirun --tag-output, mpiexec -l and srun --label put before each line.
_TAG = re.compile(r"^.*?\]<(stdout|stderr)>:\s?|^\s*\[\d+\]\s|^\s*\d+:\s")
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
_FOOT = re.compile(r"#\s*Out of bounds values\s*:\s*(\d{1,18})")
_FIX = "Give the output of nccl-tests as it was printed, whole runs only."


class Reading(NamedTuple):
    """What logs hold: samples, versions of nccl-tests and NCCL, and what tells nothing.

    Args:
        devices: names of the GPUs, each once.
    """

    devices: tuple[str, ...]
    samples: tuple[CollectiveSample, ...]
    versions: Mapping[str, str]
    notes: tuple[str, ...]


def read_logs(logs: Iterable[tuple[str, str]], kind: CollectiveKind | None = None) -> Reading:
    """Read several logs, each a name and a text.

    Args:
        kind: of runs that do not print their name; from the file's name by default.

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
    """A log while its lines go by; ``columns`` are those of a table that is open."""

    def __init__(self, name: str, kind: CollectiveKind | None) -> None:
        self._name, self._file_kind = name, kind
        self._samples: list[CollectiveSample] = []
        self._versions: dict[str, str] = {}
        self._devices: dict[str, None] = {}
        self._empty = self._tables = self._number = 0
        self._line = ""
        self._iterations = 1
        self._begin(kind)
        self._comments = (
            (_STARTING, self._start),
            (_ITERATIONS, self._take_iterations),
            (_RANK, self._take_rank),
            (_VERSION, self._note_version),
            (_HEAD, self._open),
            (_FOOT, self._close),
        )

    def _begin(self, kind: CollectiveKind | None) -> None:
        self._kind = kind
        self._ranks: dict[int, tuple[str, str]] = {}
        self._columns: tuple[str, ...] = ()
        self._head_line = self._rows = 0

    def read(self, text: str) -> Reading:
        for self._number, raw in enumerate(text.splitlines(), start=1):
            tag = _TAG.match(raw)
            if tag is None or tag[1] != "stderr":
                self._line = _TAG.sub("", raw)
                self._take()
        self._require_closed()
        if not self._tables:
            limit = "no table of nccl-tests is in it (# size count type ...)"
            raise ProfileError("measurements", self._name, limit, _FIX)
        note = f"{self._name}: {self._empty} rows of no bytes tell nothing and are left out."
        return Reading(
            devices=tuple(self._devices),
            samples=tuple(self._samples),
            versions=self._versions,
            notes=(note,) if self._empty else (),
        )

    def _take(self) -> None:
        line, words = self._line, self._line.split()
        if line.lstrip().startswith("#"):
            for pattern, take in self._comments:
                if found := pattern.match(line.strip()):
                    return take(found)
        elif self._columns:
            if words and not _NOISE.search(line):
                self._take_row(words)
        elif found := _VERSION.search(line):
            self._note_version(found)
        elif len(words) >= 8 and all(word.isdecimal() for word in words[:2]):
            raise self._wrong("a row without the head (# size count type ...) above")
        return None

    def _start(self, found: re.Match[str]) -> None:
        self._require_closed()
        kind = kind_named(found[1])
        if kind is None:
            raise self._wrong(f"this test is none of {', '.join(CollectiveKind)}", found[1])
        self._iterations = 1
        self._begin(kind)

    def _take_iterations(self, found: re.Match[str]) -> None:
        self._iterations = int(found[1]) * int(found[2] or 1)

    def _take_rank(self, found: re.Match[str]) -> None:
        self._require_closed()
        rank = int(found[1])
        if rank in self._ranks:  # the next run of a release that does not print its name
            self._begin(self._file_kind)
        self._ranks[rank] = (found[2] or "0", found[3])
        if found[4]:
            self._devices[found[4]] = None

    def _open(self, _: re.Match[str]) -> None:
        self._require_closed()
        if not self._ranks:
            raise self._wrong("which ranks ran is not said: no '#  Rank ...' above")
        if self._kind is None:
            raise self._wrong("which collective ran is not said; give --kind, or name the file so")
        names = self._line.strip().lstrip("# ").split()
        if "cputime" in names:
            raise self._wrong("it holds CPU times (-C 1), which are not those of the network")
        leading = [name for name in _LEADING if name in names]
        rest = names[len(leading) : len(names) - (names[-1] == _LAST)]
        bodies = ([*_BODY] * 2, [*_OLD_BODY] * 2, [*_BODY, *_PER_ITERATION] * 2)
        if names[: len(leading)] != leading or rest not in bodies:
            raise self._wrong(
                f"a head reads: {' '.join(_LEADING)}, then twice {' '.join(_BODY)} (out of place, "
                "in place)"
            )
        self._columns = tuple(names)
        self._head_line, self._rows = self._number, 0

    def _take_row(self, words: list[str]) -> None:
        """Read and check a row; ``time`` and what follows it stand twice, first out of place."""
        columns, kind, (inside, hosts) = self._columns, self._kind, self._shape()
        assert kind is not None
        has_timestamp = columns[-1] == _LAST
        if len(words) != len(columns) + has_timestamp:
            raise self._wrong(
                f"a row has {len(columns) + has_timestamp} columns here ({' '.join(columns)}), not "
                f"{len(words)}"
            )
        at = columns.index("time")
        size = self._checked_size(words, kind, inside * hosts)
        step = (len(columns) - has_timestamp - at) // 2
        for body in (words[at : at + 4], words[at + step : at + step + 4]):
            self._check_body(body[:3], kind, size, inside * hosts)
            wrong, column = body[3], columns[at + 3]  # N/A: not looked at (all-to-all in place)
            if wrong != "N/A" and self._number_of(wrong, column) and column == "#wrong":
                raise self._wrong(f"{wrong} values came out wrong (#wrong): the run proves nothing")
        self._rows += 1
        if not size:
            self._empty += 1
            return
        variation = columns.index("i_cv%") if step > len(_BODY) else None
        # of a normal distribution, whose middle half is 1.35 standard deviations wide
        spread = None if variation is None else 0.0135 * self._number_of(words[variation], "i_cv%")
        self._samples.append(
            CollectiveSample(
                kind=kind,
                num_ranks=inside * hosts,
                shape=(inside, hosts),
                message_bytes=size,
                seconds=self._number_of(words[at], "time") * 1e-6,
                spread=spread,
                repetitions=self._iterations,
            )
        )

    def _checked_size(self, words: list[str], kind: CollectiveKind, num_ranks: int) -> int:
        """The size, which must be that of all elements: some collectives count per rank."""
        for word, name in zip(words, ("size", "count"), strict=False):
            if not (word.isascii() and word.isdecimal() and len(word) <= _MAX_DIGITS):
                raise self._wrong(f"{name} is a whole number, not {word}")
        size, count, type_name = int(words[0]), int(words[1]), words[2]
        if type_name not in _TYPE_BYTES:
            raise self._wrong(f"a type is one of {', '.join(_TYPE_BYTES)}, not {type_name}")
        expected = count * _TYPE_BYTES[type_name] * (num_ranks if kind in _COUNTED else 1)
        if size != expected:
            raise self._wrong(
                f"{count} elements of {type_name} in {kind} of {num_ranks} ranks are {expected} "
                f"bytes, not {size}"
            )
        return size

    def _check_body(
        self, words: list[str], kind: CollectiveKind, size: int, num_ranks: int
    ) -> None:
        """Time, algorithm and bus bandwidth must belong together."""
        micros, algorithm, bus = map(self._number_of, words, _BODY)
        if size and not micros:
            raise self._wrong("a time is above 0")
        rate = size / (micros * 1e3) if size else 0.0
        rounding = _rounding(words[0]) / micros * rate if size else 0.0
        if abs(algorithm - rate) > _rounding(words[1]) + rounding + _SHARE * rate:
            raise self._wrong(
                f"{size} bytes in {words[0]} us are {rate:.2f} GB/s, not algbw {words[1]}"
            )
        factor = 1.0
        if kind is not CollectiveKind.SEND_RECV:
            factor = (2 if kind is CollectiveKind.ALL_REDUCE else 1) * (num_ranks - 1) / num_ranks
        rounding = _rounding(words[2]) + factor * _rounding(words[1])
        if abs(bus - factor * algorithm) > rounding + _SHARE * bus:
            raise self._wrong(
                f"{kind} of {num_ranks} ranks has busbw = {factor:.3f} algbw, not {words[2]} "
                f"with {words[1]}"
            )

    def _number_of(self, word: str, name: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise self._wrong(f"{name} is a number of at least 0, not {word}")
        return value

    def _close(self, found: re.Match[str]) -> None:
        if not self._columns:
            raise self._wrong("no table is above it", "# Out of bounds values")
        if wrong := int(found[1]):
            raise self._wrong("values came out wrong: the network or its software is broken", wrong)
        if not self._rows:
            self._number = self._head_line
            raise self._wrong("it has no rows", "the table")
        self._columns = ()
        self._tables += 1

    def _require_closed(self) -> None:
        if self._columns:
            raise self._wrong(
                "it ends without its foot (# Out of bounds values), so the log was cut short",
                f"the table from line {self._head_line}",
            )

    def _shape(self) -> tuple[int, int]:
        """Ranks on a host, and hosts, of the group that rank 0 is in."""
        group, _ = self._ranks.get(0, next(iter(self._ranks.values())))
        counts = Counter(host for each, host in self._ranks.values() if each == group)
        inside = set(counts.values())
        if len(inside) > 1:
            limit = "hosts hold different numbers of ranks, or ranks are missing"
            raise self._wrong(limit, dict(counts))
        if sum(counts.values()) < 2:
            raise self._wrong("one rank alone sends nothing", dict(counts))
        return inside.pop(), len(counts)

    def _note_version(self, found: re.Match[str]) -> None:
        tests, code, library = found.groups()
        if tests:
            self._versions["nccl-tests"] = tests
        self._versions["nccl"] = _version_of(int(code)) if tests else library

    def _wrong(self, limit: str, value: object = None) -> ProfileError:
        return ProfileError(
            f"{self._name}, line {self._number}",
            self._line.strip() if value is None else value,
            limit,
            _FIX,
        )


def _rounding(word: str) -> float:
    """Half of the last digit that is printed.

    >>> _rounding("43.8"), _rounding("1.2e+07")
    (0.05, 500000.0)
    """
    exponent = Decimal(word).as_tuple().exponent
    assert isinstance(exponent, int), "numbers are finite"
    return 0.5 * 10.0**exponent


def _version_of(code: int) -> str:
    """NCCL's version from its number.

    >>> _version_of(22902), _version_of(2804)
    ('2.29.2', '2.8.4')
    """
    base = 10000 if code >= 10000 else 1000
    return f"{code // base}.{code % base // 100}.{code % 100}"
