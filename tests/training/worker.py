"""Trains every job of a folder: ``python -m tests.training.worker FOLDER``.

torch and megatron-core are imported once; each job's ranks are forked from here, so that they start
at once, share nothing, and a rank that dies or hangs takes its own job down and no other.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from nest_megatron.layout import plan_file
from tests.training import cpu_megatron, train
from tests.training.parent import end_with_parent

#: A rank that runs longer says where it is and ends; a job takes about a second.
JOB_SECONDS = 600
_LAST_WORDS_SECONDS = 2


def main(folder: Path) -> None:
    """Train the jobs that ``jobs.json`` lists, in order."""
    end_with_parent()
    torch.set_num_threads(1)
    cpu_megatron.install()
    for job in json.loads((folder / "jobs.json").read_text(encoding="utf-8")):
        started = time.monotonic()
        codes = _run(folder, job)
        seconds = time.monotonic() - started
        print(f"{job['name']}: {seconds:.1f} s, exit codes {codes}", flush=True)


def _run(folder: Path, job: dict[str, Any]) -> list[int | None]:
    """Fork a job's ranks and wait for all; where one fails, the others are ended."""
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=_rank, args=(folder, job, rank)) for rank in range(job["world_size"])
    ]
    for process in ranks:
        process.start()
    _wait(ranks)
    for process in ranks:
        process.join(_LAST_WORDS_SECONDS)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return codes


def _wait(ranks: list[BaseProcess]) -> None:
    """Until all are done, or one has failed."""
    while not any(process.exitcode for process in ranks):
        running = [process.sentinel for process in ranks if process.exitcode is None]
        if not running:
            return
        wait(running)


def _rank(folder: Path, job: dict[str, Any], rank: int) -> None:
    """One rank of a job, in a process of its own: its report, or its last words in a log."""
    end_with_parent()
    place, world_size = folder / job["name"], job["world_size"]
    log = os.open(place / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    faulthandler.dump_traceback_later(JOB_SECONDS, exit=True)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(str(place / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=2 * JOB_SECONDS),
    )
    report = train.train(
        plan_file.read(place / "plan.yaml"),
        folder / job["reference"],
        is_reference=job["is_reference"],
    )
    (place / f"rank{rank}.json").write_text(json.dumps(report), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
