"""Fit the cost model's constants to measured runs, and tell how well they carry over.

Bounded least squares on the logarithm of predicted over measured time, every source weighing the
square root of its rows, each constant pulled to its prior by its width. Cross-validation leaves out
whole sources and whole models and predicts them with what the others say.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.targets import EXECUTION
from nest_megatron.parallel.grid import Grid
from nest_megatron.validation.calibration import (
    OWNERS,
    Parameter,
    Values,
    generation_of,
    with_values,
)
from nest_megatron.validation.job import Job
from nest_megatron.validation.predict import Predictor

#: Residuals beyond this (in logarithms) count less and less: some rows are misprints.
_ROBUST = 0.1
#: What a constant one standard error off its prior costs, as a row's error would.
_PULL = 0.04
#: Rows of one source that are fitted; more of them teach nothing new and cost time.
_MOST_ROWS = 120
_STEP = 0.02
_EVALUATIONS = 8
#: Evaluations of a fit that starts from another one's end, and parts that sources or models are
#: left out in.
_AGAIN, _FOLDS = 2, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured job."""

    source: str
    model: str
    job: Job
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted constants and what is left.

    Args:
        errors: absolute errors by source, per cent, of the rows that were fitted.
    """

    values: Values
    errors: Mapping[str, tuple[float, ...]]

    def mape_pct(self, source: str | None = None) -> float:
        """Mean absolute error of one source, or of all rows."""
        rows = self.errors[source] if source else [e for each in self.errors.values() for e in each]
        return statistics.fmean(rows)


def thinned(samples: Sequence[Sample], seed: int = 0) -> list[Sample]:
    """At most ``_MOST_ROWS`` of each source, drawn evenly."""
    by_source: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_source[sample.source].append(sample)
    draw = random.Random(seed)
    kept: list[Sample] = []
    for rows in by_source.values():
        kept += draw.sample(rows, _MOST_ROWS) if len(rows) > _MOST_ROWS else rows
    return kept


class _Problem:
    """Residuals of some samples under some parameters; a sample is priced again only if it must."""

    def __init__(self, samples: Sequence[Sample], parameters: Sequence[Parameter]) -> None:
        self.samples = samples
        self.parameters = parameters
        counts: dict[str, int] = defaultdict(int)
        for sample in samples:
            counts[sample.source] += 1
        self._weights = [counts[sample.source] ** -0.25 for sample in samples]
        self._mine = [
            tuple(i for i, p in enumerate(parameters) if p.owner in sample.owners)
            for sample in samples
        ]
        self._seen: list[dict[tuple[float, ...], float]] = [{} for _ in samples]

    def log_errors(self, x: Sequence[float]) -> list[float]:
        """Logarithm of predicted over measured time, sample by sample."""
        values = {p.key: float(v) for p, v in zip(self.parameters, x, strict=True)}
        predictor = Predictor()
        clusters: dict[int, Cluster] = {}
        found = []
        for sample, mine, seen in zip(self.samples, self._mine, self._seen, strict=True):
            key = tuple(float(x[i]) for i in mine)
            if key not in seen:
                predicted = predictor.predict(with_values(sample.job, values, clusters))
                seen[key] = math.log(predicted.iteration_time_s / sample.measured_s)
            found.append(seen[key])
        return found

    def residuals(self, x: Sequence[float]) -> list[float]:
        """What least squares minimises: weighted robust errors, then the pull of the priors."""
        rows = [
            weight * _robust(error)
            for weight, error in zip(self._weights, self.log_errors(x), strict=True)
        ]
        pulls = [
            _PULL * (value - p.prior) / p.width for p, value in zip(self.parameters, x, strict=True)
        ]
        return rows + pulls


def _robust(error: float) -> float:
    """Square root of the soft absolute value, with the error's sign.

    >>> abs(_robust(0.001) - 0.001) < 1e-6, round(_robust(1.0), 2)
    (True, 0.43)
    """
    loss = 2 * _ROBUST**2 * (math.sqrt(1 + (error / _ROBUST) ** 2) - 1)
    return math.copysign(math.sqrt(loss), error)


def fit(
    samples: Sequence[Sample],
    parameters: Sequence[Parameter],
    start: Values | None = None,
    evaluations: int = _EVALUATIONS,
) -> Fit:
    """Fit parameters to samples.

    Args:
        start: where to begin; the priors if not given.
        evaluations: of all residuals, at most.
    """
    from scipy.optimize import least_squares

    wanted = [p for p in parameters if any(p.owner in sample.owners for sample in samples)]
    problem = _Problem(samples, wanted)
    first = [min(max((start or {}).get(p.key, p.prior), p.low), p.high) for p in wanted]
    result = least_squares(
        problem.residuals,
        first,
        bounds=([p.low for p in wanted], [p.high for p in wanted]),
        x_scale=[p.width for p in wanted],
        diff_step=[_STEP] * len(wanted),
        max_nfev=evaluations,
    )
    errors: dict[str, list[float]] = defaultdict(list)
    for sample, error in zip(samples, problem.log_errors(result.x), strict=True):
        errors[sample.source].append(100 * abs(math.expm1(error)))
    return Fit(
        values={p.key: float(v) for p, v in zip(wanted, result.x, strict=True)},
        errors={source: tuple(rows) for source, rows in errors.items()},
    )


def fit_all(
    samples: Sequence[Sample], parameters: Sequence[Parameter], start: Values | None = None
) -> Fit:
    """Fit each set of samples that share constants by itself, and put the results together.

    Args:
        start: as ``fit`` takes it.
    """
    fits = [fit(part, parameters, start) for part in components(samples)]
    errors: dict[str, tuple[float, ...]] = defaultdict(tuple)
    for each in fits:
        for source, rows in each.errors.items():
            errors[source] += rows
    values = {key: value for each in fits for key, value in each.values.items()}
    return Fit(values=values, errors=dict(errors))


def components(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Samples that share constants, directly or through others, are fitted together."""
    groups: list[tuple[set[str], list[Sample]]] = []
    for sample in samples:
        if not sample.owners:
            continue
        owners, together = set(sample.owners), [sample]
        rest = []
        for known, members in groups:
            if known & owners:
                owners |= known
                together = members + together
            else:
                rest.append((known, members))
        groups = [*rest, (owners, together)]
    return [members for _, members in groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Rows predicted by a fit that has not seen them.

    Args:
        name: source or model that was left out.
        seen_pct, unseen_pct: their mean absolute error in the whole fit, and left out.
    """

    name: str
    rows: int
    seen_pct: float
    unseen_pct: float


def cross_validate(
    samples: Sequence[Sample], parameters: Sequence[Parameter], whole: Fit, by: str
) -> list[HeldOut]:
    """Leave out whole sources, or whole models, a tenth of them at a time.

    Args:
        by: ``source`` or ``model``.
    """
    names = sorted({str(getattr(sample, by)) for sample in samples})
    folds = min(_FOLDS, len(names))
    priors = {p.key: p.prior for p in parameters}
    found = []
    for fold in range(folds):
        left = names[fold::folds]
        rest = [sample for sample in samples if getattr(sample, by) not in left]
        if not rest:
            continue
        again = fit(rest, parameters, start=whole.values, evaluations=_AGAIN)
        unseen = {**priors, **again.values}
        for name in left:
            out = [sample for sample in samples if getattr(sample, by) == name]
            found.append(
                HeldOut(
                    name=name,
                    rows=len(out),
                    seen_pct=_mape(out, whole.values),
                    unseen_pct=_mape(out, unseen),
                )
            )
    return sorted(found, key=lambda held: held.name)


def _mape(samples: Sequence[Sample], values: Values) -> float:
    predictor = Predictor()
    return statistics.fmean(
        100 * abs(predictor.predict(with_values(s.job, values)).iteration_time_s / s.measured_s - 1)
        for s in samples
    )
