"""``nest-megatron whatif``; its work is in ``cli/variants.py``."""

from __future__ import annotations

from typing import Any

import click

from nest_megatron.cli.command_kinds import FOLDER, NEXT, PATH, command, json_option
from nest_megatron.cli.complete import complete_override


@command(
    f"nest-megatron whatif plan.yaml cluster.levels.node.bandwidth=300GB/s,900GB/s{NEXT}"
    "memory=141GiB",
    "nest-megatron whatif plan.yaml gpus=16,32,64 cost.gpu_hour=2.5",
    "nest-megatron whatif plan.yaml cluster.accelerator=h200_sxm_141gb --json",
)
@click.argument("plan", type=PATH)
@click.argument("changes", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_override)
@click.option("--out", type=FOLDER, help="Keep the plans and their table here, and go on from it.")
@json_option
def whatif(**options: Any) -> int:
    """Plan a plan file's job again on changed clusters: every combination of a,b values.

    Changes are settings of the cluster, the batch, the layout or the model; gpus and memory are
    short for cluster.num_gpus and cluster.accelerator.memory_bytes. Other settings hold for every
    row, the unchanged one too. Each row also prices the present layout there.
    """
    from nest_megatron.cli.variants import run_whatif

    return run_whatif(**options)
