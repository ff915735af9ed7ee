"""Fit how far predictions are off, by mechanism, to runs whose source was left out.

Scales of errors (``cost_model.uncertainty``) by largest posterior: runs of one job are one draw
from a Student's t distribution of several dimensions, so that both how far jobs are off and how
far layouts of one job differ decide. The logarithm of each scale is pulled to a prior. A run
weighs the eighth root of one over the runs of its source, so that large sources do not dominate.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.distributions import DEGREES_OF_FREEDOM
from nest_megatron.cost_model.features import (
    Feature,
    coordinates,
    device_class,
    distance,
    features_of,
    number_format,
)
from nest_megatron.cost_model.mechanisms import Mechanism, Shares, shares
from nest_megatron.cost_model.uncertainty import ANY, RUN_NOISE, Predictive, Scales, applies
from nest_megatron.validation.assess import Predictor
from nest_megatron.validation.scores import Coverage, coverage_of
from tools.calibration.catalogue import write_record
from tools.calibration.constants import LeftOut

Floats = NDArray[np.float64]

#: Where each scale is pulled to, and by how much its logarithm may differ (standard deviation).
_PRIORS: Mapping[str, Mapping[str, float]] = {
    "mechanisms": {
        Mechanism.GEMM: 0.06,
        Mechanism.ATTENTION: 0.15,
        Mechanism.GROUPED_GEMM: 0.2,
        Mechanism.MEMORY_BOUND: 0.2,
        Mechanism.PROFILED: 0.03,
        Mechanism.LAUNCH: 0.3,
        Mechanism.RECOMPUTE: 0.15,
        Mechanism.TENSOR: 0.25,
        Mechanism.CONTEXT: 0.3,
        Mechanism.EXPERT: 0.4,
        Mechanism.EXPERT_NETWORK: 0.4,
        Mechanism.PIPELINE: 0.25,
        Mechanism.REPLICAS: 0.3,
        Mechanism.FSDP: 0.3,
        Mechanism.STRAGGLERS: 0.4,
        Mechanism.OPTIMIZER: 0.3,
    },
    "job": {
        ANY: 0.03,
        Feature.EXPERTS: 0.08,
        Feature.FP8: 0.05,
        Feature.LORA: 0.1,
        Feature.SCAN: 0.15,
        Feature.LONG_CONTEXT: 0.08,
        Feature.OTHER_FRAMEWORK: 0.08,
        Feature.OTHER_DEVICE: 0.2,
    },
    "layout": {
        ANY: 0.03,
        Feature.EXPERTS: 0.05,
        Feature.SMALL_STEP: 0.05,
        "experts+fsdp": 0.1,
        "lora+small_step": 0.1,
    },
}
_WIDTH = 0.7
#: Ranges of layouts that are tried, in steps.
_RANGES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
#: A source's runs weigh this power of their number, each.
_SOURCE_POWER = -0.125
#: Fitted runs from which a device is known; parts in which sources are left out of the scales.
_KNOWN_DEVICE, _FOLDS = 5, 8

_HEAD = """\
# scales: of errors of predicted steps, in logarithms, fitted to runs whose source was left out of
# the cost model's constants: by mechanism, of its price; job: common to all plans of a job; layout:
# of one layout; layout_range: steps between layouts after which their errors are correlated by 1/e.
# devices: fitted runs of each. runs: by features, number format and class of devices, how many and
# their mean absolute error, source left out. coverage_pct: of those runs, the share inside the 50
# and the 90 % interval, their source left out of the scales as well: [runs, 50 %, 90 %]; sources:
# the mean over sources.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A measured run and how far off its prediction is.

    Args:
        job: what runs of one job have in common.
        error: logarithm of measured over predicted time, source left out.
    """

    source: str
    job: object
    device: str
    precision: Precision
    error: float
    shares: Shares
    features: frozenset[Feature]
    point: tuple[float, ...]


def residuals_of(left_out: Iterable[LeftOut]) -> list[Residual]:
    """What is known of runs that a fit without their source predicted."""
    left_out = list(left_out)
    devices = Counter(each.sample.job.cluster.accelerator.name for each in left_out)
    known = frozenset(name for name, count in devices.items() if count >= _KNOWN_DEVICE)
    predictor = Predictor()
    return [_residual(each, predictor, known) for each in left_out]


def _residual(each: LeftOut, predictor: Predictor, devices: frozenset[str]) -> Residual:
    sample, job = each.sample, each.sample.job
    predicted, model = predictor.predict(job), predictor.model(job)
    grid, device = predicted.layout, job.cluster.accelerator.name
    same = (sample.source, sample.model, job.cluster.num_gpus, device, job.spec.seq_length)
    return Residual(
        source=sample.source,
        job=(*same, grid.global_batch_size, job.settings.precision, job.target.name),
        device=device,
        precision=job.settings.precision,
        error=-each.unseen,
        shares=shares(model, grid),
        features=features_of(model, grid, predicted.iteration_time_s, devices),
        point=coordinates(grid),
    )


def fit_scales(residuals: Sequence[Residual], start: Scales | None = None) -> Scales:
    """Scales with the largest posterior; ``start``, of nearly the same runs, fixes the range."""
    from scipy.optimize import minimize

    found = []
    for layout_range in _RANGES if start is None else (start.layout_range,):
        problem = _Posterior(residuals, layout_range)
        first = problem.prior if start is None else np.log(_flat(start))
        result = minimize(problem.value, first, jac=True, method="L-BFGS-B")
        found.append((float(result.fun), _scales(np.exp(result.x), layout_range)))
    return min(found, key=lambda each: each[0])[1]


def _flat(scales: Scales | None = None) -> list[float]:
    return [
        prior if scales is None else getattr(scales, kind)[name]
        for kind, priors in _PRIORS.items()
        for name, prior in priors.items()
    ]


def _scales(values: Iterable[float], layout_range: float) -> Scales:
    rest = iter(float(f"{value:.3g}") for value in values)
    kinds = {kind: {str(name): next(rest) for name in priors} for kind, priors in _PRIORS.items()}
    return Scales(layout_range=layout_range, **kinds)


class _Posterior:
    """The negative logarithm of the scales' posterior, and its gradient in their logarithms."""

    def __init__(self, residuals: Sequence[Residual], layout_range: float) -> None:
        self.prior = np.log(_flat())
        counts = Counter(each.source for each in residuals)
        jobs: dict[object, list[Residual]] = defaultdict(list)
        for each in residuals:
            jobs[each.job].append(each)
        self._jobs = [
            (
                _parts(runs, layout_range),
                np.array([run.error for run in runs]),
                counts[runs[0].source] ** _SOURCE_POWER,
            )
            for runs in jobs.values()
        ]

    def value(self, x: Floats) -> tuple[float, Floats]:
        squares = np.exp(2 * x)
        off = (x - self.prior) / _WIDTH
        total, slope = 0.5 * float(off @ off), off / _WIDTH
        for parts, errors, weight in self._jobs:
            found, by_square = _job_value(parts, errors, squares)
            total += weight * found
            slope = slope + 2 * weight * squares * by_square
        return total, slope


