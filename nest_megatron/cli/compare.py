"""``nest-megatron compare``; its work is in ``research``."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

from nest_megatron.cli.command_kinds import NEXT, OUTPUT, Command, job_options, json_option
from nest_megatron.cli.complete import complete_override

_KEY = "planners="


def complete_setting(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Candidates for a setting, ``planners=[...]`` among them."""
    if not incomplete.startswith(_KEY):
        own = [CompletionItem(_KEY)] if incomplete and _KEY.startswith(incomplete) else []
        return [*own, *complete_override(context, parameter, incomplete)]
    from nest_megatron.research.comparison import PLANNERS

    at = max(incomplete.rfind(mark) for mark in "=[,") + 1
    before, last = incomplete[:at], incomplete[at:]
    return [CompletionItem(f"{before}{name}") for name in PLANNERS if name.startswith(last)]


@click.command(
    cls=Command,
    examples=(
        "nest-megatron compare model=llama3_70b cluster=h100_spine_leaf cluster.num_gpus=512",
        "nest-megatron compare model=llama3_8b cluster=dgx_h100 cluster.num_gpus=64"
        + NEXT
        + "'planners=[nest,manual,phaze]' --chart planners.svg --json",
    ),
)
@job_options(complete_setting)
@click.option("--chart", type=OUTPUT, help="Draw it: an .svg or .png picture, or an .html page.")
@json_option
def compare(**options: Any) -> int:
    """Plan one job with other planners, priced by the same cost model, and say what each loses.

    planners=[...] names some of nest, manual, mcmc, phaze, alpa_e, mist, aceso, autoconfigurator;
    all take part unless it is given, nest always. Other settings are those of plan. Exits with 1
    where nest finds no plan.
    """
    from nest_megatron.research.comparison_run import run_compare

    return run_compare(**options)
