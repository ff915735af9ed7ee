"""The work of ``plan -m``, ``--for-nodes`` and ``--for-gpus``, and of ``whatif``."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nest_megatron.api import PlanTable, table_job
from nest_megatron.api.jobs import command_content, sweep_job
from nest_megatron.api.results import Scaling
from nest_megatron.api.sweep import (
    SweepOptions,
    Swept,
    command_variants,
    parse_changes,
    plan_variants,
    run_jobs,
)
from nest_megatron.cli.command_kinds import forced
from nest_megatron.cli.planning import CommandOptions, PlanOptions, composed_settings
from nest_megatron.config.compose import compose
from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.overrides import (
    Setting,
    expand,
    read_counts,
    refuse_sweeps,
    split_launcher,
    swept,
)
from nest_megatron.errors import ENDED_EARLY, OK, UserInputError
from nest_megatron.files import is_standard_output, write_text
from nest_megatron.integrations.megatron_lm.node_counts import (
    TableJob,
    plan_for_nodes,
    settings_for_nodes,
)
from nest_megatron.integrations.typed_command import command_of_plan, kept_command, read_request
from nest_megatron.plain import frozen
from nest_megatron.report.console import (
    print_notes,
    progress,
    say,
    say_written,
    show_or_json,
)
from nest_megatron.report.plan_rows import scaling_table, sweep_table

_SIZE = "cluster.num_gpus"


def run_plan_table(options: PlanOptions, nodes: str) -> int:
    """Plan one job for each number of nodes and print the table."""
    settings, counts = options.job_settings(), read_counts(nodes, "--for-nodes")
    composed = settings_for_nodes(composed_settings(settings, options.config_dir), counts)
    with progress() as report:
        if (command := options.command()) is None:
            job = table_job(composed)
        else:
            own, request = read_request(command, composed)
            job = TableJob(
                request=request,
                version=own.version,
                values=own.values,
                finished=lambda found: command_of_plan(own, request, composed, found).plan,
            )
        made = plan_for_nodes(dataclasses.replace(job, on_progress=report), counts)
    found = PlanTable(record=made, notes=job.request.notes)
    show_or_json(found.to_dict, found.report, as_json=options.as_json)
    if out := composed.out:
        found.save(Path(out), force=True)  # checked before the search
        if not (options.as_json or is_standard_output(Path(out))):
            freezes = f"`nest-megatron pin {shlex.quote(out)}` freezes it for +nest=pinned."
            say(f"Written to {out}; {freezes}")
    return ENDED_EARLY * any(plan.search.may_be_far_off for _, plan in made.planned())


def run_sweep(options: PlanOptions) -> int:
    """Plan each job that the folder of ``out`` does not hold yet, and print one row a job."""
    settings, launcher = options.settings()
    keys = swept(settings)
    each = expand([s for s in settings if s.key != "out"])
    jobs = [sweep_job(job, keys, options.config_dir) for job in each]
    found = run_jobs(jobs, _sweep_options(settings, launcher))
    same = " ".join(str(s) for s in settings if s.key not in {"out", *keys})
    table = sweep_table(found.rows)
    done = [{"overrides": [*map(str, job.varied)], **result} for job, result in found.done]
    show_or_json(lambda: {"jobs": done}, lambda: (same, *table.report()), as_json=options.as_json)
    _say_files(found, as_json=options.as_json)
    if options.html:
        write_text(options.html, table.page("A sweep", same, found.rows))
    return found.exit_code()


def _sweep_options(settings: Sequence[Setting], launcher: Sequence[Setting]) -> SweepOptions:
    """Where jobs run by their settings, whose ``out`` is the folder."""
    out = next((s.value for s in settings if s.key == "out" and s.value != "null"), None)
    return SweepOptions(launcher=launcher, out=out, force=forced())


def _say_files(found: Swept, *, as_json: bool) -> None:
    """Say which files were written."""
    if (files := found.files) and not as_json:
        say(f"Plans written to {Path(files[0]).parent}, all of them in {', '.join(files)}.")


def run_scaling(options: PlanOptions, gpus: str) -> int:
    """Plan one job for each number of GPUs and print one row each."""
    settings, launcher = options.settings()
    sizes = read_counts(gpus, "--for-gpus", doubling=True)
    refuse_sweeps(settings)
    for setting in settings:
        if setting.key == _SIZE:
            limit = "--for-gpus says it"
            raise UserInputError(_SIZE, setting.value, limit, "Leave one of the two out.")
    same = tuple(setting for setting in settings if setting.key != "out")
    each = [(*same, Setting(key=_SIZE, value=str(size))) for size in sizes]
    if (command := options.command()) is not None:
        composed = compose(with_defaults(each[0]), options.config_dir)
        command = kept_command(command, composed)
        print_notes(command.notes)
        command_content(command, composed)  # what cannot be read is so in all
    jobs = [sweep_job(job, [_SIZE], options.config_dir, command) for job in each]
    swept_jobs = run_jobs(jobs, _sweep_options(settings, launcher))
    found, job = Scaling(rows=tuple(swept_jobs.rows)), " ".join(map(str, same))
    show_or_json(found.to_dict, lambda: (job, *found.report()), as_json=options.as_json)
    _say_files(swept_jobs, as_json=options.as_json)
    if options.html:
        page = scaling_table(found.rows).page("One job on several numbers of GPUs", job, found.rows)
        write_text(options.html, page)
    code = swept_jobs.exit_code()
    return code if code == ENDED_EARLY or not found.plans() else OK


@frozen
class WhatIfOptions(CommandOptions):
    """Options of ``whatif``.

    Args:
        overrides: the changes, behind the plan file where there is one.
        html: the page that is written.
        out: the folder that keeps the plans.
    """

    html: Path | None
    out: Path | None


def run_whatif(options: WhatIfOptions) -> int:
    """Plan each change of a job, and print one row a change."""
    words = list(options.overrides)
    if (command := options.command()) is None:
        path = Path(words.pop(0)) if words else None
        if path is None or ("=" in path.name and not path.exists()):
            raise UserInputError(
                "whatif",
                path and str(path),
                "no job is named",
                "Put a plan file before the changes, or add --from COMMAND.",
            )
        plan_all = partial(plan_variants, path)
    else:
        plan_all = partial(command_variants, command)
    texts, launcher = split_launcher(words)
    out = None if options.out is None else str(options.out)
    where = SweepOptions(launcher=launcher, out=out, force=forced())
    found = plan_all(parse_changes(texts), where)
    if not found.variants:
        return found.swept.exit_code()
    show_or_json(found.to_dict, found.report, as_json=options.as_json)
    _say_files(found.swept, as_json=options.as_json)
    if html := options.html:
        found.write_html(html, force=True)  # checked before the search
        if not options.as_json:
            say_written(html)
    return found.swept.exit_code()
