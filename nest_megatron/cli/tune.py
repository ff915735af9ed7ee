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
    flag,
    json_option,
    option,
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
@option(
    "--from from_command",
    "Your Megatron-LM command, in quotes. To read it from a launch script, end the line "
    "with: -- bash train.sh ARGUMENTS (bash runs it with stand-ins for torchrun, srun and the "
    "like, so that nothing starts).",
    metavar="COMMAND",
)
@set_option
@option(
    "--free",
    "Your flags that may change, separated by commas; none keeps all.",
    metavar="NAMES",
    default="all",
    show_default=True,
    shell_complete=completing(freed_names),
)
@version_option
@option("--budget", "Largest number of runs.", click.IntRange(1), default=5, show_default=True)
@option(
    "--iterations", "Steps to time in each run.", click.IntRange(4), default=20, show_default=True
)
@option(
    "--run-timeout run_timeout_minutes",
    "Time limit of a run, in minutes or with a unit (90s); a longer one is stopped and "
    "counts as failed.",
    Duration("run_timeout_minutes"),
    default=30.0,
    show_default=True,
    metavar="MINUTES",
)
@option(
    "--launcher",
    "What starts the runs: this host, steps of this Slurm allocation, submitit, or an "
    "executor of NeMo-Run.",
    click.Choice(LAUNCHERS),
    default="auto",
    show_default=True,
)
@option(
    "--launcher-option launcher_options",
    "For submitit (slurm_partition=h100) or NeMo-Run (executor=NAME or FILE.yaml).",
    multiple=True,
    metavar="KEY=VALUE",
)
@option("--out", "The folder of the runs; by default a new one in this folder.", FOLDER)
@option("--resume", "Continue the runs of this folder.", FOLDER)
@flag("--dry-run", "Print what would run and for how long; start nothing.")
@json_option
def tune(**options: Any) -> int:
    """Run the plans that could be the fastest for a few steps each, and choose by measured time.

    Each run is your job with the layout of a plan, without checkpoints, evaluation and trackers.
    Its measured step time corrects the predictions of all plans, and so decides which runs next.
    """
    from nest_megatron.cli.tuning import TuneOptions, run_tune

    return run_tune(TuneOptions(**with_set_flags(options), begun_s=click.get_current_context().obj))
