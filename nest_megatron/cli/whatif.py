"""``nest-megatron whatif``; its work is in ``cli/variants.py``."""

from __future__ import annotations

from typing import Any

import click

from nest_megatron.cli.command_kinds import (
    FOLDER,
    NEXT,
    OUTPUT,
    command,
    free_option,
    from_option,
    json_option,
    set_option,
    strict_option,
    version_option,
    with_set_flags,
)
from nest_megatron.cli.complete import complete_override


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
@click.option(
    "--html", type=OUTPUT, help="Write an HTML page with heat maps of throughput and cost."
)
@click.option(
    "--out",
    type=FOLDER,
    help="Keep the plans and their table in this folder; a second run continues from it.",
)
@json_option
def whatif(**options: Any) -> int:
    """Plan a job again on a changed cluster: every combination of a,b values.

    The job is that of a plan file or of a command (--from). Changes are settings of the cluster,
    the batch, the layout or the model; gpus and memory stand for cluster.num_gpus and
    cluster.accelerator.memory_bytes. Other settings, and with --from all that have one value,
    apply to every row. Each row also prices the present layout.
    """
    from nest_megatron.cli.variants import WhatIfOptions, run_whatif

    given = with_set_flags({"overrides": options.pop("words"), **options})
    return run_whatif(WhatIfOptions(config_dir=None, **given))
