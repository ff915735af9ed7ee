"""The child that measures for one rank: where it runs, how long it may, what it brings back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from nest_megatron.config.cluster_detection import processes_per_host
from nest_megatron.errors import NestError
from nest_megatron.integrations.megatron_lm.agreement import Check
from nest_megatron.integrations.megatron_lm.messages import Answer, Orders, from_json, to_json
from nest_megatron.megatron_core.stage import Where
from nest_megatron.units import Seconds

_COMMAND = (sys.executable, "-m", "nest_megatron.integrations.megatron_lm.measure_child")
#: Time for what the budget leaves out: imports from a slow disk, and a last block that was begun.
SPARE_S = 300.0
_PAUSE_S = 0.25
_LAST_WORDS = 15
#: Variables by which a process would take itself for a rank of the job.
_OF_RANKS = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
_PREFIXES_OF_RANKS = ("TORCHELASTIC_", "SLURM_", "PMI_", "OMPI_")


class MeasuringError(NestError):
    """A child that measures died, or did not end."""


def measure_in_child(
    orders: Orders, environment: Mapping[str, str], check: Check, *, spare_s: Seconds = SPARE_S
) -> Answer:
    """Time the blocks of some orders in a process of its own.

    Args:
        orders: with this rank's share of the tasks alone.
        environment: of this rank.
        check: called now and then; what it raises ends the child.

    Raises:
        MeasuringError: if the child dies or takes too long, with its last words.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        given, out, err = (
            stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            for _ in range(3)
        )
        given.write(to_json(orders))
        given.seek(0)
        command = [*_COMMAND, str(os.getpid()), str(threads_for(environment))]
        variables = child_environment(orders, environment)
        child = stack.enter_context(_started(command, (given, out, err), variables))
        _wait(child, check, started + orders.max_seconds + spare_s, err)
        out.seek(0)
        answer = out.read()
        if child.returncode or not answer:
            raise MeasuringError(f"{_end(child.returncode)}{_last_words(err)}")
    found = from_json(Answer, answer)
    return dataclasses.replace(found, seconds=time.monotonic() - started)


@contextlib.contextmanager
def _started(
    command: Sequence[str], files: tuple[IO[str], IO[str], IO[str]], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A running child, which is gone in the end.

    Args:
        files: its standard input, output and error.
    """
    given, out, err = files
    child = subprocess.Popen(command, stdin=given, stdout=out, stderr=err, env=dict(environment))
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def _wait(child: subprocess.Popen[bytes], check: Check, ended: float, err: IO[str]) -> None:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_PAUSE_S)
            return
        check()
        if time.monotonic() > ended:
            raise MeasuringError(
                f"the process that measures did not end within its time{_last_words(err)}"
            )


def _end(code: int) -> str:
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"the process that measures {how}"


def _last_words(err: IO[str]) -> str:
    err.seek(0)
    lines = [line.rstrip() for line in err if line.strip()][-_LAST_WORDS:]
    return "\n  ".join(["; it said:", *lines]) if lines else ""


def threads_for(environment: Mapping[str, str]) -> int:
    """Threads of a process: the cores of this host that it may use, shared by the host's ranks."""
    return max(1, len(os.sched_getaffinity(0)) // (processes_per_host(environment) or 1))


def child_environment(orders: Orders, environment: Mapping[str, str]) -> dict[str, str]:
    """A rank's variables without those that make it one, with its own GPU alone.

    The child imports from the same places; where the script lies is among them.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _OF_RANKS and not name.startswith(_PREFIXES_OF_RANKS)
    }
    paths = [path or str(Path.cwd()) for path in sys.path]
    kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([_script_folder(orders), *paths]))
    kept["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if orders.where is Where.GPU:
        kept["CUDA_VISIBLE_DEVICES"] = own_gpu(environment)
    else:
        kept["OMP_NUM_THREADS"] = str(threads_for(environment))
    return kept


def _script_folder(orders: Orders) -> str:
    return str(Path(orders.job.script).resolve().parent)


def own_gpu(environment: Mapping[str, str]) -> str:
    """The one GPU of a rank, as ``CUDA_VISIBLE_DEVICES`` names it.

    >>> own_gpu({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}), own_gpu({"LOCAL_RANK": "3"})
    ('6', '3')
    """
    local = environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))
    seen = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    seen = [name for name in seen if name]
    if not seen:
        return local
    return seen[int(local) % len(seen)]  # a launcher may show each rank its own GPU alone
