"""``nest-megatron paper``; its work is in ``research.paper``."""

from __future__ import annotations

from typing import Any

import click

from nest_megatron.cli.command_kinds import OUTPUT, Command, json_option

_NAMES = ("table2", "figure5", "figure6", "figure7", "table4", "table7")


@click.command(
    cls=Command,
    examples=(
        "nest-megatron paper table2 --model llama2_7b",
        "nest-megatron paper figure7 --model bert_large --num-gpus 64 --num-gpus 128 --json",
    ),
)
@click.argument("experiment", type=click.Choice(_NAMES))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--model", "models", multiple=True, metavar="NAME", help="Keep jobs of this model.")
@click.option("--num-gpus", multiple=True, type=int, metavar="N", help="Keep jobs of this size.")
@click.option("--chart", type=OUTPUT, help="Draw a figure: .svg or .png.")
@json_option
def paper(experiment: str, **options: Any) -> int:
    """An experiment of the NEST paper on our cost model: ours, the artifact's, the paper's.

    Settings hold for every planner (search.max_seconds=5 train.seq_length=2048). A whole figure
    takes minutes: it plans 25 jobs by five planners.
    """
    from nest_megatron.research.paper.experiments import run_paper

    return run_paper(experiment, **options)
