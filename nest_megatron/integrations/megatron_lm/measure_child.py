"""A child process that times layer blocks and ends.

Whoever starts it must not touch CUDA itself yet, and has its memory back whole when this ends. The
orders come as JSON on standard input, and the answer goes to standard output once all is done. What
the frameworks print goes to standard error.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import TextIO

from nest_megatron.integrations.megatron_lm.messages import (
    Answer,
    Orders,
    Skipped,
    from_json,
    to_json,
)
from nest_megatron.megatron_core.stage import Where
from nest_megatron.profile.layer_timer import Measuring
from nest_megatron.profile.records import Timing
from nest_megatron.profile.session import Task, run, this_machine

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
    done = [each for task in orders.tasks for each in _one(orders, task, measuring, until)]
    timings = tuple(each for each in done if isinstance(each, Timing))
    skipped = tuple(each for each in done if isinstance(each, Skipped))
    return Answer(machine=machine, timings=timings, skipped=skipped)


def _one(orders: Orders, task: Task, measuring: Measuring, until: float) -> list[Timing | Skipped]:
    """One block; what cannot be built says so, and the others are timed all the same.

    After an error of CUDA itself nothing more runs in a process, so that one ends it.
    """
    done: list[Timing | Skipped] = []

    def skip(_: object, reason: str, *, is_too_large: bool = True) -> None:
        done.append(Skipped(task=task, reason=reason, is_too_large=is_too_large))

    try:
        done += run(orders.spec, [task], measuring, until=until, on_skip=skip)
    except Exception as error:  # whatever Megatron has against this shape
        if "cuda error" in str(error).lower():  # "CUDA Error" is Transformer Engine's
            raise
        words = str(error).strip().splitlines() or [type(error).__name__]
        skip(task, words[0], is_too_large=False)
    return done


def _own_output() -> TextIO:
    """Standard output for the answer alone; what others print goes to standard error."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


if __name__ == "__main__":
    main()
