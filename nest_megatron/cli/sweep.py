"""``plan --multirun``: every combination of the values that were given, gathered in one table."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from nest_megatron.cli.sweep_folder import (
    SweepJob,
    SweepResult,
    is_done,
    opened,
    read_result,
    sweep_job,
    write_list,
)
from nest_megatron.cli.sweep_launch import check_launcher, launch
from nest_megatron.config.overrides import Setting, expand, swept
from nest_megatron.errors import BAD_INPUT, ENDED_EARLY, INTERRUPTED, NOTHING_FITS, NestError
from nest_megatron.files import check_output, write_bytes, write_text
from nest_megatron.packages import install_command
from nest_megatron.parallel import plan_file
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.report.console import say, show, show_json
from nest_megatron.report.sweep_table import SweepRow, to_csv, to_parquet
from nest_megatron.units import format_seconds


def run_sweep(
    settings: Sequence[Setting],
    launcher: Sequence[Setting],
    config_dir: Path | None,
    *,
    as_json: bool,
) -> int:
    """Plan each job that the folder of ``out`` does not hold yet, and print one row a job.

    Args:
        launcher: settings of Hydra's launcher, none for its basic one.

    Returns:
        The highest exit code of all jobs.

    Raises:
        UserInputError: for an ``out`` that is no folder or in use, or a launcher that is not there.
    """
    out = next((s.value for s in settings if s.key == "out"), None)
    has_folder = out is not None and out != "null"
    check_launcher(launcher, has_folder=has_folder)
    with _folder(out if has_folder else None) as folder, opened(folder):
        jobs = _jobs([s for s in settings if s.key != "out"], config_dir)
        if has_folder:
            _check_files(folder, jobs)
        write_list(folder, jobs, config_dir)
        try:
            _run_left(folder, jobs, launcher)
        except KeyboardInterrupt:
            _say_how_far(folder, jobs, has_folder=has_folder)
            return INTERRUPTED
        results = [(job, read_result(folder, job)) for job in jobs]
        done = [(job, result) for job, result in results if result is not None]
        rows = [_row(number, job, result) for number, (job, result) in enumerate(done)]
        files = _write(folder, rows, jobs, done) if has_folder else ()
    if as_json:
        documents = [
            {"overrides": [str(s) for s in job.varied], **result.document} for job, result in done
        ]
        show_json({"jobs": documents})
    else:
        _show(settings, rows, files)
    if len(done) < len(jobs):
        raise NestError(
            f"{len(jobs) - len(done)} of {len(jobs)} jobs left no result; the launcher's own logs "
            "say why, and the same command runs them again"
        )
    return max(result.code for _, result in done)


def _run_left(folder: Path, jobs: Sequence[SweepJob], launcher: Sequence[Setting]) -> None:
    """Run the jobs of which the folder holds no result."""
    left = [number for number, job in enumerate(jobs) if not is_done(folder, job)]
    if len(left) < len(jobs):
        print(f"{len(jobs) - len(left)} of {len(jobs)} jobs are done.", file=sys.stderr)
    if left:
        launch(folder, jobs, left, launcher)


def _jobs(settings: Sequence[Setting], config_dir: Path | None) -> list[SweepJob]:
    keys = swept(settings)
    return [
        sweep_job(job, tuple(s for s in job if s.key in keys), config_dir)
        for job in expand(settings)
    ]


@contextlib.contextmanager
def _folder(out: str | None) -> Iterator[Path]:
    if out is not None:
        yield Path(out.strip("'\"")).expanduser()
        return
    with tempfile.TemporaryDirectory(prefix="nest-megatron-sweep-") as folder:
        yield Path(folder)


def _say_how_far(folder: Path, jobs: Sequence[SweepJob], *, has_folder: bool) -> None:
    done = sum(is_done(folder, job) for job in jobs)
    kept = "the same command goes on from there" if has_folder else "with out=FOLDER they are kept"
    print(f"\nInterrupted: {done} of {len(jobs)} jobs are done; {kept}.", file=sys.stderr)


def _row(number: int, job: SweepJob, result: SweepResult) -> SweepRow:
    document = result.document
    settings = {s.key: s.value or "" for s in job.varied}
    if result.code == BAD_INPUT:
        error = document["error"]
        told = f"{error['what']} = {error['value']}: {error['limit']}"
        return SweepRow(number=number, settings=settings, status="bad input", told=told)
    if result.code == NOTHING_FITS:
        refusal = document["no_plan"]
        return SweepRow(
            number=number,
            settings=settings,
            status="does not fit",
            missing_bytes=refusal["missing_bytes"],
            told="" if refusal.get("complete", True) else "at most",
        )
    if result.code == ENDED_EARLY:
        bound = format_seconds(document["ended_early"]["lower_bound_s"])
        told = f"no plan yet, none below {bound}: raise search.max_seconds"
        return SweepRow(number=number, settings=settings, status="ended early", told=told)
    return SweepRow(number=number, settings=settings, status="ok", plan=_plan(job, result))


def _plan(job: SweepJob, result: SweepResult) -> ParallelPlan:
    return plan_file.from_fields(result.document["plan"], job.key)


def _check_files(folder: Path, jobs: Sequence[SweepJob]) -> None:
    """Refuse, before any job runs, to write a plan over somebody else's file."""
    from nest_megatron.cli.command_kinds import forced

    for name in _names(jobs).values():
        check_output("out", folder / name, force=forced())


