"""The app as a process, as users start it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.runs import environment


@dataclass(frozen=True)
class Served:
    """An app that runs, and its address with the token."""

    process: subprocess.Popen[str]
    address: str

    @property
    def origin(self) -> str:
        """The address without the token."""
        return self.address.partition("?")[0]


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[Served]:
    """Start ``nest-megatron app`` in a folder; skip where its library is missing."""
    pytest.importorskip("nicegui", reason="nicegui is not installed")
    words = [sys.executable, "-m", "nest_megatron", "app", "--port", "0", "--no-browser", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, cwd=folder, env=environment(), text=True, **pipes)
    try:
        assert process.stdout is not None
        yield Served(process, process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()
