"""What the commands share: examples that tests run, kinds of options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.complete import Complete, complete_override
from nest_megatron.files import check_output, is_standard_output, reserved_standard_output


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


_FORCE = "nest_megatron.force"


def _note_force(context: click.Context, _: click.Parameter, value: bool) -> bool:
    context.meta[_FORCE] = value
    return value


def forced() -> bool | None:
    """Whether the command that runs was given ``--force``; ``None`` if it has no such option."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(_FORCE)


class OutputFile(click.Path):
    """A file that a command writes; ``-`` is standard output."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, allow_dash=True)


class Command(Examples):
    """A command with examples, whose outputs are checked before it runs.

    A command that can write a file has ``--force``.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        kinds = [parameter.type for parameter in self.params]
        if any(isinstance(kind, OutputFile) for kind in kinds) or self._takes_settings():
            self.params.append(
                click.Option(
                    ["--force"],
                    is_flag=True,
                    expose_value=False,
                    callback=_note_force,
                    help="Replace a file that nest-megatron has not written.",
                )
            )

    def _takes_settings(self) -> bool:
        return any(parameter.name == "overrides" for parameter in self.params)

    def invoke(self, context: click.Context) -> Any:
        """Check the outputs, then run.

        Raises:
            UserInputError: for a file that must not be written.
        """
        outputs, inputs = self._files(context)
        for what, path in outputs:
            check_output(what, path, inputs=inputs, force=context.meta.get(_FORCE))
        printed = [what for what, path in outputs if is_standard_output(path)]
        if not printed:
            return super().invoke(context)
        if len(printed) > 1 or context.params.get("as_json"):
            raise click.UsageError(f"{printed[0]} -: standard output holds one document.")
        with reserved_standard_output():
            return super().invoke(context)

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
                named = {key: Path(value.strip("'\"")) for key, value in pairs if value}
                out = named.pop("out", None)
                if out is not None and str(out) != "null" and not context.params.get("multirun"):
                    outputs.append(("out", out))
                inputs += named.values()
            else:
                inputs += [Path(value) for value in values if isinstance(value, str | Path)]
        return outputs, inputs


class Group(Examples, click.Group):
    """A group of commands with examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A command that is imported when it is asked for.

    Args:
        module: the module of this package that holds it, under the command's own name.
        help: the first sentence of its help, so that listing commands loads none.
        needs: the optional package of ``nest_megatron`` that does its work.
    """

    module: str
    help: str
    needs: str | None = None

    def is_here(self) -> bool:
        """Whether the optional package that it needs is part of this installation."""
        return self.needs is None or find_spec(f"nest_megatron.{self.needs}") is not None


class LazyGroup(Group):
    """A group that imports the module of a command when the command is asked for."""

    def __init__(self, *args: Any, loaded: Mapping[str, Loaded], **options: Any) -> None:
        super().__init__(*args, **options)
        self.loaded = loaded

    def list_commands(self, context: click.Context) -> list[str]:
        """Names of the commands whose packages are installed."""
        return sorted(name for name, each in self.loaded.items() if each.is_here())

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import a command.

        Raises:
            UsageError: if its package is not part of this installation.
        """
        if name not in self.loaded:
            return None
        each = self.loaded[name]
        if not each.is_here():
            raise click.UsageError(
                f"{name} needs nest_megatron.{each.needs}, which this installation leaves out",
                context,
            )
        found = getattr(import_module(f"nest_megatron.cli.{each.module}"), name)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands without importing them."""
        names = self.list_commands(context)
        limit = formatter.width - 6 - max(map(len, names))
        rows = [(name, self._about(name, limit)) for name in names]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _about(self, name: str, limit: int) -> str:
        """What a command is for, cut as click cuts its help."""
        return click.Command(name, help=self.loaded[name].help).get_short_help_str(limit)


#: Goes on with an example in the next line.
NEXT = " \\\n      "
INPUT = click.Path(path_type=Path)
OUTPUT = OutputFile()
FOLDER = click.Path(file_okay=False, path_type=Path)


def job_options(
    complete: Complete = complete_override,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the settings of a job, and the folder of the user's own files.

    Args:
        complete: what completes a setting.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        function = click.argument(
            "overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete
        )(function)
        return click.option(
            "--config-dir",
            type=FOLDER,
            help="A folder with your own model/, cluster/ or accelerator/ files.",
        )(function)

    return add


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(
        function
    )
