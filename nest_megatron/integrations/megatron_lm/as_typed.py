"""A command's own layout: what runs today, exactly as it is typed; nothing is searched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nest_megatron.config.compose import Settings
from nest_megatron.config.request import request_for
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER
from nest_megatron.integrations.megatron_lm.present_layout import on_device, typed_plan
from nest_megatron.integrations.stated_job import made_for
from nest_megatron.integrations.typed_command import CommandPlan, read_typed
from nest_megatron.layout.plan import LaunchCommand
from nest_megatron.solver.space import SearchSpace


def estimate_command(
    text: str | Sequence[str], composed: Settings, *, version: str | None, strict: bool = False
) -> CommandPlan:
    """Price a command, or the script that launches it, as it is typed.

    Args:
        strict: refuse flags that Megatron-LM does not have.

    Raises:
        UserInputError: for a command that cannot be read, that Megatron refuses, with its rule, or
            a setting of the layout, which is the command's.
    """
    job, cluster = read_typed(text, composed, version=version, strict=strict)
    for name in sorted(composed.given):
        if name.startswith("parallel."):
            limit, fix = "the layout is that of the command", "Give its flag with --set."
            value = composed.parallel.stated().get(name.partition(".")[2])
            raise UserInputError(name, value, limit, fix)
    job = dataclasses.replace(job, num_gpus=job.num_gpus or cluster.num_gpus)
    asked = on_device(job, cluster)
    request = request_for(asked, cluster, composed, SearchSpace(), choose_execution=False)
    found, _ = typed_plan(job, request, composed)
    launch = {}
    if (command := job.command) is not None:
        launch[LAUNCHER] = LaunchCommand(
            script=command.script, argv=command.argv, environment=command.environment
        )
    found = dataclasses.replace(made_for(found, job, "estimate --from"), launch=launch)
    return CommandPlan(job=job, request=request, plan=found, changes=())
