"""Errors and ranking quality of predictions."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nest_megatron.cost_model import uncertainty

#: Two layouts of one job whose measured times differ by no more are as fast as each other: the same
#: layout run twice differs by 1 to 2 % where sources print both.
NOISE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorScores:
    """Relative errors of predictions, in per cent; ``None`` where nothing was predicted.

    Args:
        mape_pct: mean of the absolute errors.
        median_signed_pct: above 0 where predictions are too large.
        p90_abs_pct: nine of ten errors are smaller.
    """

    mape_pct: float | None = None
    median_signed_pct: float | None = None
    p90_abs_pct: float | None = None


def error_scores(pairs: Sequence[tuple[float, float]]) -> ErrorScores:
    """Score pairs of predicted and measured figures.

    >>> error_scores([(11.0, 10.0), (9.0, 10.0), (10.0, 10.0)]).median_signed_pct
    0.0
    """
    if not pairs:
        return ErrorScores()
    errors = [100.0 * (predicted / measured - 1.0) for predicted, measured in pairs]
    sizes = sorted(map(abs, errors))
    return ErrorScores(
        mape_pct=statistics.fmean(sizes),
        median_signed_pct=statistics.median(errors),
        p90_abs_pct=quantile(sizes, 0.9),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted figures, between neighbours in proportion.

    >>> quantile([0.0, 1.0, 2.0], 0.75)
    1.5
    """
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Share of runs inside their intervals, per cent."""

    runs: int
    within_50_pct: float
    within_90_pct: float


def coverage_of(errors: Sequence[float]) -> Coverage:
    """Coverage by errors of logarithms over their scales (``Predictive.scale``).

    >>> coverage_of([0.1, -0.2, 1.0, -5.0])
    Coverage(runs=4, within_50_pct=50.0, within_90_pct=75.0)
    """

    def within(level: float) -> float:
        limit = uncertainty.quantile(0.5 + level / 2.0)
        return 100.0 * sum(abs(error) <= limit for error in errors) / len(errors)

    return Coverage(runs=len(errors), within_50_pct=within(0.5), within_90_pct=within(0.9))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankScores:
    """How well predictions rank the configurations of one job.

    Args:
        spearman: rank correlation; ``None`` where one side is constant.
        regret_pct: how much slower the configuration that we would choose was than the best.
        pairs: pairs of configurations whose measured times differ by more than ``NOISE``.
        pairs_in_order: those of them of which the faster one is predicted to be the faster.
    """

    spearman: float | None
    regret_pct: float
    pairs: int
    pairs_in_order: int


def rank_scores(pairs: Sequence[tuple[float, float]]) -> RankScores:
    """Score at least two pairs of predicted and measured times of one job.

    Of several configurations predicted alike, the first counts as chosen.

    >>> rank_scores([(1.0, 10.0), (2.0, 8.0), (3.0, 12.0)])
    RankScores(spearman=0.5, regret_pct=25.0, pairs=3, pairs_in_order=2)
    """
    predicted = [pair[0] for pair in pairs]
    measured = [pair[1] for pair in pairs]
    chosen = measured[predicted.index(min(predicted))]
    order = list(_in_order(pairs))
    return RankScores(
        spearman=spearman(predicted, measured),
        regret_pct=100.0 * (chosen / min(measured) - 1.0),
        pairs=len(order),
        pairs_in_order=sum(order),
    )


def _in_order(pairs: Sequence[tuple[float, float]]) -> Iterable[bool]:
    """Of each pair that is not a tie by measurement, whether the prediction orders it alike."""
    for (predicted, measured), (other_predicted, other) in itertools.combinations(pairs, 2):
        if max(measured, other) > (1 + NOISE) * min(measured, other):
            yield (predicted - other_predicted) * (measured - other) > 0


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Rank correlation, ties sharing their mean rank; ``None`` where one side is constant."""
    if len(set(left)) < 2 or len(set(right)) < 2:
        return None
    from scipy.stats import rankdata

    return statistics.correlation(rankdata(left).tolist(), rankdata(right).tolist())
