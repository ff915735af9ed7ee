"""The runs that constants are fitted to."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nest_megatron.cost_model.targets import EXECUTION
from nest_megatron.parallel.grid import Grid
from nest_megatron.validation.assess import job_time
from nest_megatron.validation.calibration import OWNERS, generation_of
from nest_megatron.validation.job import RowJob, job_of
from nest_megatron.validation.measured import is_sanity_check
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.predict import Predictor
from nest_megatron.validation.rows import RefusedRowError, Row, RowFile, RowKind

#: Frameworks that run no kernels of Megatron's; they are predicted, not fitted.
_FOREIGN = ("maxtext", "paxml")
#: Rows of one source that are fitted; more of them teach nothing new and cost time.
_MOST_ROWS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured job."""

    source: str
    model: str
    job: RowJob
    measured_s: float

    @property
    def owners(self) -> frozenset[str]:
        """Whose fitted constants its prediction depends on."""
        generation = generation_of(self.job.cluster.accelerator.name)
        owners = {self.job.target.fitted, generation or ""}
        if self.job.settings.traits.fp8_attention or any(map(_switches, self.job.grids)):
            owners.add(EXECUTION)
        return frozenset(owners & OWNERS)


def _switches(grid: Grid) -> bool:
    """Whether a grid has traffic that a switch of ``Execution`` acts on."""
    overlaps = grid.execution.tp_comm_overlap and grid.dims.tensor_model_parallel_size > 1
    return overlaps or grid.dims.expert_model_parallel_size > 1


def samples_of(files: Iterable[RowFile], book: ModelBook) -> list[Sample]:
    """Rows with a measured time that speak of a tuned run of a framework that is fitted.

    One sample for each job of a source: a run that is published again teaches nothing new.
    """
    same: dict[object, list[Sample]] = defaultdict(list)
    for sample in _samples(files, book, Predictor()):
        job = sample.job
        same[sample.source, job.spec, id(job.cluster), job.grids, job.settings].append(sample)
    means = [statistics.geometric_mean(each.measured_s for each in runs) for runs in same.values()]
    return [
        dataclasses.replace(runs[0], measured_s=mean)
        for runs, mean in zip(same.values(), means, strict=True)
    ]


def _samples(files: Iterable[RowFile], book: ModelBook, predictor: Predictor) -> Iterator[Sample]:
    rows = (row for file in files if file.kind is RowKind.THROUGHPUT for row in file.rows)
    for row in filter(_speaks_of_performance, rows):
        try:
            job = job_of(row, book)
            measured = job_time(row, job, predictor.predict(job))
        except RefusedRowError:
            continue
        source, model = row.get("source", ""), row.get("model", "")
        yield Sample(source=source, model=model, job=job, measured_s=measured)


def _speaks_of_performance(row: Row) -> bool:
    """Whether a row can teach the cost model something.

    Not a run whose authors call its timing a sanity check, nor one on other kernels, nor one whose
    batch is not stated.
    """
    if not row.get("gbs", "").strip() and not row.get("ga", "").strip():
        return False
    return not is_sanity_check(row) and not row.get("framework", "").lower().startswith(_FOREIGN)


def thinned(samples: Sequence[Sample], seed: int = 0) -> list[Sample]:
    """At most ``_MOST_ROWS`` of each source, drawn evenly."""
    by_source: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_source[sample.source].append(sample)
    draw = random.Random(seed)
    drawn: list[Sample] = []
    for rows in by_source.values():
        drawn += draw.sample(rows, _MOST_ROWS) if len(rows) > _MOST_ROWS else rows
    return drawn
