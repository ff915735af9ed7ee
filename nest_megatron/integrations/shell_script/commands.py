"""Commands whose output is computed here instead of running them; all others stay unknown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from posixpath import basename, dirname, normpath

from nest_megatron.files import read_text
from nest_megatron.integrations.shell_script.expansion import home_relative
from nest_megatron.integrations.shell_script.state import Shell
from nest_megatron.integrations.shell_script.values import ScriptError, is_unknown, known

#: Commands that prepare a machine and print nothing that a script uses; they are taken to succeed.
SKIPPED = frozenset(
    (
        *("alias", "chmod", "chown", "clear", "conda", "cp", "disown", "kill", "ln", "mamba"),
        *("mkdir", "ml", "module", "mv", "nvidia-smi", "pip", "pip3", "pkill", "ray", "rm"),
        *("rmdir", "rsync", "scontrol", "sleep", "spack", "sync", "tee", "touch", "wandb"),
    )
)
#: Words before a command that change nothing of what it launches.
PREFIXES = frozenset(("nohup", "exec", "command", "builtin", "time", "setsid", "env", "sudo"))


def echo(args: Sequence[str], _given: str, _shell: Shell) -> str:
    """``echo`` with ``-n`` and ``-e``."""
    words = list(args)
    end, escapes = "\n", False
    while words and re.fullmatch(r"-[neE]+", words[0]):
        flags = words.pop(0)
        end, escapes = ("" if "n" in flags else end), escapes or "e" in flags
    text = " ".join(words)
    return (_unescaped(text) if escapes else text) + end


def printf(args: Sequence[str], _given: str, _shell: Shell) -> str:
    """``printf`` with ``%s``, ``%d`` and widths."""
    if not args:
        return ""
    form, rest, found = _unescaped(args[0]), list(args[1:]), ""
    spots = re.findall(r"%[-0]?\d*(?:\.\d+)?[sdfq%]", form)
    while True:
        values: list[str | int | float] = []
        for spot in spots:
            if spot == "%%":
                continue
            text = rest.pop(0) if rest else ""
            values.append(_converted(text, spot[-1]))
        found += re.sub(r"q(?![A-Za-z])", "s", form) % tuple(values) if spots else form
        if not rest or not values:
            return found


def _converted(text: str, kind: str) -> str | int | float:
    if kind not in "df":
        return text
    try:
        number = float(known(text, "printf") or 0)
    except ValueError:
        raise ScriptError(f"printf needs a number, not {text!r}") from None
    return int(number) if kind == "d" else number


def _unescaped(text: str) -> str:
    signs = {"n": "\n", "t": "\t", "\\": "\\", "r": "\r"}
    return re.sub(r"\\([nt\\r])", lambda found: signs[found[1]], text)


def _dirname(args: Sequence[str], _given: str, _shell: Shell) -> str:
    return (dirname(args[-1].rstrip("/") or "/") or ".") + "\n" if args else ""


def _basename(args: Sequence[str], _given: str, _shell: Shell) -> str:
    words = [word for word in args if word not in ("--", "-a")]
    if not words:
        return ""
    suffix = words[1] if len(words) > 1 else ""
    name = basename(words[0].rstrip("/"))
    return (name.removesuffix(suffix) if suffix != name else name) + "\n"


def _realpath(args: Sequence[str], _given: str, shell: Shell) -> str:
    words = [word for word in args if not word.startswith("-")]
    if not words:
        return ""
    return normpath(home_relative(known(words[0], "a path"), shell.folder)) + "\n"


def _seq(args: Sequence[str], _given: str, _shell: Shell) -> str:
    words = [known(word, "seq") for word in args]
    separator = "\n"
    if words[:1] == ["-s"]:
        separator, words = words[1], words[2:]
    if not 1 <= len(words) <= 3 or not all(re.fullmatch(r"-?\d+", word) for word in words):
        raise ScriptError(f"seq {' '.join(words)} is not supported")
    numbers = list(map(int, words))
    first, step, last = (1, 1, *numbers) if len(numbers) == 1 else (numbers[0], 1, numbers[-1])
    step = numbers[1] if len(numbers) == 3 else step
    if step == 0 or abs(last - first) // abs(step) > 100_000:
        raise ScriptError("seq is too long")
    found = range(first, last + (1 if step > 0 else -1), step)
    return separator.join(map(str, found)) + ("\n" if found else "")


def _expr(args: Sequence[str], _given: str, shell: Shell) -> str:
    return f"{shell.sum(' '.join(args))}\n"


def _cat(args: Sequence[str], given: str, shell: Shell) -> str:
    names = [word for word in args if word != "-"]
    if any(word.startswith("-") for word in names):
        raise ScriptError(f"cat {' '.join(args)} is not supported")
    if not names:
        return given
    paths = [Path(home_relative(known(name, "a path"), shell.folder)) for name in names]
    return "".join(read_text(path, "cat") for path in paths)


def _wc(args: Sequence[str], given: str, _shell: Shell) -> str:
    counted = {"-l": given.count("\n"), "-w": len(given.split()), "-c": len(given)}
    if len(args) != 1 or args[0] not in counted:
        raise ScriptError(f"wc {' '.join(args)} is not supported")
    return f"{counted[args[0]]}\n"


def _lines(args: Sequence[str], given: str, _shell: Shell, *, last: bool = False) -> str:
    found = re.fullmatch(r"(?:-n\s*|-)?(\d+)?", " ".join(args))
    if found is None:
        raise ScriptError(f"{'tail' if last else 'head'} {' '.join(args)} is not supported")
    count, lines = int(found[1] or 10), given.splitlines(keepends=True)
    return "".join((lines[-count:] if count else []) if last else lines[:count])


def _cut(args: Sequence[str], given: str, _shell: Shell) -> str:
    found = re.fullmatch(r"(?:-d\s*(.) )?-f\s*(\d+)(?: -d\s*(.))?", " ".join(args))
    if found is None:
        raise ScriptError(f"cut {' '.join(args)} is not supported")
    sign, place = found[1] or found[3] or "\t", int(found[2]) - 1
    cells = [line.split(sign) for line in given.splitlines()]
    return "".join(
        f"{row[place] if place < len(row) else ''}\n" if len(row) > 1 else f"{row[0]}\n"
        for row in cells
    )


def _tr(args: Sequence[str], given: str, _shell: Shell) -> str:
    classes = {"[:upper:]": "A-Z", "[:lower:]": "a-z"}
    sets = [_characters(classes.get(word, word)) for word in args if not word.startswith("-")]
    if args[:1] == ["-d"] and len(sets) == 1:
        return "".join(char for char in given if char not in sets[0])
    if len(args) != 2 or len(sets) != 2 or not sets[1]:
        raise ScriptError(f"tr {' '.join(args)} is not supported")
    new = sets[1].ljust(len(sets[0]), sets[1][-1])
    return given.translate(str.maketrans(sets[0], new[: len(sets[0])]))


def _characters(text: str) -> str:
    text = _unescaped(text)
    return re.sub(r"(.)-(.)", lambda m: "".join(map(chr, range(ord(m[1]), ord(m[2]) + 1))), text)


#: A command's output, from its words and its standard input.
COMPUTED: dict[str, Callable[[Sequence[str], str, Shell], str]] = {
    "echo": echo,
    "printf": printf,
    "dirname": _dirname,
    "basename": _basename,
    "realpath": _realpath,
    "readlink": _realpath,
    "seq": _seq,
    "expr": _expr,
    "cat": _cat,
    "wc": _wc,
    "head": _lines,
    "tail": lambda args, given, shell: _lines(args, given, shell, last=True),
    "cut": _cut,
    "tr": _tr,
}
#: Those that read their standard input.
FILTERS = frozenset(("cat", "wc", "head", "tail", "cut", "tr"))


def compute(name: str, args: Sequence[str], given: str, shell: Shell) -> str | None:
    """What a command prints; ``None`` where that is not known."""
    if name not in COMPUTED or (name in FILTERS and is_unknown(given)):
        return None
    if name not in ("echo", "printf", "dirname", "basename") and any(map(is_unknown, args)):
        return None
    try:
        return COMPUTED[name](args, given, shell)
    except ScriptError:
        return None
