"""Run a training script as one rank of a job, with a fault on one of the ranks.

``python faulty_rank.py SCRIPT ARGUMENTS``; ``FAULT`` in the environment is ``RANK:MOMENT:ACT``.
Moments are ``start`` (before the ranks meet), ``plan`` (while rank 0 plans) and ``validate`` (once
the rank's arguments are rewritten, before it says so). Acts are ``kill``, ``stop``,
``stop the launcher``, ``sleep SECONDS``, ``without +nest``, ``megatron-core VERSION`` and
``arguments WORDS``.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nest_megatron.boot  # noqa: F401 - it watches for Megatron where the command asks for a plan


def main() -> None:
    """Run the script that the command line names."""
    rank, moment, act = [*os.environ.get("FAULT", "").split(":", 2), "", ""][:3]
    sys.argv = sys.argv[1:]
    if rank == os.environ["RANK"]:
        at(moment, act)
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def at(moment: str, act: str) -> None:
    """Arrange for the fault."""
    if moment == "start":
        do(act)
        return
    from nest_megatron.integrations.megatron_lm import launch, planning

    where, name = {
        "plan": (planning, "_build_tokenizer"),
        "validate": (launch, "require_planned"),
    }[moment]
    setattr(where, name, first(act, getattr(where, name)))


def first(act: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does something else before."""

    def wrapped(*args: Any) -> Any:
        do(act)
        return original(*args)

    return wrapped


def do(act: str) -> None:
    """The fault itself."""
    word, _, value = act.partition(" ")
    if act == "stop the launcher":
        os.kill(os.getppid(), signal.SIGSTOP)
    elif word in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if word == "kill" else signal.SIGSTOP)
    elif word == "sleep":
        time.sleep(float(value))
    elif word == "without":
        sys.argv = [w for w in sys.argv if not w.startswith(("+nest", "nest."))]
    elif word == "arguments":
        sys.argv += value.split()
    elif word == "megatron-core":
        another_release(value)
    else:
        raise ValueError(act)


def another_release(version: str) -> None:
    """Take another version of megatron-core for the installed one."""
    from nest_megatron.integrations.megatron_lm import rendezvous

    found = rendezvous.installed_versions()
    rendezvous.installed_versions = lambda: {**found, "megatron_core": version}


if __name__ == "__main__":
    main()
