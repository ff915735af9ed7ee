"""Errors and ranks against SciPy, and regret by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from nest_megatron.validation.outcome import RowOutcome
from nest_megatron.validation.report import scores
from nest_megatron.validation.rows import RowKind
from nest_megatron.validation.scores import (
    ErrorScores,
    error_scores,
    quantile,
    rank_scores,
    spearman,
)

FEW = st.integers(min_value=1, max_value=4).map(float)  # few values: many ties
MANY = st.floats(min_value=0.01, max_value=1e6)


@given(st.lists(st.tuples(FEW | MANY, FEW | MANY), min_size=2, max_size=30))
def test_the_rank_correlation_is_scipys(pairs: list[tuple[float, float]]) -> None:
    left, right = zip(*pairs, strict=True)
    found = spearman(left, right)
    if len(set(left)) == 1 or len(set(right)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(stats.spearmanr(left, right).statistic, abs=1e-9)


@given(st.lists(MANY, min_size=1, max_size=40), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_quantiles_are_scipys(values: list[float], share: float) -> None:
    expected = float(stats.mstats.mquantiles(values, [share], alphap=1, betap=1)[0])
    assert quantile(sorted(values), share) == pytest.approx(expected)


def test_errors_have_a_sign_and_a_size() -> None:
    found = error_scores([(12.0, 10.0), (9.0, 10.0), (10.0, 10.0), (5.0, 10.0)])
    assert found.mape_pct == pytest.approx((20 + 10 + 0 + 50) / 4)
    assert found.median_signed_pct == pytest.approx(-5)
    assert found.p90_abs_pct == pytest.approx(41)
    assert error_scores([]) == ErrorScores()


@given(st.lists(st.tuples(MANY, MANY), min_size=2, max_size=20))
def test_regret_is_what_our_choice_costs(pairs: list[tuple[float, float]]) -> None:
    chosen = min(pairs, key=lambda pair: pair[0])[1]
    best = min(measured for _, measured in pairs)
    found = rank_scores(pairs).regret_pct
    assert found == pytest.approx(100 * (chosen - best) / best, rel=1e-9, abs=1e-6)
    assert found >= 0


def test_of_layouts_predicted_alike_the_first_is_chosen() -> None:
    assert rank_scores([(1.0, 3.0), (1.0, 2.0)]).regret_pct == pytest.approx(50)


def _outcome(predicted: float | None, measured: float, **cells: str) -> RowOutcome:
    row = {"source": "one", "model": "m", "gpu": "H100", **cells}
    if predicted is None:
        return RowOutcome(row=row, refused="unknown GPU")
    return RowOutcome(row=row, predicted_s=predicted, measured_s=measured, fits=True)


def test_scores_rank_within_jobs_and_count_refusals() -> None:
    rows = [
        _outcome(1.0, 2.0, gbs="8", tp="1"),
        _outcome(2.0, 1.0, gbs="8", tp="2"),
        _outcome(1.0, 1.0, gbs="16", tp="1"),
        _outcome(2.0, 4.0, gbs="16", tp="2"),
        _outcome(3.0, 3.0, gbs="32"),  # alone: nothing to rank
        _outcome(None, 1.0, gbs="8"),
    ]
    found = scores(RowKind.THROUGHPUT, rows)
    assert (found.rows, found.predicted, dict(found.refused)) == (6, 5, {"unknown GPU": 1})
    assert [group.spearman for group in found.groups] == pytest.approx([-1.0, 1.0])
    assert found.spearman_mean == pytest.approx(0.0)
    assert found.regret_mean_pct == pytest.approx(50)
    assert found.regret_max_pct == pytest.approx(100)
    assert found.pairs_in_order_pct == pytest.approx(50)
    assert found.ran == (5, 0)


def test_runs_of_one_layout_count_once_and_other_shapes_are_other_jobs() -> None:
    rows = [
        _outcome(1.0, 1.0, tp="1"),
        _outcome(1.0, 1.5, tp="1"),  # the same layout, on a slower day
        _outcome(1.2, 1.1, tp="2"),
        _outcome(0.5, 9.0, tp="4", layers="8"),  # another model
    ]
    (found,) = scores(RowKind.THROUGHPUT, rows).groups
    assert (found.regret_pct, found.pairs, found.pairs_in_order) == (0.0, 1, 1)


@pytest.mark.parametrize(("framework", "groups"), [("NeMo 24.07", 1), ("NeMo AutoModel", 0)])
def test_pages_of_two_quarters_are_two_releases(framework: str, groups: int) -> None:
    """Unless the framework's name says which release it is."""
    rows = [
        _outcome(1.0, 1.0, tp="1", commit="a1", framework=framework),
        _outcome(1.2, 1.1, tp="2", commit="b2", framework=framework),
    ]
    assert len(scores(RowKind.THROUGHPUT, rows).groups) == groups


def test_ties_by_noise_are_no_pairs_and_equal_predictions_are_wrong() -> None:
    assert rank_scores([(1.0, 1.0), (2.0, 1.019)]).pairs == 0
    found = rank_scores([(1.0, 1.0), (1.0, 1.03), (0.9, 1.06)])
    assert (found.pairs, found.pairs_in_order) == (3, 0)


def test_an_estimate_of_the_author_is_no_run_that_ran() -> None:
    rows = [_outcome(1.0, 1.0, outcome=text) for text in ("", "ok", "blank", "estimate")]
    assert scores(RowKind.THROUGHPUT, rows).ran == (2, 0)


def test_scores_of_nothing_are_empty() -> None:
    found = scores(RowKind.THROUGHPUT, [])
    assert found.errors == ErrorScores()
    assert found.spearman_mean is found.regret_mean_pct is found.regret_max_pct is None


def test_the_mean_is_that_of_the_sizes() -> None:
    draw = random.Random(1)
    pairs = [(draw.uniform(1, 2), draw.uniform(1, 2)) for _ in range(100)]
    found = error_scores(pairs)
    assert found.mape_pct is not None
    assert math.isclose(found.mape_pct, statistics.fmean(100 * abs(p / m - 1) for p, m in pairs))
