"""``nest.dry_run=true``: everything that a launch would do, as far as the first GPU."""

from __future__ import annotations

import contextlib
import copy
import io
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from nest_megatron.integrations.launched import launched_report
from nest_megatron.integrations.megatron_lm.attach import (
    LAUNCHER,
    device_architecture,
    launch_words,
)
from nest_megatron.integrations.megatron_lm.flag_cost import print_costs
from nest_megatron.integrations.megatron_lm.launch import apply, asked_file, find, keep, validated
from nest_megatron.integrations.megatron_lm.launched_job import LaunchedJob
from nest_megatron.integrations.megatron_lm.namespace import require_planned
from nest_megatron.integrations.megatron_lm.planning import LaunchPlan
from nest_megatron.integrations.megatron_lm.stand_in import stand_in_device
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.report.console import command_lines, say
from nest_megatron.report.console import show as show_parts


def show(
    launched: LaunchedJob,
    args: Namespace,
    defaults: Mapping[str, Any],
    validate: Callable[..., Any],
) -> None:
    """Print the plan, the changes and the command, and have Megatron validate the result.

    Only rank 0 speaks, if the dry run is launched on many.

    Raises:
        NestError: as a launch would.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    outcome = find(launched, args, defaults)
    plan = outcome.decision.plan
    show_parts(launched_report(plan, outcome.changes, outcome.notes))
    args.world_size = plan.placement.num_gpus
    unplanned = copy.deepcopy(args)
    apply(args, outcome.decision)
    with _device_of(plan), contextlib.redirect_stdout(io.StringIO()):  # it prints every argument
        validated(validate, args, defaults, unplanned)
    require_planned(args, plan)
    say("nest: Megatron's own validation accepts this.\n")
    _show_command(launched, outcome)
    if asked_file(launched) is not None:
        say(keep(launched, plan))
    if outcome.searched is not None and outcome.searched.kept:
        print_costs(outcome.searched)
    say("nest: dry run; nothing was started.")


def _show_command(launched: LaunchedJob, outcome: LaunchPlan) -> None:
    plan = outcome.decision.plan
    launch = plan.launch[LAUNCHER]
    wanted = [(name, text) for name, text in launch.environment.items() if text is not None]
    say("nest: the same without nest\n")
    say(command_lines(launch_words(plan, launched.script, launch.argv), wanted))
    for name, text in launch.environment.items():
        if text is None:
            say(f"  with {name} unset")
    say()


def _device_of(plan: ParallelPlan) -> AbstractContextManager[None]:
    """Stand in for the planned device where there is none: Megatron asks for its generation."""
    import torch

    if torch.cuda.is_available():
        return contextlib.nullcontext()
    device = plan.cluster.accelerator
    return stand_in_device(device.name, device_architecture(plan), device.memory_bytes)
