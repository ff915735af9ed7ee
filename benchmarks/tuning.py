r"""How many measured runs it takes to find a fast layout, and what a site's runs teach it.

Run from the project's root with files of measured runs (``nest-megatron validate --help``)::

    python benchmarks/tuning.py throughput.csv throughput_2.csv throughput_vtrain_a100.csv \
        memory_peak.csv memory_peak_2.csv memory_megatron_golden.csv

Constants are those that were fitted without the row's source (``nest-megatron validate
--left-out``). Measured layouts of one job stand for all that a search found; a run of one tells its
measured step. The next run is chosen as ``tune`` does, by what it is expected to gain given the
runs so far (``cost_model/shortlist.py``), or in an order that needs no run.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from memory_runs import peak_runs, section  # noqa: E402

from nest_megatron.cost_model.posterior import Observation, Posterior  # noqa: E402
from nest_megatron.cost_model.shortlist import run_gains  # noqa: E402
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.layout.layout import PartialLayout  # noqa: E402
from nest_megatron.model.spec import TransformerSpec  # noqa: E402
from nest_megatron.planner.choice import Candidate  # noqa: E402
from nest_megatron.research.baselines.autoconfigurator import row_for  # noqa: E402
from nest_megatron.tuning.selection import START_S  # noqa: E402
from nest_megatron.units import Seconds  # noqa: E402
from nest_megatron.validation.assess import Assessor  # noqa: E402
from nest_megatron.validation.job import job_of  # noqa: E402
from nest_megatron.validation.models import ModelBook  # noqa: E402
from nest_megatron.validation.outcome import Basis, RowOutcome  # noqa: E402
from nest_megatron.validation.report import measured_jobs  # noqa: E402
from nest_megatron.validation.rows import RowKind, read_rows  # noqa: E402
from nest_megatron.validation.scores import coverage_of  # noqa: E402
from tools.calibration.parameters import shipped_left_out  # noqa: E402
from tools.markdown import table  # noqa: E402

#: Iterations of a run, as ``tune`` has them by default.
ITERATIONS = 20
#: Regret that ends a search, measured layouts that a job needs, and shuffles of a random order.
REGRET, LAYOUTS, SHUFFLES = 0.01, 8, 200
#: Of a site: runs of each job, runs in all, and jobs that are left out in turn.
RUNS_OF_JOB, RUNS, JOBS = 3, 60, 12
#: Layouts of a job that are predicted after runs of it.
DRAWS = 6


class Layout(NamedTuple):
    """A measured layout of a job."""

    candidate: Candidate
    step_s: Seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The measured layouts of one job."""

    source: str
    name: str
    spec: TransformerSpec
    memory_bytes: int
    layouts: tuple[Layout, ...]


def jobs_of(outcomes: Sequence[RowOutcome], book: ModelBook) -> Iterator[Job]:
    """Jobs that were measured in enough layouts."""
    for measured in measured_jobs(outcomes):
        if len(measured.candidates) >= LAYOUTS:
            row = measured.row.row
            job = job_of(row, book)
            yield Job(
                source=row.get("source", ""),
                name=f"{row.get('model', '')} on {job.cluster.num_gpus}",
                spec=job.spec,
                memory_bytes=job.cluster.accelerator.memory_bytes,
                layouts=tuple(Layout(*each) for each in measured.candidates),
            )


def runs_until(job: Job, order: Sequence[Layout]) -> int:
    """Runs in an order until one is within the regret of the fastest."""
    enough = (1 + REGRET) * min(each.step_s for each in job.layouts)
    return next(n for n, each in enumerate(order, 1) if each.step_s <= enough)


def by_gain(job: Job) -> int:
    """Runs that ``tune`` would choose: most expected gain a second, the first by the prediction."""
    enough = (1 + REGRET) * min(each.step_s for each in job.layouts)
    left = sorted(job.layouts, key=lambda each: each.candidate.step.median_s)
    runs = [left.pop(0)]
    while runs[-1].step_s > enough:
        posterior = Posterior(
            [Observation(predictive=r.candidate.step, step_s=r.step_s, job="") for r in runs]
        )
        steps = [posterior.of(each.candidate.step, "") for each in [*left, *runs]]
        values = [
            gain / (START_S + (ITERATIONS + 1) * step.median_s)
            for gain, step in zip(run_gains(steps), steps, strict=True)
        ][: len(left)]
        runs.append(left.pop(values.index(max(values))))
    return len(runs)


def by_prediction(job: Job) -> int:
    """Runs in the order of predicted steps."""
    return runs_until(job, sorted(job.layouts, key=lambda each: each.candidate.step.median_s))


def by_chance(job: Job) -> float:
    """Mean runs in a random order."""
    draw = random.Random(0)
    orders = (draw.sample(job.layouts, len(job.layouts)) for _ in range(SHUFFLES))
    return statistics.fmean(runs_until(job, order) for order in orders)


def by_grid(job: Job) -> int:
    """Runs by degrees and micro batch, from small to large."""
    return runs_until(job, sorted(job.layouts, key=lambda each: _degrees(each.candidate)))


