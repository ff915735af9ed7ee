"""``nest-megatron nest``, ``compare`` and ``paper``: their work is in ``research``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.command_kinds import (
    NEXT,
    OUTPUT,
    PATH,
    command,
    config_dir_option,
    group,
    json_option,
    option,
    settings_argument,
)
from nest_megatron.cli.complete import complete_override
from nest_megatron.packages import import_from_checkout

_PLANNERS = "planners="


def complete_planners(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Candidates for a setting, ``planners=[...]`` among them."""
    if not incomplete.startswith(_PLANNERS):
        own = [_PLANNERS] if incomplete and _PLANNERS.startswith(incomplete) else []
        return [*own, *complete_override(context, parameter, incomplete)]
    from nest_megatron.research.comparison import PLANNERS

    at = max(incomplete.rfind(mark) for mark in "=[,") + 1
    before, last = incomplete[:at], incomplete[at:]
    return [f"{before}{name}" for name in PLANNERS if name.startswith(last)]


@command(
    "nest-megatron compare model=llama3_70b cluster=h100_spine_leaf cluster.num_gpus=512",
    f"nest-megatron compare model=llama3_8b cluster=dgx_h100 cluster.num_gpus=64{NEXT}"
    "'planners=[nest,manual,phaze]' --chart planners.svg --json",
)
@config_dir_option
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_planners)
@option("--chart", "Draw the result as an .svg or .png picture, or an .html page.", OUTPUT)
@json_option
def compare(**options: Any) -> int:
    """Plan one job with other planners too, and price all plans by one cost model.

    planners=[...] chooses among nest, manual, mcmc, phaze, alpa_e, mist, aceso and
    autoconfigurator; the default is all. nest always takes part: its plan is the one that `plan`
    finds. All settings of `plan` work here, and it exits with 1 and 3 as `plan` does.
    """
    from nest_megatron.research.comparison_run import run_compare

    return run_compare(**options)


@command(
    "nest-megatron paper table2 --model llama2_7b",
    "nest-megatron paper figure7 --model bert_large --num-gpus 64 --num-gpus 128 --json",
)
@click.argument(
    "experiment",
    type=click.Choice(["table2", "figure5", "figure6", "figure7", "table4", "table7"]),
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@option("--model models", "Only jobs of this model.", multiple=True, metavar="NAME")
@option("--num-gpus", "Only jobs of this number of GPUs.", int, multiple=True, metavar="N")
@option("--chart", "Draw the figure as .svg or .png.", OUTPUT)
@json_option
def paper(experiment: str, **options: Any) -> int:
    """Repeat an experiment of the NEST paper: our result, the artifact's, the paper's.

    Settings apply to every planner (search.max_seconds=5 train.seq_length=2048). A whole figure
    takes minutes: five planners plan 25 jobs.
    """
    work = import_from_checkout("benchmarks.paper.run", "paper")
    return int(work.run_paper(experiment, **options))


@group(
    "nest-megatron nest solve bertlarge_128.json",
    "nest-megatron nest evaluate bertlarge_128.json bertlarge_128.result.json",
    "nest-megatron nest plan model=llama3_8b cluster=h100_spine_leaf",
)
def nest() -> None:
    """Run NEST as published: its solver's instances, and its recurrence on any job.

    solve and evaluate use the published formula; times are in the instance's unit, which its
    authors take as milliseconds. plan uses the cost model of nest-megatron.
    """


_instance_argument = click.argument("instance", type=PATH, metavar="INSTANCE.JSON")
_without_option = option(
    "--without",
    "Turn off a peculiarity of the artifact's formula; a wrong name lists them all. Repeatable.",
    metavar="SWITCH",
    multiple=True,
)


@nest.subcommand(
    "solve",
    "nest-megatron nest solve bertlarge_128.json",
    "nest-megatron nest solve mixtral_64.json --out plan.json --json",
    "nest-megatron nest solve llama2_64.json --without recomputed_forward_costs_backward",
)
@_instance_argument
@option("--out", "Write the plan here, as the artifact writes its output.", OUTPUT)
@_without_option
@json_option
def nest_solve(instance: Path, **options: Any) -> int:
    """Find the fastest plan in the artifact's space: tensor degree, replicas, stage boundaries.

    Exits with 1 if no plan fits.
    """
    from nest_megatron.research.nest_artifact.run import run_solve

    return run_solve(instance, **options)


@nest.subcommand(
    "plan",
    f"nest-megatron nest plan model=llama3_8b cluster=h100_spine_leaf{NEXT}"
    "train.global_batch_size=256",
    f"nest-megatron nest plan model=llama3_8b cluster=h100_spine_leaf cluster.num_gpus=32{NEXT}"
    "research.schedule=gpipe research.recompute=on research.memory=paper --json",
    "nest-megatron nest plan model=llama3_8b cluster=torus_3d research.topology=torus",
)
@config_dir_option
@settings_argument
@json_option
def nest_plan(**options: Any) -> int:
    """Find the fastest plan of the paper's recurrence for a job of the catalogue.

    \b
    It takes the settings of `nest-megatron plan`, and research.KEY=VALUE:
      schedule            1f1b or gpipe
      recompute           auto, on or off
      zero                true or false: divide states over further devices
      strategy_per_stage  true or false: stages may differ in their degrees
      memory              ours or paper; with paper optimizer=adam or sgd
      divide              exactly or loosely: replicas of devices and batches
      topology            levels, torus or mesh: how the network is read
      flash_attention     true or false

    Such a plan cannot be launched: Megatron has no such layouts. Exits with 1 if none fits.
    """  # noqa: D301 - click keeps the lines behind a backspace as they are
    from nest_megatron.research.nest_dp.run import run_nest_plan

    return run_nest_plan(**options)


@nest.subcommand(
    "evaluate",
    "nest-megatron nest evaluate llama2_64.json llama2_64.result.json",
    "nest-megatron nest evaluate llama2_64.json --baseline Manual",
    f"nest-megatron nest evaluate llama2_64.json --baseline Manual{NEXT}"
    "--without baselines_last_stage_first --without baseline_cuts_count_embedding --json",
    "nest-megatron nest evaluate llama2_64.json --baseline MCMC --without all",
)
@_instance_argument
@click.argument("placement", required=False, type=PATH, metavar="[PLACEMENT.JSON]")
@option("--baseline", "A baseline of the instance, in place of a file.", metavar="NAME")
@_without_option
@json_option
def nest_evaluate(instance: Path, placement: Path | None, **options: Any) -> int:
    """Price a plan by the artifact's formula.

    PLACEMENT.JSON is the artifact's output, a recorded result that holds one, or a baseline's p,
    d, t and num_transformer_layers. Exits with 1 if the plan cannot run.
    """
    from nest_megatron.research.nest_artifact.run import run_evaluate

    return run_evaluate(instance, placement, **options)
