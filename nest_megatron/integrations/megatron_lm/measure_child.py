"""A child process that times layer blocks and ends.

Whoever starts it must not touch CUDA itself yet, and has its memory back whole when this ends. The
orders come as JSON on standard input, and the answer goes to standard output once all is done. What
the frameworks print goes to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import TextIO

from nest_megatron.errors import ProfileError
from nest_megatron.integrations.megatron_lm.messages import (
    Answer,
    Orders,
    from_json,
    to_json,
)
from nest_megatron.megatron_core.stage import Where
from nest_megatron.profile.layer_timer import Measuring
from nest_megatron.profile.records import Timing
from nest_megatron.profile.session import Skipped, run, this_machine, with_clocks

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


def main() -> None:
    """Carry out the orders on standard input; the parent and torch's threads are arguments."""
    parent, num_threads = map(int, sys.argv[1:])
    end_with(parent)
    with _own_output() as out:
        out.write(to_json(measured(from_json(Orders, sys.stdin.read()), num_threads)))
    os._exit(0)  # a framework's own way out may take long, or fail


def end_with(parent: int) -> None:
    """Have Linux end this process when the one that started it is gone, or is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def measured(orders: Orders, num_threads: int) -> Answer:
    """The timing, or the reason for none, of each block that was begun in time."""
    import torch

    from nest_megatron.integrations.megatron_lm.own_layers import JobLayers

    if orders.where is not Where.GPU:
        if torch.cuda.is_available():
            raise RuntimeError(
                "CUDA has a GPU, but NVML, which was asked before, has none: nothing is timed on "
                "the CPU in its place. In a container add utility to NVIDIA_DRIVER_CAPABILITIES."
            )
        torch.set_num_threads(num_threads)
    measuring = Measuring(
        where=orders.where,
        implementation=orders.implementation,
        max_seconds=orders.block_seconds,
        make_layers=JobLayers(orders.job, orders.where),
    )
    machine = this_machine(orders.where, orders.implementation)
    until = time.monotonic() + orders.max_seconds
    done: list[Timing | Skipped] = []
    with contextlib.suppress(ProfileError):  # CUDA has failed: what it did before counts
        done.extend(run(orders.spec, orders.tasks, measuring, until=until))
    timings = tuple(each for each in done if isinstance(each, Timing))
    skipped = tuple(each for each in done if isinstance(each, Skipped))
    return Answer(machine=with_clocks(machine), timings=timings, skipped=skipped)


def _own_output() -> TextIO:
    """Standard output for the answer alone; what others print goes to standard error."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


if __name__ == "__main__":
    main()
