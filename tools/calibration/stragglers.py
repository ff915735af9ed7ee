"""Fit what ranks are late to published weak scalings.

A weak scaling is one job at several sizes with the same work for each GPU. Only the ratios of its
steps are fitted, predicted and measured, so that no error of the whole scaling enters. Scalings in
which the network alone lengthens the step would have its errors fitted, and are left out.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.units import Seconds
from nest_megatron.validation.assess import Predictor, job_time
from nest_megatron.validation.job import RowJob, job_of
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.rows import RefusedRowError, Row, RowFile, RowKind
from tools.calibration.catalogue import write_record

#: Columns that rows of one weak scaling have in common, besides the work of each GPU.
_SAME = (
    *("source", "task", "model", "seq", "gpu", "precision", "framework", "mbs"),
    *("tp", "pp", "vp", "cp", "ep", "etp", "fsdp", "zero", "recompute"),
)
#: Tasks whose steps differ in nothing but their size: batches of fine-tuning differ in length.
_TASKS = ("", "pretrain")
#: Growth of a step, as predicted without stragglers, above which the network decides a scaling.
_FLAT = 1.02
#: No rank is later than this after a second.
_MOST = 0.5

_HEAD = """\
# straggler_delay_s: standard deviation of what a rank is late after a second of work, and the
# default of cost.straggler_delay_s. rows: runs of weak scalings that were fitted, by source.
# deviation_pct: mean deviation of a run from what the others of its scaling let expect, without the
# term, with it, and by model with the term fitted to the other models alone.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRun:
    """One size of a weak scaling.

    Args:
        predicted_s: its step without stragglers.
        wait_s: what it waits for each second that a rank is late.
    """

    num_gpus: int
    measured_s: Seconds
    predicted_s: Seconds
    wait_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """One job at several sizes."""

    source: str
    model: str
    runs: tuple[ScalingRun, ...]

    @property
    def speaks(self) -> bool:
        """Whether its sizes differ in what they wait for stragglers, and in little else."""
        steps = [run.predicted_s for run in self.runs]
        sizes, waits = ({getattr(r, name) for r in self.runs} for name in ("num_gpus", "wait_s"))
        return len(sizes) > 1 and len(waits) > 1 and max(steps) <= _FLAT * min(steps)

    def deviations(self, delay_s: float) -> Iterator[float]:
        """Sizes of the logarithms of measured over predicted steps, beside their mean."""
        errors = [
            math.log(run.measured_s / (run.predicted_s + delay_s * run.wait_s)) for run in self.runs
        ]
        mean = statistics.fmean(errors)
        return (abs(error - mean) for error in errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerFit:
    """The fitted delay, and how far it carries over to models that it has not seen.

    Args:
        rows: fitted runs by source.
        without_pct, with_pct: mean deviation of the runs.
        left_out_pct: by model, its deviation without the term, and with the term as the other
            models have it.
    """

    delay_s: float
    rows: Counter[str]
    without_pct: float
    with_pct: float
    left_out_pct: Mapping[str, tuple[float, float]]

    def document(self) -> dict[str, object]:
        """For ``--json``."""
        left_out = {model: list(pair) for model, pair in self.left_out_pct.items()}
        found = {"straggler_delay_s": self.delay_s, "rows": dict(self.rows)}
        errors = {"without_pct": self.without_pct, "with_pct": self.with_pct}
        return {"stragglers": {**found, **errors, "left_out_pct": left_out}}

    def write(self, out: Path) -> Iterator[Path]:
        """Write the fit into a catalogue."""
        deviations = {
            "without": round(self.without_pct, 2),
            "with": round(self.with_pct, 2),
            "left_out": {
                model: [round(each, 2) for each in pair]
                for model, pair in self.left_out_pct.items()
            },
        }
        rows = dict(self.rows.most_common())
        record = {"straggler_delay_s": self.delay_s, "rows": rows, "deviation_pct": deviations}
        yield write_record(out / "calibration", "stragglers", _HEAD, record)


def scalings_of(files: Iterable[RowFile], book: ModelBook) -> list[Scaling]:
    """The weak scalings in tables of throughput."""
    predictors = (Predictor(), Predictor())
    found: dict[tuple[tuple[str, ...], object], list[ScalingRun]] = defaultdict(list)
    rows = (row for file in files if file.kind is RowKind.THROUGHPUT for row in file.rows)
    for row in rows:
        if row.get("task", "") not in _TASKS:
            continue
        try:
            job = job_of(row, book)
            run = _run(row, job, predictors)
        except RefusedRowError:
            continue
        work = (job.grids[0].num_microbatches, job.grids[0].micro_batch_size)
        found[(tuple(row.get(name, "") for name in _SAME), work)].append(run)
    scalings = (
        Scaling(source=row[0], model=row[2], runs=tuple(runs)) for (row, _), runs in found.items()
    )
    return [scaling for scaling in scalings if scaling.speaks]


def _run(row: Row, job: RowJob, predictors: tuple[Predictor, Predictor]) -> ScalingRun:
    settings = [dataclasses.replace(job.settings, straggler_delay_s=delay) for delay in (0.0, 1.0)]
    without, late = (
        predictor.predict(dataclasses.replace(job, settings=each))
        for predictor, each in zip(predictors, settings, strict=True)
    )
    return ScalingRun(
        num_gpus=job.cluster.num_gpus,
        measured_s=job_time(row, job, without),
        predicted_s=without.iteration_time_s,
        wait_s=late.iteration_time_s - without.iteration_time_s,
    )


def fit_stragglers(scalings: Sequence[Scaling]) -> StragglerFit:
    """The delay with which the runs deviate least from their scalings, all models weighing alike.

    Absolute deviations are added up, so that a few odd runs do not decide.
    """
    rows: Counter[str] = Counter()
    by_model: dict[str, list[Scaling]] = defaultdict(list)
    for scaling in scalings:
        by_model[scaling.model].append(scaling)
        rows[scaling.source] += len(scaling.runs)
    delay = _best(by_model)
    return StragglerFit(
        delay_s=delay,
        rows=rows,
        without_pct=_mean_pct(by_model, 0.0),
        with_pct=_mean_pct(by_model, delay),
        left_out_pct={
            model: (_mean_pct({model: mine}, 0.0), _mean_pct({model: mine}, _best(others)))
            for model, mine in by_model.items()
            if (others := {name: each for name, each in by_model.items() if name != model})
        },
    )


def _best(by_model: Mapping[str, Sequence[Scaling]]) -> float:
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(
        lambda delay: _mean_pct(by_model, float(delay)), bounds=(0.0, _MOST), method="bounded"
    )
    return float(f"{found.x:.2g}")


def _mean_pct(by_model: Mapping[str, Sequence[Scaling]], delay_s: float) -> float:
    means = [
        statistics.fmean(size for each in scalings for size in each.deviations(delay_s))
        for scalings in by_model.values()
    ]
    return 100 * statistics.fmean(means)
