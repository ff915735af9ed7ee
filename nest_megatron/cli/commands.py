"""The commands: what each is for, and the module that is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import click
from click.shell_completion import get_completion_class

from nest_megatron.cli.command_kinds import Group, command
from nest_megatron.errors import PROGRAM
from nest_megatron.version import __version__


class Loaded(NamedTuple):
    """A command that is imported when it is asked for.

    Attributes:
        module: of this package, that holds it under the command's own name.
        help: the first sentence of its help, so that listing commands loads none.
        needs: the optional package of ``nest_megatron`` that does its work.
    """

    module: str
    help: str
    needs: str | None = None

    def is_here(self) -> bool:
        """Whether the optional package that it needs is part of this installation."""
        return self.needs is None or find_spec(f"nest_megatron.{self.needs}") is not None


COMMANDS: Mapping[str, Loaded] = {
    "app": Loaded(
        "app", "Plan in the browser: a form for a model or a command, and the report of its plan."
    ),
    "audit": Loaded(
        "audit",
        "Who launched what, with which plan, and what it took beside its prediction.",
    ),
    "calibrate": Loaded(
        "validate",
        "Fit the cost model's constants to measured runs, and those of links to collectives.",
    ),
    "cluster": Loaded(
        "cluster",
        "Describe the machines of a job or a site: GPUs, adapters, switches; a file for plan.",
    ),
    "clusters": Loaded(
        "catalogue", "List the clusters of the catalogue, or show one, or that of a file."
    ),
    "compare": Loaded(
        "research",
        "Plan one job with other planners, priced by the same cost model, and say what each loses.",
        "research",
    ),
    "completion": Loaded(
        "commands", "Print the script that completes commands, settings and catalogue names."
    ),
    "estimate": Loaded(
        "plan", "Price one layout: iteration time by term, memory by stage. Nothing is searched."
    ),
    "explain": Loaded("explain", "Read a plan file and say why it is what it is."),
    "extract": Loaded(
        "extract", "Show the work of one layer on one rank, as megatron-core's own modules do it."
    ),
    "history": Loaded(
        "audit", "Runs of planned jobs: what was predicted, what was measured, how they ended."
    ),
    "keygen": Loaded("explain", "Make a key that signs pinned plans, in minisign's format."),
    "models": Loaded(
        "catalogue", "List the models of the catalogue, or show one, or that of a file."
    ),
    "nest": Loaded(
        "research",
        "NEST itself: its published solver's instances, and its recurrence on any job.",
        "research",
    ),
    "network": Loaded(
        "network", "Measured networks: figures for a cluster from timed collectives."
    ),
    "paper": Loaded(
        "research",
        "An experiment of the NEST paper on our cost model: ours, the artifact's, the paper's.",
        "research",
    ),
    "pin": Loaded(
        "explain", "Freeze a reviewed plan: it launches the job that it was made for, and no other."
    ),
    "plan": Loaded(
        "plan", "Find the plan that is expected to be the fastest and to fit in memory."
    ),
    "profile": Loaded(
        "profile",
        "Time a model's layers on the devices that are here, and the network between them.",
    ),
    "profiles": Loaded("profiles", "Measured layer times: list, show, export, import, verify."),
    "tune": Loaded(
        "tune",
        "Run the few plans that could be the fastest for some steps, and choose after what they "
        "took.",
    ),
    "validate": Loaded(
        "validate",
        "Compare predictions with measured runs: errors, ranking of layouts, memory.",
        "validation",
    ),
    "verify": Loaded(
        "explain",
        "Say whether a pinned plan is as it was pinned, and with --key who signed it.",
    ),
    "whatif": Loaded(
        "plan",
        "Plan a plan file's job again on changed clusters: every combination of a,b values.",
    ),
}


class LazyGroup(Group):
    """A group that imports the module of a command when the command is asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Names of the commands whose packages are installed."""
        return [name for name, each in COMMANDS.items() if each.is_here()]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import a command."""
        each = COMMANDS.get(name)
        if each is None:
            return None
        if not each.is_here():
            lacks = f"needs nest_megatron.{each.needs}, which this installation leaves out"
            raise click.UsageError(f"{name} {lacks}", context)
        found = getattr(import_module(f"nest_megatron.cli.{each.module}"), name)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands without importing them."""
        names = self.list_commands(context)
        limit = formatter.width - 6 - max(map(len, names))
        rows = [
            (name, click.Command(name, help=COMMANDS[name].help).get_short_help_str(limit))
            for name in names
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    examples=(
        "nest-megatron plan model=llama3_70b cluster=dgx_h100 cluster.num_gpus=64",
        "nest-megatron plan --from 'torchrun --nproc-per-node 8 pretrain_gpt.py <your flags>' "
        "cluster=dgx_h100",
        "nest-megatron models",
        "nest-megatron clusters",
    ),
)
@click.version_option(__version__, prog_name=PROGRAM)
def cli() -> None:
    """Plans for Megatron training jobs: the fastest layout on a cluster that is expected to fit.

    Exit codes: 0 done, 1 nothing is predicted to fit, 2 bad input, 3 time ended the
    search before it had a plan, or one within 10 % of the best, 10 to 15 a plan that is not
    as it was pinned or signed, 16 a policy forbids it, 70 a fault of ours, 130 interrupted.
    """


@command(
    'eval "$(nest-megatron completion bash)"                 # in ~/.bashrc',
    'eval "$(nest-megatron completion zsh)"                  # in ~/.zshrc',
    "nest-megatron completion fish > ~/.config/fish/completions/nest-megatron.fish",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands, settings and catalogue names."""
    found = get_completion_class(shell)
    assert found is not None, "the command offers the shells that click knows"
    click.echo(found(cli, {}, PROGRAM, "_NEST_MEGATRON_COMPLETE").source())
