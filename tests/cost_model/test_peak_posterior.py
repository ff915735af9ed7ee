"""Peaks given runs: closed cases, a simulation of censored runs, and what they change."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from nest_megatron.cost_model.device_memory import out_of_memory_probability, peak_error
from nest_megatron.cost_model.peak_posterior import (
    OWN,
    LearnedPeakError,
    PeakPosterior,
    PeakRun,
    PredictedPeak,
    _shared,
)
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.units import GIB

LIMIT = 73 * GIB


def peak(static: int, activations: int, at: float = 0.0) -> PredictedPeak:
    """A plan whose peak is so many GiB."""
    terms = {"static": static * GIB, "activations": activations * GIB, "working": 5 * GIB}
    return PredictedPeak(terms=terms, point=(at,), error=peak_error(ZeroStage.OPTIMIZER))


PLAN = peak(30, 30)


def ran(gib: float, plan: PredictedPeak = PLAN, job: str = "a", **versions: str) -> PeakRun:
    return PeakRun(
        predicted=plan, bytes=round(gib * GIB), ran_out=False, job=job, versions=versions
    )


def ran_out(plan: PredictedPeak = PLAN, job: str = "a") -> PeakRun:
    return PeakRun(predicted=plan, bytes=LIMIT, ran_out=True, job=job)


def chance(runs: Sequence[PeakRun], plan: PredictedPeak = PLAN, job: str = "a") -> float:
    return out_of_memory_probability(plan.peak_bytes, LIMIT, PeakPosterior(runs).of(plan, job))


def test_without_runs_the_error_is_the_public_one() -> None:
    assert PeakPosterior().of(PLAN, "a") is peak_error(ZeroStage.OPTIMIZER)
    prior = LearnedPeakError(prior=peak_error(ZeroStage.OPTIMIZER), mean=0.0, deviation=1.0)
    for share in (0.05, 0.5, 0.95):
        assert prior.quantile(share) == pytest.approx(prior.prior.quantile(share))
        assert prior.at_most(prior.quantile(share)) == pytest.approx(share)


def test_a_measured_peak_is_what_the_next_run_of_the_plan_needs() -> None:
    for gib in (60.0, 65.0, 70.0):
        known = PeakPosterior([ran(gib)]).of(PLAN, "a")
        assert math.exp(known.quantile(0.5)) * 65 == pytest.approx(gib, rel=0.02)
        width = known.quantile(0.95) - known.quantile(0.05)
        before = peak_error(ZeroStage.OPTIMIZER)
        assert width < 0.5 * (before.quantile(0.95) - before.quantile(0.05))


def test_a_run_out_of_memory_rules_out_what_needs_as_much() -> None:
    near, less = peak(30, 34, 1.0), peak(30, 10, 2.0)
    runs = [ran_out()]
    assert chance([], PLAN) < 0.05 < 0.5 < chance(runs)
    assert chance(runs, near) > 0.7
    assert chance(runs, less) < 0.05
    assert chance([], PLAN, "b") < chance(runs, PLAN, "b") < chance(runs)


def test_a_peak_far_below_makes_others_less_likely_to_run_out() -> None:
    near = peak(30, 34, 1.0)
    assert chance([ran(55.0)], near) < 0.7 * chance([], near)


def test_plans_of_alike_terms_are_told_more_of() -> None:
    runs = [ran(72.0, peak(10, 50), "a")]
    alike, other = (PeakPosterior(runs).of(each, "b") for each in (peak(10, 50), peak(60, 0)))
    assert alike.quantile(0.5) > other.quantile(0.5) > peak_error(ZeroStage.OPTIMIZER).median


def test_a_changed_version_widens_what_is_known() -> None:
    runs = [ran(70.0, peak(30, 30, float(n)), f"{n}", driver="1") for n in range(4)]
    same, other = (PeakPosterior(runs, {"driver": v}).of(PLAN, "new") for v in ("1", "2"))
    assert isinstance(same, LearnedPeakError)
    assert isinstance(other, LearnedPeakError)
    assert same.deviation < other.deviation < 1.0
    assert same.mean > other.mean > 0.0


@pytest.mark.parametrize("censored", [1, 2, 3])
def test_moments_are_those_of_drawn_truncated_scores(censored: int) -> None:
    """Against a million draws of the joint scores, of which those above the bounds are kept."""
    plans = [peak(30, 30 - 2 * n, float(n)) for n in range(4)]
    runs = [ran(66.0, plans[3]), *map(ran_out, plans[:censored])]
    joint = np.array([[sum(_shared(r.predicted, "a", {}, each)) for each in runs] for r in runs])
    joint += OWN * np.eye(len(runs))
    first, bounds = (
        runs[0].predicted.score(runs[0].bytes),
        np.array([run.predicted.score(run.bytes) for run in runs[1:]]),
    )
    gain = joint[1:, 0] / joint[0, 0]
    left = joint[1:, 1:] - np.outer(gain, joint[0, 1:])
    draws = np.random.default_rng(0).multivariate_normal(gain * first, left, 1_000_000)
    kept = draws[(draws > bounds).all(axis=1)]
    assert len(kept) > 300
    whole = np.column_stack([np.full(len(kept), first), kept])
    plan = peak(30, 27, 1.5)
    weights = np.linalg.solve(joint, [sum(_shared(plan, "a", {}, run)) for run in runs])
    told = whole @ weights
    known = PeakPosterior(runs).of(plan, "a")
    assert isinstance(known, LearnedPeakError)
    assert known.mean == pytest.approx(told.mean(), abs=0.05)
    own = 1.0 - weights @ joint @ weights
    assert known.deviation**2 == pytest.approx(own + told.var(), abs=0.05)
