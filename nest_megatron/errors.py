"""The error tree.

Every error a user can cause says what is wrong, the value, the limit that it breaks and
the fix. ``assert`` is kept for our invariants.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar

#: The command's name, in messages.
PROGRAM = "nest-megatron"
#: Exit codes of every command, and of a job that cannot be planned.
OK, NOTHING_FITS, BAD_INPUT, ENDED_EARLY, OUR_FAULT, INTERRUPTED = 0, 1, 2, 3, 70, 130


class NestError(Exception):
    """Base of everything this package raises on purpose.

    Attributes:
        exit_code: of a process that it ends.
        rule: that does not allow what it refuses; ``None`` where it is no refusal.
    """

    exit_code = BAD_INPUT
    rule: str | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what it keeps, since ``__init__`` takes something else."""
        return Exception.__new__, (type(self), *self.args), self.__dict__


class FaultError(NestError):
    """An invariant of this package does not hold: no input of a user is to blame."""

    exit_code = OUR_FAULT


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that an error ends, on each of its ranks."""
    if isinstance(error, NestError):
        return error.exit_code
    if isinstance(error, SystemExit):  # a text as its code is printed, and counts as 1
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return BAD_INPUT if isinstance(error, OSError) else OUR_FAULT


def interruption_of(error: BaseException | None) -> KeyboardInterrupt | None:
    """What an error came of: while a class was made, or a library set its state back."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def error_line(error: BaseException, most: int | None = None) -> str:
    r"""The kind of an error, and so much of its first line.

    >>> error_line(ValueError("no\nmore"))
    'ValueError: no'
    """
    line = next(iter(str(error).strip().splitlines()), "")[:most]
    return f"{type(error).__name__}: {line}".rstrip(": ")


def message_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def shortened(text: str) -> str:
    """A text as an error repeats it: the start of a long one."""
    return text if len(text) <= 200 else f"{text[:197]}..."


class UserInputError(NestError, ValueError):
    """Something the user typed cannot be used.

    Args:
        what: the thing that is wrong, in the user's words (``cluster.num_gpus``); its start, where
            it is long.
        value: the value; the start of a long text.
        limit: the rule it breaks.
        fix: what to type instead.
    """

    def __init__(self, what: str, value: object, limit: str, fix: str) -> None:
        self.what = shortened(what)
        self.value = shortened(str(value)) if isinstance(value, str) else value
        self.limit = limit
        self.fix = fix
        super().__init__(f"{self.what} = {shortened(repr(self.value))}: {limit}. {fix}")


class OneRankError(NestError):
    """Ends one rank of several, which says so wherever it runs."""


class RefusedByMegatronError(NestError):
    """Megatron refuses what the user typed, with a plan and without one."""


class PlanFileError(UserInputError):
    """A plan file is missing, truncated, edited by hand or from another schema."""


class ProfileError(UserInputError):
    """A measured figure is missing, negative or not a number."""


class UnplannableModelError(UserInputError):
    """A model whose shape this planner does not support (Mamba hybrids, vision, ...)."""


_spelling: ContextVar[Callable[[str], str]] = ContextVar("spelling", default=str)


@contextlib.contextmanager
def settings_typed_as(spelling: Callable[[str], str]) -> Iterator[None]:
    """Advise to type settings of a job as this command takes them, given their keys."""
    token = _spelling.set(spelling)
    try:
        yield
    finally:
        _spelling.reset(token)


def typed_setting(key: str) -> str:
    """A setting of a job as the user types it here.

    >>> with settings_typed_as("nest.{}".format):
    ...     typed_setting("search.max_seconds")
    'nest.search.max_seconds'
    """
    return _spelling.get()(key)


#: Known names that an error lists whole.
_MOST_LISTED = 24


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> str:
    """The known names closest to a misspelt one, as the tail of an error message.

    >>> nearest("lama3_70b", ["llama3_8b", "llama3_70b", "bert_large"], count=1)
    'Did you mean llama3_70b?'
    """
    names = sorted(known)
    if close := _close(name, names, count):
        return close
    if len(names) > _MOST_LISTED:
        return f"The nearest are {', '.join(difflib.get_close_matches(name, names, 3, 0))}."
    return f"Known: {', '.join(names)}."


def _close(name: str, names: Iterable[str], count: int = 3) -> str:
    close = difflib.get_close_matches(str(name), names, count, 0.4)
    return f"Did you mean {' or '.join(close)}?" if close else ""


def require_known(what: str, name: str, known: Iterable[str], limit: str = "") -> None:
    """Refuse a name that is none of those known; the error says the nearest.

    Args:
        limit: the rule; by default that it is one of the known names.

    Raises:
        UserInputError: for any other name.
    """
    names = tuple(known)
    if name not in names:
        if limit:
            raise UserInputError(what, name, limit, nearest(name, names))
        limit = f"it must be one of {', '.join(names)}"
        fix = _close(name, names) or "Give one of them."
        raise UserInputError(what, name, limit, fix)


def require_at_least(what: str, value: float, least: int, fix: str) -> None:
    """Refuse a number below the least that it can be."""
    if value < least:
        raise UserInputError(what, value, f"it must be at least {least}", fix)


def require_seconds(what: str, value: float) -> float:
    """A time for something, which must be above 0 and finite."""
    if 0 < value < math.inf:
        return value
    raise UserInputError(what, value, "it must be above 0 and finite", "Give seconds, such as 120.")
