"""``plan --for-gpus``: one job on each of several numbers of GPUs, and which are worth it."""

from __future__ import annotations

from nest_megatron.cli.plan_table import read_counts, refuse_other_jobs
from nest_megatron.cli.planning import PlanOptions
from nest_megatron.cli.sweep import run_jobs, say_written
from nest_megatron.config.overrides import Setting, refuse_sweeps
from nest_megatron.errors import INTERRUPTED, OK, UserInputError
from nest_megatron.report.console import show, show_json
from nest_megatron.report.scaling import scaling_document, scaling_report

_OPTION, _SIZE = "--for-gpus", "cluster.num_gpus"


def run_scaling(options: PlanOptions) -> int:
    """Plan one job for each number of GPUs and print one row each."""
    settings, launcher = options.settings()
    assert options.for_gpus is not None
    sizes = read_counts(options.for_gpus, _OPTION, doubling=True)
    refuse_other_jobs(options, _OPTION)
    refuse_sweeps(settings)
    given = {setting.key: setting.value for setting in settings}
    for key, value, limit in (
        ("--from", options.from_command, "a command is planned by itself"),
        (_SIZE, given.get(_SIZE), f"{_OPTION} says it"),
    ):
        if value is not None:
            raise UserInputError(key, value=value, limit=limit, fix="Leave one of the two out.")
    out = given.get("out") if given.get("out") != "null" else None
    same = tuple(setting for setting in settings if setting.key != "out")
    jobs = [(*same, Setting(key=_SIZE, value=str(size))) for size in sizes]
    found = run_jobs(jobs, [_SIZE], launcher, out, options.config_dir)
    if found is None:
        return INTERRUPTED
    if options.as_json:
        show_json(scaling_document(found.rows))
    else:
        show(" ".join(map(str, same)), *scaling_report(found.rows))
        say_written(found)
    code = found.exit_code()
    return OK if any(row.plan is not None for row in found.rows) else code
