"""``nest-megatron plan`` and ``estimate``; their work is in ``cli/planning.py``."""

from __future__ import annotations

from typing import Any

import click

from nest_megatron.cli.command_kinds import (
    NEXT,
    OUTPUT,
    PATH,
    command,
    config_dir_option,
    free_option,
    from_option,
    full_option,
    harmless_option,
    json_option,
    set_option,
    settings_argument,
    strict_option,
    version_option,
    with_set_flags,
)
from nest_megatron.cluster.placement import Launcher


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
@click.option("-m", "--multirun", is_flag=True, help="Plan every combination of a,b values.")
@click.option(
    "--shortlist",
    is_flag=True,
    help="List the plans that could be the fastest, and what to measure to tell them apart.",
)
@click.option(
    "--for-nodes",
    metavar="RANGE",
    help="Plan for each of these numbers of nodes (120..128 or 96..128:8), in one table.",
)
@click.option(
    "--hosts",
    type=PATH,
    help="A file of the job's hosts, a line of HOST GROUP... each (rack, row): plan for their "
    "place in the network, and compare with neighbouring hosts.",
)
@click.option(
    "--write-hostfile",
    "hostfile",
    type=OUTPUT,
    help="With --hosts: write the hosts in the order of ranks, for the launcher.",
)
@click.option(
    "--launcher",
    type=click.Choice([each.value for each in Launcher]),
    default=Launcher.SRUN.value,
    show_default=True,
    help="The launcher that reads --write-hostfile.",
)
@click.option(
    "--for-gpus",
    metavar="RANGE",
    help="Plan for each of these numbers of GPUs (64..4096 by doubling, or 64..512:64): time, "
    "cost, and how well the job scales.",
)
@click.option("--html", type=OUTPUT, help="Write the report as an HTML page.")
@full_option
@json_option
def plan(**options: Any) -> int:
    """Find the fastest layout of a job that is expected to fit in memory.

    Settings are KEY=VALUE; those that you leave out are searched. docs/settings.md explains each.
    Exits with 1 if nothing fits, and with 3 if search.max_seconds ends the search without a plan
    or with one that may be more than 10 % slower than the best (it is written all the same).
    """
    from nest_megatron.cli import planning

    given = planning.PlanOptions(**with_set_flags(options), begun_s=click.get_current_context().obj)
    if given.for_nodes is not None:
        from nest_megatron.cli.plan_table import run_plan_table

        return run_plan_table(given)
    if given.for_gpus is not None:
        from nest_megatron.cli.scaling import run_scaling

        return run_scaling(given)
    if given.multirun:
        from nest_megatron.cli.sweep import run_sweep

        return run_sweep(given)
    return planning.run_plan(given)


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
