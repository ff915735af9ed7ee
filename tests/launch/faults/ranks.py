"""Start the ranks of a job, with torchrun or by hand, and see how each ends."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cli.runs import PACKAGE_ROOT
from tests.megatron_lm.training import SHIM, free_port

RUNNER = Path(__file__).with_name("faulty_rank.py")
NUM_RANKS = 3
#: Far above every bound that is documented: nothing of this may decide a test on a busy machine.
_LIMIT_S = 300.0


class Launcher(enum.Enum):
    TORCHRUN = "torchrun"
    BY_HAND = "by hand"
    COMMAND = "nest-megatron"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended.

    Args:
        codes: of each process that was started; ``None`` where it was stopped and had to be killed.
        said: what they printed.
    """

    codes: tuple[int | None, ...]
    said: tuple[str, ...]
    seconds: float

    @property
    def out(self) -> str:
        """Everything that was printed."""
        return "\n".join(self.said)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job.

    Args:
        home: a checkout of Megatron-LM, or the stand-in for one.
        argv: of its training script.
        fault: for ``faulty_rank.py``.
        missing: ranks that are not started, by hand.
        on_shim: whether it needs what Megatron-LM lacks on a machine without a GPU.
    """

    home: Path
    argv: tuple[str, ...]
    fault: str = ""
    missing: tuple[int, ...] = ()
    on_shim: bool = False
    variables: Mapping[str, str]

    def start(self, launcher: Launcher) -> Running:
        """Start it."""
        if launcher is Launcher.TORCHRUN:
            options = ["--standalone", "--nproc-per-node", str(NUM_RANKS), "--max-restarts", "0"]
            return Running([self._process(["-m", "torch.distributed.run", *options], {})])
        shared = {"WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "localhost"}
        shared["MASTER_PORT"] = free_port()
        ranks = [rank for rank in range(NUM_RANKS) if rank not in self.missing]
        return Running([self._process([], {**shared, "RANK": str(rank)}) for rank in ranks])

    def _process(self, launcher: list[str], rank: Mapping[str, str]) -> Process:
        words = [*launcher, str(RUNNER), str(self.home / "pretrain_gpt.py"), *self.argv]
        plain = {k: v for k, v in os.environ.items() if "RANK" not in k and k != "WORLD_SIZE"}
        shim = str(SHIM) if self.on_shim else ""
        paths = [str(self.home), shim, str(PACKAGE_ROOT), plain.get("PYTHONPATH", "")]
        common = {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONWARNINGS": "ignore",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
            "FAULT": self.fault,
        }
        out = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        child = subprocess.Popen(
            [sys.executable, *words],
            env={**plain, **common, **self.variables, **rank},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return Process(child=child, out=out)


@dataclass(frozen=True, kw_only=True)
class Process:
    child: subprocess.Popen[bytes]
    out: tempfile._TemporaryFileWrapper[str]

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        try:
            text = Path(f"/proc/{self.child.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] == "T"

    def text(self) -> str:
        """What it printed."""
        self.out.seek(0)
        return self.out.read()


class Running:
    """The processes of a job."""

    def __init__(self, processes: list[Process]) -> None:
        self.processes = processes
        self.started = time.monotonic()

    def wait(self) -> Ended:
        """Wait until all have ended but those that are stopped, and leave none behind."""
        try:
            while any(p.child.poll() is None and not p.is_stopped for p in self.processes):
                if time.monotonic() - self.started > _LIMIT_S:
                    raise AssertionError(f"still running after {_LIMIT_S:g} s:\n{self._said()}")
                time.sleep(0.1)
            self._wait_for_ranks_of_stopped_launchers()
            seconds = time.monotonic() - self.started
            codes = tuple(process.child.poll() for process in self.processes)
        finally:
            self._end_all()
        return Ended(codes=codes, said=tuple(p.text() for p in self.processes), seconds=seconds)

    def _wait_for_ranks_of_stopped_launchers(self) -> None:
        """A launcher that is stopped cannot notice that its ranks have ended."""
        for process in self.processes:
            while process.is_stopped and set(_children(process.child.pid, "state")) - {"Z", "T"}:
                if time.monotonic() - self.started > _LIMIT_S:
                    raise AssertionError(f"ranks run on after {_LIMIT_S:g} s:\n{self._said()}")
                time.sleep(0.1)

    def _end_all(self) -> None:
        for process in self.processes:
            if process.child.poll() is None:
                for pid in [*_children(process.child.pid, "pid"), process.child.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            process.child.wait()

    def _said(self) -> str:
        return "\n".join(process.text()[-3000:] for process in self.processes)


def _children(pid: int, column: str) -> list[str]:
    """A column of ``ps`` on the children of a process."""
    found = subprocess.run(
        ["ps", "--ppid", str(pid), "-o", f"{column}="], capture_output=True, text=True, check=False
    )
    return found.stdout.split()
