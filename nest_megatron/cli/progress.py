"""A line that says how far the search is, on a terminal and only if it takes a while."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nest_megatron.units import format_seconds

if TYPE_CHECKING:
    from nest_megatron.planner import Progress

_PATIENCE_S = 1.0
_REFRESH_S = 0.25


@contextlib.contextmanager
def progress() -> Iterator[Progress | None]:
    """A callback for ``plan``, or ``None`` where standard error is no terminal.

    A thread of its own writes the line, so that a search that never calls back costs nothing.
    """
    if not sys.stderr.isatty():
        yield None
        return
    latest: list[str] = ["searching"]
    finished = threading.Event()

    def report(solved: int, best: float | None, bound: float) -> None:
        told = "no plan yet" if best is None or best > 1e5 else f"best {format_seconds(best)}"
        latest[0] = f"searching: {solved} solved, {told}, bound {format_seconds(bound)}"

    def write() -> None:
        if finished.wait(_PATIENCE_S):
            return
        from rich.console import Console

        with Console(stderr=True).status("searching") as status:
            while not finished.wait(_REFRESH_S):
                status.update(latest[0])

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield report
    finally:
        finished.set()
        writer.join()
