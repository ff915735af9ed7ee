"""What a command runs today beside its plan: what each change brings, and what it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from nest_megatron.config.compose import Settings
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER
from nest_megatron.integrations.megatron_lm.checkpoint import check_loadable
from nest_megatron.integrations.megatron_lm.parser import newest_flags
from nest_megatron.integrations.megatron_lm.present_layout import refusal, typed_plan
from nest_megatron.integrations.megatron_lm.saved_by_plan import saved_by
from nest_megatron.integrations.typed_command import CommandPlan
from nest_megatron.layout.estimate import BeforeAfter, Changes, LayoutChange
from nest_megatron.layout.knobs import KNOBS
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner.changes import changes
from nest_megatron.planner.layouts import Variant

_RESHARDABLE = "dist_ckpt_optim_fully_reshardable"


def before_and_after(found: CommandPlan, composed: Settings) -> BeforeAfter:
    """A command as it is typed beside its plan, both of the same batch and cluster."""
    job, request, plan = found.job, found.request, found.plan
    try:
        before, own = typed_plan(job, request, composed)
    except UserInputError as error:
        return BeforeAfter(before=None, refused=str(error))
    after = Variant(settings=request.settings, layout=plan.layout)
    return BeforeAfter(
        before=before.priced(),
        changes=_by_fields(changes(request, own, after, refusal(request, job)), job.fields),
        needs=(*_packages(before, plan), *_releases(found), *_checkpoint(found, before)),
    )


def _by_fields(found: Changes, fields: Mapping[str, str]) -> Changes:
    """Changes of a recipe by its own fields, as far as a choice is one of them."""

    def named(change: LayoutChange) -> LayoutChange:
        choices = (
            dataclasses.replace(each, name=fields.get(each.name, each.name))
            for each in change.choices
        )
        return dataclasses.replace(change, choices=tuple(choices))

    return dataclasses.replace(
        found, alone=tuple(map(named, found.alone)), in_order=tuple(map(named, found.in_order))
    )


def _packages(before: ParallelPlan, plan: ParallelPlan) -> Iterator[str]:
    """What choices of the plan need that a container may lack."""
    for knob in KNOBS:
        value = getattr(plan.layout.execution, knob.name)
        if value != getattr(before.layout.execution, knob.name) and value in knob.needs:
            words = " ".join(value) if isinstance(value, tuple) else value
            yield f"{knob.flag} {words} needs {knob.needs[value].words} where the job runs."


def _releases(found: CommandPlan) -> Iterator[str]:
    """The release that the flags need which the plan adds."""
    if found.job.command is None:
        return
    argv = found.plan.launch[LAUNCHER].argv
    if needed := newest_flags(argv, given=found.job.command.argv):
        yield needed


def _checkpoint(found: CommandPlan, before: ParallelPlan) -> Iterator[str]:
    """Whether the plan goes on from a checkpoint of the present layout, and what that takes."""
    values = found.job.values
    if not (values.get("save") or values.get("load")):
        return
    kind = "fsdp_dtensor" if before.layout.uses_megatron_fsdp else values.get("ckpt_format")
    said = f"a checkpoint of the present layout ({kind or 'torch_dist'})"
    if not (limit := _obstacle(found, before, values)):
        yield f"Checkpoint: the plan loads {said} as it is."
        return
    yield f"Checkpoint: {limit}"
    if not _obstacle(found, before, {**values, _RESHARDABLE: True}):
        yield (
            "With --dist-ckpt-optim-fully-reshardable in the present command, the next checkpoint "
            "that it saves is one that the plan loads with its optimizer state."
        )


def _obstacle(found: CommandPlan, before: ParallelPlan, values: Mapping[str, Any]) -> str:
    """Why the plan does not load what a job of the present layout saves; empty where it does."""
    version = found.job.version
    saved = saved_by(before, values, version, "a checkpoint of the present layout")
    try:
        check_loadable(saved, found.plan.arguments, values, version)
    except UserInputError as error:
        return str(error)
    return ""
