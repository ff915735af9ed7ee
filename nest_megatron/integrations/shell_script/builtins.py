"""Bash's own commands."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

from nest_megatron.files import read_text
from nest_megatron.integrations.shell_script.conditions import Decision
from nest_megatron.integrations.shell_script.expansion import home_relative
from nest_megatron.integrations.shell_script.state import Shell
from nest_megatron.integrations.shell_script.syntax import parse
from nest_megatron.integrations.shell_script.values import (
    Leave,
    ScriptError,
    is_unknown,
    known,
    unknown,
)

#: Files that set up a shell or a virtual environment, and nothing of a job.
_SETUP = frozenset(
    ("activate", ".bashrc", ".bash_profile", ".profile", "profile", "modules.sh", "conda.sh")
)


def _true(shell: Shell, _args: list[str]) -> None:
    shell.status = 0


def _false(shell: Shell, _args: list[str]) -> None:
    shell.status = 1


def _test(shell: Shell, args: list[str]) -> None:
    shell.status = int(not Decision(args, shell, is_keyword=False).holds())


def _bracket(shell: Shell, args: list[str]) -> None:
    if args[-1:] != ["]"]:
        raise ScriptError("a ] is missing")
    _test(shell, args[:-1])


def _leave(kind: str) -> Callable[[Shell, list[str]], None]:
    def leave(shell: Shell, args: list[str]) -> None:
        status = shell.status
        if args and kind in ("exit", "return"):
            status = None if is_unknown(args[0]) else shell.sum(args[0]) & 255
        raise Leave(kind, status, int(args[0]) if args and kind in ("break", "continue") else 1)

    return leave


def _cd(shell: Shell, args: list[str]) -> None:
    words = [word for word in args if word == "-" or not word.startswith("-")]
    home, last = shell.lookup("HOME"), shell.lookup("OLDPWD")
    to = words[0] if words else str(home or "/")
    to = str(last or shell.folder) if to == "-" else known(to, "the folder")
    shell.variables["OLDPWD"] = shell.folder
    shell.folder = home_relative(to, shell.folder)
    if not Path(shell.folder).is_dir():
        shell.record.not_found.setdefault(shell.folder, shell.line)
    shell.status = 0


def _pwd(shell: Shell, _args: list[str]) -> None:
    shell.printed.append(f"{shell.folder}\n")
    shell.status = 0


def _pushd(shell: Shell, args: list[str]) -> None:
    shell.stack.append(shell.folder)
    _cd(shell, args)


def _popd(shell: Shell, _args: list[str]) -> None:
    if shell.stack:
        shell.folder = shell.stack.pop()


def _shift(shell: Shell, args: list[str]) -> None:
    count = shell.sum(args[0]) if args else 1
    shell.status = int(count > len(shell.args))
    if not shell.status:
        shell.args = shell.args[count:]


def _set(shell: Shell, args: list[str]) -> None:
    for place, word in enumerate(args):
        if word == "--" or not word.startswith(("-", "+")):
            named = place and args[place - 1] in ("-o", "+o", "-euo", "-eo", "-exo", "-euxo")
            if named:
                continue
            shell.args = args[place + (word == "--") :]
            return
        change = shell.options.update if word[0] == "-" else shell.options.difference_update
        change(word[1:])
    names = dict(itertools.pairwise(args))
    for flag, letter in (("errexit", "e"), ("nounset", "u"), ("allexport", "a")):
        shell.options |= {letter} if names.get("-o") == flag else set()
        shell.options -= {letter} if names.get("+o") == flag else set()


def _unset(shell: Shell, args: list[str]) -> None:
    for name in args:
        found = re.fullmatch(r"(\w+)\[(.*)\]", name)
        held = shell.variables.get(found[1]) if found else None
        if found and isinstance(held, dict):
            shell.variables[found[1]] = {k: v for k, v in held.items() if k != found[2]}
        shell.variables.pop(name, None)
        shell.functions.pop(name, None)
        shell.exported.discard(name)


def _eval(shell: Shell, args: list[str]) -> None:
    text = " ".join(args)
    shell.run(parse(text if "torchrun" in text or "python" in text else known(text, "eval")))


def _source(shell: Shell, args: list[str]) -> None:
    if not args:
        raise ScriptError("source names no file")
    path = Path(home_relative(known(args[0], "the file to read"), shell.folder))
    if path.name in _SETUP:
        shell.record.not_run.setdefault(str(path), shell.line)
        shell.status = 0
        return
    if not path.is_file():
        limit = f"it reads {path}, which is not on this host"
        raise ScriptError(limit, "Plan where the file is, in the folder that the script expects")
    with shell.called(args[1:] or shell.args):
        shell.walk(read_text(path, "source"), str(path))


def _read(shell: Shell, args: list[str]) -> None:
    """A line of standard input, or all of it with ``-d ''``."""
    names = [word for word in args if re.fullmatch(r"[A-Za-z_]\w*", word)] or ["REPLY"]
    if not shell.given or is_unknown(shell.given):
        is_there = bool(shell.given)
        for name in names:
            shell.assign(name, unknown("$(read)") if is_there or not shell.piped else "")
        shell.status = None if is_there or not shell.piped else 1
        return
    if "-d" in args:
        text, shell.given = shell.given, ""
        shell.assign(names[-1], text.strip())
        shell.status = 1
        return
    text, _, shell.given = shell.given.partition("\n")
    parts = text.split(None, len(names) - 1)
    for place, name in enumerate(names):
        shell.assign(name, parts[place] if place < len(parts) else "")
    shell.status = 0


def _mapfile(shell: Shell, args: list[str]) -> None:
    names = [word for word in args if re.fullmatch(r"[A-Za-z_]\w*", word)] or ["MAPFILE"]
    lines = [shell.given] if is_unknown(shell.given) else shell.given.splitlines()
    if not shell.given:
        lines = [unknown("$(mapfile)")]
    shell.assign(names[-1], {str(place): line for place, line in enumerate(lines)})
    shell.status = 0


def _let(shell: Shell, args: list[str]) -> None:
    value = 0
    for each in args:
        value = shell.sum(each)
    shell.status = int(not value)


def _hostname(shell: Shell, _args: list[str]) -> None:
    shell.printed.append(unknown("$(hostname)"))
    shell.status = 0


def _getopts(_shell: Shell, _args: list[str]) -> None:
    raise ScriptError("getopts is not supported")


BUILTINS: dict[str, Callable[[Shell, list[str]], None]] = {
    ":": _true,
    "true": _true,
    "false": _false,
    "test": _test,
    "[": _bracket,
    "exit": _leave("exit"),
    "return": _leave("return"),
    "break": _leave("break"),
    "continue": _leave("continue"),
    "cd": _cd,
    "pwd": _pwd,
    "pushd": _pushd,
    "popd": _popd,
    "shift": _shift,
    "set": _set,
    "unset": _unset,
    "eval": _eval,
    "source": _source,
    ".": _source,
    "read": _read,
    "mapfile": _mapfile,
    "readarray": _mapfile,
    "let": _let,
    "hostname": _hostname,
    "getopts": _getopts,
    **dict.fromkeys(("trap", "shopt", "wait", "ulimit", "umask", "alias", "hash"), _true),
}
