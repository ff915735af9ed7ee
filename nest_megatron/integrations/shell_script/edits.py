"""What ``${NAME#...}``, ``%``, ``/``, ``^``, ``,`` and ``:`` make of a text."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

from nest_megatron.integrations.shell_script.values import ScriptError, known

_LONGEST = 1 << 16


def matches(text: str, pattern: str) -> bool:
    """Whether a text matches a pattern of the shell."""
    return fnmatch.fnmatchcase(known(text, "a comparison"), known(pattern, "a comparison"))


def edit(
    rest: str,
    fill: Callable[[str], str],
    pattern_of: Callable[[str], str],
    number: Callable[[str], int],
) -> Callable[[str], str]:
    """The edit that stands behind a parameter's name.

    Args:
        fill, pattern_of, number: a word as text, as a pattern, as a sum.

    Raises:
        ScriptError: for one that is not supported.
    """
    if rest.startswith(("##", "#", "%%", "%")):
        operator = rest[:2] if rest[1:2] == rest[0] else rest[0]
        pattern = pattern_of(rest[len(operator) :])
        return lambda text: _stripped(text, operator, pattern)
    if rest.startswith("/"):
        return _replacement(rest[1:], fill, pattern_of)
    if rest in (",", ",,", "^", "^^"):
        change = str.lower if rest[0] == "," else str.upper
        return change if len(rest) == 2 else lambda text: change(text[:1]) + text[1:]
    if rest.startswith(":"):
        first, _, count = rest[1:].partition(":")
        start, length = number(first), number(count) if count else None
        return lambda text: _part(text, start, length)
    raise ScriptError(f"${{...{rest}}} is not supported")


def _part(text: str, start: int, length: int | None) -> str:
    start = max(len(text) + start, 0) if start < 0 else start
    if length is None:
        return text[start:]
    return text[start : start + length] if length >= 0 else text[start:length]


def _stripped(text: str, operator: str, pattern: str) -> str:
    if len(text) > _LONGEST:
        raise ScriptError("a text to be cut is too long")
    sizes = range(len(text), -1, -1) if operator in ("##", "%%") else range(len(text) + 1)
    for size in sizes:
        cut = text[:size] if operator[0] == "#" else text[len(text) - size :]
        if matches(cut, pattern):
            return text[size:] if operator[0] == "#" else text[: len(text) - size]
    return text


def _replacement(
    rest: str, fill: Callable[[str], str], pattern_of: Callable[[str], str]
) -> Callable[[str], str]:
    found = re.fullmatch(r"(/?)((?:\\.|[^/\\])*)(?:/(.*))?", rest, re.DOTALL)
    pattern = pattern_of(found[2]) if found else ""
    if found is None or pattern[:1] in ("", "#", "%"):
        raise ScriptError(f"${{.../{rest}}} is not supported")
    new = fill(found[3] or "")
    regex = re.sub(r"\\[Zz]$", "", fnmatch.translate(pattern))
    count = 0 if found[1] else 1
    return lambda text: re.sub(regex, lambda _: new, text, count=count)
