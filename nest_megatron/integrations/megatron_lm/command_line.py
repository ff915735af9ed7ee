"""Shell commands of training jobs: what launches, which script, which arguments, how many ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from nest_megatron.errors import UserInputError

_ASSIGNMENT = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)
_TORCH_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")
_SHELLS = ("bash", "sh")
#: A variable, a command or a sum of the shell.
_FILLED_IN = re.compile(r"[$`]")
_COUNT = r"0*[1-9][0-9]{0,8}"
#: torchrun's words and elastic ranges, and Slurm's ranges and lists of sizes (``srun --nodes``).
_RANGES = {
    "--nproc-per-node": r"auto|cpu|gpu|xpu",
    "--nnodes": rf"{_COUNT}:{_COUNT}",
    "--nodes": rf"{_COUNT}[kKmM]?([-:,]{_COUNT}[kKmM]?)*",
}
_EXAMPLES = {"--nnodes": ", or a range such as 2:4", "--nodes": ", or a range such as 2-4"}
_SRUN_SHORT = {"-n": "--ntasks", "-N": "--nodes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCommand:
    """A command in its parts; see ``parser.ReadCommand`` for the fields."""

    environment: tuple[tuple[str, str], ...]
    launcher: tuple[str, ...]
    script: str
    argv: tuple[str, ...]
    world_size: int | None


def split_command(command: str | Sequence[str]) -> SplitCommand:
    """Split a training command into environment, launcher, script and script arguments.

    >>> parts = split_command("A=1 torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py --bf16")
    >>> parts.script, parts.argv, parts.world_size
    ('pretrain_gpt.py', ('--bf16',), 32)

    Raises:
        UserInputError: if the quotes do not close, or no script and no flags are found.
    """
    tokens = _unwrap_shell(_tokens(command))
    environment, rest = _leading_assignments(tokens)
    at, length = _find_script(rest)
    launcher, script = tuple(rest[:at]), rest[at + length - 1] if length else ""
    environment += tuple(pair for pair in map(_assignment, launcher) if pair)
    return SplitCommand(
        environment=environment,
        launcher=launcher,
        script=script,
        argv=tuple(rest[at + length :]),
        world_size=launched_ranks(launcher, dict(environment)),
    )


def launched_ranks(launcher: Sequence[str], environment: dict[str, str]) -> int | None:
    """Number of ranks that a launcher's own flags ask for, or ``None`` where they do not say."""
    if any(_is_torchrun(token) for token in launcher):
        nodes = _count("--nnodes", _option(launcher, "--nnodes"), default=1)
        per_node = _count("--nproc-per-node", _option(launcher, "--nproc-per-node"), default=1)
        return nodes * per_node if nodes and per_node else None
    if launcher and launcher[0].rpartition("/")[2] == "srun":
        tasks = _count("--ntasks", _option(launcher, "--ntasks"))
        nodes = _count("--nodes", _option(launcher, "--nodes"))
        per_node = _count("--ntasks-per-node", _option(launcher, "--ntasks-per-node"))
        if tasks or (nodes and per_node):
            return tasks or (nodes or 1) * (per_node or 1)
    return _count("WORLD_SIZE", environment.get("WORLD_SIZE"))


def _tokens(command: str | Sequence[str]) -> list[str]:
    if not isinstance(command, str):
        return list(command)
    try:
        return shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserInputError(
            "command", value=command, limit=str(error), fix="Close the quotes."
        ) from error


def _unwrap_shell(tokens: list[str]) -> list[str]:
    """``srun ... bash -c "python x.py ..."`` as one flat command."""
    for at, token in enumerate(tokens):
        is_shell = token.rpartition("/")[2] in _SHELLS
        flags = tokens[at + 1] if at + 1 < len(tokens) else ""
        if is_shell and re.fullmatch(r"-[a-z]*c", flags) and at + 2 < len(tokens):
            return [*tokens[:at], *_tokens(tokens[at + 2])]
    return tokens


def _assignment(token: str) -> tuple[str, str] | None:
    match = _ASSIGNMENT.match(token)
    return (match.group(1), match.group(2)) if match else None


def _leading_assignments(tokens: list[str]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    found: list[tuple[str, str]] = []
    for at, token in enumerate(tokens):
        pair = _assignment(token)
        if pair is None and token not in ("env", "export", "exec"):
            return tuple(found), tokens[at:]
        if pair is not None:
            found.append(pair)
    return tuple(found), []


def _find_script(tokens: list[str]) -> tuple[int, int]:
    """Index of the script and the number of tokens that name it (``-m module`` takes two)."""
    for at, token in enumerate(tokens):
        if token.endswith(".py") and not token.startswith("-"):
            return at, 1
        module = tokens[at + 1] if token in ("-m", "--module") and at + 1 < len(tokens) else ""
        if module and module not in _TORCH_LAUNCHERS:
            return at, 2
    if tokens and tokens[0].startswith("-"):
        return 0, 0
    raise UserInputError(
        "command",
        value=" ".join(tokens[:4]),
        limit="it names no training script (a file ending in .py) and does not begin with a flag",
        fix="Give the whole command, or the script's flags alone.",
    )


def _is_torchrun(token: str) -> bool:
    return token.rpartition("/")[2] == "torchrun" or token in _TORCH_LAUNCHERS


def _option(tokens: Sequence[str], name: str) -> str | None:
    """Value of a launcher's option; ``_`` and ``-`` are the same, as torchrun takes both."""
    for at, token in enumerate(tokens):
        flag, equals, value = token.partition("=")
        flag = _SRUN_SHORT.get(flag, flag.replace("_", "-"))
        if flag == name:
            return value if equals else (tokens[at + 1] if at + 1 < len(tokens) else None)
    return None


def _count(name: str, text: str | None, *, default: int | None = None) -> int | None:
    """A count; a range, a word (``gpu``, ``auto``) or what a shell fills in is no fixed count.

    Raises:
        UserInputError: for what no launcher takes: 0, a negative number, another word.
    """
    if text is None:
        return default
    fixed = re.fullmatch(rf"({_COUNT})(:\1)?", text)
    if fixed:
        return int(fixed[1])
    if _FILLED_IN.search(text) or re.fullmatch(_RANGES.get(name, ""), text):
        return None
    raise UserInputError(
        name,
        value=text,
        limit="it must be a whole number of at least 1" + _EXAMPLES.get(name, ""),
        fix="Correct the launcher's option, or leave the launcher out.",
    )
