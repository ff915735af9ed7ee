"""The child that measures for one rank: where it runs, how long it may, what it brings back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from nest_megatron.config.cluster_detection import processes_per_host
from nest_megatron.errors import NestError
from nest_megatron.integrations.megatron_lm.messages import Answer, Orders, from_json, to_json
from nest_megatron.megatron_core.stage import Where
from nest_megatron.units import Seconds

_COMMAND = (sys.executable, "-m", "nest_megatron.integrations.megatron_lm.measure_child")
#: Time for what the budget leaves out: imports from a slow disk, and a last block that was begun.
SPARE_S = 300.0
#: Between two looks for another rank's failure, of which each calls the store.
_PAUSE_S = 2.0
_LAST_WORDS = 15
#: Variables by which a process would take itself for a rank of the job.
_OF_RANKS = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|SLURM|PMI|OMPI)_.*)"
)


class MeasuringError(NestError):
    """A child that measures died, or did not end."""


def measure_in_child(
    orders: Orders,
    environment: Mapping[str, str],
    check: Callable[[], None],
    *,
    spare_s: Seconds = SPARE_S,
) -> Answer:
    """Time the blocks of this rank's orders in a process of its own.

    Args:
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
        child = subprocess.Popen(command, stdin=given, stdout=out, stderr=err, env=variables)
        stack.callback(child.wait)
        stack.callback(child.kill)
        if not _ends(child, check, started + orders.max_seconds + spare_s):
            words = _last_words(err)
            raise MeasuringError(f"the process that measures did not end within its time{words}")
        out.seek(0)
        answer, code = out.read(), child.returncode
        if code or not answer:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            raise MeasuringError(f"the process that measures {how}{_last_words(err)}")
    found = from_json(Answer, answer)
    return dataclasses.replace(found, seconds=time.monotonic() - started)


def _ends(child: subprocess.Popen[bytes], check: Callable[[], None], ended: float) -> bool:
    while time.monotonic() <= ended:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_PAUSE_S)
            return True
        check()
    return False


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
    found = {name: value for name, value in environment.items() if not _OF_RANKS.fullmatch(name)}
    script_folder = str(Path(orders.job.script).resolve().parent)
    paths = [script_folder, *(path or str(Path.cwd()) for path in sys.path)]
    found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if orders.where is Where.GPU:
        found["CUDA_VISIBLE_DEVICES"] = own_gpu(environment)
    else:
        found["OMP_NUM_THREADS"] = str(threads_for(environment))
    return found


def own_gpu(environment: Mapping[str, str]) -> str:
    """The one GPU of a rank, as ``CUDA_VISIBLE_DEVICES`` names it.

    >>> own_gpu({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}), own_gpu({"LOCAL_RANK": "3"})
    ('6', '3')
    """
    local = environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))
    seen = re.findall(r"[^,\s]+", environment.get("CUDA_VISIBLE_DEVICES", ""))
    # a launcher may show each rank its own GPU alone
    return seen[int(local) % len(seen)] if seen else local
