"""``plan --multirun``: every combination of the values that were given, gathered in one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from nest_megatron.api.jobs import sweep_job
from nest_megatron.api.sweep import SweepOptions, Swept, run_jobs
from nest_megatron.cli.command_kinds import forced
from nest_megatron.cli.planning import PlanOptions
from nest_megatron.config.overrides import Setting, expand, swept
from nest_megatron.files import write_text
from nest_megatron.report.console import say, show, show_json
from nest_megatron.report.plan_rows import PlanRow, sweep_page, sweep_table, without_effect


def run_sweep(options: PlanOptions) -> int:
    """Plan each job that the folder of ``out`` does not hold yet, and print one row a job."""
    settings, launcher = options.settings()
    keys = swept(settings)
    each = expand([s for s in settings if s.key != "out"])
    jobs = [sweep_job(job, keys, options.config_dir) for job in each]
    found = run_jobs(jobs, sweep_options(settings, launcher))
    same = " ".join(str(s) for s in settings if s.key not in {"out", *keys})
    if options.html is not None:
        write_text(options.html, sweep_page(same, found.rows))
    if options.as_json:
        done = found.done
        show_json({"jobs": [{"overrides": [*map(str, j.varied)], **r} for j, r in done]})
    else:
        _show(same, found.rows)
        say_written(found)
    return found.exit_code()


def sweep_options(settings: Sequence[Setting], launcher: Sequence[Setting]) -> SweepOptions:
    """Where jobs run by their settings, whose ``out`` is the folder."""
    out = next((s.value for s in settings if s.key == "out" and s.value != "null"), None)
    return SweepOptions(launcher=launcher, out=out, force=forced())


def _show(same: str, rows: Sequence[PlanRow]) -> None:
    show(Text(same), sweep_table(rows))
    for key in without_effect(rows):
        say(f"\nnote: {key} changes nothing: the step takes as long with each of its values.")


def say_written(found: Swept) -> None:
    """Say which files a sweep has written, if any."""
    if files := found.files:
        say(f"Plans written to {Path(files[0]).parent}, all of them in {', '.join(files)}.")
