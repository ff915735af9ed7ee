"""What the commands share: examples that tests run, checks of outputs, options."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from nest_megatron.cli.complete import complete_override, completing, freed_names
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.files import check_output, expanded, is_standard_output, reserved_standard_output
from nest_megatron.units import dimension_of, read_quantity

Made = TypeVar("Made")
Decorator = Callable[[Callable[..., Any]], Made]
_FORCE = "nest_megatron.force"


class NamedPath(click.Path):
    """A file or a folder that a command reads or writes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; ``UserInputError`` for an empty text, which would be the current folder."""
        if value != "" or param is None:
            return super().convert(value, param, ctx)
        fix = "Name one." if param.required else "Name one, or leave it out."
        raise UserInputError(_typed_name(param), "", "it is empty", fix)


class OutputFile(NamedPath):
    """A file that a command writes; ``-`` is standard output."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, allow_dash=True)


def _typed_name(param: click.Parameter) -> str:
    """What a user types for a parameter, as the help has it."""
    return param.opts[-1] if isinstance(param, click.Option) else (param.metavar or "").strip("[].")


def _refuse(context: click.Context, param: click.Parameter, limit: str, fix: str) -> None:
    """Refuse a parameter with what was typed for it; nothing of several was typed."""
    value = context.params[str(param.name)]
    text = shlex.join(map(str, value)) if isinstance(value, tuple) else str(value)
    if text:
        raise UserInputError(_typed_name(param), None if value is True else text, limit, fix)


class Duration(click.types.FloatParamType):
    """A time above 0 with a unit (``90s``), or a plain number of what its field's name says."""

    name = "time"

    def __init__(self, field: str) -> None:
        self.field = field

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The time in the unit of the field; ``UserInputError`` for anything else."""
        what = self.field if param is None else param.opts[0]
        try:
            found = float(value)
        except ValueError:
            found = float(read_quantity(value, self.field, what))
        if 0 < found < math.inf:
            return found
        raise UserInputError(
            what,
            found,
            "it must be above 0 and finite",
            f"Write for example {dimension_of(self.field).example}.",
        )


class Option(click.Option):
    """An option that is refused where it would change nothing.

    Args:
        needs: the option that it goes with, and what is said of it.
        excludes: what changes nothing where this option is, and why.
    """

    def __init__(
        self, *args: Any, needs: str = "", excludes: tuple[str, str] = ("", ""), **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.needs, self.excludes = needs, excludes


class Examples(click.Command):
    """Examples under the options, word for word; tests run them."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.examples = tuple(examples)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        formatter.write_paragraph()
        formatter.write("Examples:\n")
        for example in self.examples:
            formatter.write(f"  {example}\n")


class Command(Examples):
    """A command with examples, whose outputs are checked before it runs.

    A command that can write a file has ``--force``.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if any(isinstance(p.type, OutputFile) or p.name == "overrides" for p in self.params):
            about = "Replace a file that nest-megatron has not written."
            self.params.append(click.Option(["--force"], is_flag=True, help=about))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; those behind ``--`` stand for a command (``from_option``)."""
        if "--" not in args or all(each.name != "from_command" for each in self.params):
            return super().parse_args(ctx, args)
        at = args.index("--")
        rest = super().parse_args(ctx, args[:at])
        words = tuple(args[at + 1 :])
        if words and (text := ctx.params["from_command"]) is not None:
            raise UserInputError(
                "--from", text, "the words behind -- are a command too", "Leave one of the two out."
            )
        if words:
            ctx.params["from_command"] = words
            ctx.set_parameter_source("from_command", ParameterSource.COMMANDLINE)
        return rest

    def invoke(self, context: click.Context) -> Any:
        """Check the options and the outputs, then run."""
        self._refuse_without_effect(context)
        context.meta[_FORCE] = context.params.pop("force", None)
        outputs, inputs = self._files(context)
        written: dict[Path, str] = {}
        for what, path in outputs:
            check_output(what, path, inputs=inputs, force=forced())
            other = written.setdefault(expanded(path, what).resolve(), what)
            if other != what and not is_standard_output(path):
                raise UserInputError(
                    what,
                    str(path),
                    f"{other} is written to this file too",
                    "Name another file.",
                )
        printed = [what for what, path in outputs if is_standard_output(path)]
        if not printed:
            return super().invoke(context)
        if len(printed) > 1 or context.params.get("as_json"):
            limit = "standard output holds one document"
            raise UserInputError(printed[0], "-", limit, "Name a file, or leave --json out.")
        with reserved_standard_output():
            return super().invoke(context)

    def _refuse_without_effect(self, context: click.Context) -> None:
        """Refuse options that would change nothing without another one, or with it."""
        typed = {
            _typed_name(each): each
            for each in self.params
            if context.get_parameter_source(str(each.name)) is ParameterSource.COMMANDLINE
        }
        for name, each in typed.items():
            if isinstance(each, Option):
                needed, (others, why) = each.needs.partition(" ")[0], each.excludes
                if needed and needed not in typed:
                    _refuse(context, each, f"it goes with {needed}", f"Add {each.needs}.")
                for other in others.split():
                    if other in typed:
                        limit = f"with {name}, {why}"
                        _refuse(context, typed[other], limit, "Leave one of the two out.")

    def _files(self, context: click.Context) -> tuple[list[tuple[str, Path]], list[Path]]:
        """Files that the arguments name: outputs with their options, and inputs."""
        outputs: list[tuple[str, Path]] = []
        inputs: list[Path] = []
        for parameter in self.params:
            given = context.params.get(parameter.name or "")
            values = given if isinstance(given, tuple) else (given,)
            if isinstance(parameter.type, OutputFile):
                outputs += [(parameter.opts[0], value) for value in values if value is not None]
            elif parameter.name == "overrides":
                pairs = [str(text).lstrip("+").partition("=")[::2] for text in values]
                if ("out", "") in pairs:
                    raise UserInputError("out", "", "it is empty", "Name one, or leave it out.")
                named = {key: Path(value.strip("'\"")) for key, value in pairs if value}
                out = named.pop("out", None)
                is_folder = context.params.get("multirun") or context.params.get("for_gpus")
                if out is not None and str(out) != "null" and not is_folder:
                    outputs.append(("out", out))
                inputs += named.values()
            else:
                inputs += [Path(value) for value in values if isinstance(value, str | Path)]
        return outputs, inputs


