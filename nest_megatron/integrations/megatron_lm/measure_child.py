"""A child process that times pieces of layers and ends.

Whoever starts it must not touch CUDA itself yet, and has its memory back whole when this ends. The
orders come as JSON on standard input; each line of standard output is JSON too: the machine, a
timing, a piece that was skipped, and at last that all is done. What the frameworks print goes to
standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from nest_megatron.integrations.megatron_lm.measure_orders import ChildOrders, Skipped
from nest_megatron.megatron_core.stage import Where
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.profile.layer_timer import Measuring
from nest_megatron.profile.records import Timing
from nest_megatron.profile.session import Task, run, this_machine

#: Words of a line: what it holds.
MACHINE, TIMING, SKIPPED, DONE = "machine", "timing", "skipped", "done"
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


def main() -> None:
    """Carry out the orders on standard input."""
    told = from_plain(ChildOrders, json.load(sys.stdin))
    end_with(told.parent)
    with _own_output() as out:
        for word, record in measured(told):
            out.write(json.dumps({word: to_plain(record)}) + "\n")
            out.flush()
    os._exit(0)  # a framework's own way out may take long, or fail


def end_with(parent: int) -> None:
    """Have Linux end this process when the one that started it is gone, or is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def measured(told: ChildOrders) -> Iterator[tuple[str, Any]]:
    """Lines to write: the machine first, then a timing or the reason of each piece."""
    import torch

    from nest_megatron.integrations.megatron_lm.own_layers import JobLayers

    orders = told.orders
    if orders.where is not Where.GPU:
        torch.set_num_threads(told.num_threads)
    measuring = Measuring(
        where=orders.where,
        implementation=orders.implementation,
        max_seconds=told.piece_seconds,
        make_layers=JobLayers(orders.job, orders.where),
    )
    yield MACHINE, this_machine(orders.where, orders.implementation)
    until = time.monotonic() + orders.max_seconds
    for task in orders.tasks:
        yield from _one(told, task, measuring, until)
    yield DONE, None


def _one(
    told: ChildOrders, task: Task, measuring: Measuring, until: float
) -> Iterator[tuple[str, Timing | Skipped]]:
    """One piece; what cannot be built says so, and the others are timed all the same.

    After an error of CUDA itself nothing more runs in a process, so that one ends it.
    """
    too_large: list[str] = []
    try:
        for timing in run(
            told.orders.spec,
            [task],
            measuring,
            until=until,
            on_skip=lambda _, reason: too_large.append(reason),
        ):
            yield TIMING, timing
    except Exception as error:  # whatever Megatron has against this shape
        if "CUDA error" in str(error):
            raise
        words = str(error).strip().splitlines() or [type(error).__name__]
        yield SKIPPED, Skipped(task=task, reason=words[0], is_too_large=False)
    for reason in too_large:
        yield SKIPPED, Skipped(task=task, reason=reason, is_too_large=True)


def _own_output() -> TextIO:
    """Standard output for our lines alone; what others print goes to standard error."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


if __name__ == "__main__":
    main()
