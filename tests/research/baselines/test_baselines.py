"""What holds for every baseline: legal plans of our space, never faster than ours, repeatable."""

from __future__ import annotations

import random
from functools import cache, partial

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.research.baselines import aceso, mcmc
from nest_megatron.research.baselines.job import NOTHING_FITS, ComparisonJob
from nest_megatron.research.comparison import BASELINES, Baseline
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace
from tests.catalogue import cluster, model
from tests.research.baselines.jobs import check_in_our_space, job_of, named_job
from tests.solver.jobs import KERNEL, small_cluster, small_settings, small_spec

JOBS = {
    "dense": ("llama3_8b", "dgx_h100", 16, 64),
    "levels": ("llama3_70b", "h100_spine_leaf", 64, 128),
    "experts": ("mixtral_8x7b", "dgx_h100", 32, 128),
    "latents": ("deepseek_v2_lite", "dgx_h100", 16, 128),
    "no flash": ("llama2_7b", "v100_spine_leaf", 32, 64),
}
#: Its table has no pipeline for 70 billion parameters at this length; it takes no latent attention.
FOUND_NOTHING = {("levels", "autoconfigurator"), ("latents", "autoconfigurator")}
#: Local searches with smaller budgets than their own.
BUDGETS = {
    "mcmc": partial(mcmc.find, seeds=3, steps=80),
    "aceso": partial(aceso.find, evaluations=600),
}
QUICK = tuple(each._replace(find=BUDGETS.get(each.name, each.find)) for each in BASELINES)
BY_NAME = pytest.mark.parametrize("baseline", QUICK, ids=lambda baseline: baseline.name)


def ours(job: ComparisonJob) -> SolvedLayout | None:
    search = Search(job.model, job.global_batch_size, job.space, KERNEL, num_layouts=1)
    result = search.run()
    assert result.optimal or not result.plans
    return result.plans[0] if result.plans else None


@cache
def our_best(name: str) -> SolvedLayout:
    best = ours(named_job(*JOBS[name]))
    assert best is not None
    return best


@BY_NAME
@pytest.mark.parametrize("name", JOBS)
def test_plans_are_launchable_and_never_faster_than_ours(name: str, baseline: Baseline) -> None:
    job, best = named_job(*JOBS[name]), our_best(name)
    choice = baseline.find(job)
    if choice.plan is None:
        assert (name, baseline.name) in FOUND_NOTHING
        return
    check_in_our_space(job, choice.plan)
    assert choice.plan.iteration >= best.iteration
    assert choice.candidates >= 1
    assert choice.reason


@BY_NAME
def test_the_same_job_gives_the_same_plan(baseline: Baseline) -> None:
    first, second = (baseline.find(named_job(*JOBS["experts"])) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("seed", range(12))
def test_random_small_jobs(seed: int) -> None:
    rng = random.Random(seed)
    spec, machines = small_spec(rng), small_cluster(rng)
    job = job_of(spec, machines, rng.choice([4, 8, 16]), settings=small_settings())
    best = ours(job)
    for baseline in QUICK:
        plan = baseline.find(job).plan
        if plan is not None:
            check_in_our_space(job, plan)
            assert best is not None, f"{baseline.name} found what ours did not"
            assert plan.iteration >= best.iteration, baseline.name


@BY_NAME
def test_a_space_of_one_plan_leaves_nothing_to_lose(baseline: Baseline) -> None:
    """Degrees, ZeRO and recomputation are the user's; 32 even layers have one even partition."""
    fixed = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": 1,
        "micro_batch_size": 1,
    }
    space = SearchSpace(fixed=fixed, zero_stages=(ZeroStage.OPTIMIZER,), recompute=NO_RECOMPUTE)
    job = named_job("llama3_8b", "dgx_h100", 8, 32, space)
    best, choice = ours(job), baseline.find(job)
    assert best is not None
    assert choice.plan == best


@BY_NAME
def test_what_the_user_fixes_holds(baseline: Baseline) -> None:
    """Also in dimensions that a method does not have."""
    fixed = {"context_parallel_size": 2, "tensor_model_parallel_size": 4}
    space = SearchSpace(fixed=fixed, zero_stages=(ZeroStage.OPTIMIZER,))
    job = named_job("llama3_70b", "h100_spine_leaf", 128, 256, space)
    plan = baseline.find(job).plan
    if plan is None:
        assert baseline.name in ("alpa_e", "autoconfigurator")
        return
    assert plan.layout.dims.context_parallel_size == 2
    assert plan.layout.dims.tensor_model_parallel_size == 4
    assert plan.layout.zero is ZeroStage.OPTIMIZER
    check_in_our_space(job, plan)


@BY_NAME
def test_a_job_that_does_not_fit_says_why(baseline: Baseline) -> None:
    choice = baseline.find(named_job("llama3_70b", "dgx_h100", 8, 8))
    assert choice.plan is None
    assert choice.reason == NOTHING_FITS or "do not fit in memory" in choice.reason
    assert choice.candidates > 0


@BY_NAME
def test_a_job_without_a_legal_layout_says_why(baseline: Baseline) -> None:
    space = SearchSpace(fixed={"tensor_model_parallel_size": 3})
    choice = baseline.find(named_job("llama3_8b", "dgx_h100", 8, 8, space))
    assert choice.plan is None
    assert "Megatron launches none" in choice.reason
    assert choice.candidates == 0


def test_a_given_layout_is_refused() -> None:
    partition = StagePartition(boundaries=(0, 34), pipeline_model_parallel_size=1)
    with pytest.raises(UserInputError, match="Leave the layout out"):
        job_of(model("llama3_8b"), cluster("dgx_h100", 8), 8, SearchSpace(partition=partition))
