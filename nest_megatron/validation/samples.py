"""The rows that constants are fitted to."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator

from nest_megatron.validation.assess import job_time
from nest_megatron.validation.calibrate import Sample
from nest_megatron.validation.job import job_of
from nest_megatron.validation.measured import is_sanity_check
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.predict import Predictor
from nest_megatron.validation.refusal import RefusedRowError
from nest_megatron.validation.rows import Row, RowFile, RowKind

#: Frameworks that run no kernels of Megatron's; they are predicted, not fitted.
_FOREIGN = ("maxtext", "paxml")


def samples_of(files: Iterable[RowFile], book: ModelBook) -> list[Sample]:
    """Rows with a measured time that speak of a tuned run of a framework that is fitted."""
    predictor = Predictor()
    rows = (row for file in files if file.kind is RowKind.THROUGHPUT for row in file.rows)
    return list(_joined(_samples(rows, book, predictor)))


def _joined(samples: Iterable[Sample]) -> Iterator[Sample]:
    """One sample for each job of a source: a run that is published again teaches nothing new."""
    same: dict[object, list[Sample]] = defaultdict(list)
    for sample in samples:
        job = sample.job
        same[sample.source, job.spec, id(job.cluster), job.grids, job.settings].append(sample)
    for each in same.values():
        mean = statistics.geometric_mean(sample.measured_s for sample in each)
        yield dataclasses.replace(each[0], measured_s=mean)


def _samples(rows: Iterable[Row], book: ModelBook, predictor: Predictor) -> Iterator[Sample]:
    for row in rows:
        if not _speaks_of_performance(row):
            continue
        try:
            job = job_of(row, book)
            measured = job_time(row, job, predictor.predict(job))
        except RefusedRowError:
            continue
        yield Sample(
            source=row.get("source", ""),
            model=row.get("model", ""),
            job=job,
            measured_s=measured,
        )


def _speaks_of_performance(row: Row) -> bool:
    """Whether a row can teach the cost model something.

    Not a run whose authors call its timing a sanity check, nor one on other kernels, nor one whose
    batch is not stated.
    """
    framework = row.get("framework", "").lower()
    if not row.get("gbs", "").strip() and not row.get("ga", "").strip():
        return False
    return not is_sanity_check(row) and not framework.startswith(_FOREIGN)
