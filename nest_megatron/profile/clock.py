"""Times that a device says, their middle and spread, and how it says that its memory is short."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any

from nest_megatron.units import Seconds

#: What says that memory is short, in the words of torch, CUDA (which libraries ask, too), NCCL,
#: cuBLAS and cuDNN.
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|out of memory|_STATUS_ALLOC_FAILED", re.IGNORECASE
)


class HostClock:
    """Marks moments in the processor's work."""

    def mark(self) -> Any:
        """This moment."""
        return time.perf_counter()

    def read(self, marks: Sequence[Sequence[Any]]) -> list[tuple[Seconds, ...]]:
        """Seconds between the marks of each sequence."""
        return [tuple(b - a for a, b in itertools.pairwise(times)) for times in marks]


class DeviceClock(HostClock):
    """Marks moments in the work of CUDA's current stream; marking waits for nothing."""

    def mark(self) -> Any:
        """The moment at which the device comes to here."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, marks: Sequence[Sequence[Any]]) -> list[tuple[Seconds, ...]]:
        """The same, once the device has done all of its work."""
        import torch

        torch.cuda.synchronize()
        return [
            tuple(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))
            for events in marks
        ]


def job_clock() -> HostClock:
    """The clock of a training job: its device's, where CUDA has started."""
    import torch

    return DeviceClock() if torch.cuda.is_initialized() else HostClock()


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
    return [ordered[at] for at in places]


def middle_half(times: Sequence[float]) -> tuple[float, float]:
    """Median, and the range of the middle half over the median.

    >>> middle_half([1.0, 2.0, 2.0, 3.0])
    (2.0, 0.25)
    """
    middle = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return middle, (high - low) / middle
