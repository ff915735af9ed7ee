"""A plan leaves memory free as far as that is worth it, and says what more would cost."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.errors import UserInputError
from nest_megatron.layout.plan import Headroom, ParallelPlan
from nest_megatron.planner import NoPlan, Request, plan
from nest_megatron.planner.headroom import with_larger_margin
from nest_megatron.planner.request import DEFAULT_HEADROOM
from nest_megatron.report.words import headroom_words, proof
from nest_megatron.solver.search import Search
from tests.estimates import estimate_plan

#: A job whose fastest plan fills nearly all.
FULL = ("model=llama2_13b", "cluster.num_gpus=16")
JOB = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8", "train.global_batch_size=64")


def asked(*words: str) -> Request:
    return request_of(compose(parse([*JOB, *words])))


def found(request: Request) -> ParallelPlan:
    answer = plan(request)
    assert isinstance(answer, ParallelPlan)
    return answer


def told(answer: ParallelPlan) -> Headroom:
    assert answer.headroom is not None
    return answer.headroom


def left(answer: ParallelPlan) -> float:
    """Share of the GPU with the highest peak beside the peak and the reserve of 2 GiB."""
    taken = answer.predicted.peak_memory_bytes + 2 * 2**30
    return 1 - taken / answer.cluster.accelerator.memory_bytes


def test_memory_is_left_free_where_that_is_worth_its_price() -> None:
    nominal = found(asked("search.objective=nominal", *FULL))
    assert nominal.headroom is None
    assert 0.04 <= left(nominal) < DEFAULT_HEADROOM
    usual = found(asked(*FULL))
    assert left(usual) > left(nominal)
    assert told(usual).left == pytest.approx(left(usual))
    assert nominal.predicted.iteration_time_s < usual.predicted.iteration_time_s
    assert usual.alternatives[0].iteration_time_s == nominal.predicted.iteration_time_s


def test_the_nominal_plan_is_that_of_the_whole_device() -> None:
    """What is proven and shown beside a plan is not of a space with memory kept free."""
    nominal = found(asked("search.objective=nominal", *FULL))
    usual = found(asked(*FULL))
    assert usual.search.candidates == nominal.search.candidates
    assert usual.shortest_step_s == nominal.predicted.iteration_time_s
    assert "not in the space" not in proof(usual)
    assert "leave less than 10 % of a GPU free" in proof(found(asked("memory.margin=0.1")))


def test_a_job_that_does_not_fit_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    search = Search.run
    monkeypatch.setattr(Search, "run", lambda self: runs.append(self) or search(self))
    answer = plan(asked("model=llama3_70b", "parallel.recompute_granularity=none"))
    assert isinstance(answer, NoPlan)
    spaces = [(run.model.capacity_bytes, run.grids.space) for run in runs]
    assert len(spaces) == len(set(map(repr, spaces)))
    assert spaces[0][0] == max(capacity for capacity, _ in spaces)


def test_where_nothing_leaves_a_tenth_a_tighter_plan_is_taken_and_says_so() -> None:
    fixed = (
        "parallel.tensor_model_parallel_size=2",
        "parallel.pipeline_model_parallel_size=1",
        "parallel.context_parallel_size=1",
        "parallel.recompute_granularity=none",
        "parallel.zero_stage=1",
        "train.micro_batch_size=2",
    )
    tight = found(asked(*fixed))
    assert told(tight).is_tight
    assert told(tight).left == pytest.approx(left(tight))
    assert 0.04 <= left(tight) < DEFAULT_HEADROOM
    assert "no plan is known to leave 10 %" in headroom_words(told(tight))
    strict = plan(asked(*fixed, "memory.margin=0.1"))  # what a user types is a limit
    assert isinstance(strict, NoPlan)


def test_the_price_of_more_is_searched_where_it_is_asked_for() -> None:
    priced = found(asked("memory.priced_margin=0.3"))
    other = found(asked("memory.margin=0.3", "search.objective=nominal"))
    ratio = other.predicted.iteration_time_s / priced.predicted.iteration_time_s
    assert ratio > 1
    headroom = told(priced)
    assert headroom.is_searched
    assert headroom.more_costs_percent == pytest.approx(100 * (ratio - 1))
    words = headroom_words(headroom)
    assert words.endswith(f"30 % would cost {headroom.more_costs_percent:.1f} %")


def test_runners_up_bound_the_price() -> None:
    usual = told(found(asked("model=llama2_13b")))
    assert usual.more == pytest.approx(usual.left + 0.1, abs=0.005)
    exact = told(found(asked("model=llama2_13b", f"memory.priced_margin={usual.more}")))
    assert exact.more_costs_percent is not None
    assert usual.more_costs_percent is not None
    assert usual.more_costs_percent >= exact.more_costs_percent
    assert "at most" in headroom_words(usual)


@pytest.mark.parametrize("priced", ["0.1", "0.95", "-1"])
def test_a_priced_share_must_be_larger(priced: str) -> None:
    with pytest.raises(UserInputError, match="priced_margin"):
        asked(f"memory.priced_margin={priced}")


def test_free_memory_that_was_wanted_is_no_limit_of_the_device() -> None:
    """What is said of memory is of the device, as an estimate of the same layout says it."""
    request = asked()
    limited = with_larger_margin(request, 0)
    assert limited is not None
    assert limited.memory_margin == DEFAULT_HEADROOM
    assert with_larger_margin(dataclasses.replace(request, settings=limited), 0) is None
    usual = found(request)
    again = estimate_plan(request.spec, request.cluster, request.settings, usual.layout)
    assert again.predicted == usual.predicted


def test_roomier_plans_are_searched_only_where_they_may_be_worth_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []
    search = Search.run
    monkeypatch.setattr(Search, "run", lambda self: runs.append(self) or search(self))
    easy = found(dataclasses.replace(asked("cluster=b200"), numeric_offers=()))
    assert easy.choice is not None
    assert easy.choice.slower_percent == 0
    assert len(runs) == 1
    found(asked(*FULL))
    device, roomy = runs[1:3]
    assert roomy.model.capacity_bytes < device.model.capacity_bytes
