"""A command whose words are filled in: a function, bash's own, or a program, which is not run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from nest_megatron.files import read_text
from nest_megatron.integrations.launchers import header_options, slurm_options
from nest_megatron.integrations.shell_script.builtins import BUILTINS
from nest_megatron.integrations.shell_script.commands import PREFIXES, SKIPPED, compute
from nest_megatron.integrations.shell_script.expansion import home_relative
from nest_megatron.integrations.shell_script.record import Launched, is_launch
from nest_megatron.integrations.shell_script.slurm import variables
from nest_megatron.integrations.shell_script.state import Shell
from nest_megatron.integrations.shell_script.syntax import parse
from nest_megatron.integrations.shell_script.values import (
    Leave,
    is_wholly_unknown,
    known,
    plain,
    unknown,
)

_SHELLS = ("bash", "sh", "sbatch")
_SUFFIXES = (".sh", ".slurm", ".sbatch")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Nested:
    """What another shell is to read.

    Args:
        before: words before that shell (``srun ...``).
        options: sizes of the job that it is.
    """

    before: list[str]
    text: str
    script: str = ""
    args: list[str] = field(default_factory=list)
    options: tuple[str, ...] = ()


def call(shell: Shell, words: list[str]) -> None:
    """Carry out a command."""
    if not words:
        return
    name = plain(words[0])
    if name in shell.functions:
        _function(shell, name, words[1:])
    elif nested := _nested(shell, words):
        _read_nested(shell, nested)
    elif name in BUILTINS:
        BUILTINS[name](shell, words[1:])
    elif name in PREFIXES and len(words) > 1 and not words[1].startswith("-"):
        _with_prefix(shell, words[1:])
    else:
        _program(shell, name, words)


def _with_prefix(shell: Shell, words: list[str]) -> None:
    """What follows ``nohup``, ``env A=1`` and their like."""
    before = dict(shell.variables), set(shell.exported)
    while words and (found := _VARIABLE.fullmatch(words[0])):
        shell.variables[found[1]] = found[2]
        shell.exported.add(found[1])
        words = words[1:]
    call(shell, words)
    shell.variables, shell.exported = before


def _function(shell: Shell, name: str, args: list[str]) -> None:
    shell.hidden.append({})
    try:
        with shell.called(args):
            shell.command(shell.functions[name])
    finally:
        for hidden, value in shell.hidden.pop().items():
            shell.variables.pop(hidden, None)
            if value is not None:
                shell.variables[hidden] = value


def _program(shell: Shell, name: str, words: list[str]) -> None:
    """Note a launch, compute what a program would print, or leave it out."""
    if is_launch(words):
        shell.record.launched.append(
            Launched(shell.line, tuple(map(plain, words)), _environment(shell))
        )
        shell.printed.append(unknown(f"$({name} ...)"))
        return
    base = name.rpartition("/")[2]
    found = compute(base, words[1:], shell.given, shell)
    if found is None:
        shell.record.not_run.setdefault(base, shell.line)
        shell.printed.append(unknown(f"$({plain(' '.join(words))})"))
        shell.status = 0 if base in SKIPPED else None
        return
    if base in ("echo", "printf") and found.strip():
        shell.record.said.append(plain(found.strip()))
    shell.printed.append(found)


def _environment(shell: Shell) -> dict[str, str]:
    """Variables that the script has exported, as far as they were not so before."""
    found = {}
    for name in sorted(shell.exported):
        value = shell.variables.get(name)
        if isinstance(value, str) and shell.original.get(name) != value:
            found[name] = plain(value)
    return found


def _nested(shell: Shell, words: list[str]) -> _Nested | None:
    """A script or text that a command has a shell read."""
    for place, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in _SHELLS and (found := _text(words[place + 1 :])) is not None:
            return _Nested(words[:place], plain(words[place + 1 + found]))
        if word.endswith(_SUFFIXES) and not word.startswith("-"):
            starters = {w.rpartition("/")[2] for w in words[:place] if not w.startswith("-")}
            path = home_relative(known(word, "the script to read"), shell.folder)
            if (place == 0 or starters & {*_SHELLS, "srun"}) and Path(path).is_file():
                before = [w for w in words[:place] if w.rpartition("/")[2] not in _SHELLS]
                text, args = read_text(Path(path), "script"), words[place + 1 :]
                kept = before if "srun" in starters else []
                return _Nested(kept, text, path, args, tuple(words[1:place]))
    alone = words[0] in _SHELLS and all(word.startswith("-") for word in words[1:])
    if alone and shell.given and not is_wholly_unknown(shell.given):
        return _Nested([], plain(shell.given), options=tuple(words[1:]))
    return None


def _text(words: list[str]) -> int | None:
    """Where the text behind ``-c`` is."""
    for place, word in enumerate(words[:-1]):
        if not word.startswith("-"):
            return None
        if re.fullmatch(r"-[a-z]*c", word):
            return place + 1
    return None


def _read_nested(shell: Shell, nested: _Nested) -> None:
    """Walk through what another shell reads, with the exported variables alone."""
    options = (*header_options(nested.text), *nested.options)
    inner = shell.child()
    inner.variables = {n: v for n, v in shell.variables.items() if n in shell.exported}
    sizes = slurm_options(options)
    if sizes or nested.before:
        inner.variables = {**variables(sizes), **inner.variables}
    inner.functions, inner.options, inner.args = {}, set(), nested.args
    inner.script, inner.given = nested.script or shell.script, ""
    launched = shell.record.launched
    count = len(launched)
    try:
        inner.run(parse(nested.text))
    except Leave as left:
        inner.status = left.status
    shell.status = inner.status
    shell.printed += inner.printed
    before = tuple(map(plain, nested.before))
    launched[count:] = [
        Launched(shell.line, (*before, *each.words), each.exported, (*options, *each.header))
        for each in launched[count:]
    ]
