"""What running out of memory costs: a failed start, and a run of the next plan."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_megatron.planner.choice import with_retries

CHANCES = st.floats(0.0, 0.99).map(lambda chance: round(chance, 2))
PLANS = st.lists(st.tuples(st.floats(1.0, 2.0), CHANCES), min_size=1, max_size=5)


def mean_of(order: tuple[tuple[float, float], ...], failed_s: float) -> float:
    """The mean step where plans are started in this order, each safer than the one before.

    One error moves all peaks: a plan fails with its chance, whatever failed before it.
    """
    total, reached = 0.0, 1.0
    for step_s, chance in order:
        total += (reached - chance) * step_s + chance * failed_s
        reached = chance
    last_s, chance = order[-1]
    return total + chance * last_s / (1 - chance)


@given(PLANS, st.floats(0.0, 20.0))
def test_each_plan_is_followed_by_the_best_order_of_safer_ones(
    plans: list[tuple[float, float]], percent: float
) -> None:
    steps, chances = zip(*plans, strict=True)
    failed_s = percent / 100 * min(steps)
    least = min(chances)
    values = with_retries(steps, chances, percent)
    for (step_s, chance), value in zip(plans, values, strict=True):
        safer = sorted({plan for plan in plans if plan[1] < chance}, key=lambda plan: -plan[1])
        orders = [
            ((step_s, chance), *rest)
            for size in range(len(safer) + 1)
            for rest in combinations(safer, size)
            if len({plan[1] for plan in rest}) == size
        ]
        # Only the surest plans are started again and again; of those as sure the fastest.
        ending = [order for order in orders if order[-1][1] == least]
        found = [mean_of(order, failed_s) for order in ending]
        if chance == least:
            fastest_s = min(s for s, c in plans if c == least)
            found = [(1 - chance) * step_s + chance * (failed_s + fastest_s / (1 - chance))]
        assert value == pytest.approx(min(found))
        assert value >= min(steps) - 1e-12


def test_two_per_cent_of_risk_are_worth_three_per_cent_of_time() -> None:
    risky, safe = with_retries([1.0, 1.03], [0.02, 0.0], 4.0)
    assert risky == pytest.approx(1.0 + 0.02 * (0.04 + 0.03))
    assert risky < safe


def test_a_plan_that_hardly_starts_is_worth_no_little_gain() -> None:
    risky, safe = with_retries([1.0, 1.01], [0.6, 0.0], 4.0)
    assert risky > safe


def test_a_failed_start_costs_what_is_said() -> None:
    dear, cheap = (with_retries([1.0, 1.03], [0.5, 0.0], cost)[0] for cost in (20.0, 0.0))
    assert dear - cheap == pytest.approx(0.5 * 0.2)


def test_where_nothing_starts_no_plan_has_a_mean() -> None:
    assert with_retries([1.0, 2.0], [1.0, 1.0], 4.0) == [math.inf, math.inf]
