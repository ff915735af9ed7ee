"""Fit how far predicted peaks are off to the peaks that others measured.

Sources weigh alike, however many rows they print: rows of one source share its framework, its
kernels and its way to measure. Settings are those that a row states, so that the error is of the
formula and not of a guess at the job. Frameworks that nothing is planned for teach nothing of
Megatron's peaks, but where weights are gathered they are most of what is public.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from nest_megatron.cost_model.memory_uncertainty import PeakError
from nest_megatron.files import write_text
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.validation.assess import Assessor
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.outcome import Basis, RowOutcome
from nest_megatron.validation.possible import states_recompute
from nest_megatron.validation.rows import RowFile, RowKind

#: Logarithms of measured over predicted peaks, by source.
Errors = Mapping[str, Sequence[float]]

_RUNS_MEGATRON = re.compile(r"megatron|^nemo(?! automodel)", re.IGNORECASE)
_LEAST_SCALE = 1e-4

_HEAD = """\
# Written by `nest-megatron calibrate` (nest_megatron/validation/fit_memory.py); do not edit.
# Error of predicted peaks, log(measured / predicted): halves of Student's t with 4 degrees of
# freedom, of the scale above and the scale below the median.
# replicated: Megatron with whole weights on each replica; sharded: ZeRO-2, ZeRO-3 and FSDP of all
# frameworks. rows: peaks that were fitted, by source. coverage_pct: share of the peaks of a source
# inside the 50 and the 90 % interval of a fit without it; mean over sources, and of all rows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakFit:
    """A fitted error, and how often intervals hold for sources that it has not seen.

    Args:
        by_source_pct, by_row_pct: share inside an interval, by the interval's own share.
    """

    error: PeakError
    rows: Mapping[str, int]
    by_source_pct: Mapping[int, float]
    by_row_pct: Mapping[int, float]


def peak_errors(files: Iterable[RowFile], book: ModelBook) -> Mapping[str, Errors]:
    """Errors of peaks in tables, ``replicated`` and ``sharded``."""
    assessor = Assessor(book)
    found: dict[str, dict[str, list[float]]] = {
        "replicated": defaultdict(list),
        "sharded": defaultdict(list),
    }
    seen = set()
    for file in files:
        if file.kind is RowKind.COLLECTIVES:
            continue
        for outcome in assessor.outcomes(file, Basis.AS_STATED):
            name = outcome.row.get("throughput_row") or outcome.row.get("row_id", "")
            is_golden = file.kind is RowKind.MEMORY_GOLDEN
            group = _group(outcome, is_golden=is_golden)
            if outcome.memory is None or group is None or (name and name in seen):
                continue
            if not (is_golden or states_recompute(outcome.row)):
                continue  # an error of the guess, not of the formula
            seen.add(name)
            predicted, measured = outcome.memory
            found[group][outcome.source].append(math.log(measured / predicted))
    return found


def _group(outcome: RowOutcome, *, is_golden: bool) -> str | None:
    if outcome.zero is not None and outcome.zero >= ZeroStage.GRADIENTS:
        return "sharded"
    runs_megatron = is_golden or _RUNS_MEGATRON.search(outcome.row.get("framework", ""))
    return "replicated" if runs_megatron else None


def fit_peaks(errors: Errors) -> PeakFit:
    """Median and scales, and coverage of sources left out.

    Args:
        errors: of at least two sources.
    """
    fitted = _error(errors)
    inside = {share: _inside_left_out(errors, share / 100) for share in (50, 90)}
    return PeakFit(
        error=PeakError(
            median=round(fitted.median, 3),
            above=round(fitted.above, 3),
            below=round(fitted.below, 3),
            runs=fitted.runs,
            sources=fitted.sources,
        ),
        rows={source: len(each) for source, each in errors.items()},
        by_source_pct={
            share: 100 * statistics.fmean(map(statistics.fmean, each))
            for share, each in inside.items()
        },
        by_row_pct={
            share: 100 * statistics.fmean(hit for hits in each for hit in hits)
            for share, each in inside.items()
        },
    )


def _inside_left_out(errors: Errors, share: float) -> list[list[float]]:
    """By source, for each of its rows, 1 if inside the interval of a fit without it, else 0."""
    hits = []
    for source, own in errors.items():
        fitted = _error({name: each for name, each in errors.items() if name != source})
        low, high = (fitted.quantile(0.5 + side * share / 2) for side in (-1, 1))
        hits.append([float(low <= error <= high) for error in own])
    return hits


def _error(errors: Errors) -> PeakError:
    """Median and scales, all sources weighing alike; scales widened for a source to come.

    With four degrees of freedom the mean size of Student's t is its scale.
    """
    points = sorted((x, 1 / len(own)) for own in errors.values() for x in own)
    median = _median(points)
    widened = math.sqrt(1 + 1 / len(errors))
    above, below = (
        widened * _mean([(side * (x - median), w) for x, w in points if side * (x - median) >= 0])
        for side in (1, -1)
    )
    return PeakError(median=median, above=above, below=below, runs=len(points), sources=len(errors))


def _median(points: Sequence[tuple[float, float]]) -> float:
    """The error at which half the weight of sorted errors is reached."""
    reached = itertools.accumulate(share for _, share in points)
    half = sum(share for _, share in points) / 2
    return next(x for (x, _), so_far in zip(points, reached, strict=True) if so_far >= half)


def _mean(points: Sequence[tuple[float, float]]) -> float:
    mean = sum(x * weight for x, weight in points) / sum(weight for _, weight in points)
    return max(_LEAST_SCALE, mean)


def write_peaks(path: Path, fits: Mapping[str, PeakFit]) -> None:
    """Write the fits into a catalogue's ``calibration/``."""
    document = {
        name: {
            "median": fit.error.median,
            "above": fit.error.above,
            "below": fit.error.below,
            "rows": dict(fit.rows),
            "coverage_pct": {
                "sources": {share: round(pct) for share, pct in fit.by_source_pct.items()},
                "rows": {share: round(pct) for share, pct in fit.by_row_pct.items()},
            },
        }
        for name, fit in fits.items()
    }
    text = yaml.safe_dump(document, sort_keys=False, width=100, default_flow_style=None)
    write_text(path, f"{_HEAD}{text}")
