"""One rank of a job with the recorder in it; the argument says what befalls.

Its steps take time on a clock of their own, and ranks wait for each other where a test needs it, so
that nothing depends on how busy the machine is.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from nest_megatron.integrations import recorder as recording
from nest_megatron.integrations.megatron_lm.agreement import RendezvousStore
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
from tests.launch.test_watch import started
from tests.patience import LONG_S, wait_until

_STEPS, _WORK_S = 8, 0.05

what, rank, num_ranks = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
recording._GATHER_S = 0.5 if what == "without one" else LONG_S
clock_s = [0.0]
time.perf_counter = lambda: clock_s[0]
store = None
if num_ranks > 1:
    store = RendezvousStore(
        RankContext(rank=rank, world_size=num_ranks, environment=dict(os.environ))
    )
    store.stop_heartbeat()
run = started(num_ranks, id=os.environ.get("NEST_TEST_RUN", "run"), end=None)
if rank == 0:
    recording.leave_run(store, run, is_watched=True)
if store is not None:
    store.count("begun")
    wait_until(lambda: store.num_parts("run") and store.count("begun", 0) == num_ranks)
recorder = recording.Recorder(
    steps=_STEPS,
    rank=rank,
    num_ranks=num_ranks,
    store=store,
    own_run=run if rank == 0 else None,
)


@recorder.with_timing
def work() -> None:
    """The passes of a step."""
    clock_s[0] += _WORK_S * (3 if what == "slow" else 1)


def train() -> None:
    for number in range(_STEPS + 2):
        if what == "without one" and number == _STEPS:  # the last that is watched is over
            wait_until(lambda: store is not None and store.num_parts("measured") >= num_ranks - 2)
        with recorder.step():
            work()
            if what == "killed" and number == _STEPS // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "out_of_memory" and number == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if what == "failing" and number == rank:  # rank 0 first
                raise RuntimeError("connection closed by peer")
            if what == "waiting":
                print("training", flush=True)
                time.sleep(LONG_S)


try:
    train()
except BaseException as error:
    recorder.end(error)
    if store is not None:
        store.count("failed and said it")
        # rank 0 hosts the store
        wait_until(lambda: rank or store.count("failed and said it", 0) == num_ranks)
    raise
recorder.end()
