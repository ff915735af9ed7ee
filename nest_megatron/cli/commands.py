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
        "List launches: user, job, plan, and measured beside predicted step time.",
    ),
    "calibrate": Loaded(
        "validate",
        "Fit the cost model's constants to measured runs, and its links to measured collectives.",
    ),
    "cluster": Loaded(
        "cluster",
        "Describe your cluster (GPUs, adapters, switches) in a file that plan reads.",
    ),
    "clusters": Loaded("catalogue", "List the clusters of the catalogue, or show one."),
    "compare": Loaded(
        "research",
        "Plan one job with other planners too, and price all plans by one cost model.",
        "research",
    ),
    "completion": Loaded(
        "commands", "Print the script that completes commands, settings and catalogue names."
    ),
    "estimate": Loaded(
        "plan",
        "Price one layout: its step time, and the memory of each stage. It searches nothing.",
    ),
    "explain": Loaded(
        "explain", "Explain a plan file: where time and memory go, and why other layouts lose."
    ),
    "extract": Loaded(
        "extract",
        "Show the work of one layer on one rank, traced from megatron-core's own modules.",
    ),
    "history": Loaded(
        "audit",
        "List runs of planned jobs: predicted and measured step time, and how each run ended.",
    ),
    "keygen": Loaded("explain", "Make a key that signs pinned plans, in minisign's format."),
    "models": Loaded("catalogue", "List the models of the catalogue, or show one."),
    "nest": Loaded(
        "research",
        "Run NEST as published: its solver's instances, and its recurrence on any job.",
        "research",
    ),
    "network": Loaded("cluster", "Fit a cluster's network to timed collectives."),
    "paper": Loaded(
        "research",
        "Repeat an experiment of the NEST paper: our result, the artifact's, the paper's.",
        "research",
    ),
    "pin": Loaded(
        "explain", "Pin a reviewed plan: it launches the job that it was made for, and no other."
    ),
    "plan": Loaded("plan", "Find the fastest layout of a job that is expected to fit in memory."),
    "profile": Loaded(
        "profile",
        "Time a model's layers on this machine's devices, and the network between them.",
    ),
    "profiles": Loaded("profiles", "Measured layer times: list, show, export, import, verify."),
    "tune": Loaded(
        "plan",
        "Run the plans that could be the fastest for a few steps each, and choose by measured "
        "time.",
    ),
    "validate": Loaded(
        "validate",
        "Compare predictions with measured runs: errors, ranking of layouts, memory.",
        "validation",
    ),
    "verify": Loaded(
        "explain",
        "Check that a pinned plan is unchanged, and with --key who signed it.",
    ),
    "whatif": Loaded(
        "plan",
        "Plan a job again on a changed cluster: every combination of a,b values.",
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
    """Find the fastest layout of a Megatron training job that fits on its cluster.

    Exit codes: 0 done, 1 nothing is predicted to fit, 2 bad input, 3 the time limit ended the
    search without a plan within 10 % of the best, 10 to 15 a pinned plan was changed or its
    signature is not trusted, 16 a policy forbids it, 70 a bug of nest-megatron, 130 interrupted.
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
