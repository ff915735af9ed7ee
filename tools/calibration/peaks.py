"""Fit how far predicted peaks are off to peaks that others measured, and to what ran and ran out.

A printed peak is one error. A run that printed none but ran says that its error is at most what
the device left free, and one that ran out says that it is more. Sources weigh alike, however many
rows they print: rows of one source share its framework, its kernels and its way to measure.
Settings are those that a row states, so that the error is of the formula and not of a guess at the
job. Frameworks that nothing is planned for teach nothing of Megatron's peaks, but where weights are
gathered they are most of what is public.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nest_megatron.cost_model.device_memory import PeakError
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.validation.assess import Assessor
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.outcome import Basis, RowOutcome
from nest_megatron.validation.row_settings import states_recompute
from nest_megatron.validation.rows import RowFile, RowKind
from tools.calibration.catalogue import write_record

Floats = NDArray[np.float64]

_RUNS_MEGATRON = re.compile(r"megatron|^nemo(?! automodel)", re.IGNORECASE)
_OFFLOADS = re.compile(r"offload", re.IGNORECASE)
_OFFLOADS_IN_NOTES = re.compile(r"(?:activation|state) offload", re.IGNORECASE)
_LEAST_SCALE = 1e-4

_HEAD = """\
# Error of predicted peaks, log(measured / predicted): halves of Student's t with 2 degrees of
# freedom, of the scale above and the scale below the median.
# replicated: Megatron with whole weights on each replica; sharded: ZeRO-2, ZeRO-3 and FSDP of all
# frameworks. By source: peaks that were measured, other runs that ran, and runs that ran out.
# coverage_pct: share of the measured peaks of a source inside the 50 and the 90 % interval of a fit
# without it; mean over sources, and of all rows. expected_to_run_out: of the runs that ran or ran
# out, by a fit without their source.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What the runs of one source say of predicted peaks, as logarithms over the prediction.

    Args:
        measured: peaks.
        ran: upper bounds of the peaks of runs that ran, what the allocator could give out.
        ran_out: lower bounds of the peaks of runs that ran out of memory.
    """

    measured: list[float] = field(default_factory=list)
    ran: list[float] = field(default_factory=list)
    ran_out: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.measured) + len(self.ran) + len(self.ran_out)


#: What is known of predicted peaks, by source.
Evidence = Mapping[str, Peaks]


_KINDS = ("measured", "ran", "ran_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakFit:
    """A fitted error, and how often it holds for sources that it has not seen.

    Args:
        by_source_pct, by_row_pct: share of measured peaks inside an interval, by the interval's
            own share.
        expected_to_run_out: of the runs that ran or ran out.
    """

    error: PeakError
    evidence: Evidence
    by_source_pct: Mapping[int, float]
    by_row_pct: Mapping[int, float]
    expected_to_run_out: float

    def total(self, kind: str) -> int:
        """How many peaks were measured, runs ran, or ran out, over all sources."""
        return sum(len(getattr(peaks, kind)) for peaks in self.evidence.values())

    def document(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            **dataclasses.asdict(self.error),
            **{kind: self.total(kind) for kind in _KINDS},
            "expected_to_run_out": self.expected_to_run_out,
            "coverage_by_source_pct": dict(self.by_source_pct),
            "coverage_by_row_pct": dict(self.by_row_pct),
        }

    def record(self) -> dict[str, object]:
        """For the catalogue."""
        counts = {
            kind: {s: n for s, peaks in self.evidence.items() if (n := len(getattr(peaks, kind)))}
            for kind in _KINDS
        }
        shares = {"sources": self.by_source_pct, "rows": self.by_row_pct}
        return {
            **dataclasses.asdict(self.error),
            **counts,
            "coverage_pct": {
                name: {share: round(pct) for share, pct in each.items()}
                for name, each in shares.items()
            },
            "expected_to_run_out": round(self.expected_to_run_out, 1),
        }


@dataclass(frozen=True, slots=True)
class PeakFits:
    """Fits by how weights are stored, ``replicated`` and ``sharded``."""

    fits: Mapping[str, PeakFit]

    def document(self) -> dict[str, object]:
        """For ``--json``."""
        return {"peaks": {name: fit.document() for name, fit in self.fits.items()}}

    def write(self, out: Path) -> Iterator[Path]:
        """Write the fits into a catalogue."""
        record = {name: fit.record() for name, fit in self.fits.items()}
        yield write_record(out / "calibration", "memory", _HEAD, record)


def peak_evidence(files: Iterable[RowFile], book: ModelBook) -> Mapping[str, Evidence]:
    """What tables say of predicted peaks, ``replicated`` and ``sharded``."""
    assessor = Assessor(book)
    found: dict[str, dict[str, Peaks]] = {
        name: defaultdict(Peaks) for name in ("replicated", "sharded")
    }
    seen = set()
    for file in (each for each in files if each.kind is not RowKind.COLLECTIVES):
        for outcome in assessor.outcomes(file, Basis.AS_STATED):
            name = outcome.row.get("throughput_row") or outcome.row.get("row_id", "")
            group = peak_group(outcome, is_golden=file.kind is RowKind.MEMORY_GOLDEN)
            if group is None or (name and name in seen):
                continue
            for kind, error in peak_said(outcome):
                seen.add(name)
                getattr(found[group][outcome.source], kind).append(error)
    return found


def peak_group(outcome: RowOutcome, *, is_golden: bool) -> str | None:
    """Which fit a row is for, if its error is of the formula and not of a guess or an offload."""
    row = outcome.row
    framework = row.get("framework", "")
    stated = f"{row.get('recompute', '')} {framework}"
    offloads = _OFFLOADS.search(stated) or _OFFLOADS_IN_NOTES.search(row.get("ambiguity", ""))
    is_clear = (outcome.out_of_memory or states_recompute(row)) and not offloads
    if not is_golden and not is_clear:
        return None
    if outcome.zero is not None and outcome.zero >= ZeroStage.GRADIENTS:
        return "sharded"
    return "replicated" if is_golden or _RUNS_MEGATRON.search(framework) else None


def peak_said(outcome: RowOutcome) -> Iterator[tuple[str, float]]:
    """What a row says of its peak: a field of ``Peaks``, and the logarithm."""
    if outcome.memory is not None:
        predicted, measured = outcome.memory
        # What a process takes as a whole is at least what its tensors take.
        unclear = "not stated" in outcome.row.get("peak_mem_scope", "")
        yield "ran" if unclear else "measured", math.log(measured / predicted)
    elif outcome.allocatable_bytes and outcome.needed_bytes:
        bound = math.log(outcome.allocatable_bytes / outcome.needed_bytes)
        if outcome.out_of_memory:
            yield "ran_out", bound
        elif outcome.ran and outcome.predicted_bytes is not None:
            yield "ran", bound


def fit_peaks(evidence: Evidence) -> PeakFit:
    """Median and scales of at least two sources, and how they hold on sources left out."""
    unseen = unseen_errors(evidence)
    inside = {share: _inside(evidence, unseen, share / 100) for share in (50, 90)}
    fitted = _error(evidence)
    return PeakFit(
        error=PeakError(**{k: round(v, 3) for k, v in dataclasses.asdict(fitted).items()}),
        evidence=evidence,
        by_source_pct={
            share: 100 * statistics.fmean(map(statistics.fmean, each))
            for share, each in inside.items()
        },
        by_row_pct={
            share: 100 * statistics.fmean(hit for hits in each for hit in hits)
            for share, each in inside.items()
        },
        expected_to_run_out=math.fsum(
            1.0 - unseen[source].at_most(bound)
            for source, peaks in evidence.items()
            for bound in (*peaks.ran, *peaks.ran_out)
        ),
    )


def unseen_errors(evidence: Evidence) -> Mapping[str, PeakError]:
    """By source, the error that a fit without it has."""
    return {
        source: _error({name: each for name, each in evidence.items() if name != source})
        for source in evidence
    }


def _inside(evidence: Evidence, unseen: Mapping[str, PeakError], share: float) -> list[list[float]]:
    """By source, for each measured peak, 1 if inside the interval of a fit without it, else 0."""
    hits = []
    for source, peaks in evidence.items():
        low, high = (unseen[source].quantile(0.5 + side * share / 2) for side in (-1, 1))
        hits.append([float(low <= error <= high) for error in peaks.measured])
    return [each for each in hits if each]


def _error(evidence: Evidence) -> PeakError:
    from scipy.optimize import minimize

    table = _table(evidence)
    starts = np.quantile(table[0][table[1] == 0], (0.25, 0.5, 0.75))
    found = min(
        (
            minimize(_loss, (median, -3.0, -3.0), args=table, method="Nelder-Mead", tol=1e-5)
            for median in starts
        ),
        key=lambda each: float(each.fun),
    )
    median, above, below = found.x
    widened = math.sqrt(1 + 1 / len(evidence))
    return PeakError(
        median=float(median),
        above=max(_LEAST_SCALE, widened * math.exp(above)),
        below=max(_LEAST_SCALE, widened * math.exp(below)),
    )


def _table(evidence: Evidence) -> tuple[Floats, NDArray[np.int64], Floats]:
    """Errors and bounds, their kinds (measured, ran, ran out) and weights, one row each."""
    rows = [
        (value, kind, 1.0 / len(peaks))
        for peaks in evidence.values()
        for kind, name in enumerate(_KINDS)
        for value in getattr(peaks, name)
    ]
    values, kinds, weights = zip(*rows, strict=True)
    return np.array(values), np.array(kinds), np.array(weights)


def _loss(x: Floats, values: Floats, kinds: NDArray[np.int64], weights: Floats) -> float:
    """Negative logarithm of the likelihood of a median and the logarithms of two scales.

    Density of a measured peak, chance of at most a bound, and of more than one.
    """
    off = values - x[0]
    scales = np.maximum(_LEAST_SCALE, np.exp(np.where(off > 0, x[1], x[2])))
    t = off / scales
    root = np.sqrt(2.0 + t * t)
    beyond = 1.0 / (root * (root + np.abs(t)))
    at_most = np.where(t > 0, 1.0 - beyond, beyond)
    density = -3.0 * np.log(root) - np.log(scales)
    each = np.choose(kinds, (density, np.log(at_most), np.log1p(-at_most)))
    return -float(weights @ each)
