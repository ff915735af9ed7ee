"""One rank of a job whose steps sleep, with the recorder in it; the argument says what befalls."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from nest_megatron.integrations import recorder as recording
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
from nest_megatron.integrations.megatron_lm.rendezvous_store import connect
from tests.launch.test_watch import started

_STEPS, _WORK_S = 8, 0.05

what, rank, num_ranks = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
recording._GATHER_S = 5.0
store = None
if num_ranks > 1:
    store = connect(RankContext(rank=rank, world_size=num_ranks, environment=dict(os.environ)))
    store.stop_heartbeat()
run = started(num_ranks, id=os.environ.get("NEST_TEST_RUN", "run"), end=None)
if rank == 0:
    recording.leave_run(store, run, is_watched=True)
elif store is not None:
    while not store.num_left("run"):
        time.sleep(0.05)
recorder = recording.Recorder(
    steps=_STEPS,
    rank=rank,
    num_ranks=num_ranks,
    store=store,
    own_run=run if rank == 0 else None,
)
work = recorder.timed(lambda: time.sleep(_WORK_S * (3 if what == "slow" else 1)))


def train() -> None:
    for number in range(_STEPS + 2):
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
                time.sleep(600)


try:
    train()
except BaseException as error:
    recorder.end(error)
    time.sleep(3.0 if rank == 0 else 0.0)  # it hosts the store
    raise
recorder.end()