def _write(
    folder: Path,
    rows: Sequence[SweepRow],
    jobs: Sequence[SweepJob],
    done: Sequence[tuple[SweepJob, SweepResult]],
) -> tuple[str, ...]:
    """Write the table, its chart and each plan; what is missing for one of them is said."""
    names = _names(jobs)
    for row, (job, _) in zip(rows, done, strict=True):
        if row.plan is not None:
            plan_file.write(row.plan, folder / names[job.key])
    write_text(folder / "sweep.csv", to_csv(rows))
    files = ["sweep.csv"]
    try:
        write_bytes(folder / "sweep.parquet", to_parquet(rows))
        files.append("sweep.parquet")
    except ImportError:
        print(f"sweep.parquet needs pyarrow: {install_command('sweep')}", file=sys.stderr)
    from nest_megatron.report.sweep_chart import sweep_chart

    write_bytes(folder / "sweep.svg", sweep_chart(rows))
    files.append("sweep.svg")
    return (*(str(folder / name) for name in files),)


def _show(settings: Sequence[Setting], rows: Sequence[SweepRow], files: Sequence[str]) -> None:
    from nest_megatron.report.terminal import sweep_table

    same = [s for s in settings if s.key not in {"out", *swept(settings)}]
    show(" ".join(map(str, same)), sweep_table(row.shown() for row in rows))
    for key in without_effect(rows):
        say(f"\nnote: {key} changes nothing: the step takes as long with each of its values.")
    if files:
        say(f"Plans written to {Path(files[0]).parent}, all of them in {', '.join(files)}.")


def without_effect(rows: Sequence[SweepRow]) -> list[str]:
    """Settings whose values all give the same step, whatever the other settings are."""
    if any(row.plan is None for row in rows):
        return []
    return [key for key in (rows[0].settings if rows else ()) if not _matters(key, rows)]


def _matters(key: str, rows: Sequence[SweepRow]) -> bool:
    found: dict[tuple[str, ...], set[float]] = {}
    for row in rows:
        assert row.plan is not None
        others = tuple(value for name, value in row.settings.items() if name != key)
        found.setdefault(others, set()).add(row.plan.predicted.iteration_time_s)
    return any(len(steps) > 1 for steps in found.values())


def _names(jobs: Sequence[SweepJob]) -> dict[str, str]:
    """A file for each job's key, named by what varies: the same one if the sweep grows."""
    slugs = [_slug(job.varied) for job in jobs]
    return {
        job.key: f"{slug}.yaml" if slugs.count(slug) == 1 else f"{slug}_{job.key}.yaml"
        for job, slug in zip(jobs, slugs, strict=True)
    }


def _slug(varied: Sequence[Setting]) -> str:
    text = ",".join(f"{s.key.rpartition('.')[2]}={s.value}" for s in varied) or "plan"
    return re.sub(r"[^A-Za-z0-9._=,+-]+", "-", text)[:100]