def by_table(job: Job) -> int:
    """The same, those first that NeMo's AutoConfigurator has in its table."""
    row = row_for(job.spec, job.memory_bytes)

    def in_table(grid: PartialLayout) -> bool:
        tensor, pipeline = _degrees_of(grid)[:2]
        low, high = row.pipeline
        least, most = row.model_parallel
        return (
            tensor in row.tensor
            and low <= pipeline <= high
            and least <= tensor * pipeline <= most
            and grid.micro_batch_size in row.micro_batch
        )

    key = sorted(
        job.layouts,
        key=lambda each: (not in_table(each.candidate.solved.layout), *_degrees(each.candidate)),
    )
    return runs_until(job, key)


def _degrees(candidate: Candidate) -> tuple[int, ...]:
    return _degrees_of(candidate.solved.layout)


def _degrees_of(grid: PartialLayout) -> tuple[int, ...]:
    dims = grid.dims
    return (
        dims.tensor_model_parallel_size,
        dims.pipeline_model_parallel_size,
        dims.context_parallel_size,
        dims.expert_model_parallel_size,
        dims.virtual_pipeline_model_parallel_size,
        grid.micro_batch_size,
    )


ORDERS: Mapping[str, Callable[[Job], float]] = {
    "expected gain": by_gain,
    "prediction alone": by_prediction,
    "AutoConfigurator's table": by_table,
    "grid": by_grid,
    "random": by_chance,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteResult:
    """Mean errors of the plans of jobs that were left out of a site, and their intervals."""

    site: str
    jobs: int
    before_pct: float
    after_pct: float
    inside_before_pct: float
    inside_after_pct: float


def sites(outcomes: Sequence[RowOutcome]) -> Iterator[SiteResult]:
    """Each source on one device as a site, each job predicted by the site's other jobs."""
    runs: dict[tuple[str, str], dict[object, list[Observation]]] = defaultdict(dict)
    for each in outcomes:
        if each.time and each.candidate:
            row, grid = each.row, each.candidate.solved.layout
            names = ("model", "n_gpus", "seq", "precision")
            job = (*(row.get(name, "") for name in names), grid.global_batch_size)
            found = Observation(predictive=each.candidate.step, step_s=each.time[1], job=job)
            site = (row.get("source", ""), row.get("gpu", ""))
            runs[site].setdefault(job, []).append(found)
    for (source, device), jobs in runs.items():
        if len(jobs) >= LAYOUTS // 2:
            yield _site(f"{source}, {device}", jobs)


def _site(name: str, jobs: Mapping[object, list[Observation]]) -> SiteResult:
    draw = random.Random(0)
    some = [run for own in jobs.values() for run in draw.sample(own, min(len(own), RUNS_OF_JOB))]
    some = draw.sample(some, min(len(some), RUNS))
    kept = list(dict.fromkeys(run.job for run in some))
    before, after, scaled_before, scaled_after = [], [], [], []
    for job in draw.sample(kept, min(len(kept), JOBS)):
        posterior = Posterior([run for run in some if run.job != job])
        for run in (each for each in some if each.job == job):
            told = posterior.of(run.predictive, job)
            before.append(abs(run.predictive.median_s / run.step_s - 1))
            after.append(abs(told.median_s / run.step_s - 1))
            scaled_before.append(run.error / run.predictive.scale)
            scaled_after.append(math.log(run.step_s / told.median_s) / told.scale)
    return SiteResult(
        site=name,
        jobs=len(jobs),
        before_pct=100 * statistics.fmean(before),
        after_pct=100 * statistics.fmean(after),
        inside_before_pct=coverage_of(scaled_before).within_90_pct,
        inside_after_pct=coverage_of(scaled_after).within_90_pct,
    )


def own_runs(outcomes: Sequence[RowOutcome]) -> Iterator[tuple[str, ...]]:
    """Other layouts of a job after some runs of it: rows of a table, means over sources and runs.

    Of each job up to ``DRAWS`` layouts, each with other runs of the job, in a random order.
    """
    jobs: dict[tuple[object, ...], dict[object, Observation]] = defaultdict(dict)
    for each in outcomes:
        if each.time and each.candidate:
            solved, step = each.candidate.solved, each.candidate.step
            job = (each.source, *each.group)
            found = Observation(predictive=step, step_s=each.time[1], job=job)
            jobs[job].setdefault(solved, found)
    for known in range(1 + RUNS_OF_JOB):
        by_source: dict[object, list[tuple[float, float, float]]] = defaultdict(list)
        for job, layouts in jobs.items():
            draw, runs = random.Random(0), [*layouts.values()]
            for _ in range(min(len(runs), DRAWS) if len(runs) > max(1, known) else 0):
                *some, run = draw.sample(runs, known + 1)
                told = Posterior(some).of(run.predictive, job)
                scaled = [math.log(run.step_s / told.median_s) / told.scale]
                inside = coverage_of(scaled)
                off = 100 * abs(told.median_s / run.step_s - 1)
                by_source[job[0]].append((off, inside.within_50_pct, inside.within_90_pct))
        every = [run for runs in by_source.values() for run in runs]
        means = [
            [statistics.fmean(each) for each in zip(*runs, strict=True)]
            for runs in by_source.values()
        ]
        figures = [
            statistics.fmean(each) for group in (means, every) for each in zip(*group, strict=True)
        ]
        yield str(known), str(len(means)), str(len(every)), *(f"{each:.1f}" for each in figures)


_HEAD = """\
# Measured runs until a layout is fast

Written on {today} by
`python benchmarks/tuning.py {files} --out docs/{page}`.
Constants are those of a fit without the row's source; scales of errors are the
catalogue's.

## One job

{jobs} jobs of the public tables were measured in {layouts} layouts and more. These stand for all
layouts, and a run tells the measured step. Counted are the runs until one of them is within
{regret:g} % of the fastest; none but the first row learns from runs.

"""
_SITES = """
## One site

Each source on one device is taken as a site, if it has {least} jobs and more: of at most {runs} of
its runs, {of_job} of a job, up to {left_out} jobs are left out in turn, and predicted by the runs
of the others. `error` is without them, `after` with them; then the share inside 90 % intervals.
That all runs weigh alike was chosen, of five ways, on these same tables, which flatters the gain.

"""


_OWN_RUNS = """
## After runs of the job itself

Of every job with two layouts and more, other layouts after so many runs of it, in random order: the
mean error and the share inside 50 and 90 % intervals, in the mean over sources, then over all.
That two degrees of freedom stay was chosen, of six ways, on these same tables, which flatters it.

"""
_OWN_HEADS = (
    *("runs", "sources", "predictions", "error %", "in 50 %", "in 90 %"),
    *("error %, all", "in 50 %", "in 90 %"),
)


def document(
    jobs: Sequence[Job],
    found: Sequence[SiteResult],
    own: Iterable[tuple[str, ...]],
    memory: str,
    files: str,
    page: str,
) -> str:
    """The page."""
    counts = {name: [order(job) for job in jobs] for name, order in ORDERS.items()}
    rows = []
    for name, runs in counts.items():
        at = sorted(runs)
        # A random order's are means over orders already.
        first, three = (
            ""
            if name == "random"
            else f"{100 * sum(each <= most for each in runs) / len(runs):.0f}"
            for most in (1, 3)
        )
        ninth = at[math.ceil(0.9 * len(at)) - 1]
        mean = statistics.fmean(runs)
        rows.append(
            (
                *(name, f"{mean:.1f}", f"{statistics.median(runs):.1f}", f"{ninth:.1f}"),
                *(first, three),
            )
        )
    heads = ("next run by", "mean runs", "median", "90 % of jobs", "1 run, %", "3 runs, %")
    text = _HEAD.format(
        today=date.today(),
        files=files,
        page=page,
        jobs=len(jobs),
        layouts=LAYOUTS,
        regret=100 * REGRET,
    )
    text += table(heads, rows, numeric=5)
    by_source: dict[str, list[int]] = defaultdict(list)
    for number, job in enumerate(jobs):
        by_source[job.source].append(number)
    lines = [
        (
            *(source, str(len(numbers))),
            *(f"{statistics.fmean(runs[n] for n in numbers):.1f}" for runs in counts.values()),
        )
        for source, numbers in by_source.items()
    ]
    text += "\n\nMean runs by source:\n\n"
    text += table(("source", "jobs", *counts), lines, numeric=6)
    text += "\n" + _OWN_RUNS + table(_OWN_HEADS, own, numeric=9) + "\n"
    text += _SITES.format(least=LAYOUTS // 2, runs=RUNS, of_job=RUNS_OF_JOB, left_out=JOBS)
    means = (
        f"{statistics.fmean(getattr(each, name) for each in found):.1f}"
        for name in ("before_pct", "after_pct", "inside_before_pct", "inside_after_pct")
    )
    site_rows = [
        (
            *(each.site, str(each.jobs), f"{each.before_pct:.1f}", f"{each.after_pct:.1f}"),
            *(f"{each.inside_before_pct:.0f}", f"{each.inside_after_pct:.0f}"),
        )
        for each in found
    ]
    site_heads = ("site", "jobs", "error %", "after %", "in 90 %", "after")
    sites_table = table(site_heads, [*site_rows, ("**mean**", "", *means)], numeric=5)
    return f"{text}{sites_table}\n{memory}"


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="THROUGHPUT.CSV")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the page here")
    options = parser.parse_args()
    book = ModelBook.load()
    assessor = Assessor(book, left_out=shipped_left_out())
    files = [read_rows(path) for path in options.files]
    outcomes = [
        each
        for file in files
        if file.kind is RowKind.THROUGHPUT
        for each in assessor.outcomes(file, Basis.AS_STATED)
    ]
    names = " ".join(path.name for path in options.files)
    page = options.out.name if options.out else "tuning_published.md"
    text = document(
        [*jobs_of(outcomes, book)],
        [*sites(outcomes)],
        own_runs(outcomes),
        section(peak_runs(files, book)),
        names,
        page,
    )
    print(text)
    if options.out:
        write_text(options.out, text)


if __name__ == "__main__":
    main()
