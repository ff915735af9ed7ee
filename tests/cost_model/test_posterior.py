"""The model of errors given runs: against numpy, against closed cases, and what it learns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from nest_megatron.cost_model.distributions import cumulative, deviation, quantile
from nest_megatron.cost_model.features import Feature, distance
from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.cost_model.posterior import (
    KEPT,
    Observation,
    Posterior,
    differing_versions,
)
from nest_megatron.cost_model.shortlist import measurements, moments, run_gains, shortlist
from nest_megatron.cost_model.uncertainty import DEVIATION, RUN_NOISE, Predictive
from tests.cost_model.test_uncertainty import plan_of

GEMM, TENSOR, EXPERT = Mechanism.GEMM, Mechanism.TENSOR, Mechanism.EXPERT


def mixed(tensor: float, at: float = 0.0, median_s: float = 1.0) -> Predictive:
    """A plan with a share of tensor-parallel traffic."""
    return plan_of(median_s, {GEMM: 1.0 - tensor, TENSOR: tensor}, point=(at,))


def run_of(plan: Predictive, factor: float, job: str = "a", **more: object) -> Observation:
    """A run that took so many times what was predicted."""
    return Observation(predictive=plan, step_s=factor * plan.median_s, job=job, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.001, 0.05, 0.25, 0.5, 0.75, 0.95, 0.999])
def test_student_s_distribution(share: float) -> None:
    exact = stats.t(2)
    assert quantile(share) == pytest.approx(exact.ppf(share), abs=1e-9)
    assert cumulative(exact.ppf(share)) == pytest.approx(share, abs=1e-12)


def test_without_runs_nothing_changes() -> None:
    plan = mixed(0.3)
    assert Posterior().of(plan, "a") is plan
    told = Posterior([run_of(plan, 1.2)]).of(plan, "a")
    assert Posterior().of(told, "a") == plan
    assert Posterior([run_of(plan, 1.2)]).of(told, "a") == told


RUNS = (
    run_of(mixed(0.1), 1.05),
    run_of(mixed(0.4, 2.0), 1.2),
    run_of(mixed(0.2, 1.0), 1.1, job="b"),
    run_of(plan_of(1.0, {GEMM: 0.6, EXPERT: 0.4}, (4.0,), frozenset({Feature.EXPERTS})), 0.9, "c"),
    run_of(mixed(0.3, 3.0), 1.4, job="d", versions={"nccl": "2.1"}),
    run_of(mixed(0.1), 1.07, runs=4),
)


def by_numpy(
    runs: Sequence[Observation], plans: Sequence[Predictive | Observation], job: str
) -> tuple[np.ndarray, np.ndarray]:
    """Means and covariances of the plans' errors in scales, from one joint matrix.

    Args:
        plans: those that ran have their run's versions and noise.
    """
    rest = [
        plan
        if isinstance(plan, Observation)
        else run_of(plan, 1.0, job, versions=runs[-1].versions)
        for plan in plans
    ]
    points = [*runs, *rest]
    joint = np.zeros((len(points), len(points)))
    for i, first in enumerate(points):
        for j, second in enumerate(points):
            a, b = first.predictive, second.predictive
            kept = KEPT ** len(differing_versions(first.versions, second.versions))
            for mechanism, scale in a.scales.mechanisms.items():
                both = a.shares.get(Mechanism(mechanism), 0) * b.shares.get(Mechanism(mechanism), 0)
                joint[i, j] += kept * both * scale**2
            if first.job == second.job:
                near = math.exp(-distance(a.point, b.point) / a.scales.layout_range)
                joint[i, j] += a.job_scale * b.job_scale + near * a.layout_scale * b.layout_scale
    for i, (point, given) in enumerate(zip(points, [*runs, *plans], strict=True)):
        if isinstance(given, Observation):
            joint[i, i] += RUN_NOISE**2 / point.runs
    n, errors = len(runs), np.array([run.error for run in runs])
    gain = joint[n:, :n] @ np.linalg.inv(joint[:n, :n])
    return gain @ errors, joint[n:, n:] - gain @ joint[:n, n:]


@pytest.mark.parametrize("job", ["a", "b", "d", "new"])
def test_it_is_what_numpy_makes_of_one_joint_matrix(job: str) -> None:
    plans = [mixed(0.0, 1.0), mixed(0.25, 2.0), plan_of(1.0, {EXPERT: 0.3, GEMM: 0.7}, (5.0,))]
    posterior = Posterior(RUNS)
    told = [posterior.of(plan, job) for plan in plans]
    means, covariances = by_numpy(RUNS, plans, job)
    assert [each.own_runs for each in told] == [sum(run.job == job for run in RUNS)] * 3
    logs, found = moments(told)
    assert logs == pytest.approx(means, abs=1e-9)
    assert told[0].learned is not None
    factor = told[0].learned.factor
    assert np.array(found) == pytest.approx(deviation() ** 2 * factor * covariances, abs=1e-9)
    scales = np.sqrt(factor * (np.diag(covariances) + RUN_NOISE**2))
    assert [each.scale for each in told] == pytest.approx(scales, abs=1e-9)


def test_a_jobs_factor_is_that_of_student_s_t_given_all_other_jobs() -> None:
    """(degrees + squared distance of the job's runs from what others say) / (degrees + runs)."""
    for job in "abcd":
        own = [run for run in RUNS if run.job == job]
        others = [run for run in RUNS if run.job != job]
        last = dataclasses.replace(others[-1], versions={})
        means, covariances = by_numpy([*others[:-1], last], own, job)
        off = np.array([run.error for run in own]) - means
        square = off @ np.linalg.solve(covariances, off)
        found = Posterior([*others[:-1], last, *own]).of(mixed(0.2), job)
        assert found.learned is not None
        assert found.learned.factor == pytest.approx((2 + square) / (2 + len(own)))


def test_a_job_that_is_off_by_more_is_known_less() -> None:
    near, far = (Posterior([run_of(mixed(0.2), by)]).of(mixed(0.2, 3.0), "a") for by in (1.01, 2.0))
    assert far.median_s > near.median_s
    assert far.scale > mixed(0.2).scale > near.scale


def test_two_runs_teach_the_price_of_a_mechanism_not_a_row() -> None:
    """Both are slow by what their tensor-parallel traffic takes, were it 40 % dearer."""
    runs = [run_of(mixed(share, 3.0 * share), math.exp(0.4 * share)) for share in (0.1, 0.5)]
    posterior = Posterior(runs)
    dearer, left = posterior.mechanism(TENSOR)
    assert 0.2 < dearer < 0.4
    assert left < 0.5 * DEVIATION * mixed(0.0).scales.mechanisms[TENSOR]
    assert posterior.mechanism(EXPERT)[0] == 0.0
    without, half, much = (posterior.of(mixed(share, 9.0), "new") for share in (0.0, 0.3, 0.6))
    assert 1.0 < without.median_s < 1.02 < half.median_s < much.median_s
    assert math.log(much.median_s) == pytest.approx(0.6 * dearer, abs=0.03)
    assert much.scale < mixed(0.6, 9.0).scale


def test_a_run_says_most_of_its_own_plan_then_of_its_job_then_of_the_site() -> None:
    posterior = Posterior([run_of(mixed(0.2), 1.06)])
    again = posterior.of(mixed(0.2), "a")
    near = posterior.of(mixed(0.2, 1.0), "a")
    elsewhere = posterior.of(mixed(0.2), "b")
    assert again.median_s > near.median_s > elsewhere.median_s > 1.0
    assert again.scale < near.scale < elsewhere.scale < mixed(0.2).scale


def test_a_changed_version_widens_what_is_known() -> None:
    runs = [run_of(mixed(0.4, n), 1.15, f"{n}", versions={"nccl": "2.1"}) for n in range(8)]
    same, one, two = (
        Posterior(runs, versions).of(mixed(0.4, 20.0), "new")
        for versions in ({"nccl": "2.1"}, {"nccl": "2.2"}, {"nccl": "2.2", "driver": "580"})
    )
    assert Posterior(runs).of(mixed(0.4, 20.0), "new") == same
    assert same.scale < one.scale < two.scale < mixed(0.4).scale
    assert same.median_s > one.median_s > two.median_s > 1.0
    assert math.log(one.median_s) == pytest.approx(KEPT * math.log(same.median_s))


def test_shortlists_and_measurements_follow_the_runs() -> None:
    plans = [mixed(0.5, 0.0), mixed(0.1, 3.0, 1.02), mixed(0.3, 6.0, 1.01)]
    assert shortlist(plans).plans != shortlist(plans[:1]).plans
    runs = [run_of(plan, math.exp(0.5 * plan.shares[TENSOR])) for plan in plans]
    told = [Posterior(runs).of(plan, "a") for plan in plans]
    assert shortlist(told).plans == (1,)
    before, after = (
        {
            each.profile: each.gain_percent
            for each in measurements(steps, profiles=[frozenset({TENSOR})])
        }
        for steps in (plans, [Posterior(runs[:2]).of(plan, "a") for plan in plans])
    )
    assert before[0] > after.get(0, 0.0)


def test_what_a_run_may_gain_falls_with_what_is_known() -> None:
    plans = [mixed(0.5, 0.0), mixed(0.1, 3.0, 1.02)]
    told = [Posterior([run_of(plans[1], 1.02)]).of(plan, "a") for plan in plans]
    assert run_gains(told)[1] < 0.3 * run_gains(plans)[1]


def test_more_runs_are_those_of_the_versions_that_plans_run_with() -> None:
    before = Posterior(RUNS[:1], {"nccl": "2.2"})
    after, run = before.with_runs([run_of(mixed(0.4), 1.2, "new")]), mixed(0.5, 3.0)
    assert after.observations[-1].versions == {"nccl": "2.2"}
    assert after.of(run, "new").scale < before.of(run, "new").scale
    assert Posterior().with_runs(RUNS[:1]).of(run, "a") == Posterior(RUNS[:1], {}).of(run, "a")
