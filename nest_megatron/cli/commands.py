"""The commands: what each is for, and the module that is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping

import click

from nest_megatron.cli.command_kinds import Command, LazyGroup, Loaded
from nest_megatron.version import __version__

COMMANDS: Mapping[str, Loaded] = {
    "calibrate": Loaded(
        module="validate",
        help="Fit the cost model's constants to measured runs, and those of links to collectives.",
        needs="validation",
    ),
    "clusters": Loaded(
        module="catalogue",
        help="List the clusters of the catalogue, or show one, or that of a file.",
    ),
    "compare": Loaded(
        module="compare",
        help="Plan one job with other planners, priced by the same cost model, and say what each "
        "loses.",
        needs="research",
    ),
    "completion": Loaded(
        module="commands",
        help="Print the script that completes commands, settings and catalogue names.",
    ),
    "estimate": Loaded(
        module="plan",
        help="Price one layout: iteration time by term, memory by stage. Nothing is searched.",
    ),
    "explain": Loaded(module="explain", help="Read a plan file and say why it is what it is."),
    "extract": Loaded(
        module="extract",
        help="Show the work of one layer on one rank, as megatron-core's own modules do it.",
    ),
    "models": Loaded(
        module="catalogue", help="List the models of the catalogue, or show one, or that of a file."
    ),
    "nest": Loaded(
        module="nest",
        help="NEST itself: its published solver's instances, and its recurrence on any job.",
        needs="research",
    ),
    "network": Loaded(
        module="network", help="Measured networks: figures for a cluster from timed collectives."
    ),
    "paper": Loaded(
        module="paper",
        help="An experiment of the NEST paper on our cost model: ours, the artifact's, the "
        "paper's.",
        needs="research",
    ),
    "pin": Loaded(
        module="explain",
        help="Freeze a reviewed plan: it launches the job that it was made for, and no other.",
    ),
    "plan": Loaded(
        module="plan", help="Find the plan that is expected to be the fastest and to fit in memory."
    ),
    "profile": Loaded(
        module="profile",
        help="Time a model's layers on the devices that are here, and the network between them.",
    ),
    "profiles": Loaded(
        module="profiles", help="Measured layer times: list, show, export, import, verify."
    ),
    "validate": Loaded(
        module="validate",
        help="Compare predictions with measured runs: errors, ranking of layouts, memory.",
        needs="validation",
    ),
}


@click.group(
    cls=LazyGroup,
    loaded=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    examples=(
        "nest-megatron plan model=llama3_70b cluster=dgx_h100 cluster.num_gpus=64",
        "nest-megatron plan --from 'pretrain_gpt.py <your flags>' cluster=dgx_h100",
        "nest-megatron models",
        "nest-megatron clusters",
    ),
)
@click.version_option(__version__, prog_name="nest-megatron")
def cli() -> None:
    """Plans for Megatron training jobs: the fastest layout on a cluster that is expected to fit.

    Exit codes: 0 done, 1 nothing is predicted to fit, 2 bad input, 3 time ended the
    search before it had a plan, 70 a fault of ours, 130 interrupted.
    """


@click.command(
    cls=Command,
    examples=(
        'eval "$(nest-megatron completion bash)"                 # in ~/.bashrc',
        'eval "$(nest-megatron completion zsh)"                  # in ~/.zshrc',
        "nest-megatron completion fish > ~/.config/fish/completions/nest-megatron.fish",
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print the script that completes commands, settings and catalogue names."""
    from nest_megatron.cli.complete import script

    click.echo(script(shell, cli))
    return 0
