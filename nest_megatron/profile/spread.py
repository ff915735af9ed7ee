"""Order of sizes, and middle and spread of repeated times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def middle_out(sizes: Sequence[int]) -> list[int]:
    """Sizes in an order of which every beginning covers the range: ends, then what halves the gaps.

    >>> middle_out([1, 2, 3, 4, 5, 6, 7, 8, 9])
    [1, 5, 9, 3, 7, 2, 4, 6, 8]
    """
    ordered = sorted(set(sizes))
    last = len(ordered) - 1
    if last < 2:
        return ordered
    places = [0, last // 2, last]
    step = (last + 1) // 2
    while step > 1:
        step = (step + 1) // 2
        places += [at for at in range(0, last, step) if at not in places]
    places += [at for at in range(last) if at not in places]
    return [ordered[at] for at in places]


def middle_half(times: Sequence[float]) -> tuple[float, float]:
    """Median, and the range of the middle half over the median.

    >>> middle_half([1.0, 2.0, 2.0, 3.0])
    (2.0, 0.25)
    """
    middle = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return middle, (high - low) / middle
