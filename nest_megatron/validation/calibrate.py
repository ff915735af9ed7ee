"""Fit the cost model's constants to measured runs, and tell how well they carry over.

Bounded least squares on the logarithm of predicted over measured time, every source weighing the
square root of its rows, each constant pulled to its prior by its width. Cross-validation leaves out
each source and each model in turn: what the other rows say is one Gauss-Newton step away from the
whole fit, whose Jacobian already has every row, so that no run is priced again to find it.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from nest_megatron.validation.job import RowJob
from nest_megatron.validation.predict import Predictor

#: Residuals beyond this (in logarithms) count less and less: some rows are misprints.
_ROBUST = 0.1
#: What a constant one standard error off its prior costs, as a row's error would.
_PULL = 0.04
#: Rows of one source that are fitted; more of them teach nothing new and cost time.
_MOST_ROWS = 120
_STEP = 0.02
_EVALUATIONS = 8


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPart:
    """A fit of samples that share constants, and how its residuals answer to these.

    Args:
        log_errors: logarithm of predicted over measured time, a number for each sample.
        residuals: what was minimised, an array of shape (samples + parameters,), pulls last.
        jacobian: its derivatives, an array of shape (samples + parameters, parameters).
    """

    samples: tuple[Sample, ...]
    parameters: tuple[Parameter, ...]
    values: tuple[float, ...]
    log_errors: tuple[float, ...]
    residuals: Any
    jacobian: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted constants and what is left."""

    parts: tuple[FittedPart, ...]

    @property
    def values(self) -> Values:
        """The constants, by parameter key."""
        return {
            p.key: value
            for part in self.parts
            for p, value in zip(part.parameters, part.values, strict=True)
        }

    @property
    def errors(self) -> Mapping[str, Sequence[float]]:
        """Absolute errors by source, per cent, of the rows that were fitted."""
        found: dict[str, list[float]] = defaultdict(list)
        for part in self.parts:
            for sample, error in zip(part.samples, part.log_errors, strict=True):
                found[sample.source].append(_absolute_pct(error))
        return found

    def mape_pct(self, source: str | None = None) -> float:
        """Mean absolute error of one source, or of all rows."""
        rows = self.errors[source] if source else [e for each in self.errors.values() for e in each]
        return statistics.fmean(rows)


def _absolute_pct(log_error: float) -> float:
    return 100 * abs(math.expm1(log_error))


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


def fit_constants(
    samples: Sequence[Sample],
    parameters: Sequence[Parameter],
    start: Values | None = None,
    evaluations: int = _EVALUATIONS,
) -> Fit:
    """Fit parameters to samples, each set of samples that share constants by itself.

    Args:
        start: where to begin; the priors if not given.
        evaluations: of all residuals, at most.
    """
    parts = [_fit_part(part, parameters, start or {}, evaluations) for part in components(samples)]
    return Fit(parts=tuple(parts))


def _fit_part(
    samples: Sequence[Sample], parameters: Sequence[Parameter], start: Values, evaluations: int
) -> FittedPart:
    from scipy.optimize import least_squares

    wanted = [p for p in parameters if any(p.owner in sample.owners for sample in samples)]
    problem = _Problem(samples, wanted)
    result = least_squares(
        problem.residuals,
        [min(max(start.get(p.key, p.prior), p.low), p.high) for p in wanted],
        bounds=([p.low for p in wanted], [p.high for p in wanted]),
        x_scale=[p.width for p in wanted],
        diff_step=[_STEP] * len(wanted),
        max_nfev=evaluations,
    )
    return FittedPart(
        samples=tuple(samples),
        parameters=tuple(wanted),
        values=tuple(map(float, result.x)),
        log_errors=tuple(problem.log_errors(result.x)),
        residuals=result.fun,
        jacobian=result.jac,
    )


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
class LeftOut:
    """A run predicted by a fit that has not seen its source, or its model.

    Args:
        seen, unseen: logarithm of predicted over measured time in the whole fit, and left out.
    """

    sample: Sample
    seen: float
    unseen: float


def cross_validate(fit: Fit, by: str) -> list[LeftOut]:
    """Leave out each source, or each model, and predict its runs with what the others say.

    Args:
        by: ``source`` or ``model``.
    """
    return [
        each
        for part in fit.parts
        for name in sorted({str(getattr(sample, by)) for sample in part.samples})
        for each in _leave_out(part, [getattr(sample, by) == name for sample in part.samples])
    ]


def constants_without(fit: Fit, by: str) -> dict[str, dict[str, float]]:
    """The constants of a fit to all others, by what is left out and by parameter key.

    What leaving out changes is the difference of two steps, with all samples and without some: a
    fit that has not converged to the last digit moves without leaving out anything.

    Args:
        by: ``source`` or ``model``.
    """
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for part in fit.parts:
        whole = _without(part, [False] * len(part.samples))
        for name in sorted({str(getattr(sample, by)) for sample in part.samples}):
            rest = _without(part, [getattr(sample, by) == name for sample in part.samples])
            rows = zip(part.parameters, part.values, rest, whole, strict=True)
            found[name] |= {
                p.key: min(max(value + after - before, p.low), p.high)
                for p, value, after, before in rows
            }
    return dict(found)


def _leave_out(part: FittedPart, out: Sequence[bool]) -> Iterator[LeftOut]:
    values = _without(part, out)
    keyed = {p.key: value for p, value in zip(part.parameters, values, strict=True)}
    predictor = Predictor()
    clusters: dict[int, Cluster] = {}
    for sample, seen, is_out in zip(part.samples, part.log_errors, out, strict=True):
        if is_out:
            predicted = predictor.predict(with_values(sample.job, keyed, clusters))
            unseen = math.log(predicted.iteration_time_s / sample.measured_s)
            yield LeftOut(sample=sample, seen=seen, unseen=unseen)


def _without(part: FittedPart, out: Sequence[bool]) -> list[float]:
    """The constants that the other samples give: one bounded Gauss-Newton step."""
    from scipy.optimize import lsq_linear

    pairs = list(zip(part.parameters, part.values, strict=True))
    kept = [not each for each in out] + [True] * len(pairs)
    # a margin, since a constant that sits at its bound leaves no space between the two
    step = lsq_linear(
        part.jacobian[kept] * [p.width for p in part.parameters],
        -part.residuals[kept],
        bounds=(
            [(p.low - value) / p.width - 1e-9 for p, value in pairs],
            [(p.high - value) / p.width + 1e-9 for p, value in pairs],
        ),
    )
    return [
        min(max(value + p.width * float(move), p.low), p.high)
        for (p, value), move in zip(pairs, step.x, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Mean absolute errors of a source or model, per cent, in the whole fit and left out."""

    name: str
    rows: int
    seen_pct: float
    unseen_pct: float


def by_name(left_out: Iterable[LeftOut], by: str) -> list[HeldOut]:
    """Errors of what was left out, a line for each source or model."""
    found: dict[str, list[LeftOut]] = defaultdict(list)
    for each in left_out:
        found[getattr(each.sample, by)].append(each)
    return [
        HeldOut(
            name=name,
            rows=len(rows),
            seen_pct=statistics.fmean(_absolute_pct(row.seen) for row in rows),
            unseen_pct=statistics.fmean(_absolute_pct(row.unseen) for row in rows),
        )
        for name, rows in sorted(found.items())
    ]
