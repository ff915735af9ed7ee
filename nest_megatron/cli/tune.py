"""``nest-megatron tune``."""

from __future__ import annotations

from typing import Any

import click

from nest_megatron.cli.command_kinds import (
    FOLDER,
    NEXT,
    Duration,
    command,
    config_dir_option,
    json_option,
    set_option,
    settings_argument,
    version_option,
    with_set_flags,
)
from nest_megatron.cli.complete import completing, freed_names
from nest_megatron.tuning import LAUNCHERS


@command(
    "nest-megatron tune --from 'torchrun --nproc-per-node 8 pretrain_gpt.py <your flags>' "
    f"cluster=dgx_h100 --dry-run{NEXT}--budget 5 --iterations 20",
)
@config_dir_option
@settings_argument
@click.option(
    "--from",
    "from_command",
    metavar="COMMAND",
    help="Your own Megatron-LM command, in quotes. A script that launches it goes behind all else: "
    "-- bash train.sh ARGUMENTS; bash runs it once, with programs that start nothing.",
)
@set_option
@click.option(
    "--free",
    metavar="NAMES",
    default="all",
    show_default=True,
    shell_complete=completing(freed_names),
    help="Flags of yours that may change, separated by commas; none keeps all.",
)
@version_option
@click.option("--budget", type=click.IntRange(1), default=5, show_default=True, help="Most runs.")
@click.option(
    "--iterations",
    type=click.IntRange(4),
    default=20,
    show_default=True,
    help="Steps that are timed of each run.",
)
@click.option(
    "--run-timeout",
    "run_timeout_minutes",
    type=Duration("run_timeout_minutes"),
    default=30.0,
    show_default=True,
    metavar="MINUTES",
    help="A run that takes longer, in minutes or with a unit (90s), is ended, and counts as "
    "failed.",
)
@click.option(
    "--launcher",
    type=click.Choice(LAUNCHERS),
    default="auto",
    show_default=True,
    help="What starts the runs: this host, steps of this Slurm allocation, jobs by submitit, or an "
    "executor of NeMo-Run.",
)
@click.option(
    "--launcher-option",
    "launcher_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="For submitit (slurm_partition=h100) or NeMo-Run (executor=NAME or FILE.yaml).",
)
@click.option("--out", type=FOLDER, help="The folder of the runs; a new one here if not given.")
@click.option("--resume", type=FOLDER, help="Go on with the runs of a folder.")
@click.option("--dry-run", is_flag=True, help="Say what would run and how long; start nothing.")
@json_option
def tune(**options: Any) -> int:
    """Run the few plans that could be the fastest for some steps, and choose after what they took.

    Each run is your own job: without checkpoints, evaluation and trackers, and with the layout of a
    plan. What it measures changes what is expected of all plans, and so what runs next.
    """
    from nest_megatron.cli.tuning import TuneOptions, run_tune

    return run_tune(TuneOptions(**with_set_flags(options), begun_s=click.get_current_context().obj))
