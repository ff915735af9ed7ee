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
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection

from nest_megatron.app.asked import Answer, Asked
from nest_megatron.errors import NestError
from nest_megatron.report.console import print_error, show
from nest_megatron.report.failure import WITHOUT_PLAN, report

_REFRESH_S = 0.2


class Run:
    """The answer to a form, which is being made."""

    def __init__(self, asked: Asked) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._messages, theirs = spawning.Pipe(duplex=False)
        self._process = spawning.Process(target=_work, args=(asked, theirs), daemon=True)
        with _interrupts_held():
            self._process.start()
        theirs.close()

    async def messages(self) -> AsyncIterator[str | Answer]:
        """How far it is, and at last the answer."""
        begun_s = time.monotonic()
        while not self._messages.poll():
            yield f"planning, {time.monotonic() - begun_s:.0f} s"
            await asyncio.sleep(_REFRESH_S)
        with self._messages:
            try:
                yield self._messages.recv()
            except (EOFError, OSError):
                yield self._ended()

    def cancel(self) -> None:
        """End it without an answer."""
        self._process.terminate()

    def _ended(self) -> Answer:
        self._process.join()
        code = self._process.exitcode
        if code == -signal.SIGTERM:
            return Answer(text="Cancelled.", is_error=True)
        text = f"error: the planning process ended with {code}; memory may have run out."
        return Answer(text=text, is_error=True)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let a process that starts here leave Ctrl-C to this one, which ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(asked: Asked, messages: Connection) -> None:
    """Send the answer to a form; a server that has gone wants none."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            answer = asked.answer()
        except Exception as error:  # noqa: BLE001 - no user should see a traceback
            _print(error)
            answer = Answer(text=printed.getvalue().rstrip(), is_error=True)
    with contextlib.suppress(OSError):
        messages.send(answer)


def _print(error: Exception) -> None:
    """Print an error as the command line does."""
    if isinstance(error, WITHOUT_PLAN):
        show(*error.report())
    elif isinstance(error, NestError):
        print_error(error, as_json=False)
    else:
        report(error, ["app"])
