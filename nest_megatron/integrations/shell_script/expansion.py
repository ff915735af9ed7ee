"""Words filled in: parameters, substitutions, sums, fields, patterns of files."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nest_megatron.integrations.shell_script.edits import edit
from nest_megatron.integrations.shell_script.scanning import braces, closing
from nest_megatron.integrations.shell_script.state import Shell
from nest_megatron.integrations.shell_script.values import (
    MAX_TEXT,
    MAX_WORDS,
    ScriptError,
    UnknownError,
    is_unknown,
    known,
    split_known,
    unknown,
)

_PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
_SPECIAL = frozenset("*?[")
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"', "r": "\r", "a": "\a", "e": "\x1b"}


class _Star(list[str]):
    """The elements of ``$*``, one word where it is quoted."""


@dataclass(slots=True)
class _Fields:
    """Fields under construction; patterns hold what is quoted with its special signs escaped.

    Args:
        is_one: all is one text, as in an assignment.
    """

    is_one: bool = False
    done: list[tuple[str, str | None]] = field(default_factory=list)
    text: str = ""
    pattern: str = ""
    is_pattern: bool = False
    is_there: bool = False

    def add(self, text: str, *, quoted: bool) -> None:
        self.text += text
        self.pattern += glob.escape(text) if quoted else text
        self.is_pattern |= not quoted and bool(_SPECIAL.intersection(text))
        self.is_there |= quoted or bool(text)
        if len(self.text) > MAX_TEXT:
            raise ScriptError("a word is too long")

    def end(self) -> None:
        if self.is_there:
            self.done.append((self.text, self.pattern if self.is_pattern else None))
        self.text, self.pattern, self.is_pattern, self.is_there = "", "", False, False


def expand(words: Sequence[str], shell: Shell) -> list[str]:
    """Words as a command would get them."""
    found: list[str] = []
    for word in (each for raw in words for each in braces(raw)):
        fields = _Fields()
        _fill(word, shell, fields, split=True)
        fields.end()
        for text, pattern in fields.done:
            found += _files(text, pattern, shell)
        if len(found) > MAX_WORDS:
            raise ScriptError(f"a list has more than {MAX_WORDS:,} words")
    return found


def fill(word: str, shell: Shell) -> str:
    """One word without splitting it, as in an assignment."""
    return _filled(word, shell).text


def pattern_of(word: str, shell: Shell) -> str:
    """One word as a pattern of the shell; quoted signs stand for themselves."""
    return _filled(word, shell).pattern


def fill_document(text: str, shell: Shell) -> str:
    """A here-document, in which only parameters and substitutions are filled in."""
    fields = _Fields(is_one=True)
    _fill_quoted(text, shell, fields)
    return fields.text


def _filled(word: str, shell: Shell) -> _Fields:
    fields = _Fields(is_one=True)
    _fill(word, shell, fields, split=False)
    return fields


def _files(text: str, pattern: str | None, shell: Shell) -> list[str]:
    if pattern is None or is_unknown(text):
        return [text]
    every = glob.iglob(pattern, root_dir=shell.folder)  # noqa: PTH207 - text, not paths
    found = itertools.islice(every, MAX_WORDS)
    return sorted(found) or [text]


def _fill(word: str, shell: Shell, fields: _Fields, *, split: bool) -> None:
    at = 0
    if re.match(r"~(/|$)", word):
        home = shell.lookup("HOME")
        fields.add(home if isinstance(home, str) else "~", quoted=True)
        at = 1
    while at < len(word):
        char = word[at]
        if char == "\\":
            if word[at + 1 : at + 2] != "\n":
                fields.add(word[at + 1 : at + 2], quoted=True)
            at += 2
        elif char == "'" or word.startswith("$'", at):
            end = word.index("'", at + (1 if char == "'" else 2))
            while char == "$" and word[end - 1] == "\\":
                end = word.index("'", end + 1)
            text = word[at + (1 if char == "'" else 2) : end]
            fields.add(_escaped(text) if char == "$" else text, quoted=True)
            at = end + 1
        elif char == '"':
            end = _end_of_quoted(word, at)
            fields.is_there |= "@" not in word[at:end] or end - at == 1
            _fill_quoted(word[at + 1 : end], shell, fields)
            at = end + 1
        elif char in "$`":
            found, at = _substitute(word, at, shell)
            _add(found, fields, shell, quoted=not split)
        else:
            fields.add(char, quoted=False)
            at += 1


def _end_of_quoted(word: str, at: int) -> int:
    at += 1
    while at < len(word) and word[at] != '"':
        if word[at] == "\\":
            at += 2
        elif word.startswith(("$(", "${"), at):
            at = closing(word, at + 2, ")" if word[at + 1] == "(" else "}")
        elif word[at] == "`":
            at = word.index("`", at + 1) + 1
        else:
            at += 1
    return at


def _fill_quoted(text: str, shell: Shell, fields: _Fields) -> None:
    at = 0
    while at < len(text):
        char, following = text[at], text[at + 1 : at + 2]
        if char == "\\" and following and following in '$`"\\\n':
            fields.add("" if following == "\n" else following, quoted=True)
            at += 2
        elif char in "$`":
            found, at = _substitute(text, at, shell)
            _add(found, fields, shell, quoted=True)
        else:
            fields.add(char, quoted=True)
            at += 1


def _escaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), text, flags=re.DOTALL)


def _add(
    found: str | list[str],
    fields: _Fields,
    shell: Shell,
    *,
    quoted: bool,
) -> None:
    """Add what a substitution gives; a list has a field for each of its elements."""
    if isinstance(found, _Star) and quoted:
        sign = shell.lookup("IFS")
        found = (sign[:1] if isinstance(sign, str) else " ").join(found)
    elif isinstance(found, list) and fields.is_one:
        found = " ".join(found)
    if isinstance(found, list):
        for place, each in enumerate(found):
            if place:
                fields.end()
            _add(each, fields, shell, quoted=quoted)
        return
    if quoted:
        fields.add(found, quoted=True)
        return
    separators = shell.lookup("IFS")
    signs = separators if isinstance(separators, str) else " \t\n"
    if not signs:
        fields.add(found, quoted=False)
        return
    parts = split_known(found, signs)
    for place, part in enumerate(parts):
        if place:
            fields.end()
        fields.add(part, quoted=False)


def _substitute(text: str, at: int, shell: Shell) -> tuple[str | list[str], int]:
    """What stands for the ``$`` or backquote at ``at``, and where the text goes on."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        if end < 0:
            raise ScriptError("a backquote is not closed")
        return shell.output(text[at + 1 : end].replace("\\`", "`").replace("\\$", "$")), end + 1
    if text.startswith("$((", at):
        end = closing(text, at + 2, ")")
        if text[end - 2 : end] == "))":
            return _sum(text[at + 3 : end - 2], shell), end
    if text.startswith("$(", at):
        end = closing(text, at + 2, ")")
        return shell.output(text[at + 2 : end - 1]), end
    if text.startswith("${", at):
        end = closing(text, at + 2, "}")
        return _parameter(text[at + 2 : end - 1], shell), end
    found = _PARAMETER.match(text, at + 1)
    if found is None:
        return "$", at + 1
    name = found[0]
    if name.isdigit():
        name, end = name[0], at + 2
    else:
        end = found.end()
    return _given(_value(name, None, shell), name, shell), end


