"""Units: SI everywhere inside, other units at the edges only, and the solver's integer clock.

The solver counts time in whole *ticks* of one picosecond. Sums and maxima of ticks are exact, so
two schedules that tie really tie, a bound that is proven on paper is proven in the machine, and the
compiled kernel and its Python twin agree to the last bit (decision 002 of ``docs/decisions.md``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from nest_megatron.errors import ProfileError, UserInputError

Seconds = float
Bytes = int
Flops = float
Ticks = int

GIB = 2**30
GB = 10**9

TICKS_PER_SECOND = 10**12
#: Longest time the clock carries: nine days, far from the edge of int64.
MAX_SECONDS = 8.0e5


def to_ticks(seconds: Seconds, *, what: str = "time") -> Ticks:
    """Round a time to the solver's clock.

    Args:
        seconds: a finite, non-negative time in seconds.
        what: its name, for the error.

    Raises:
        ProfileError: if the time is NaN, infinite, negative or longer than the clock carries.
    """
    if not 0.0 <= seconds <= MAX_SECONDS:  # also false for NaN
        raise ProfileError(
            what,
            seconds,
            f"a time must be a number of seconds between 0 and {MAX_SECONDS:g}",
            "Check the cluster's bandwidths (bytes/s), rates (FLOP/s) and latencies (s), and "
            "a measured profile where one is used: one of them is off by orders of magnitude.",
        )
    return round(seconds * TICKS_PER_SECOND)


def to_seconds(ticks: Ticks) -> Seconds:
    """A time on the solver's clock, in seconds."""
    return ticks / TICKS_PER_SECOND


def format_seconds(seconds: Seconds) -> str:
    """A time for people.

    >>> format_seconds(0.00042), format_seconds(1.5)
    ('420 us', '1.500 s')
    """
    if not math.isfinite(seconds):
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1.0:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.3f} s"


def format_range(low: Seconds, high: Seconds) -> str:
    """Two times for people, in one unit and to three figures.

    >>> format_range(27.94, 32.31), format_range(0.0279, 0.0323), format_range(4.066, 7.0)
    ('27.9 to 32.3 s', '27.9 to 32.3 ms', '4.07 to 7.00 s')
    """
    unit, scale = ("ms", 1e3) if high < 1.0 else ("s", 1.0)
    digits = max(0, 2 - math.floor(math.log10(scale * high))) if 0 < high < math.inf else 0
    return f"{scale * low:,.{digits}f} to {scale * high:,.{digits}f} {unit}"


def format_duration(seconds: Seconds) -> str:
    """A longer time for people.

    >>> format_duration(60.0), format_duration(1080.0), format_duration(11_140.0)
    ('60 s', '18.0 min', '3.1 h')
    """
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def format_gib(num_bytes: float) -> str:
    """Bytes for people, in MiB where they would be 0.0 GiB.

    >>> format_gib(80 * GIB), format_gib(12_000_000), format_gib(1), format_gib(0)
    ('80.0 GiB', '12 MiB', '1 MiB', '0.0 GiB')
    """
    if 0 < num_bytes < 0.05 * GIB:
        return f"{math.ceil(num_bytes / 2**20)} MiB"
    return f"{num_bytes / GIB:.1f} GiB"


def format_count(number: float) -> str:
    """A number of tokens or dollars for people, to four figures.

    >>> format_count(950), format_count(1_234_567), format_count(15 * 10**12)
    ('950', '1.235 M', '15 T')
    """
    for name, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:,.4g} {name}"
    return f"{number:,.0f}"


def counted(number: int, thing: str) -> str:
    """A number of things for people.

    >>> counted(1, "host"), counted(1024, "process")
    ('1 host', '1,024 processes')
    """
    plural = "es" if thing.endswith("s") else "s"
    return f"{number:,} {thing}{'' if number == 1 else plural}"


def format_chance(share: float) -> str:
    """A chance for people, which is never quite 0 and never quite 1.

    >>> [format_chance(each) for each in (0.0004, 0.024, 0.57, 0.9999)]
    ['below 0.1 %', '2 %', '57 %', 'above 99.9 %']
    """
    if share < 0.001:
        return "below 0.1 %"
    if share > 0.999:
        return "above 99.9 %"
    digits = 0 if 0.01 <= share <= 0.99 else 1
    return f"{100 * share:.{digits}f} %"


