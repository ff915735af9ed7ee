"""A process that answers one form.

It can be ended at any moment, keeps the page alive while it works, and has to itself Hydra's
registries, which are of a whole process.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import multiprocessing
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import NamedTuple

from nest_megatron.app.task import Answer, MistakesError, Task
from nest_megatron.errors import NestError
from nest_megatron.report.console import print_error, search_words, show
from nest_megatron.report.failure import WITHOUT_PLAN, report
from nest_megatron.units import Seconds

_REFRESH_S = 0.2


class Working(NamedTuple):
    """How far a run is, in words, and for how long it has run."""

    text: str
    elapsed_s: Seconds


class Run:
    """The answer to a form, which is being made."""

    def __init__(self, task: Task) -> None:
        spawning = multiprocessing.get_context("spawn")
        # a process that is ended removes no files
        self._folder = tempfile.TemporaryDirectory(prefix="nest-megatron-app-")
        self._messages, theirs = spawning.Pipe(duplex=False)
        self._process = spawning.Process(
            target=_work, args=(task, theirs, self._folder.name), daemon=True
        )
        self._begun_s, self._is_cancelled = time.monotonic(), False
        # a process that starts here leaves Ctrl-C to this one, which ends it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    async def messages(self) -> AsyncIterator[Working | Answer]:
        """How far it is, and at last the answer."""
        message: str | Answer = "planning"
        with self._messages, self._folder:
            while True:
                while self._messages.poll() and isinstance(message, str):
                    message = self._received()
                if isinstance(message, Answer):
                    yield message
                    return
                yield Working(text=message, elapsed_s=self._elapsed_s())
                await asyncio.sleep(_REFRESH_S)

    def cancel(self) -> None:
        """End it without an answer."""
        self._is_cancelled = True
        self._process.terminate()

    def _elapsed_s(self) -> Seconds:
        return time.monotonic() - self._begun_s

    def _received(self) -> str | Answer:
        try:
            message: str | Answer = self._messages.recv()
        except (EOFError, OSError):
            self._process.join()
            if self._is_cancelled:
                return Answer(text="Cancelled.", is_error=True)
            how = _ending(self._process.exitcode)
            after = f"after {self._elapsed_s():.0f} s"
            return Answer(
                text=f"error: planning ended without an answer {after}: {how}", is_error=True
            )
        return message


def _ending(code: int | None) -> str:
    """How a process ended that left no answer, and what helps."""
    if code is None or code >= 0:
        return (
            f"its exit code is {code}.\n       What it printed is in the terminal of the app; "
            "`nest-megatron plan` there says more."
        )
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return (
            f"it was killed ({name}), as Linux does where memory runs out.\n"
            "       Free some memory, or allow the job more, and plan again."
        )
    return f"the signal {name} ended it.\n       Plan again; the form is as it was."


def _work(task: Task, messages: Connection, folder: str) -> None:
    """Send how far the answer to a form is, and the answer; a server that has gone wants none."""
    tempfile.tempdir, sent_s = folder, 0.0

    def on_progress(solved: int, best: float | None, bound: float) -> None:
        nonlocal sent_s
        if (now_s := time.monotonic()) - sent_s >= _REFRESH_S:  # no search waits for a reader
            sent_s = now_s
            messages.send(search_words(solved, best, bound))

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            answer = task.answer(on_progress, messages.send)
        except Exception as error:  # noqa: BLE001 - no user should see a traceback
            if isinstance(error, WITHOUT_PLAN):
                show(*error.report())
            elif isinstance(error, NestError):
                print_error(error, as_json=False)
            else:
                report(error, ["app"])
            mistakes = error.texts if isinstance(error, MistakesError) else {}
            text = printed.getvalue().rstrip()
            answer = Answer(text=text, is_error=True, mistakes=mistakes)
    with contextlib.suppress(OSError):
        messages.send(answer)
