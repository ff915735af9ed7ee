"""Predictive distributions: intervals, pairs of plans, shortlists."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.distributions import DEGREES_OF_FREEDOM, quantile
from nest_megatron.cost_model.features import (
    Feature,
    Level,
    Runs,
    confidence,
    kind_words,
    runs_like,
)
from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.cost_model.shortlist import AS_FAST, LAYERS, NETWORK, measurements, shortlist
from nest_megatron.cost_model.uncertainty import (
    DEVIATION,
    Predictive,
    difference_deviation,
    price_effects,
    probability_faster,
    shipped_scales,
)

H100 = "H100-SXM-80GB"


def plan_of(
    median_s: float,
    shares: dict[Mechanism, float],
    point: tuple[float, ...] = (0.0,),
    features: frozenset[Feature] = frozenset(),
) -> Predictive:
    """A plan with given shares, under the shipped scales."""
    return Predictive(
        median_s=median_s,
        shares=shares,
        features=features,
        point=point,
        scales=shipped_scales(),
    )


@pytest.mark.parametrize("share", [0.001, 0.05, 0.25, 0.5, 0.75, 0.95, 0.999])
def test_the_distribution_is_student_s(share: float) -> None:
    exact = stats.t(DEGREES_OF_FREEDOM)
    assert quantile(share) == pytest.approx(exact.ppf(share), abs=1e-12)


def test_an_interval_holds_its_prediction_and_grows_with_its_level() -> None:
    plan = plan_of(10.0, {Mechanism.GEMM: 1.0})
    narrow, wide = plan.interval(0.5), plan.interval(0.9)
    assert wide[0] < narrow[0] < 10.0 < narrow[1] < wide[1]
    assert narrow[0] * narrow[1] == pytest.approx(100.0)
    assert plan.expected_s > plan.median_s


def test_what_plans_share_cancels_in_their_difference() -> None:
    shares = {Mechanism.EXPERT: 0.5, Mechanism.GEMM: 0.5}
    alike = plan_of(10.0, shares), plan_of(10.2, shares)
    assert difference_deviation(*alike) == 0.0
    assert probability_faster(*alike) == 1.0
    assert probability_faster(*reversed(alike)) == 0.0
    other = plan_of(10.2, {Mechanism.GEMM: 1.0})
    assert DEVIATION * alike[0].scale > difference_deviation(alike[0], other) > 0.0
    assert 0.5 < probability_faster(alike[0], other) < 0.6


def test_layouts_that_lie_apart_differ_more() -> None:
    shares = {Mechanism.GEMM: 1.0}
    first, near, far = (plan_of(1.0, shares, point=(at,)) for at in (0.0, 1.0, 9.0))
    assert difference_deviation(first, near) < difference_deviation(first, far)


def test_probability_faster_is_what_draws_give() -> None:
    a = plan_of(10.0, {Mechanism.GEMM: 0.7, Mechanism.EXPERT: 0.3}, point=(0.0,))
    b = plan_of(10.3, {Mechanism.GEMM: 0.9, Mechanism.EXPERT: 0.1}, point=(1.0,))
    faster, slower = shortlist((a, b)).chances
    by = 1 - math.exp(-AS_FAST)
    assert faster == pytest.approx(1 - probability_faster(b, a, by), abs=0.03)
    assert slower == pytest.approx(1 - probability_faster(a, b, by), abs=0.03)


def test_probability_of_a_gain() -> None:
    plan, other = (plan_of(s, {Mechanism.GEMM: 1.0}, point=(s,)) for s in (9.0, 10.0))
    chances = [probability_faster(plan, other, by) for by in (0.0, 0.05, 0.1, 0.2)]
    assert chances == sorted(chances, reverse=True)
    assert chances[2] == pytest.approx(0.5)


def test_a_shortlist_is_the_fewest_plans_that_reach_its_level() -> None:
    shares = {Mechanism.GEMM: 1.0}
    plans = [plan_of(10.0 + 0.05 * i, shares, point=(3.0 * i,)) for i in range(6)]
    found = shortlist(plans, level=0.9)
    assert found.chance >= 0.9
    assert shortlist(plans, level=0.9) == found
    slow = [plans[0], plan_of(40.0, shares, point=(3.0,))]
    assert shortlist(slow).plans == (0,)


def test_plans_that_no_measurement_tells_apart_are_one_entry() -> None:
    """Six plans that spend their time alike and lie near each other; 0.1 % lies between them."""
    shares = {Mechanism.GEMM: 0.8, Mechanism.TENSOR: 0.2}
    alike = [plan_of(10.0 + 0.01 * i, shares) for i in range(6)]
    found = shortlist(alike)
    assert found.plans == (0,)
    assert found.chance == 1.0
    assert min(found.chances) == 1.0
    apart = plan_of(10.2, {Mechanism.GEMM: 0.5, Mechanism.EXPERT: 0.5}, point=(4.0,))
    assert set(shortlist([*alike, apart]).plans) == {0, 6}


def test_a_profile_of_what_tells_plans_apart_is_worth_most() -> None:
    heavy = plan_of(10.0, {Mechanism.EXPERT: 0.4, Mechanism.GEMM: 0.6})
    light = plan_of(10.1, {Mechanism.GEMM: 1.0})
    parts = [frozenset({Mechanism.GEMM}), frozenset({Mechanism.EXPERT}), LAYERS | NETWORK]
    gains = {m.profile: m.gain_percent for m in measurements((heavy, light), profiles=parts)}
    assert gains[2] >= gains[1] > gains.get(0, 0.0)
    assert measurements((heavy,)) == ()


def test_what_a_profile_of_several_prices_tells_is_that_of_each() -> None:
    """Errors of prices do not depend on each other, so that variances add up."""
    plan = plan_of(1.0, {Mechanism.ATTENTION: 0.4, Mechanism.GROUPED_GEMM: 0.6})
    both = price_effects(plan, [Mechanism.ATTENTION, Mechanism.GROUPED_GEMM], 0.03)
    each = [price_effects(plan, [one], 0.03)[0] for one in plan.shares]
    assert both == pytest.approx(each)
    assert price_effects(plan, [Mechanism.EXPERT], 0.0) == pytest.approx([0.0])
    (exact,) = price_effects(plan, [Mechanism.ATTENTION], 0.0)
    assert exact == pytest.approx(0.4 * DEVIATION * plan.scales.mechanisms[Mechanism.ATTENTION])
    assert 0 < each[0] < exact


def test_confidence_counts_runs_like_the_plan() -> None:
    across = frozenset({Feature.EXPERTS, Feature.EXPERT_NETWORK})

    def runs(features: frozenset[Feature], number: int, error: float, **other: str) -> Runs:
        kind = {"precision": "bf16", "device": "Hopper", **other}
        return Runs(features=features, runs=number, error_pct=error, **kind)

    evidence = (
        runs(frozenset(), 60, 5.0),
        runs(frozenset({Feature.CONTEXT}), 4, 10.0),
        runs(across, 3, 40.0),
        runs(frozenset(), 30, 1.0, device="Blackwell"),
        runs(frozenset({Feature.FP8}), 40, 5.0, precision="fp8"),
    )
    plain = runs_like(evidence, frozenset(), Precision.BF16, H100)
    assert (confidence(plain), plain.runs) == (Level.HIGH, 64)
    assert runs_like(evidence, frozenset(), Precision.FP16, H100).runs == 64
    assert runs_like(evidence, frozenset(), Precision.BF16, "GB200-186GB").runs == 30
    assert runs_like(evidence, frozenset(), Precision.BF16, "A100-SXM-80GB").runs == 0
    quantized = frozenset({Feature.FP8})
    assert runs_like(evidence, quantized, Precision.FP8, H100).runs == 40
    assert runs_like(evidence, quantized, Precision.NVFP4, H100).runs == 0
    experts = runs_like(evidence, across, Precision.BF16, H100)
    assert (confidence(experts), experts.runs, round(experts.error_pct)) == (Level.LOW, 3, 40)
    assert kind_words(frozenset(), Precision.BF16, H100) == "dense bf16 on Hopper"
    assert kind_words(across, Precision.BF16, H100) == "experts bf16 on Hopper, EP across nodes"
    lora = runs_like(evidence, frozenset({Feature.LORA}), Precision.BF16, H100)
    assert (confidence(lora), lora.runs) == (Level.LOW, 0)
