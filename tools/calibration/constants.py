"""Fit the cost model's constants to measured runs, and tell how well they carry over.

Bounded least squares on the logarithm of predicted over measured time, every source weighing the
square root of its rows, each constant pulled to its prior by its width. Cross-validation leaves out
each source and each model in turn: what the other rows say is one Gauss-Newton step away from the
whole fit, whose Jacobian already has every row, so that no run is priced again to find it.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.targets import EXECUTION
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.validation.assess import Predictor, job_time
from nest_megatron.validation.job import RowJob, job_of
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.rows import (
    RefusedRowError,
    Row,
    RowFile,
    RowKind,
    require_measurement,
)
from tools.calibration.parameters import (
    AT_PRIOR,
    OWNERS,
    PARAMETERS,
    Parameter,
    Values,
    generations_of,
    with_values,
)

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
        owners = {self.job.target.fitted, *generations_of(self.job.cluster.accelerator.name)}
        if self.job.settings.traits.fp8_attention or any(map(_switches, self.job.grids)):
            owners.add(EXECUTION)
        return frozenset(owners & OWNERS)


def _switches(grid: PartialLayout) -> bool:
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
            require_measurement(row)
            job = job_of(row, book)
            measured = job_time(row, job, predictor.predict(job))
        except RefusedRowError:
            continue
        source, model = row.get("source", ""), row.get("model", "")
        yield Sample(source=source, model=model, job=job, measured_s=measured)


def _speaks_of_performance(row: Row) -> bool:
    """Whether a row can teach the cost model something.

    Not a run on other kernels, nor one whose batch is not stated.
    """
    if not row.get("gbs", "").strip() and not row.get("ga", "").strip():
        return False
    return not row.get("framework", "").lower().startswith(_FOREIGN)


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


#: Residuals beyond this (in logarithms) pull less the larger they are: some rows are misprints, and
#: some runs were slow for reasons that the model does not know.
_ROBUST = 0.1
#: What a constant one standard error off its prior costs, as a row's error would.
_PULL = 0.04
_STEP = 0.02
#: Steps of a fit, and of one that starts at the best values of nearly all.
_EVALUATIONS, _FOLLOWING = 8, 3


@dataclass(slots=True)
class LogErrors:
    """Logarithms of predicted over measured time, as a function of some variables.

    Args:
        samples: each with its ``measured_s``.
        variables: of each sample, those that its prediction depends on; it is predicted again only
            if one of them changed.
        pricing: from all variables to what predicts a sample in seconds.
    """

    samples: Sequence[Any]
    variables: Sequence[Sequence[int]]
    pricing: Callable[[Sequence[float]], Callable[[Any], float]]
    _known: list[dict[tuple[float, ...], float]] = field(default_factory=list)

    def __call__(self, x: Iterable[float]) -> list[float]:
        """Sample by sample."""
        values = [float(value) for value in x]
        predict = self.pricing(values)
        self._known = self._known or [{} for _ in self.samples]
        found = []
        for sample, mine, known in zip(self.samples, self.variables, self._known, strict=True):
            key = tuple(values[i] for i in mine)
            if key not in known:
                known[key] = math.log(predict(sample) / sample.measured_s)
            found.append(known[key])
        return found


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


def _pricing(
    parameters: Sequence[Parameter], x: Sequence[float], others: Values = AT_PRIOR
) -> Callable[[Sample], float]:
    """What predicts a sample under some constants; samples of one cluster share their prices."""
    values = {**others, **{p.key: value for p, value in zip(parameters, x, strict=True)}}
    predictor = Predictor()
    clusters: dict[int, Cluster] = {}
    return lambda sample: (
        predictor.predict(with_values(sample.job, values, clusters)).iteration_time_s
    )


def _robust(error: float) -> float:
    """Square root of Cauchy's loss, with the error's sign.

    >>> abs(_robust(0.001) - 0.001) < 1e-6, round(_robust(1.0), 2)
    (True, 0.21)
    """
    loss = _ROBUST**2 * math.log1p((error / _ROBUST) ** 2)
    return math.copysign(math.sqrt(loss), error)


def fit_constants(samples: Sequence[Sample], start: Values) -> Fit:
    """Fit all constants from ``start`` or their priors; samples that share none apart."""
    return Fit(parts=tuple(_fit_part(part, start) for part in components(samples)))


def _fit_part(
    samples: Sequence[Sample], start: Values, without: Parameter | None = None
) -> FittedPart:
    """A fit of samples that share constants; one may stay at its prior, which takes fewer steps."""
    from scipy.optimize import least_squares

    others, evaluations = AT_PRIOR, _EVALUATIONS
    if without is not None:
        others, evaluations = {**AT_PRIOR, without.key: without.prior}, _FOLLOWING
    wanted = [
        p
        for p in PARAMETERS
        if p is not without and any(p.owner in sample.owners for sample in samples)
    ]
    mine = [[i for i, p in enumerate(wanted) if p.owner in s.owners] for s in samples]
    log_errors = LogErrors(samples, mine, lambda x: _pricing(wanted, x, others))
    counts = Counter(sample.source for sample in samples)
    weights = [counts[sample.source] ** -0.25 for sample in samples]

    def residuals(x: Sequence[float]) -> list[float]:
        """Weighted robust errors, then the pull of the priors."""
        errors = zip(weights, log_errors(x), strict=True)
        pulls = zip(wanted, x, strict=True)
        return [
            *(weight * _robust(error) for weight, error in errors),
            *(_PULL * (value - p.prior) / p.width for p, value in pulls),
        ]

    result = least_squares(
        residuals,
        [p.bounded(start.get(p.key, p.prior)) for p in wanted],
        bounds=([p.low for p in wanted], [p.high for p in wanted]),
        x_scale=[p.width for p in wanted],
        diff_step=[_STEP] * len(wanted),
        max_nfev=evaluations,
    )
    return FittedPart(
        samples=tuple(samples),
        parameters=tuple(wanted),
        values=tuple(map(float, result.x)),
        log_errors=tuple(log_errors(result.x)),
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
    """A run by the whole fit and without its source or model: ``log(predicted / measured)``."""

    sample: Sample
    seen: float
    unseen: float


def cross_validate(fit: Fit, by: str) -> list[LeftOut]:
    """Leave out each ``source`` or ``model``, and predict its runs with what the others say."""
    return [
        each
        for part in fit.parts
        for _, out in _left_out_in_turn(part, by)
        for each in _predicted_without(part, out)
    ]


def _left_out_in_turn(part: FittedPart, by: str) -> Iterator[tuple[str, list[bool]]]:
    names = [str(getattr(sample, by)) for sample in part.samples]
    for name in sorted(set(names)):
        yield name, [each == name for each in names]


def _predicted_without(part: FittedPart, out: Sequence[bool]) -> Iterator[LeftOut]:
    predict = _pricing(part.parameters, _without(part, out))
    for sample, seen, is_out in zip(part.samples, part.log_errors, out, strict=True):
        if is_out:
            unseen = math.log(predict(sample) / sample.measured_s)
            yield LeftOut(sample=sample, seen=seen, unseen=unseen)


def constants_without(fit: Fit, by: str) -> dict[str, dict[str, float]]:
    """The constants of a fit to all others, by what is left out and by parameter key.

    What leaving out changes is the difference of two steps, with all samples and without some: a
    fit that has not converged to the last digit moves without leaving out anything.
    """
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for part in fit.parts:
        whole = _without(part, [False] * len(part.samples))
        for name, out in _left_out_in_turn(part, by):
            rows = zip(part.parameters, part.values, _without(part, out), whole, strict=True)
            found[name] |= {p.key: p.bounded(at + after - before) for p, at, after, before in rows}
    return dict(found)


def _without(part: FittedPart, out: Sequence[bool]) -> list[float]:
    """The constants that the other samples give: one bounded Gauss-Newton step."""
    from scipy.optimize import lsq_linear

    pairs = list(zip(part.parameters, part.values, strict=True))
    used = [not each for each in out] + [True] * len(pairs)
    # a margin, since a constant that sits at its bound leaves no space between the two
    step = lsq_linear(
        part.jacobian[used] * [p.width for p in part.parameters],
        -part.residuals[used],
        bounds=(
            [(p.low - value) / p.width - 1e-9 for p, value in pairs],
            [(p.high - value) / p.width + 1e-9 for p, value in pairs],
        ),
    )
    moves = zip(pairs, step.x, strict=True)
    return [p.bounded(value + p.width * float(move)) for (p, value), move in moves]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What speaks for a constant.

    Args:
        rows: runs whose prediction moves with it.
        loses_pct: points of their mean error that a fit loses with it at its prior, which the other
            constants follow; 0 without such runs.
    """

    rows: int
    loses_pct: float


def evidence(fit: Fit) -> dict[str, Evidence]:
    """What speaks for each constant that is fitted, by parameter key."""
    return {
        p.key: _evidence(part, place)
        for part in fit.parts
        for place, p in enumerate(part.parameters)
    }


def _evidence(part: FittedPart, place: int) -> Evidence:
    fitted = {p.key: at for p, at in zip(part.parameters, part.values, strict=True)}
    again = _fit_part(part.samples, fitted, without=part.parameters[place])
    slopes = part.jacobian[: len(part.samples), place]
    losses = [
        _absolute_pct(without) - _absolute_pct(error)
        for without, error, slope in zip(again.log_errors, part.log_errors, slopes, strict=True)
        if slope
    ]
    return Evidence(rows=len(losses), loses_pct=statistics.fmean(losses) if losses else 0.0)


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
