"""``plan --multirun``: every combination of the values that were given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nest_megatron.app import BAD_INPUT, NOTHING_FITS, OK
from nest_megatron.app.output import error_fields, say, show, show_json
from nest_megatron.app.plan import describe, plan_job
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import Setting, expand, swept
from nest_megatron.errors import UserInputError
from nest_megatron.parallel import plan_file
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.plain import to_plain
from nest_megatron.planner import NoPlan
from nest_megatron.units import format_gib, format_seconds


def run_sweep(settings: Sequence[Setting], config_dir: Path | None, *, as_json: bool) -> int:
    """Plan each job, write its file if asked, and print one row a job.

    Returns:
        The worst exit code of all jobs.
    """
    folder = _folder(settings)
    rest = [setting for setting in settings if setting.key != "out"]
    keys = swept(rest)
    rows: list[dict[str, str]] = []
    documents: list[dict[str, Any]] = []
    worst = OK
    for number, job in enumerate(expand(rest)):
        varied = [setting for setting in job if setting.key in keys]
        code, row, document = _one(job, config_dir)
        worst = max(worst, code)
        if folder is not None and "plan" in document:
            path = folder / f"{number:03d}_{_slug(varied)}.yaml"
            plan_file.write(document["plan"], path)
        rows.append({"#": str(number), "Job": "\n".join(_short(s) for s in varied), **row})
        plain = {name: to_plain(value) for name, value in document.items()}
        documents.append({"overrides": [str(setting) for setting in varied], **plain})
    if as_json:
        show_json({"jobs": documents})
    else:
        from nest_megatron.report.terminal import sweep_table

        same = describe([s for s in rest if s.key not in keys])
        show(same, sweep_table(rows))
        if folder is not None:
            say(f"Plans written to {folder}")
    return worst


def _one(
    job: Sequence[Setting], config_dir: Path | None
) -> tuple[int, dict[str, str], dict[str, Any]]:
    try:
        found, _ = plan_job(compose(job, config_dir))
    except UserInputError as error:
        row = {"Iteration": "bad input", "Layout": f"{error.what} = {error.value}: {error.limit}"}
        return BAD_INPUT, row, {"error": error_fields(error)}
    if isinstance(found, NoPlan):
        missing = f"does not fit: {format_gib(found.missing_bytes)} missing"
        row = {"Iteration": "-", "Layout": missing}
        return NOTHING_FITS, row, {"no_plan": found}
    return OK, _row(found), {"plan": found}


def _row(plan: ParallelPlan) -> dict[str, str]:
    chosen, predicted = plan.parallel, plan.predicted
    degrees = [f"TP {chosen.tensor_model_parallel_size}"]
    virtual = chosen.virtual_pipeline_model_parallel_size
    times = f"x{virtual}" if virtual else ""
    degrees.append(f"PP {chosen.pipeline_model_parallel_size}{times}")
    degrees += [f"CP {chosen.context_parallel_size}", f"DP {chosen.data_parallel_size}"]
    if plan.model.is_moe:
        degrees.append(f"EP {chosen.expert_model_parallel_size}")
    return {
        "Iteration": format_seconds(predicted.iteration_time_s),
        "MFU": f"{100 * predicted.mfu:.1f} %",
        "Memory": format_gib(predicted.peak_memory_bytes),
        "Layout": " ".join(degrees),
        "Proof": "optimal" if plan.search.certificate == "optimal" else "gap",
    }


def _folder(settings: Sequence[Setting]) -> Path | None:
    """The folder of ``out``, made if its parent is there."""
    value = next((s.value for s in settings if s.key == "out"), None)
    if value is None or value == "null":
        return None
    folder = Path(value.strip("'\"")).expanduser()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserInputError(
            "out",
            value=str(folder),
            limit=f"with --multirun it is a folder, and it cannot be made: {error.strerror}",
            fix="Name a folder inside one that is there.",
        ) from error
    return folder


def _short(setting: Setting) -> str:
    return f"{setting.key.rpartition('.')[2]}={setting.value}"


def _slug(varied: Sequence[Setting]) -> str:
    text = ",".join(map(_short, varied)) or "plan"
    return re.sub(r"[^A-Za-z0-9._=,+-]+", "-", text)[:100]
