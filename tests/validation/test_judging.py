"""Choices and shortlists among measured layouts, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.planner.choice import Candidate
from nest_megatron.units import to_ticks
from nest_megatron.validation.assess import Predictor, candidate_of
from nest_megatron.validation.job import job_of
from nest_megatron.validation.models import ModelBook
from nest_megatron.validation.scores import choice_scores, choice_summary
from tests.cli.test_validate import RUN


@pytest.fixture(scope="module")
def measured() -> Candidate:
    """A run of one layout as a plan that may be chosen."""
    predictor = Predictor()
    job = job_of(RUN, ModelBook.load())
    return candidate_of(predictor.model(job), predictor.predict(job))


def variant(
    of: Candidate, median_s: float, out_of_memory: float = 0.0, away: float = 0.0
) -> Candidate:
    """The same layout with another prediction, and its point so far away."""
    point = (of.step.point[0] + away, *of.step.point[1:])
    return dataclasses.replace(
        of,
        solved=dataclasses.replace(of.solved, iteration=to_ticks(median_s)),
        step=dataclasses.replace(of.step, median_s=median_s, point=point),
        out_of_memory=out_of_memory,
    )


def test_a_run_is_a_plan_with_its_distribution(measured: Candidate) -> None:
    assert measured.solved.iteration == to_ticks(measured.step.median_s)
    low_s, high_s = measured.step.interval(0.9)
    assert low_s < measured.step.median_s < high_s
    assert 0 <= measured.out_of_memory < 0.5


def test_regret_of_both_choices(measured: Candidate) -> None:
    """The fastest prediction risks its memory: the default takes the next, which ran slower."""
    risky, safe = variant(measured, 10.0, out_of_memory=0.9), variant(measured, 10.5)
    found = choice_scores([(risky, 8.0), (safe, 10.0)])
    assert found.nominal_regret_pct == 0.0
    assert found.default_regret_pct == pytest.approx(25.0)
    assert found.started_regret_pct == 0.0


def test_a_small_risk_is_worth_a_faster_plan(measured: Candidate) -> None:
    """Of 100 starts two fail and cost an hour of a day: 0.1 %, for steps that are 3 % shorter."""
    risky, safe = variant(measured, 10.0, out_of_memory=0.02), variant(measured, 10.3)
    found = choice_scores([(risky, 8.0), (safe, 10.0)])
    assert found.default_regret_pct == 0.0


def test_a_shortlist_is_judged_by_the_fastest_measured(measured: Candidate) -> None:
    near = [variant(measured, 10.0), variant(measured, 10.1, away=4.0)]
    slow = variant(measured, 30.0, away=4.0)
    found = choice_scores([(near[0], 10.0), (near[1], 9.0), (slow, 31.0)])
    assert (found.shortlist_size, found.shortlist_holds) == (2, True)
    assert (found.sure, found.sure_right) == (2, 2)
    missed = choice_scores([(near[0], 10.0), (near[1], 9.5), (slow, 5.0)])
    assert (missed.shortlist_holds, missed.sure_right) == (False, 0)
    both = choice_summary([found, missed])
    assert both is not None
    assert (both.jobs, both.shortlist_holds_pct, both.sure_right_pct) == (2, 50.0, 50.0)
    assert choice_summary([]) is None
