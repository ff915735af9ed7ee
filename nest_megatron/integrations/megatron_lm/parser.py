"""Read a Megatron-LM command line without Megatron: the parser is rebuilt from recorded data.

The data files list every option of ``megatron/training/arguments.py`` of two releases, so a command
can be read on a laptop, in milliseconds, with no torch. What the user's own script adds is kept
untouched.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, NoReturn

from nest_megatron.config.job import ReadCommand
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.integrations.megatron_lm.command_line import SplitCommand, split_command
from nest_megatron.model.layer_pattern import read_frequency

_DATA_FILES = {"0.16.1": "megatron_0_16_1.json", "0.20": "megatron_0_20.json"}
VERSIONS = tuple(_DATA_FILES)
_NEST_TOKEN = re.compile(r"^\+?\+?nest[.=]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One option of Megatron's parser, as recorded."""

    flags: tuple[str, ...]
    dest: str
    action: str = "store"
    type: str = "str"
    nargs: str | int | None = None
    choices: tuple[Any, ...] = ()
    default: Any = None


def read_command(command: str | Sequence[str], version: str = "0.16.1") -> ReadCommand:
    """Take a training command apart.

    Args:
        command: a shell command or its tokens: ``torchrun``, ``python``, ``srun``, environment
            assignments, or bare flags.
        version: ``0.16.1`` or ``0.20``.

    Raises:
        UserInputError: for an unknown release, an unexpanded shell variable, or a value that
            Megatron's parser refuses.
    """
    return _read(split_command(command), version)


def read_argv(
    script: str, argv: Sequence[str], version: str, *, world_size: int | None = None
) -> ReadCommand:
    """As ``read_command``, for the arguments of a script that runs already."""
    split = SplitCommand(
        environment=(), launcher=(), script=script, argv=tuple(argv), world_size=world_size
    )
    return _read(split, version)


def _read(split: SplitCommand, version: str) -> ReadCommand:
    argv = tuple(token for token in split.argv if not _NEST_TOKEN.match(token))
    given, unknown = _parse(argv, version)
    _refuse_shell_variables(split, unknown)
    values = {argument.dest: argument.default for argument in load_arguments(version)}
    values.update(given)
    return ReadCommand(
        version=version,
        environment=MappingProxyType(dict(split.environment)),
        launcher=split.launcher,
        script=split.script,
        argv=argv,
        values=MappingProxyType(values),
        explicit=frozenset(given),
        unknown=unknown,
        nest_tokens=tuple(token for token in split.argv if _NEST_TOKEN.match(token)),
        notes=tuple(_notes(unknown, version)),
        world_size=split.world_size,
    )


@cache
def load_arguments(version: str) -> tuple[Argument, ...]:
    """Every option of one Megatron release.

    Raises:
        UserInputError: if the release is not recorded.
    """
    if version not in _DATA_FILES:
        raise UserInputError(
            "Megatron-LM version",
            value=version,
            limit="its options are not recorded",
            fix=nearest(version, VERSIONS),
        )
    data = resources.files(__package__) / "arguments_data" / _DATA_FILES[version]
    rows = json.loads(data.read_text(encoding="utf-8"))["arguments"]
    return tuple(_argument(row) for row in rows)


def known_flags(version: str) -> frozenset[str]:
    """Every flag of one Megatron release."""
    return frozenset(flag for argument in load_arguments(version) for flag in argument.flags)


@cache
def build_parser(version: str) -> argparse.ArgumentParser:
    """A parser with Megatron's options and no defaults (what was not given stays absent)."""
    parser = _Parser(prog="Megatron-LM", allow_abbrev=False, add_help=False)
    for argument in load_arguments(version):
        parser.add_argument(*argument.flags, **_parser_options(argument))
    return parser


class _Parser(argparse.ArgumentParser):
    """Raises our own error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UserInputError(
            "Megatron-LM command",
            value=message,
            limit="Megatron's own parser refuses it",
            fix="Correct that flag.",
        )


def _argument(row: Mapping[str, Any]) -> Argument:
    return Argument(
        flags=tuple(row["flags"]),
        dest=row["dest"],
        action=row.get("action", "store"),
        type=row.get("type", "str"),
        nargs=row.get("nargs"),
        choices=tuple(row.get("choices", ())),
        default=row.get("default"),
    )


def _parser_options(argument: Argument) -> dict[str, Any]:
    options: dict[str, Any] = {"dest": argument.dest, "default": argparse.SUPPRESS}
    if argument.action == "boolean_optional":
        return {**options, "action": _OnOff, "nargs": 0}
    if argument.action != "store":
        return {**options, "action": argument.action}
    options["type"] = _CONVERTERS[argument.type]
    if argument.nargs is not None:
        options["nargs"] = argument.nargs
    if argument.choices:
        options["choices"] = argument.choices
    return options


class _OnOff(argparse.Action):
    """``--x`` and ``--no-x``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--no-"))


def _tuple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.strip("()").split(","))


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "name": str,
    "int": int,
    "float": float,
    "bool": bool,
    "pattern": read_frequency,
    "tuple": _tuple,
}


def _parse(argv: tuple[str, ...], version: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    given, unknown = build_parser(version).parse_known_args(list(argv))
    return vars(given), tuple(unknown)


def _refuse_shell_variables(split: SplitCommand, unknown: tuple[str, ...]) -> None:
    loose = [token for token in (split.script, *unknown) if token.startswith("$")]
    if loose:
        raise UserInputError(
            "command",
            value=loose[0],
            limit="the shell has not expanded it, so its flags cannot be read",
            fix="Paste the expanded command (bash -x prints it).",
        )


def _notes(unknown: tuple[str, ...], version: str) -> Iterable[str]:
    flags = known_flags(version)
    for token in unknown:
        name = token.partition("=")[0]
        if not name.startswith("--"):
            continue
        others = [v for v in VERSIONS if v != version and name in known_flags(v)]
        close = difflib.get_close_matches(name.replace("_", "-"), flags, n=1, cutoff=0.88)
        if others:
            yield f"{name} belongs to Megatron {others[0]}, not to {version}."
        elif close:
            yield f"Megatron {version} has no flag {name}. Did you mean {close[0]}?"
        else:
            yield f"Megatron {version} has no flag {name}; it is passed on as it is."
