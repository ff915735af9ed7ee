"""Assignments: variables, elements of arrays, declarations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nest_megatron.integrations.shell_script.expansion import expand, fill
from nest_megatron.integrations.shell_script.scanning import split_words
from nest_megatron.integrations.shell_script.state import Shell
from nest_megatron.integrations.shell_script.values import ScriptError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^]]*)\])?(\+?)=", re.DOTALL)
DECLARATIONS = frozenset(("export", "local", "declare", "readonly", "typeset"))


def assign(shell: Shell, word: str) -> str:
    """Carry out ``NAME=value``, ``NAME+=value``, ``NAME[i]=value`` or ``NAME=(...)``; the name."""
    found = ASSIGNMENT.match(word)
    if found is None:
        raise ScriptError(f"{word!r} is no assignment")
    name, index, plus = found.groups()
    rest, held = word[found.end() :], shell.variables.get(name)
    if rest.startswith("("):
        old = {"0": held} if isinstance(held, str) else dict(held or {})
        shell.variables[name] = _elements(shell, rest[1:-1], old if plus else {})
    elif index is not None or isinstance(held, dict):
        table = dict(held) if isinstance(held, dict) else {}
        key = _key(shell, name, index or "0")
        table[key] = (table.get(key, "") if plus else "") + fill(rest, shell)
        shell.variables[name] = table
    else:
        before = held if plus and isinstance(held, str) else ""
        shell.variables[name] = before + fill(rest, shell)
    if "a" in shell.options:
        shell.exported.add(name)
    return name


def _key(shell: Shell, name: str, index: str) -> str:
    text = fill(index, shell)
    return text if name in shell.keyed else str(shell.sum(text))


def _elements(shell: Shell, text: str, old: Mapping[str, str]) -> dict[str, str]:
    """The elements of ``(...)``, after those that are there."""
    found = dict(old)
    place = max((int(key) for key in found if key.isdigit()), default=-1) + 1
    for word in split_words(text):
        keyed = re.match(r"\[([^]]*)\]=", word)
        if keyed:
            found[fill(keyed[1], shell)] = fill(word[keyed.end() :], shell)
            continue
        for each in expand([word], shell):
            found[str(place)] = each
            place += 1
    return found


def declare(shell: Shell, words: Sequence[str]) -> None:
    """``export``, ``local``, ``declare``, ``readonly`` and ``typeset``."""
    flags = "".join(word[1:] for word in words[1:] if word.startswith("-"))
    exports = (words[0] == "export" or "x" in flags) and "n" not in flags
    for word in words[1:]:
        if word.startswith(("-", "+")):
            continue
        found = ASSIGNMENT.match(word)
        if found is not None and "A" in flags:
            shell.keyed.add(found[1])
        for each in [word] if found is not None else expand([word], shell):
            if words[0] in ("local", "declare", "typeset") and "g" not in flags:
                _hide(shell, each)
            name = assign(shell, each) if ASSIGNMENT.match(each) else each
            if "A" in flags or "a" in flags:
                shell.variables.setdefault(name, {})
            if "A" in flags:
                shell.keyed.add(name)
            if exports:
                shell.exported.add(name)


def _hide(shell: Shell, word: str) -> None:
    """Keep the value of a variable that a function declares for itself."""
    found = ASSIGNMENT.match(word)
    name = found[1] if found is not None else word
    if shell.hidden and name not in shell.hidden[-1]:
        shell.hidden[-1][name] = shell.variables.get(name)
        if "+=" not in word:
            shell.variables.pop(name, None)
