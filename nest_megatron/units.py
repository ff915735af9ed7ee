"""Units: SI everywhere inside, other units at the edges only, and the solver's integer clock.

The solver counts time in whole *ticks* of one picosecond. Sums and maxima of ticks are exact, so
two schedules that tie really tie, a bound that is proven on paper is proven in the machine, and the
compiled kernel and its Python twin agree to the last bit (``docs/decisions/002-integer-clock.md``).
"""

from __future__ import annotations

import math

from nest_megatron.errors import ProfileError

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
            value=seconds,
            limit=f"a time must be a number of seconds between 0 and {MAX_SECONDS:g}",
            fix="Check the cluster's bandwidths (bytes/s), rates (FLOP/s) and latencies (s), and "
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
    """Bytes for people.

    >>> format_gib(80 * GIB)
    '80.0 GiB'
    """
    return f"{num_bytes / GIB:.1f} GiB"


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
