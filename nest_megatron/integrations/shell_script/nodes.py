"""The parts of a parsed script; words stay as they are written, and ``line`` counts from 1."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Simple:
    """A simple command, assignments among its words.

    Args:
        given: text on its standard input; ``quoted`` if nothing in it is filled in.
        files: files that it reads as its standard input.
    """

    line: int
    words: tuple[str, ...]
    given: str | None = None
    quoted: bool = False
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by ``|``."""

    line: int
    commands: tuple[Command, ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class AndOr:
    """Pipelines, each with the operator before it (``&&`` or ``||``; empty for the first)."""

    line: int
    parts: tuple[tuple[str, Pipeline], ...]


@dataclass(frozen=True, slots=True)
class If:
    """Conditions with what follows each, and what follows ``else``."""

    line: int
    branches: tuple[tuple[Body, Body], ...]
    otherwise: Body


@dataclass(frozen=True, slots=True)
class For:
    """``words`` is ``None`` for the positional parameters."""

    line: int
    name: str
    words: tuple[str, ...] | None
    body: Body


@dataclass(frozen=True, slots=True)
class ForSum:
    """``for ((first; condition; step))``."""

    line: int
    parts: tuple[str, str, str]
    body: Body


@dataclass(frozen=True, slots=True)
class While:
    """``while``, or ``until``."""

    line: int
    condition: Body
    body: Body
    until: bool


@dataclass(frozen=True, slots=True)
class Case:
    """``case``: patterns with what follows each."""

    line: int
    word: str
    branches: tuple[tuple[tuple[str, ...], Body], ...]


@dataclass(frozen=True, slots=True)
class Group:
    """``{ ...; }``, or ``( ... )``."""

    line: int
    body: Body
    subshell: bool


@dataclass(frozen=True, slots=True)
class Function:
    """The definition of a function."""

    line: int
    name: str
    body: Command


@dataclass(frozen=True, slots=True)
class Condition:
    """``[[ ... ]]``, as its words."""

    line: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """``(( ... ))``."""

    line: int
    text: str


Command = Simple | If | For | ForSum | While | Case | Group | Function | Condition | Sum
Body = tuple[AndOr, ...]