class Group(Examples, click.Group):
    """A group of commands with examples."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; ``UserInputError`` with the nearest for a name that none has."""
        name, known = args[0], self.list_commands(ctx)
        found = self.get_command(ctx, name)
        if found is not None or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        fix = nearest(name, known, count=1)
        if "=" in name:
            fix = f"Put a command before the settings; `{ctx.command_path} --help` lists them."
        raise UserInputError("command", name, "there is no such command", fix)

    def subcommand(self, name: str, *examples: str) -> Decorator[click.Command]:
        """Add a command with its examples."""
        return self.command(name, examples=examples)


def command(*examples: str) -> Decorator[Command]:
    """A command with its examples."""
    return click.command(cls=Command, examples=examples)


def group(*examples: str) -> Decorator[Group]:
    """A group with its examples."""
    return click.group(cls=Group, examples=examples)


def forced() -> bool | None:
    """Whether the command that runs was given ``--force``; ``None`` if it has no such option."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(_FORCE)


#: Goes on with an example in the next line.
NEXT = " \\\n      "
PATH = NamedPath(path_type=Path)
OUTPUT = OutputFile()
FOLDER = NamedPath(file_okay=False, path_type=Path)
_COMMAND = "--from with your command"


def option(names: str, about: str, kind: Any = None, **more: Any) -> Decorator[Any]:
    """An option.

    Args:
        names: its flag, and behind it the name of its parameter where that is another.
        about: its help.
        kind: the type of its value.
        more: as for ``Option``.
    """
    return click.option(*names.split(), cls=Option, help=about, type=kind, **more)


def flag(names: str, about: str, **more: Any) -> Decorator[Any]:
    """An option without a value."""
    return option(names, about, is_flag=True, **more)


#: Settings of a job, and the folder of the user's own files.
settings_argument = click.argument(
    "overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_override
)
config_dir_option = option(
    "--config-dir", "A folder with your own model/, cluster/ or accelerator/ files.", FOLDER
)
from_option = option(
    "--from from_command",
    "Your Megatron-LM command, in quotes; - reads it from standard input. A command that "
    "trains a recipe (nemo llm pretrain --factory NAME) works where its framework is installed. "
    "To read it from a launch script, end the line with: -- bash train.sh ARGUMENTS (bash runs it "
    "with stand-ins for torchrun, srun and the like, so that nothing starts).",
    metavar="COMMAND",
)
free_option = option(
    "--free",
    "With --from: your flags that may change, separated by commas, or all. The default for a "
    "recipe is all that keep the format of checkpoints.",
    metavar="NAMES",
    default="",
    shell_complete=completing(freed_names),
    needs=_COMMAND,
)
strict_option = flag(
    "--strict",
    "With --from: refuse flags that Megatron-LM does not have; by default they are passed on.",
    needs=_COMMAND,
)
version_option = option(
    "--megatron-version",
    "With --from: the Megatron-LM release of the command (0.19); by default that of target=, "
    "else of the checkout that the script lies in, else the newest stable one.",
    metavar="RELEASE",
    needs=_COMMAND,
)
set_option = option(
    "--set flags",
    "With --from: replace a flag of the command, --set --vocab-size=131072 or --set "
    "'--vocab-size 131072'. Repeatable.",
    metavar="FLAG",
    multiple=True,
)
harmless_option = option(
    "--assume-harmless assume_harmless",
    "With --from and a recipe: plan although this field is unknown; the plan notes it. Repeatable.",
    metavar="FIELD",
    multiple=True,
)
full_option = flag("--full", "Print every figure: terms of time and memory, runners-up, the proof.")
json_option = flag("--json as_json", "Print one JSON document.")


def with_set_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a command with ``--set`` and ``--assume-harmless`` among its settings."""
    short = ("flags", "assume_harmless")
    others = {name: value for name, value in options.items() if name not in short}
    settings = list(options["overrides"])
    if options["flags"]:
        settings.append(f"flags={' '.join(options['flags'])}")
    if fields := options.get("assume_harmless"):
        settings.append(f"assume_harmless=[{','.join(fields)}]")
    return {**others, "overrides": tuple(settings)}
