"""Starts the worker that trains the planned layouts, and reads what its ranks reported."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nest_megatron.layout import plan_file
from tests.training.layouts import Layout, planned

ROOT = Path(__file__).resolve().parents[2]
#: Longest time for all layouts, which take half a minute on two cores.
ALL_SECONDS = 3600
_LOG_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Trained:
    """What the ranks of each layout reported, and the worker's own words."""

    folder: Path
    output: str

    def reports(self, layout: Layout) -> list[dict[str, Any]]:
        """The reports of a layout's ranks, in order of rank.

        Raises:
            AssertionError: with the ranks' last words, if one of them did not finish.
        """
        place = self.folder / _folder_name(layout)
        paths = [place / f"rank{rank}.json" for rank in range(layout.num_gpus)]
        assert all(path.exists() for path in paths), self._last_words(place)
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def _last_words(self, place: Path) -> str:
        logs = [
            f"{path.name}:\n{path.read_text(errors='replace')[-_LOG_CHARACTERS:]}"
            for path in sorted(place.glob("*.log"))
        ]
        return "\n".join(["a rank died or hung", self.output[-_LOG_CHARACTERS:], *logs])


def train_all(layouts: Iterable[Layout], folder: Path) -> Trained:
    """Write the plans, train them in one worker, and end whatever is left of it."""
    jobs = [_prepared(layout, folder) for layout in layouts]
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    log = folder / "worker.log"
    with log.open("wb") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.training.worker", str(folder)],
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended = f"the worker ended with {worker.wait(timeout=ALL_SECONDS)}"
        except subprocess.TimeoutExpired:
            ended = f"the worker was ended after {ALL_SECONDS} s"
        finally:
            _end(worker)
    return Trained(folder, f"{log.read_text(errors='replace')}{ended}")


def _folder_name(layout: Layout) -> str:
    return layout.name.replace(" ", "-")


def _prepared(layout: Layout, folder: Path) -> dict[str, Any]:
    """Write a layout's plan file; what the worker needs to know besides."""
    place = folder / _folder_name(layout)
    place.mkdir()
    plan_file.write(planned(layout), place / "plan.yaml")
    return {
        "name": place.name,
        "world_size": layout.num_gpus,
        "reference": f"{layout.spec.name}.pt",
        "is_reference": layout.is_reference,
    }


def _environment() -> dict[str, str]:
    """No GPU, no compiler, one thread a rank, and gloo on the loopback, whatever the machine."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {
        **os.environ,
        **loopback,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCHDYNAMO_DISABLE": "1",
    }


def _end(worker: subprocess.Popen[bytes]) -> None:
    """End the worker and every rank that it forked: they share its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
