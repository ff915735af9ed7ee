"""The work of ``whatif``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from nest_megatron.cli.sweep import Swept, run_jobs, say_written
from nest_megatron.cli.sweep_jobs import SweepJob
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import Setting, expand, parse, split_launcher, swept
from nest_megatron.config.plan_settings import settings_of
from nest_megatron.config.request import request_of
from nest_megatron.errors import INTERRUPTED, UserInputError
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner.kept import keep_layout
from nest_megatron.planner.pins import read_plan
from nest_megatron.report.console import show, show_json
from nest_megatron.report.sweep import SweepRow
from nest_megatron.report.whatif import Variant, variants_document, variants_report

_SHORT = {"gpus": "cluster.num_gpus", "memory": "cluster.accelerator.memory_bytes"}
#: What a plan's job is; other settings say how it is planned.
_OF_JOB = ("cluster", "model", "train", "parallel")


def run_whatif(*, plan: Path, changes: Sequence[str], out: Path | None, as_json: bool) -> int:
    """Plan each change of a plan's job, and print one row a change."""
    present, _ = read_plan(plan)
    overrides, launcher = split_launcher(map(_spelled, changes))
    settings = parse(overrides)
    _refuse(settings, changes)
    varied = swept(settings)
    changed = [s.key for s in settings if s.key in varied or _is_of_job(s.key)]
    base = settings_of(present, plan if plan.is_absolute() else Path.cwd() / plan)
    held = [s for s in settings if s.key not in changed]
    jobs = [_merged(base, held)]
    jobs += [_merged(base, job) for job in expand(settings)]
    compose(jobs[-1])  # what is wrong with the keys is wrong in all
    found = run_jobs(jobs, changed, launcher, None if out is None else str(out), None)
    if found is None:
        return INTERRUPTED
    variants = [
        _variant(present, job, row) for (job, _), row in zip(found.done, found.rows, strict=True)
    ]
    _tell(present, variants, found, as_json=as_json)
    return found.exit_code()


def _spelled(text: str) -> str:
    key, equals, value = text.partition("=")
    return f"{_SHORT.get(key, key)}{equals}{value}"


def _is_of_job(key: str) -> bool:
    return key.partition(".")[0] in _OF_JOB and key != "train.tokens"


def _refuse(settings: Sequence[Setting], changes: Sequence[str]) -> None:
    keys = [setting.key for setting in settings]
    for setting in settings:
        if setting.key == "out":
            limit, fix = "whatif writes a folder", "Give it as --out FOLDER."
        elif setting.key == "cluster.oversubscription" and "cluster" not in keys:
            limit = "a plan file holds the bandwidth that its cluster's oversubscription leaves"
            fix = "Change the bandwidth of the level, or name the cluster (cluster=NAME) as well."
        elif keys.count(setting.key) > 1:
            limit, fix = "it is given twice", "Give its values in one, with commas between them."
        else:
            continue
        raise UserInputError(setting.key, value=setting.value, limit=limit, fix=fix)
    if not any(_is_of_job(key) for key in keys):
        limit = "it names no change of the job"
        fix = "For example cluster.levels.node.bandwidth=900GB/s, memory=141GiB or gpus=256,512."
        raise UserInputError("whatif", value=" ".join(changes), limit=limit, fix=fix)


def _merged(base: Sequence[Setting], given: Sequence[Setting]) -> tuple[Setting, ...]:
    """The settings of a plan's job, with others in the place of its own."""
    keys = {setting.key for setting in given}
    return (*(setting for setting in base if setting.key not in keys), *given)


def _variant(present: ParallelPlan, job: SweepJob, row: SweepRow) -> Variant:
    try:
        request = request_of(compose(job.settings), choose_execution=True)
        kept = keep_layout(present, request)
    except UserInputError as error:
        return Variant(row=row, told=f"{error.what} = {error.value}: {error.limit}")
    return Variant(row=row, kept=kept)


def _tell(
    present: ParallelPlan, variants: Sequence[Variant], found: Swept, *, as_json: bool
) -> None:
    if as_json:
        show_json(variants_document(variants))
        return
    if not variants:
        return
    where = f"{present.cluster.describe()}, {present.cluster.name}"
    batch = f"global batch {present.train.global_batch_size:,}"
    show(Text(f"{present.model.name} on {where}; {batch}"), *variants_report(present, variants))
    say_written(found)