def _given(value: str | list[str] | None, name: str, shell: Shell) -> str | list[str]:
    """A value; the script's arguments stay open where they are not given."""
    if value is not None:
        return value
    if name.isdigit():
        return unknown(f"${name}")
    shell.unset(name)
    return ""


def _sum(text: str, shell: Shell) -> str:
    try:
        return str(shell.sum(fill_document(text, shell)))
    except UnknownError:
        return unknown(f"$(({text}))")


def _parameter(inside: str, shell: Shell) -> str | list[str]:
    """``${...}``."""
    length = inside.startswith("#") and len(inside) > 1
    indirect = inside.startswith("!")
    rest = inside[1:] if length or indirect else inside
    found = _PARAMETER.match(rest)
    if found is None:
        raise ScriptError(f"${{{inside}}} is not supported")
    name, rest, index = found[0], rest[found.end() :], None
    if rest.startswith("["):
        end = closing(rest.replace("[", "{", 1).replace("]", "}", 1), 1, "}")
        index, rest = rest[1 : end - 1], rest[end:]
    if indirect:
        if index in ("@", "*"):
            held = shell.lookup(name)
            return list(held) if isinstance(held, dict) else ["0"]
        name = known(_text(_value(name, index, shell)), "a name")
        found = re.fullmatch(r"(\w+)(?:\[(.*)\])?", name)
        if found is None:
            raise ScriptError(f"${{{inside}}} names {name!r}, which is no variable")
        name, index = found[1], found[2]
    value = _value(name, index, shell)
    if length:
        text = known(_text(value), f"the length of {name}")
        return str(len(value) if isinstance(value, list) else len(text))
    return _operated(value, name, rest, shell)


