"""Errors and ranking quality of predictions, and what choosing by them comes to.

Choices are judged on jobs that were measured in at least two layouts, as if these were all plans
that a search found: the nominal choice has the shortest predicted step, the default one is the
planner's.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from nest_megatron.catalogue_files import default_setting
from nest_megatron.cost_model import distributions
from nest_megatron.cost_model.shortlist import shortlist
from nest_megatron.cost_model.uncertainty import probability_faster
from nest_megatron.layout.estimate import SURE
from nest_megatron.plain import frozen
from nest_megatron.planner.choice import Candidate, allowed, ties
from nest_megatron.units import Seconds

#: Two layouts of one job whose measured times differ by no more are as fast as each other: the same
#: layout run twice differs by 1 to 2 % where sources print both.
NOISE = 0.02


@frozen
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


@frozen
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
        limit = distributions.quantile(0.5 + level / 2.0)
        return 100.0 * sum(abs(error) <= limit for error in errors) / len(errors)

    return Coverage(runs=len(errors), within_50_pct=within(0.5), within_90_pct=within(0.9))


@frozen
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
    predicted, measured = zip(*pairs, strict=True)
    chosen = measured[predicted.index(min(predicted))]
    order = [
        (guess - other_guess) * (time - other_time) > 0
        for (guess, time), (other_guess, other_time) in itertools.combinations(pairs, 2)
        if max(time, other_time) > (1 + NOISE) * min(time, other_time)  # else it is a tie
    ]
    return RankScores(
        spearman=spearman(predicted, measured),
        regret_pct=100.0 * (chosen / min(measured) - 1.0),
        pairs=len(order),
        pairs_in_order=sum(order),
    )


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Rank correlation, ties sharing their mean rank; ``None`` where one side is constant."""
    if len(set(left)) < 2 or len(set(right)) < 2:
        return None
    return statistics.correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, each) + bisect_right(ordered, each) + 1) / 2 for each in values]


@frozen
class ChoiceScores:
    """What choosing one of the measured layouts of a job comes to.

    Args:
        nominal_regret_pct, default_regret_pct: how much slower than the fastest one the choice ran.
        started_regret_pct: of the default, had it known that all of them start; every measured
            layout did, so that pricing the risk of memory can only cost here.
        shortlist_size: layouts on the shortlist.
        shortlist_holds: whether one of them ran as fast as the fastest one, but for noise.
        sure: pairs of layouts of which one is predicted to be faster with a chance of 9 in 10.
        sure_right: those of them that were measured in that order, or as fast as each other.
    """

    nominal_regret_pct: float
    default_regret_pct: float
    started_regret_pct: float
    shortlist_size: int
    shortlist_holds: bool
    sure: int
    sure_right: int


def choice_scores(layouts: Sequence[tuple[Candidate, Seconds]]) -> ChoiceScores:
    """Judge the choices among layouts of one job, each with its measured step."""
    candidates, measured = zip(*layouts, strict=True)
    starting = [dataclasses.replace(each, out_of_memory=0.0) for each in candidates]
    best = min(measured)

    def regret_pct(chosen: Candidate) -> float:
        place = [each.solved for each in candidates].index(chosen.solved)
        return float(100.0 * (measured[place] / best - 1.0))

    steps = [each.step for each in candidates]
    found = shortlist(steps, SURE)
    runs = itertools.permutations(zip(steps, measured, strict=True), 2)
    sure = [  # of each pair whose order is sure, whether it was measured so
        first <= (1 + NOISE) * second
        for (a, first), (b, second) in runs
        if probability_faster(a, b) >= SURE
    ]
    return ChoiceScores(
        nominal_regret_pct=regret_pct(min(candidates, key=lambda each: each.step.median_s)),
        default_regret_pct=regret_pct(_default(candidates)),
        started_regret_pct=regret_pct(_default(starting)),
        shortlist_size=len(found.plans),
        shortlist_holds=min(measured[plan] for plan in found.plans) <= (1 + NOISE) * best,
        sure=len(sure),
        sure_right=sum(sure),
    )


def _default(candidates: Sequence[Candidate]) -> Candidate:
    chance, tie = map(default_setting, ("memory.max_oom_chance", "search.tie_percent"))
    return min(ties(allowed(candidates, chance), tie), key=lambda each: each.complexity)


@frozen
class ChoiceSummary:
    """Choices and shortlists of several jobs: means, and shares in per cent.

    Args:
        sure_right_pct: of all pairs whose order is sure; ``None`` without one.
    """

    jobs: int
    nominal_regret_pct: float
    default_regret_pct: float
    started_regret_pct: float
    shortlist_holds_pct: float
    shortlist_size: float
    sure_pairs: int
    sure_right_pct: float | None


def choice_summary(scores: Sequence[ChoiceScores]) -> ChoiceSummary | None:
    """The means over jobs; ``None`` without jobs."""
    if not scores:
        return None
    names = ("nominal_regret_pct", "default_regret_pct", "started_regret_pct", "shortlist_size")
    means = {name: statistics.fmean(getattr(each, name) for each in scores) for name in names}
    sure, right = (sum(getattr(each, name) for each in scores) for name in ("sure", "sure_right"))
    return ChoiceSummary(
        **means,
        jobs=len(scores),
        shortlist_holds_pct=100.0 * statistics.fmean(each.shortlist_holds for each in scores),
        sure_pairs=sure,
        sure_right_pct=100.0 * right / sure if sure else None,
    )


@frozen
class Certainty:
    """Whether intervals of some runs hold, and what choosing among their layouts comes to."""

    coverage: Coverage | None
    choice: ChoiceSummary | None
