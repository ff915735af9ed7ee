"""What goes to standard output and standard error."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nest_megatron.errors import UserInputError

if TYPE_CHECKING:
    from rich.console import RenderableType

_LINE = 78


def show(*parts: RenderableType) -> None:
    """Print tables and text; plain where standard output is no terminal."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    if console.is_terminal:
        for part in parts:
            console.print(part)
        return
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    say("\n".join(line.rstrip() for line in captured.get().splitlines()))


def show_json(document: object) -> None:
    """Print one JSON document."""
    say(json.dumps(_finite(document), indent=2, allow_nan=False))


def say(text: str = "") -> None:
    """Print a text; a reader that went away (``| head``) wants no more, and that is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115


def print_error(error: Exception, *, as_json: bool) -> None:
    """Print a user's mistake: two lines on standard error, or one JSON document."""
    if as_json:
        show_json({"error": error_fields(error)})
        return
    if not isinstance(error, UserInputError):
        print(f"error: {error}", file=sys.stderr)
        return
    given = "" if error.value is None else f" = {_short(error.value)}"
    print(f"error: {error.what}{given}: {error.limit}.\n       {error.fix}", file=sys.stderr)


def error_fields(error: Exception) -> dict[str, Any]:
    """An error for a program that reads it."""
    if not isinstance(error, UserInputError):
        return {"what": type(error).__name__, "value": None, "limit": str(error), "fix": ""}
    return {
        "what": error.what,
        "value": _finite(error.value),
        "limit": error.limit,
        "fix": error.fix,
    }


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LINE else f"{text[: _LINE - 3]}..."


def _finite(value: Any) -> Any:
    """JSON has no NaN, no infinity and no types of ours."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def command_lines(
    words: Sequence[str], environment: Iterable[tuple[str, str]] = (), indent: str = "  "
) -> str:
    """A command to copy: broken before flags, with backslashes.

    >>> print(command_lines(["torchrun", "x.py", "--layout", "Et|tL"], [("A", "1")]))
      A=1 torchrun x.py --layout 'Et|tL'
    """
    pieces: list[str] = [f"{name}={shlex.quote(value)}" for name, value in environment]
    for at, word in enumerate(words):
        continues = at > 0 and words[at - 1].startswith("--") and not word.startswith("--")
        if continues:
            pieces[-1] += f" {shlex.quote(word)}"
        else:
            pieces.append(shlex.quote(word))
    lines = [indent]
    for piece in pieces:
        fits = len(lines[-1]) + len(piece) + 3 <= _LINE
        if not fits and lines[-1].strip():
            lines[-1] += "\\"
            lines.append(f"{indent}  ")
        lines[-1] += f"{piece} "
    return "\n".join(line.rstrip() for line in lines)