def _value(name: str, index: str | None, shell: Shell) -> str | list[str] | None:
    """A parameter's text, or its elements; ``None`` if it is not set."""
    if name in ("@", "*"):
        return _Star(shell.positional()) if name == "*" else shell.positional()
    held = shell.lookup(name)
    if isinstance(held, dict):
        if index in ("@", "*"):
            return _Star(held.values()) if index == "*" else list(held.values())
        key = "0" if index is None else _key(index, held, shell)
        return held.get(key)
    if index in ("@", "*"):
        return [] if held is None else [held]
    return held if index is None or _key(index, {}, shell) == "0" else None


def _key(index: str, held: Mapping[str, str], shell: Shell) -> str:
    """The key of an element; a negative one counts from the end."""
    text = fill(index, shell)
    if text in held or not re.fullmatch(r"[\w\s+*/%()$-]+", text):
        return text
    if held and not all(key.isdigit() for key in held):
        return text
    number = shell.sum(text)
    return str(number if number >= 0 else max(map(int, held), default=-1) + 1 + number)


def _text(value: str | list[str] | None) -> str:
    return " ".join(value) if isinstance(value, list) else value or ""


def _operated(value: str | list[str] | None, name: str, rest: str, shell: Shell) -> str | list[str]:
    if not rest:
        return _given(value, name, shell)
    if (found := re.match(r"(:?[-=?+])", rest)) is not None:
        return _default(value, name, found[1], rest[found.end() :], shell)
    if isinstance(value, list) and rest.startswith(":"):
        return _slice(value, name, rest, shell)

    def number(word: str) -> int:
        return shell.sum(fill(word, shell))

    apply = edit(rest, lambda w: fill(w, shell), lambda w: pattern_of(w, shell), number)
    if isinstance(value, list):
        return type(value)(apply(known(each, "an edit")) for each in value)
    return apply(known(value or "", f"an edit of {name}"))


def _default(
    value: str | list[str] | None, name: str, operator: str, word: str, shell: Shell
) -> str | list[str]:
    lacks = value is None or value == [] or (operator.startswith(":") and not value)
    if operator.endswith("+"):
        return "" if lacks else fill(word, shell)
    if not lacks:
        return value  # type: ignore[return-value]
    if operator.endswith("?"):
        said = fill(word, shell) or "it is not set"
        raise ScriptError(f"{name}: {said}", f"Set it: {name}=... before nest-megatron")
    found = fill(word, shell)
    if operator.endswith("="):
        shell.assign(name, found)
    return found


def _slice(value: list[str], name: str, rest: str, shell: Shell) -> list[str]:
    """``${A[@]:start:count}``; the script's arguments count from 1."""
    first, _, count = rest[1:].partition(":")
    start = shell.sum(fill(first, shell)) - (name in ("@", "*"))
    end = start + shell.sum(fill(count, shell)) if count else len(value)
    if start < 0:
        raise ScriptError(f"${{{name}{rest}}} is not supported")
    return value[start:end]


def home_relative(path: str, folder: str) -> str:
    """A path of the script as one of this process."""
    return os.path.normpath(os.path.join(folder, os.path.expanduser(path)))  # noqa: PTH111, PTH118
