"""``nest-megatron plan``, ``estimate``, ``whatif`` and ``tune``, whose work other modules do."""

from __future__ import annotations

from typing import Any

import click

from nest_megatron.cli.command_kinds import (
    FOLDER,
    NEXT,
    OUTPUT,
    PATH,
    Duration,
    command,
    config_dir_option,
    flag,
    free_option,
    from_option,
    full_option,
    harmless_option,
    json_option,
    option,
    set_option,
    settings_argument,
    strict_option,
    version_option,
    with_set_flags,
)
from nest_megatron.cli.complete import complete_override, completing, freed_names
from nest_megatron.cluster.placement import Launcher
from nest_megatron.tuning import LAUNCHERS


@command(
    f"nest-megatron plan model=llama3_70b cluster=h100_spine_leaf cluster.num_gpus=1024{NEXT}"
    "train.global_batch_size=4096 out=plan.yaml",
    "nest-megatron plan model=./config.json cluster=./mine.yaml parallel.zero_stage=1",
    "nest-megatron plan model=mixtral_8x7b cluster=dgx_h100 search.max_seconds=10 --json",
    "nest-megatron plan --from 'torchrun --nproc-per-node 8 pretrain_gpt.py <your flags>' "
    f"cluster=dgx_h100{NEXT}--free all --html plan.html",
    f"nest-megatron plan model=llama3_8b cluster=dgx_h100 train.global_batch_size=480{NEXT}"
    "--for-nodes 3..5",
    f"nest-megatron plan model=llama3_8b cluster=dgx_h100 train.global_batch_size=256{NEXT}"
    "--for-gpus 8..32 cost.gpu_hour=2.5",
    "nest-megatron plan -m model=llama3_8b cluster=dgx_h100 train.global_batch_size=256,512",
    f"nest-megatron plan model=llama3_8b cluster=h100_spine_leaf --hosts racks.txt{NEXT}"
    "--write-hostfile ranks.txt",
)
@config_dir_option
@settings_argument
@from_option
@set_option
@harmless_option
@free_option
@version_option
@strict_option
@flag(
    "-m --multirun",
    "Plan every combination of a,b values.",
    excludes=("--from --shortlist --full", "the table has a row for each job of settings"),
)
@flag(
    "--shortlist",
    "List the plans that could be the fastest, and what to measure to tell them apart.",
)
@option(
    "--for-nodes",
    "Plan for each of these numbers of nodes (120..128 or 96..128:8), in one table.",
    metavar="RANGE",
    excludes=(
        "--for-gpus --multirun --html --shortlist --full",
        "the table has a row for each plan, and has no page",
    ),
)
@option(
    "--hosts",
    "A file of the job's hosts, a line of HOST GROUP... each (rack, row): plan for their "
    "place in the network, and compare with neighbouring hosts.",
    PATH,
    excludes=("--for-nodes --for-gpus --multirun", "one job runs on the hosts of a file"),
)
@option(
    "--write-hostfile hostfile",
    "With --hosts: write the hosts in the order of ranks, for the launcher.",
    OUTPUT,
    needs="--hosts FILE",
)
@option(
    "--launcher",
    "The launcher that reads --write-hostfile.",
    click.Choice([each.value for each in Launcher]),
    default=Launcher.SRUN.value,
    show_default=True,
    needs="--write-hostfile FILE",
)
@option(
    "--for-gpus",
    "Plan for each of these numbers of GPUs (64..4096 by doubling, or 64..512:64): time, "
    "cost, and how well the job scales.",
    metavar="RANGE",
    excludes=("--multirun --shortlist --full", "the table has a row for each plan"),
)
@option("--html", "Write the report as an HTML page.", OUTPUT)
@full_option
@json_option
def plan(**options: Any) -> int:
    """Find the fastest layout of a job that is expected to fit in memory.

    Settings are KEY=VALUE; those that you leave out are searched. docs/settings.md explains each.
    Exits with 1 if nothing fits, and with 3 if search.max_seconds ends a search without a plan or
    with one that may be more than 10 % slower than the best (it is written all the same).
    """
    from nest_megatron.cli import planning

    typed = planning.PlanOptions(**with_set_flags(options), begun_s=click.get_current_context().obj)
    if not typed.multirun and (typed.for_nodes, typed.for_gpus) == (None, None):
        return planning.run_plan(typed)
    from nest_megatron.cli import many_plans

    if typed.for_nodes is not None:
        return many_plans.run_plan_table(typed, typed.for_nodes)
    if typed.for_gpus is not None:
        return many_plans.run_scaling(typed, typed.for_gpus)
    return many_plans.run_sweep(typed)


