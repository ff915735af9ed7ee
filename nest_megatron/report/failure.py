"""How a run ends that cannot go on: with a message, never with a bare traceback.

A training job that cannot be planned ends at once, and never trains on.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from nest_megatron.errors import (
    BAD_INPUT,
    ENDED_EARLY,
    NOTHING_FITS,
    OUR_FAULT,
    PROGRAM,
    NestError,
    OneRankError,
    error_line,
    exit_code_of,
)
from nest_megatron.files import user_folder
from nest_megatron.plain import to_plain
from nest_megatron.printing import print_to_stderr
from nest_megatron.units import format_gib
from nest_megatron.version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nest_megatron.layout.plan import ParallelPlan
    from nest_megatron.planner import EndedEarly, NoPlan, Ranked

    Found = TypeVar("Found", ParallelPlan, Ranked)

#: Set to 1, faults of ours are printed with their traceback.
DEBUG_VARIABLE = "NEST_MEGATRON_DEBUG"


class NothingFitsError(NestError):
    """No plan fits; carries what is missing."""

    exit_code = NOTHING_FITS

    def __init__(self, refusal: NoPlan, notes: Sequence[str]) -> None:
        # a rank's start needs no report
        from nest_megatron.report.memory_words import no_plan_verdict

        self.refusal, self.notes = refusal, tuple(notes)
        nearest = "the nearest" if refusal.complete else "the nearest that time allowed to find"
        lacks = f"lacks {format_gib(refusal.missing_bytes)}"
        self._verdict = no_plan_verdict(refusal)
        super().__init__(f"{self._verdict}; {nearest} ({refusal.nearest}) {lacks}")

    def document(self) -> dict[str, Any]:
        """Why there is no plan, for programs."""
        return {"no_plan": {"verdict": self._verdict, **to_plain(self.refusal)}}

    def report(self) -> Sequence[RenderableType]:
        """Why there is no plan, for people."""
        from nest_megatron.report.terminal import no_plan_report, notes_report

        return no_plan_report(self.refusal), notes_report(self.notes)


class SearchEndedError(NestError):
    """Time ended the search before it had a plan; carries what is known."""

    exit_code = ENDED_EARLY

    def __init__(self, ended: EndedEarly, notes: Sequence[str]) -> None:
        from nest_megatron.report.words import ended_early

        self.ended, self.notes = ended, tuple(notes)
        super().__init__(ended_early(ended))

    def document(self) -> dict[str, Any]:
        """Why there is no plan, for programs."""
        return {"ended_early": to_plain(self.ended)}

    def report(self) -> Sequence[RenderableType]:
        """Why there is no plan, for people."""
        from nest_megatron.report.terminal import ended_report, notes_report

        return ended_report(self.ended), notes_report(self.notes)


WITHOUT_PLAN = (NothingFitsError, SearchEndedError)


def require_plan(found: Found | NoPlan | EndedEarly, notes: Sequence[str] = ()) -> Found:
    """The planner's answer where only a plan will do.

    Raises:
        NothingFitsError: if nothing fits.
        SearchEndedError: if time ended the search first.
    """
    from nest_megatron.planner import EndedEarly, NoPlan

    if isinstance(found, NoPlan):
        raise NothingFitsError(found, notes)
    if isinstance(found, EndedEarly):
        raise SearchEndedError(found, notes)
    return found


def is_first_of_host() -> bool:
    """Whether this is the rank that speaks for its host where ranks do not know of each other."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


@contextlib.contextmanager
def ending_on_errors(speaks: Callable[[], bool] = is_first_of_host) -> Iterator[None]:
    """End the process on any error inside, our own ones without a traceback."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the job must not train unplanned
        end(error, speaks)


def end(error: Exception, speaks: Callable[[], bool] = is_first_of_host) -> NoReturn:
    """Print why on one rank of each host, or on the only one that ends, and exit."""
    if isinstance(error, OneRankError) or speaks():
        _print(error)
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(exit_code_of(error)) from error


def _print(error: Exception) -> None:
    from nest_megatron.report.console import print_error

    stops = f"nest: rank {os.environ.get('RANK', '0')} stops before training"
    if isinstance(error, NestError):
        if not isinstance(error, WITHOUT_PLAN):
            print_to_stderr(f"{stops}.")
        print_error(error, as_json=False)
    else:
        why = "a bug of nest-megatron, or a Megatron-LM that it does not know"
        print_to_stderr(f"{stops}: {why}.")
        report(error, sys.argv)


def report(error: Exception, arguments: Sequence[str]) -> int:
    """Say why a command with these arguments ended that should not have; returns its exit code."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        traceback.print_exception(error)
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        reason = error.strerror or str(error)
        print_to_stderr(f"error: the operating system refused: {where}{reason}.")
        return BAD_INPUT
    fault = f"failed: {error_line(error, 200)}"
    if isinstance(error, MemoryError):
        fault = "ran out of memory."
    path = _saved(error, arguments)
    how = f"; {DEBUG_VARIABLE}=1 prints what its authors need."
    if path is not None:
        how = f"; send {path} to its authors (it holds the command)."
    print_to_stderr(f"error: {PROGRAM} {__version__} {fault}")
    print_to_stderr(f"       This is a bug of {PROGRAM}{how}")
    return OUR_FAULT


def _saved(error: Exception, arguments: Sequence[str]) -> Path | None:
    """The file with the command, the versions and the traceback, where one can be written."""
    words = shlex.join([PROGRAM, *arguments])
    text = f"{words}\n{PROGRAM} {__version__}, Python {sys.version}\n\n"
    text += "".join(traceback.format_exception(error))
    for folder in (user_folder("log"), None):  # None is that for temporary files, if there is one
        with contextlib.suppress(OSError):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix="fault-", suffix=".txt", dir=folder)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return Path(name)
    return None
