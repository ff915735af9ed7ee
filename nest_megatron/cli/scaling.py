"""``plan --for-gpus``: one job on each of several numbers of GPUs, and which are worth it."""

from __future__ import annotations

from nest_megatron.api.jobs import sweep_job
from nest_megatron.api.results import Scaling
from nest_megatron.api.sweep import run_jobs
from nest_megatron.cli.plan_table import refuse_other_jobs
from nest_megatron.cli.planning import PlanOptions
from nest_megatron.cli.sweep import say_written, sweep_options
from nest_megatron.config.compose import compose
from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.overrides import Setting, read_counts, refuse_sweeps
from nest_megatron.errors import OK, UserInputError
from nest_megatron.files import write_text
from nest_megatron.report.console import print_notes, show, show_json
from nest_megatron.report.plan_rows import scaling_page

_OPTION, _SIZE = "--for-gpus", "cluster.num_gpus"


def run_scaling(options: PlanOptions) -> int:
    """Plan one job for each number of GPUs and print one row each."""
    settings, launcher = options.settings()
    assert options.for_gpus is not None
    sizes = read_counts(options.for_gpus, _OPTION, doubling=True)
    refuse_other_jobs(options, _OPTION)
    refuse_sweeps(settings)
    given = {setting.key: setting.value for setting in settings}
    if (value := given.get(_SIZE)) is not None:
        limit, fix = f"{_OPTION} says it", "Leave one of the two out."
        raise UserInputError(_SIZE, value, limit, fix)
    same = tuple(setting for setting in settings if setting.key != "out")
    each = [(*same, Setting(key=_SIZE, value=str(size))) for size in sizes]
    command = options.swept_command()
    if command is not None:
        command = command.recorded(compose(with_defaults(each[0]), options.config_dir))
        print_notes(command.notes)
    jobs = [sweep_job(job, [_SIZE], options.config_dir, command) for job in each]
    if command is not None:
        command.content(jobs[0].composed())  # what cannot be read is so in all
    swept = run_jobs(jobs, sweep_options(settings, launcher))
    found = Scaling(rows=tuple(swept.rows))
    job = " ".join(map(str, same))
    if options.html is not None:
        write_text(options.html, scaling_page(job, found.rows))
    if options.as_json:
        show_json(found.to_dict())
    else:
        show(job, *found.report())
        say_written(swept)
    code = swept.exit_code()
    return OK if found.plans() else code
