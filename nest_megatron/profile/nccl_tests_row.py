"""One row of a table of nccl-tests, by the columns that its head names."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from nest_megatron.cluster.records import CollectiveKind
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
