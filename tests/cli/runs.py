"""Run the command line in this process, or as users do."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nest_megatron
from nest_megatron.cli import main

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_ROOT = Path(nest_megatron.__file__).resolve().parents[1]
SMALL = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8")
#: A search that takes a quarter of the time, for tests that are not of the search.
LIMITS = (
    *("search.max_context_parallel_size=1", "search.max_pipeline_model_parallel_size=2"),
    *("search.max_virtual_pipeline_model_parallel_size=1", "search.max_micro_batch_size=2"),
)


@dataclass(frozen=True)
class Run:
    """How a command ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Its one JSON document; NaN and infinity are refused."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        return json.loads(self.out, parse_constant=refuse)


def run(*arguments: str) -> Run:
    """Run ``nest-megatron`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return Run(code, out.getvalue(), err.getvalue())


def environment(**more: str) -> dict[str, str]:
    """An environment in which a child finds this checkout."""
    return {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), "COLUMNS": "80", **more}


def spawn(*arguments: str, cwd: Path | None = None, timeout_s: float = 600.0, **more: str) -> Run:
    """Run ``python -m nest_megatron`` as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "nest_megatron", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(**more),
        check=False,
        timeout=timeout_s,
    )
    return Run(done.returncode, done.stdout, done.stderr)


#: Ctrl-C, half a second after the command has come to something that goes on for longer.
_CTRL_C = """
import os, pkgutil, signal, sys, threading
{prepare}
owner, name = pkgutil.resolve_name({owner!r}), {name!r}
original = getattr(owner, name)
def reached(*arguments, **options):
    setattr(owner, name, original)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    return original(*arguments, **options)
setattr(owner, name, reached)
from nest_megatron.cli import main
sys.exit(main(sys.argv[1:]))
"""


#: For ``interrupted``: the second job of a sweep goes on for ever, in a function of its own.
SECOND_JOB = "nest_megatron.api.jobs:second_job"
ENDLESS_SECOND_JOB = """
import itertools, time
from nest_megatron.api import jobs
outcome, calls = jobs.outcome, itertools.count()
jobs.second_job = lambda: time.sleep(10**6)
jobs.outcome = lambda plan: jobs.second_job() if next(calls) == 1 else outcome(plan)
"""


def interrupted(at: str, *arguments: str, cwd: Path, prepare: str = "", **more: str) -> Run:
    """Run a command and press Ctrl-C while it is inside a function.

    Args:
        at: the function, as ``module:Class.function``.
        prepare: code that is run before.
    """
    owner, _, name = at.rpartition("." if "." in at.partition(":")[2] else ":")
    code = _CTRL_C.format(owner=owner, name=name, prepare=prepare)
    reading, writing = os.pipe()  # standard input that says nothing and does not end
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            stdin=reading,
            capture_output=True,
            text=True,
            cwd=cwd,
            env=environment(**more),
            check=False,
            # a shell's background job ignores Ctrl-C, and its children would too
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    finally:
        os.close(reading)
        os.close(writing)
    return Run(done.returncode, done.stdout, done.stderr)


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start ``python -m nest_megatron`` and do not wait for it."""
    return subprocess.Popen(
        [sys.executable, "-m", "nest_megatron", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
