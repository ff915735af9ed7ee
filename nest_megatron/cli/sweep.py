"""``plan --multirun``: every combination of the values that were given, gathered in one table."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from nest_megatron.cli.command_kinds import forced
from nest_megatron.cli.planning import PlanOptions
from nest_megatron.cli.sweep_jobs import (
    Result,
    SweepJob,
    check_launcher,
    code_of,
    is_done,
    launch,
    opened,
    read_result,
    sweep_job,
    write_list,
)
from nest_megatron.config.overrides import Setting, expand, swept
from nest_megatron.errors import INTERRUPTED, NestError
from nest_megatron.files import check_output, write_bytes, write_text
from nest_megatron.packages import install_command
from nest_megatron.parallel import plan_file
from nest_megatron.report.console import say, show, show_json
from nest_megatron.report.sweep import (
    SweepRow,
    sweep_chart,
    sweep_table,
    to_csv,
    to_parquet,
    without_effect,
)
from nest_megatron.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What came of the jobs of a sweep.

    Args:
        done: jobs that have a result, in their order; ``rows`` are theirs.
        files: what was written, the plans apart.
        num_missing: jobs that left no result.
    """

    done: Sequence[tuple[SweepJob, Result]]
    rows: Sequence[SweepRow]
    files: Sequence[str]
    num_missing: int

    def exit_code(self) -> int:
        """The highest of all jobs; jobs without a result are an error."""
        if self.num_missing:
            raise NestError(
                f"{self.num_missing} of {self.num_missing + len(self.done)} jobs left no result; "
                "the launcher's own logs say why, and the same command runs them again"
            )
        return max(code_of(result) for _, result in self.done)


def run_sweep(options: PlanOptions) -> int:
    """Plan each job that the folder of ``out`` does not hold yet, and print one row a job."""
    settings, launcher = options.settings()
    out = next((s.value for s in settings if s.key == "out" and s.value != "null"), None)
    keys = swept(settings)
    jobs = list(expand([s for s in settings if s.key != "out"]))
    found = run_jobs(jobs, keys, launcher, out, options.config_dir)
    if found is None:
        return INTERRUPTED
    if options.as_json:
        done = found.done
        show_json({"jobs": [{"overrides": [*map(str, j.varied)], **r} for j, r in done]})
    else:
        same = [s for s in settings if s.key not in {"out", *keys}]
        _show(" ".join(map(str, same)), found.rows)
        say_written(found)
    return found.exit_code()


def run_jobs(
    asked: Sequence[tuple[Setting, ...]],
    keys: Collection[str],
    launcher: Sequence[Setting],
    out: str | None,
    config_dir: Path | None,
) -> Swept | None:
    """Plan each job that a folder does not hold yet.

    Args:
        asked: the settings of each job.
        keys: of those in which the jobs differ.
        out: the folder, as typed; ``None`` keeps nothing.

    Returns:
        ``None`` if the user interrupts; how far the jobs are is said.
    """
    check_launcher(launcher, has_folder=out is not None)
    with _folder(out) as folder, opened(folder):
        jobs = [sweep_job(job, tuple(s for s in job if s.key in keys), config_dir) for job in asked]
        names = _names(jobs)
        for name in names.values() if out is not None else ():
            check_output("out", folder / name, force=forced())
        write_list(folder, jobs, config_dir)
        try:
            _run_left(folder, jobs, launcher)
        except KeyboardInterrupt:
            _say_how_far(folder, jobs, has_folder=out is not None)
            return None
        results = [(job, read_result(folder, job)) for job in jobs]
        done = [(job, result) for job, result in results if result is not None]
        rows = [_row(at, job, result) for at, (job, result) in enumerate(done)]
        own = [names[job.key] for job, _ in done]
        files = _write(folder, rows, own) if out is not None else []
    return Swept(done=done, rows=rows, files=files, num_missing=len(jobs) - len(done))


@contextlib.contextmanager
def _folder(out: str | None) -> Iterator[Path]:
    if out is not None:
        yield Path(out.strip("'\"")).expanduser()
        return
    with tempfile.TemporaryDirectory(prefix="nest-megatron-sweep-") as folder:
        yield Path(folder)


def _run_left(folder: Path, jobs: Sequence[SweepJob], launcher: Sequence[Setting]) -> None:
    """Run the jobs of which the folder holds no result."""
    left = [number for number, job in enumerate(jobs) if not is_done(folder, job)]
    if len(left) < len(jobs):
        print(f"{len(jobs) - len(left)} of {len(jobs)} jobs are done.", file=sys.stderr)
    if left:
        launch(folder, left, launcher)


def _say_how_far(folder: Path, jobs: Sequence[SweepJob], *, has_folder: bool) -> None:
    done = sum(is_done(folder, job) for job in jobs)
    kept = "the same command goes on from there" if has_folder else "with out=FOLDER they are kept"
    print(f"\nInterrupted: {done} of {len(jobs)} jobs are done; {kept}.", file=sys.stderr)


def _row(number: int, job: SweepJob, result: Result) -> SweepRow:
    settings = {s.key: s.value or "" for s in job.varied}
    ((ending, fields),) = result.items()
    missing = None
    if ending == "plan":
        plan = plan_file.from_fields(fields, job.key)
        return SweepRow(number=number, settings=settings, status="ok", plan=plan)
    if ending == "no_plan":
        status, missing = "does not fit", fields["missing_bytes"]
        told = "" if fields.get("complete", True) else "at most"
    elif ending == "ended_early":
        bound = format_seconds(fields["lower_bound_s"])
        status, told = "ended early", f"no plan yet, none below {bound}: raise search.max_seconds"
    else:
        status, told = "bad input", f"{fields['what']} = {fields['value']}: {fields['limit']}"
    return SweepRow(
        number=number, settings=settings, status=status, told=told, missing_bytes=missing
    )


def _write(folder: Path, rows: Sequence[SweepRow], names: Sequence[str]) -> list[str]:
    """Write the table, its chart and each plan; what is missing for one of them is said.

    Args:
        names: the file of each row's plan.
    """
    for name, row in zip(names, rows, strict=True):
        if row.plan is not None:
            plan_file.write(row.plan, folder / name)
    write_text(folder / "sweep.csv", to_csv(rows))
    files = ["sweep.csv"]
    try:
        write_bytes(folder / "sweep.parquet", to_parquet(rows))
        files.append("sweep.parquet")
    except ImportError:
        print(f"sweep.parquet needs pyarrow: {install_command('sweep')}", file=sys.stderr)
    write_bytes(folder / "sweep.svg", sweep_chart(rows))
    return [str(folder / name) for name in (*files, "sweep.svg")]


def _show(same: str, rows: Sequence[SweepRow]) -> None:
    show(Text(same), sweep_table(rows))
    for key in without_effect(rows):
        say(f"\nnote: {key} changes nothing: the step takes as long with each of its values.")


def say_written(found: Swept) -> None:
    """Say which files a sweep has written, if any."""
    if files := found.files:
        say(f"Plans written to {Path(files[0]).parent}, all of them in {', '.join(files)}.")


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
