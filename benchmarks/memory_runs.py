"""How well runs of a site predict the peaks of its other runs, for ``benchmarks/tuning.py``.

A site is a source on one device of which several peaks are published; predictions have the error
that a fit without the source has (``tools/calibration/peaks.py``).
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from nest_megatron.cost_model.device_memory import PeakError, PeakErrors
from nest_megatron.cost_model.peak_posterior import PeakPosterior, PeakRun, predicted_peak
from nest_megatron.validation.assess import Assessor
from nest_megatron.validation.job import RowJob, job_of
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.outcome import Basis
from nest_megatron.validation.rows import RowFile, RowKind
from tools.calibration.peaks import (
    peak_evidence,
    peak_group,
    peak_said,
    unseen_errors,
)
from tools.golden import golden_job
from tools.markdown import table

#: Peaks that a site has at least, and runs that are predicted of each.
LEAST, MOST = 4, 60
#: Runs that are known of the other jobs, and of the job itself.
OTHERS, OWN = (1, 3, 10), (1, 2)

Sites = Mapping[tuple[str, str], Sequence[PeakRun]]


def peak_runs(files: Sequence[RowFile], book: ModelBook) -> Sites:
    """Measured peaks and runs out of memory of each site."""
    files = [each for each in files if each.kind is not RowKind.COLLECTIVES]
    unseen = {name: unseen_errors(each) for name, each in peak_evidence(files, book).items()}
    assessor, found, seen = Assessor(book), defaultdict(list), set()
    for file in files:
        is_golden = file.kind is RowKind.MEMORY_GOLDEN
        for outcome in assessor.outcomes(file, Basis.AS_STATED):
            name = outcome.row.get("throughput_row") or outcome.row.get("row_id", "")
            group = peak_group(outcome, is_golden=is_golden)
            if group is None or (name and name in seen):
                continue
            for kind, error in peak_said(outcome):
                seen.add(name)
                if kind == "ran":
                    continue
                row = outcome.row
                job = golden_job(row) if is_golden else job_of(row, book)
                device = job.cluster.accelerator.name
                prior = unseen[group][outcome.source]
                found[outcome.source, device].append(_run(assessor, job, prior, kind, error))
    return {site: runs for site, runs in found.items() if _measured(runs) >= LEAST}


def _measured(runs: Iterable[PeakRun]) -> int:
    return sum(not run.ran_out for run in runs)


def _run(assessor: Assessor, job: RowJob, prior: PeakError, kind: str, error: float) -> PeakRun:
    told, model = assessor.predictor.predict(job), assessor.predictor.model(job)
    peak = predicted_peak(model, told.layout)
    peak = dataclasses.replace(peak, error=prior)
    same = (model.spec, model.cluster.num_gpus, told.layout.global_batch_size, model.settings)
    return PeakRun(
        predicted=peak,
        bytes=round(peak.peak_bytes * math.exp(error)),
        ran_out=kind == "ran_out",
        job=same,
    )


class Score(NamedTuple):
    """Of peaks predicted with so many runs: errors in per cent, shares inside 90 % intervals."""

    runs: int
    before_pct: float
    after_pct: float
    inside_before_pct: float
    inside_after_pct: float
    narrower: float


def scores(runs: Sequence[PeakRun], known: int, *, own: bool) -> Score | None:
    """Each run predicted by some others: of its own job's other layouts, or of other jobs alone."""
    draw = random.Random(0)
    told = []
    for run in draw.sample(runs, min(len(runs), MOST)):
        pool = [each for each in runs if _may_tell(each, run, own=own)]
        if not run.ran_out and len(pool) >= known:
            posterior = PeakPosterior(draw.sample(pool, known))
            told.append((run, posterior.of(run.predicted, run.job)))
    if len(told) < LEAST:
        return None
    off, inside = (
        [
            100 * statistics.fmean(each)
            for each in zip(
                *((of(run, run.predicted.error), of(run, error)) for run, error in told),
                strict=True,
            )
        ]
        for of in (_off, _inside)
    )
    widths = [_width(error) / _width(run.predicted.error) for run, error in told]
    return Score(len(told), *off, *inside, statistics.fmean(widths))


def _may_tell(each: PeakRun, run: PeakRun, *, own: bool) -> bool:
    if own:
        return each.job == run.job and each.predicted.point != run.predicted.point
    return each.job != run.job


def _error(run: PeakRun) -> float:
    return math.log(run.bytes / run.predicted.peak_bytes)


def _off(run: PeakRun, error: PeakErrors) -> float:
    return abs(math.expm1(error.quantile(0.5) - _error(run)))


def _inside(run: PeakRun, error: PeakErrors) -> bool:
    return error.quantile(0.05) <= _error(run) <= error.quantile(0.95)


def _width(error: PeakErrors) -> float:
    return error.quantile(0.95) - error.quantile(0.05)


_HEAD = """\

## Memory at one site

Each source on one device is taken as a site, if {least} peaks of it and more are published. Each of
at most {most} is predicted by some of the site's others, of other jobs or of other layouts of its
job, runs out of memory among them. The public error is that of a fit without the source. `error`
is of the median without and with the runs; `in 90 %` the share of peaks inside the interval;
`width` is that of the interval over the one without.

"""


def section(sites: Sites) -> str:
    """The part of the page."""
    rows = []
    for own, counts in ((False, OTHERS), (True, OWN)):
        for known in counts:
            found = [
                (site, score)
                for site, runs in sites.items()
                if (score := scores(runs, known, own=own)) is not None
            ]
            rows += list(_rows(f"{known} of {'its' if own else 'other'} jobs", found))
    heads = ("known runs", "site", "peaks", "error %", "after %", "in 90 %", "after", "width")
    return _HEAD.format(least=LEAST, most=MOST) + table(heads, rows, numeric=6) + "\n"


def _rows(known: str, found: Sequence[tuple[tuple[str, str], Score]]) -> Iterator[tuple[str, ...]]:
    named = [(", ".join(site), score) for site, score in found]
    means = [
        statistics.fmean(values) for values in zip(*(score for _, score in found), strict=True)
    ]
    for site, score in [*named, ("**mean**", Score(0, *means[1:]))]:
        yield (
            *(known, site, str(score.runs or "")),
            *(f"{each:.1f}" for each in score[1:3]),
            *(f"{each:.0f}" for each in score[3:5]),
            f"{score.narrower:.2f}",
        )
