"""What a device says: moments in its work, the time between them, and that its memory is short."""

from __future__ import annotations

import itertools
import re
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
        """The same, once the device has done all that was asked of it."""
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
