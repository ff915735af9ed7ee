"""``nest-megatron nest``; the work of its commands is in ``research``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.command_kinds import NEXT, OUTPUT, Command, Group, job_options, json_option

_INSTANCE = click.Path(path_type=Path)
#: ``\b`` keeps the lines of a paragraph as they are.
_PLAN_HELP = """Find the fastest plan of the paper's recurrence for a job of the catalogue.

\b
Beside the settings of `nest-megatron plan`, research.KEY=VALUE:
  schedule            1f1b or gpipe
  recompute           auto, on or off
  zero                true or false: divide states over further devices
  strategy_per_stage  true or false: stages may differ in their degrees
  memory              ours or paper; with paper optimizer=adam or sgd
  divide              exactly or loosely: replicas of devices and batches
  topology            levels, torus or mesh: how the network is read
  flash_attention     true or false

Such a plan is not launched: Megatron has no such layouts. Exits with 1 where none fits.
"""


def _without_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--without",
        metavar="SWITCH",
        multiple=True,
        help="Turn a peculiarity of the artifact's formula off; a wrong name lists them all.",
    )(function)


@click.group(
    cls=Group,
    examples=(
        "nest-megatron nest solve bertlarge_128.json",
        "nest-megatron nest evaluate bertlarge_128.json bertlarge_128.result.json",
        "nest-megatron nest plan model=llama3_8b cluster=h100_spine_leaf",
    ),
)
def nest() -> None:
    """NEST itself: its published solver's instances, and its recurrence on any job.

    ``solve`` and ``evaluate`` use the published formula: times per batch are in the instance's
    unit, which its authors take as milliseconds. ``plan`` uses this project's cost model.
    """


@nest.command(
    "solve",
    cls=Command,
    examples=(
        "nest-megatron nest solve bertlarge_128.json",
        "nest-megatron nest solve mixtral_64.json --out plan.json --json",
        "nest-megatron nest solve llama2_64.json --without recomputed_forward_costs_backward",
    ),
)
@click.argument("instance", type=_INSTANCE, metavar="INSTANCE.JSON")
@click.option("--out", type=OUTPUT, help="Write the plan here, as the artifact writes its output.")
@_without_option
@json_option
def nest_solve(instance: Path, **options: Any) -> int:
    """Find the fastest plan in the artifact's space: tensor degree, replicas, stage boundaries.

    Exits with 1 where no plan fits.
    """
    from nest_megatron.research.nest_artifact.run import run_solve

    return run_solve(instance, **options)


@nest.command(
    "plan",
    cls=Command,
    help=_PLAN_HELP,
    examples=(
        "nest-megatron nest plan model=llama3_8b cluster=h100_spine_leaf"
        + NEXT
        + "train.global_batch_size=256",
        "nest-megatron nest plan model=llama3_8b cluster=h100_spine_leaf cluster.num_gpus=32"
        + NEXT
        + "research.schedule=gpipe research.recompute=on research.memory=paper --json",
        "nest-megatron nest plan model=llama3_8b cluster=torus_3d research.topology=torus",
    ),
)
@job_options()
@json_option
def nest_plan(**options: Any) -> int:
    """Find the fastest plan of the paper's recurrence for a job of the catalogue."""
    from nest_megatron.research.nest_dp.run import run_nest_plan

    return run_nest_plan(**options)


@nest.command(
    "evaluate",
    cls=Command,
    examples=(
        "nest-megatron nest evaluate llama2_64.json llama2_64.result.json",
        "nest-megatron nest evaluate llama2_64.json --baseline Manual",
        "nest-megatron nest evaluate llama2_64.json --baseline Manual"
        + NEXT
        + "--without baselines_last_stage_first --without baseline_cuts_count_embedding --json",
        "nest-megatron nest evaluate llama2_64.json --baseline MCMC --without all",
    ),
)
@click.argument("instance", type=_INSTANCE, metavar="INSTANCE.JSON")
@click.argument("placement", required=False, type=_INSTANCE, metavar="[PLACEMENT.JSON]")
@click.option("--baseline", metavar="NAME", help="A baseline of the instance instead of a file.")
@_without_option
@json_option
def nest_evaluate(instance: Path, placement: Path | None, **options: Any) -> int:
    """Price a plan by the artifact's formula.

    PLACEMENT.JSON is the artifact's output, a recorded result that holds one, or a baseline's p, d,
    t and num_transformer_layers. Exits with 1 where the plan cannot run.
    """
    from nest_megatron.research.nest_artifact.run import run_evaluate

    return run_evaluate(instance, placement, **options)
