"""A child process that times layer blocks of a job, made as the job makes its layers, and ends.

Whoever starts it must not touch CUDA itself yet, and has its memory back whole when this ends. The
orders come as JSON on standard input, and the answer goes to standard output once all is done. What
the frameworks print goes to standard error. Megatron parses and validates the job's arguments for
the small world of one layer; then the checkout's ``gpt_builders.gpt_builder`` runs, and what it
would build a model of is taken instead.

Source: ``gpt_builders.gpt_builder`` and ``core_transformer_config_from_args`` (0.16.1, 0.20).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import ProfileError
from nest_megatron.integrations.megatron_lm.own_layers import JobArguments, JobLayers
from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.execution import Implementation
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import from_plain, frozen, to_plain
from nest_megatron.profile.layer_timer import Measuring
from nest_megatron.profile.records import Machine, Timing
from nest_megatron.profile.session import Skipped, Task, run, this_machine, with_clocks
from nest_megatron.units import Seconds

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
#: Longest with one block; a session of many blocks and little time gives each less.
_LONGEST_BLOCK_S, _SHORTEST_BLOCK_S = 10.0, 0.2


@frozen
class Orders:
    """A session of measuring: from rank 0 to all, and from each to its child.

    Args:
        spec: the whole model.
        tasks: all blocks to time, in order; a rank's child has the rank's share alone.
        max_seconds: after this no further block is begun.
    """

    spec: TransformerSpec
    precision: Precision
    tasks: tuple[Task, ...]
    job: JobArguments
    implementation: Implementation
    where: Where
    max_seconds: Seconds

    @property
    def block_seconds(self) -> Seconds:
        """Time for the repetitions of one block."""
        each = self.max_seconds / max(1, len(self.tasks))
        return min(_LONGEST_BLOCK_S, max(_SHORTEST_BLOCK_S, each))


@frozen
class Answer:
    """What a rank has measured, for rank 0; no ``machine`` where it had nothing to do."""

    machine: Machine | None = None
    timings: tuple[Timing, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    seconds: Seconds = 0.0


def main() -> None:
    """Carry out the orders on standard input; the parent and torch's threads are arguments."""
    parent, num_threads = map(int, sys.argv[1:])
    end_with_parent(parent)
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # what others print goes to standard error
        json.dump(to_plain(measure(from_plain(Orders, json.load(sys.stdin)), num_threads)), out)
    os._exit(0)  # a framework's own way out may take long, or fail


def end_with_parent(parent: int) -> None:
    """Have Linux end this process when the one that started it is gone, or is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def measure(orders: Orders, num_threads: int) -> Answer:
    """The timing, or the reason for none, of each block that was begun in time."""
    import torch

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


if __name__ == "__main__":
    main()