def _parts(runs: Sequence[Residual], layout_range: float) -> Floats:
    """What each squared scale adds to a job's covariance, shape (scales, runs, runs)."""
    near = np.array(
        [[math.exp(-distance(a.point, b.point) / layout_range) for b in runs] for a in runs]
    )

    def outer(values: Iterable[float]) -> Floats:
        column = np.array(list(values))
        return np.outer(column, column)

    def common(feature: str) -> Floats:
        return outer(float(applies(feature, run.features)) for run in runs)

    mechanisms, jobs, layouts = _PRIORS.values()
    return np.array(
        [
            *(outer(run.shares.get(Mechanism(name), 0.0) for run in runs) for name in mechanisms),
            *(common(feature) for feature in jobs),
            *(common(feature) * near for feature in layouts),
        ]
    )


def _job_value(parts: Floats, errors: Floats, squares: Floats) -> tuple[float, Floats]:
    """Negative log density of a job's errors, and its derivatives in the squared scales."""
    n, degrees = len(errors), DEGREES_OF_FREEDOM
    scale = np.tensordot(squares, parts, 1) + RUN_NOISE**2 * np.eye(n)
    inverse = np.linalg.inv(scale)
    solved = inverse @ errors
    off = float(errors @ solved)
    _, log_determinant = np.linalg.slogdet(scale)
    density = 0.5 * (degrees + n) * math.log1p(off / degrees) + 0.5 * log_determinant
    outer = np.outer(solved, solved) * (degrees + n) / (degrees + off)
    return density, np.tensordot(parts, 0.5 * (inverse - outer), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertaintyFit:
    """Fitted scales and what they rest on.

    Args:
        coverage: by feature and ``any``, each run's source left out of constants and scales.
        coverage_of_sources: the mean over sources, their number in the place of the runs'.
    """

    scales: Scales
    residuals: tuple[Residual, ...]
    coverage: Mapping[str, Coverage]
    coverage_of_sources: Coverage

    def document(self) -> dict[str, object]:
        """For ``--json``."""
        coverage = {name: dataclasses.asdict(each) for name, each in self.coverage.items()}
        return {"uncertainty": {"scales": dataclasses.asdict(self.scales), "coverage": coverage}}

    def write(self, out: Path) -> Iterator[Path]:
        """Write the fit into a catalogue."""
        devices = Counter(each.device for each in self.residuals).most_common()
        cells: dict[tuple[tuple[str, ...], str, str], list[float]] = defaultdict(list)
        for each in self.residuals:
            size = 100 * abs(math.expm1(-each.error))
            features = tuple(str(f) for f in Feature if f in each.features)
            kind = number_format(each.precision), device_class(each.device)
            cells[features, *kind].append(size)
        record = {
            "scales": dataclasses.asdict(self.scales),
            "devices": {name: count for name, count in devices if count >= _KNOWN_DEVICE},
            "runs": [
                {
                    "features": list(features),
                    "precision": number,
                    "device": device,
                    "runs": len(sizes),
                    "error_pct": round(statistics.fmean(sizes), 1),
                }
                for (features, number, device), sizes in sorted(
                    cells.items(), key=lambda cell: -len(cell[1])
                )
            ],
            "coverage_pct": {
                name: [each.runs, round(each.within_50_pct, 1), round(each.within_90_pct, 1)]
                for name, each in {**self.coverage, "sources": self.coverage_of_sources}.items()
            },
        }
        yield write_record(out / "calibration", "uncertainty", _HEAD, record)


def fit_uncertainty(left_out: Iterable[LeftOut]) -> UncertaintyFit:
    """Fit scales to runs whose source was left out, and tell how well their intervals hold."""
    residuals = residuals_of(left_out)
    scales = fit_scales(residuals)
    found = standardized(residuals, scales)
    return UncertaintyFit(
        scales=scales,
        residuals=tuple(residuals),
        coverage=coverage_by_feature(found),
        coverage_of_sources=coverage_by_source(found),
    )


def standardized(residuals: Sequence[Residual], scales: Scales) -> list[tuple[Residual, float]]:
    """Each error over its scale, where the scales are of a fit without the run's source."""
    names = sorted({each.source for each in residuals})
    folds = [set(names[fold::_FOLDS]) for fold in range(min(_FOLDS, len(names)))]
    found = []
    for fold in folds:
        rest = [each for each in residuals if each.source not in fold]
        unseen = fit_scales(rest, start=scales) if rest else scales
        mine = (each for each in residuals if each.source in fold)
        found += [(each, each.error / _total_scale(unseen, each)) for each in mine]
    return found


def _total_scale(scales: Scales, each: Residual) -> float:
    return Predictive(
        median_s=1.0,
        shares=each.shares,
        features=each.features,
        point=each.point,
        scales=scales,
    ).scale


def coverage_by_feature(found: Sequence[tuple[Residual, float]]) -> Mapping[str, Coverage]:
    """Coverage of all runs, and of those that have each feature."""
    groups: dict[str, list[float]] = defaultdict(list)
    for each, off in found:
        kind = () if Feature.EXPERTS in each.features else ("dense",)
        for name in (ANY, *kind, *(f for f in Feature if f in each.features)):
            groups[str(name)].append(off)
    return {name: coverage_of(off) for name, off in groups.items()}


def coverage_by_source(found: Sequence[tuple[Residual, float]]) -> Coverage:
    """Mean coverage over sources, however many runs they have."""
    groups: dict[str, list[float]] = defaultdict(list)
    for each, off in found:
        groups[each.source].append(off)
    shares = [coverage_of(off) for off in groups.values()]
    return Coverage(
        runs=len(shares),
        within_50_pct=statistics.fmean(each.within_50_pct for each in shares),
        within_90_pct=statistics.fmean(each.within_90_pct for each in shares),
    )
