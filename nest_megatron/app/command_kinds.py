"""What the commands share: examples that tests run, kinds of options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from nest_megatron.app.complete import Complete, complete_override


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
    """A command with examples."""


class Group(Examples, click.Group):
    """A group of commands with examples."""


#: Goes on with an example in the next line.
NEXT = " \\\n      "
FILE = click.Path(dir_okay=False, path_type=Path)
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
