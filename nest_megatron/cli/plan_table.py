"""``plan --for-nodes``: a plan for each of several numbers of nodes, in one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from nest_megatron.api import PlanTable, table_job
from nest_megatron.cli.planning import PlanOptions, composed_settings
from nest_megatron.config.compose import Settings
from nest_megatron.config.overrides import Setting, read_counts
from nest_megatron.errors import OK, UserInputError
from nest_megatron.integrations.megatron_lm.node_counts import (
    TableJob,
    plan_for_nodes,
    settings_for_nodes,
)
from nest_megatron.integrations.typed_command import command_of_plan, read_request
from nest_megatron.report.console import progress, say, show, show_json

_OPTION = "--for-nodes"


def run_plan_table(options: PlanOptions) -> int:
    """Plan one job for each number of nodes and print the table."""
    settings, launcher = options.settings()
    assert options.for_nodes is not None
    counts = read_counts(options.for_nodes, _OPTION)
    refuse_other_jobs(options, _OPTION)
    _refuse_launcher(launcher)
    composed = settings_for_nodes(composed_settings(settings, options.config_dir), counts)
    with progress() as report:
        job = _job(composed, options)
        made = plan_for_nodes(dataclasses.replace(job, on_progress=report), counts)
    found = PlanTable(record=made, notes=job.request.notes)
    out = composed.out
    if out is not None:
        found.save(Path(out), force=True)  # checked before the search
    if options.as_json:
        show_json(found.to_dict())
        return OK
    show(*found.report())
    if out is not None:
        say(f"Written to {out}; `nest-megatron pin {out}` freezes it for +nest=pinned.")
    return OK


def _job(composed: Settings, options: PlanOptions) -> TableJob:
    if options.from_command is None:
        return table_job(composed)
    text, version = options.command(), options.megatron_version
    assert text is not None
    free, strict = options.freed, options.strict
    job, request = read_request(text, composed, free=free, version=version, strict=strict)
    return TableJob(
        request=request,
        version=job.version,
        values=job.values,
        finished=lambda found: command_of_plan(job, request, composed, found).plan,
    )


def refuse_other_jobs(options: PlanOptions, option: str) -> None:
    """Refuse options that mean one plan, or other jobs."""
    for name, given in (
        ("--multirun", options.multirun),
        ("--shortlist", options.shortlist),
        ("--for-gpus", options.for_gpus is not None and option != "--for-gpus"),
    ):
        if given:
            limit, fix = "the table is of one job", "Leave one of the two out."
            raise UserInputError(name, option, limit, fix)


def _refuse_launcher(launcher: Sequence[Setting]) -> None:
    for setting in launcher:
        limit = "a launcher runs the jobs of a sweep"
        raise UserInputError(setting.key, setting.value, limit, fix="Leave it out.")