@command(
    f"nest-megatron estimate model=llama3_70b cluster=dgx_h100 cluster.num_gpus=64{NEXT}"
    f"parallel.tensor_model_parallel_size=4 parallel.pipeline_model_parallel_size=4{NEXT}"
    "parallel.context_parallel_size=2 train.micro_batch_size=1",
    "nest-megatron estimate --from 'torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py "
    f"<your flags>'{NEXT}cluster=dgx_h100 --set --seq-length=2048",
)
@config_dir_option
@settings_argument
@from_option
@set_option
@harmless_option
@version_option
@strict_option
@full_option
@json_option
def estimate(**options: Any) -> int:
    """Price one layout: its step time, and the memory of each stage. It searches nothing.

    Settings that you leave out have Megatron's defaults: parallel sizes of 1, data parallelism
    over the remaining GPUs, the distributed optimizer, and an even split of the layers (the
    fastest split if they do not divide). --from prices your command exactly as it is. Exits with 1
    if the layout is predicted not to fit in memory.
    """
    from nest_megatron.cli.planning import EstimateOptions, run_estimate

    return run_estimate(EstimateOptions(**with_set_flags(options)))


@command(
    f"nest-megatron whatif plan.yaml cluster.levels.node.bandwidth=300GB/s,900GB/s{NEXT}"
    "memory=141GiB",
    f"nest-megatron whatif plan.yaml cluster.levels.node.bandwidth=300GB/s,900GB/s{NEXT}"
    "gpus=16,32 cost.gpu_hour=2.5 --html whatif.html",
    "nest-megatron whatif plan.yaml cluster.accelerator=h200_sxm_141gb --json",
    "nest-megatron whatif --from 'torchrun --nproc-per-node 8 pretrain_gpt.py <your flags>' "
    f"cluster=dgx_h100{NEXT}memory=80GB,141GB --free all",
)
@click.argument(
    "words", nargs=-1, metavar="[PLAN.YAML] [KEY=VALUE]...", shell_complete=complete_override
)
@from_option
@set_option
@free_option
@version_option
@strict_option
@option("--html", "Write an HTML page with heat maps of throughput and cost.", OUTPUT)
@option(
    "--out",
    "Keep the plans and their table in this folder; a second run continues from it.",
    FOLDER,
)
@json_option
def whatif(**options: Any) -> int:
    """Plan a job again on a changed cluster: every combination of a,b values.

    The job is that of a plan file or of a command (--from). Changes are settings of the cluster,
    the batch, the layout or the model; gpus and memory stand for cluster.num_gpus and
    cluster.accelerator.memory_bytes. Other settings, and with --from all that have one value,
    apply to every row. Each row also prices the present layout.
    """
    from nest_megatron.cli.many_plans import WhatIfOptions, run_whatif

    known = with_set_flags({"overrides": options.pop("words"), **options})
    return run_whatif(WhatIfOptions(config_dir=None, **known))


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
@option(
    "--resume",
    "Continue the runs of this folder.",
    FOLDER,
    excludes=(
        "KEY=VALUE --from --out --config-dir --set --free --megatron-version --budget "
        "--iterations --run-timeout --launcher --launcher-option --dry-run",
        "a tuning goes on as it was begun",
    ),
)
@flag("--dry-run", "Print what would run and for how long; start nothing.")
@json_option
def tune(**options: Any) -> int:
    """Run the plans that could be the fastest for a few steps each, and choose by measured time.

    Each run is your job with the layout of a plan, without checkpoints, evaluation and trackers.
    Its measured step time corrects the predictions of all plans, and so decides which runs next.
    Exits with 1 if no plan is chosen, since no run has measured a step.
    """
    from nest_megatron.cli.tuning import TuneOptions, run_tune

    return run_tune(TuneOptions(**with_set_flags(options), begun_s=click.get_current_context().obj))
