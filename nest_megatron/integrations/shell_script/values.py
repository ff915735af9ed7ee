"""Limits and errors of reading a script, and text that only running a command would tell."""

from __future__ import annotations

import re

#: Around the source of a substitution whose output is not known.
_OPEN, _CLOSE = "\ue000", "\ue001"
MAX_STEPS = 100_000
MAX_TEXT = 1 << 20
MAX_WORDS = 100_000
MAX_DEPTH = 60
MAX_SECONDS = 10.0
#: A variable: text, or the elements of an array by key.
Value = str | dict[str, str]


_BY_HAND = (
    "Give the script's arguments behind its name, set its variables before nest-megatron, or "
    "decide it by hand in a copy"
)


class ScriptError(Exception):
    """What a script does that cannot be followed; ``launch.py`` adds its name and line."""

    def __init__(self, limit: str, fix: str = "") -> None:
        super().__init__(limit)
        self.limit, self.fix = limit, fix


class UnknownError(ScriptError):
    """What only a run would tell."""


def unknown(source: str) -> str:
    """Text that stands for the output of a command that is not run."""
    return f"{_OPEN}{source}{_CLOSE}"


def is_unknown(text: str) -> bool:
    """Whether a part of a text is not known."""
    return _OPEN in text


def is_wholly_unknown(text: str) -> bool:
    """Whether a text is the output of one command that is not run, and nothing else."""
    return text.startswith(_OPEN) and text.find(_CLOSE) == len(text) - 1


def split_known(text: str, signs: str) -> list[str]:
    """A text split at some signs, but not inside of what is not known."""
    return re.split(f"[{re.escape(signs)}]+(?![^{_OPEN}]*{_CLOSE})", text)


def plain(text: str) -> str:
    """A text with what is not known written as in the script."""
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def known(text: str, why: str) -> str:
    """A text that something depends on.

    Raises:
        ScriptError: if a part of it is not known.
    """
    if is_unknown(text):
        found = re.search(f"{_OPEN}(.*?){_CLOSE}", text, re.DOTALL)
        source = plain(found[1]) if found else plain(text)
        limit = f"{why} depends on {source}, which only a run would tell"
        raise UnknownError(limit, _BY_HAND)
    if len(text) > MAX_TEXT:
        raise ScriptError(f"a value of {len(text)} characters is too long")
    return text


class Leave(Exception):
    """``exit``, ``return``, ``break`` or ``continue``; a status of ``None`` is not known."""

    def __init__(self, kind: str, status: int | None, count: int = 1) -> None:
        super().__init__(kind)
        self.kind, self.status, self.count = kind, status, count