#: Numbers with a unit behind them. A longer text, or a larger exponent, is no figure of a machine.
_QUANTITY = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?)\s*([A-Za-zµμ][A-Za-zµμ/]*)"
)
_LONGEST = 40
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {f"{name}i": 1024**power for power, name in enumerate("KMGTPE", 1)}
_TIMES = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86_400),
}
_TIMES |= {"µs": _TIMES["us"], "μs": _TIMES["us"]}  # the micro sign, and the Greek letter


def _prefixed(
    *units: str, each: Fraction = Fraction(1), binary: bool = True
) -> dict[str, Fraction]:
    prefixes = {**_DECIMAL, **_BINARY} if binary else _DECIMAL
    return {f"{name}{unit}": size * each for name, size in prefixes.items() for unit in units}


class Dimension(NamedTuple):
    """What a field measures, by the end of its name.

    Args:
        words: what it is, and the unit of a plain number.
        units: what one of each is in that unit.
    """

    words: str
    units: Mapping[str, Fraction]
    example: str


_COUNT = Dimension(
    "a number",
    {name: Fraction(size) for name, size in {**_DECIMAL, **_BINARY}.items() if name}
    | {"B": Fraction(10**9)},
    "128k (128,000), 128Ki (131,072) or 15T",
)
_DIMENSIONS: Mapping[str, Dimension] = {
    "_bytes_per_s": Dimension(
        "a data rate in bytes/s",
        {**_prefixed("B/s"), **_prefixed("b/s", "bit/s", "bps", each=Fraction(1, 8))},
        "100GB/s, or 400Gb/s",
    ),
    "_flops_per_s": Dimension(
        "a rate in FLOP/s", _prefixed("FLOP/s", "FLOPS", binary=False), "989TFLOP/s"
    ),
    "_bytes": Dimension("a size in bytes", _prefixed("B"), "80GB, or 141GiB"),
    "_watts": Dimension("a power in watts", _prefixed("W", binary=False), "1.2kW"),
    "_minutes": Dimension(
        "a time in minutes", {name: size / 60 for name, size in _TIMES.items()}, "90s, or 10min"
    ),
    "_hours": Dimension(
        "a time in hours", {name: size / 3600 for name, size in _TIMES.items()}, "50000h"
    ),
    "_seconds": Dimension("a time in seconds", _TIMES, "90s, or 2min"),
    "_s": Dimension("a time in seconds", _TIMES, "2us, or 1.5ms"),
}


def dimension_of(field: str) -> Dimension:
    """What a field measures; of a name without a unit, a number of something."""
    return next((each for end, each in _DIMENSIONS.items() if field.endswith(end)), _COUNT)


def without_suffix(field: str) -> str:
    """The name of a field without its unit.

    >>> without_suffix("bandwidth_bytes_per_s"), without_suffix("seq_length")
    ('bandwidth', 'seq_length')
    """
    return next((field.removesuffix(end) for end in _DIMENSIONS if field.endswith(end)), field)


def is_quantity(text: str) -> bool:
    """Whether a text is a number with a unit.

    >>> is_quantity("100GB/s"), is_quantity("2 us"), is_quantity("1e5"), is_quantity("fp8")
    (True, True, False, False)
    """
    return len(text) <= _LONGEST and _QUANTITY.fullmatch(text.strip()) is not None


def read_quantity(text: str, field: str, what: str = "") -> int | float:
    """A number with a unit, in the unit that the name of its field says: exact, to a whole byte.

    Prefixes are those of the SI (k is 1,000) and of IEC 80000-13 (Ki is 1,024); B is a byte, b and
    bit are an eighth of one; of a plain number B is a billion.

    Args:
        field: name of the field, whose end says what it measures (``latency_s``).
        what: the field in the user's words, for the error.

    Raises:
        UserInputError: for a unit of something else, or one that is not known.

    >>> read_quantity("400Gb/s", "bandwidth_bytes_per_s"), read_quantity("141GiB", "memory_bytes")
    (50000000000, 151397597184)
    >>> read_quantity("1.5ms", "latency_s"), read_quantity("128Ki", "seq_length")
    (0.0015, 131072)
    """
    dimension = dimension_of(field)
    match = _QUANTITY.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    unit = match and match[2]
    if match is None or unit not in dimension.units:
        limit = f"it is {dimension.words}, and {unit or 'this'} is not a unit of it"
        fix = f"Write for example {dimension.example}, or the plain number."
        raise UserInputError(what or field, text, limit, fix)
    found = Fraction(match[1]) * dimension.units[match[2]]
    if field.endswith("_bytes"):
        return round(found)
    return found.numerator if found.denominator == 1 else float(found)
