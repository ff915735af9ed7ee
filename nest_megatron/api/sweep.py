"""Jobs of a sweep: planned where a folder has no result of them yet, and gathered in a table."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nest_megatron.api.jobs import (
    ON_JOB,
    Result,
    SweepJob,
    check_launcher,
    code_of,
    is_done,
    launch,
    opened,
    read_result,
    write_list,
)
from nest_megatron.config.overrides import Setting
from nest_megatron.errors import NestError
from nest_megatron.files import check_output, expanded, write_bytes, write_text
from nest_megatron.layout import plan_file
from nest_megatron.packages import install_command, is_installed
from nest_megatron.printing import print_to_stderr
from nest_megatron.report.charts import sweep_chart
from nest_megatron.report.plan_rows import PlanRow, to_csv, to_parquet
from nest_megatron.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Where the jobs of a sweep run, and what is kept of them.

    Args:
        launcher: settings of Hydra's launcher; none runs them here, one after another.
        out: the folder, as typed; ``None`` keeps nothing.
        force: whether files there that this program has not written are replaced; ``None`` where
            nobody could say so.
        tell: whether to say on standard error how far they are, on a terminal at each job.
        on_job: called with which job begins, where they run here.
    """

    launcher: Sequence[Setting] = ()
    out: str | None = None
    force: bool | None = None
    tell: bool = True
    on_job: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What came of the jobs of a sweep.

    Args:
        done: jobs that have a result, in their order; ``rows`` are theirs.
        files: what was written, the plans apart.
        num_missing: jobs that left no result.
    """

    done: Sequence[tuple[SweepJob, Result]]
    rows: Sequence[PlanRow]
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


def run_jobs(jobs: Sequence[SweepJob], options: SweepOptions) -> Swept:
    """Plan each job that a folder does not hold yet.

    Raises:
        KeyboardInterrupt: if the user interrupts; it says how far the jobs are.
    """
    check_launcher(options.launcher, has_folder=options.out is not None)
    with _folder(options.out) as folder, opened(folder):
        names = _names(jobs)
        for name in names.values() if options.out is not None else ():
            check_output("out", folder / name, force=options.force)
        try:
            write_list(folder, jobs, tell=options.tell)
            _run_left(folder, jobs, options)
            results = [(job, read_result(folder, job)) for job in jobs]
            done = [(job, result) for job, result in results if result is not None]
            rows = [sweep_row(at, job.varied, result) for at, (job, result) in enumerate(done)]
            own = [names[job.key] for job, _ in done]
            files = _write(folder, rows, own) if options.out is not None else []
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(_how_far(folder, jobs, options)) from error
    return Swept(done=done, rows=rows, files=files, num_missing=len(jobs) - len(done))


@contextlib.contextmanager
def _folder(out: str | None) -> Iterator[Path]:
    if out is not None:
        yield expanded(Path(out.strip("'\"")), "out")
        return
    with tempfile.TemporaryDirectory(prefix="nest-megatron-sweep-") as folder:
        yield Path(folder)


def _run_left(folder: Path, jobs: Sequence[SweepJob], options: SweepOptions) -> None:
    """Run the jobs of which the folder holds no result."""
    left = [number for number, job in enumerate(jobs) if not is_done(folder, job)]
    if len(left) < len(jobs) and options.tell:
        print_to_stderr(f"{len(jobs) - len(left)} of {len(jobs)} jobs are done.")
    if not left:
        return
    shows = options.tell and sys.stderr.isatty()
    on_job = options.on_job or (print_to_stderr if shows else None)
    token = ON_JOB.set(on_job and (lambda number: on_job(_begun(jobs, number))))
    try:
        launch(folder, left, options.launcher)
    finally:
        ON_JOB.reset(token)


def _begun(jobs: Sequence[SweepJob], number: int) -> str:
    words = ", ".join(map(str, jobs[number].varied)) or "unchanged"
    return f"{number + 1} of {len(jobs)}: {words}"


def _how_far(folder: Path, jobs: Sequence[SweepJob], options: SweepOptions) -> str:
    done = sum(is_done(folder, job) for job in jobs)
    kept = "the same command goes on from there" if options.out else "a folder (out) keeps them"
    return f"{done} of {len(jobs)} jobs are done; {kept}"


def sweep_row(number: int, varied: Sequence[Setting], result: Result) -> PlanRow:
    """The row of a job, by how it ended."""
    row = partial(PlanRow, number=number, settings={s.key: s.value or "" for s in varied})
    ((ending, fields),) = result.items()
    if ending == "plan":
        return row(status="ok", plan=plan_file.from_fields(fields, f"job {number}"))
    if ending == "no_plan":
        most = "" if fields.get("complete", True) else "at most"
        return row(status="does not fit", reason=most, missing_bytes=fields["missing_bytes"])
    if ending == "ended_early":
        bound = format_seconds(fields["lower_bound_s"])
        reason = f"no plan yet, none below {bound}: raise search.max_seconds"
        return row(status="ended early", reason=reason)
    reason = f"{fields['what']} = {fields['value']}: {fields['limit']}"
    return row(status="bad input", reason=reason)


def _write(folder: Path, rows: Sequence[PlanRow], names: Sequence[str]) -> list[str]:
    """Write the table, its chart and each plan; what is missing for one of them is said.

    Args:
        names: the file of each row's plan.
    """
    for name, row in zip(names, rows, strict=True):
        if row.plan is not None:
            plan_file.write(row.plan, folder / name)
    write_text(folder / "sweep.csv", to_csv(rows))
    files = ["sweep.csv"]
    for name, package, made in (
        ("sweep.parquet", "pyarrow", to_parquet),
        ("sweep.svg", "matplotlib", sweep_chart),
    ):
        if is_installed(package):
            write_bytes(folder / name, made(rows))
            files.append(name)
        else:
            print_to_stderr(f"{name} needs {package}: {install_command('sweep')}")
    return [str(folder / name) for name in files]


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
