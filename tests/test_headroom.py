"""A plan leaves memory free, less only where nothing else fits, and says what more would cost."""

from __future__ import annotations

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.errors import UserInputError
from nest_megatron.parallel.plan import Headroom, ParallelPlan
from nest_megatron.planner import NoPlan, PlanRequest, estimate_plan, plan
from nest_megatron.planner.headroom import with_headroom
from nest_megatron.planner.request import DEFAULT_HEADROOM
from nest_megatron.report.words import headroom_words

#: A job whose fastest plan fills nearly all.
FULL = ("model=llama2_13b", "cluster.num_gpus=16")
JOB = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8", "train.global_batch_size=64")


def asked(*words: str) -> PlanRequest:
    return request_of(compose(parse([*JOB, *words])))


def found(request: PlanRequest) -> ParallelPlan:
    answer = plan(request)
    assert isinstance(answer, ParallelPlan)
    return answer


def told(answer: ParallelPlan) -> Headroom:
    assert answer.headroom is not None
    return answer.headroom


def left(answer: ParallelPlan) -> float:
    """Share of the fullest GPU beside the peak and the reserve of 2 GiB."""
    taken = answer.predicted.peak_memory_bytes + 2 * 2**30
    return 1 - taken / answer.cluster.accelerator.memory_bytes


def test_a_plan_leaves_a_tenth_free_and_the_old_limit_is_one_setting_away() -> None:
    usual = found(asked())
    assert left(usual) >= DEFAULT_HEADROOM
    assert told(usual).left == pytest.approx(left(usual))
    assert not told(usual).is_tight
    nominal = found(asked("search.objective=nominal", *FULL))
    assert nominal.headroom is None
    assert 0.04 <= left(nominal) < DEFAULT_HEADROOM
    roomier = found(asked(*FULL))
    assert left(roomier) >= DEFAULT_HEADROOM
    assert nominal.predicted.iteration_time_s < roomier.predicted.iteration_time_s


def test_where_nothing_leaves_that_a_tighter_plan_is_taken_and_says_so() -> None:
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
    assert "no plan leaves the 10 %" in headroom_words(told(tight))
    strict = plan(asked(*fixed, "memory.margin=0.1"))  # what a user types is a limit
    assert isinstance(strict, NoPlan)


def test_the_price_of_more_is_searched_where_it_is_asked_for() -> None:
    priced = found(asked("memory.priced_margin=0.3"))
    other = found(asked("memory.margin=0.3"))
    ratio = other.predicted.iteration_time_s / priced.predicted.iteration_time_s
    assert ratio > 1
    headroom = told(priced)
    assert headroom.is_searched
    assert headroom.more_costs_percent == pytest.approx(100 * (ratio - 1))
    words = headroom_words(headroom)
    assert words.endswith(f"30 % would cost {headroom.more_costs_percent:.1f} %")


def test_runners_up_bound_the_price() -> None:
    usual = told(found(asked("train.global_batch_size=16")))
    assert usual.more == pytest.approx(usual.left + 0.1, abs=0.005)
    exact = told(found(asked("train.global_batch_size=16", f"memory.priced_margin={usual.more}")))
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
    limited = with_headroom(request)
    assert limited.settings.memory_margin == DEFAULT_HEADROOM
    assert with_headroom(limited) is limited
    usual = found(request)
    again = estimate_plan(
        *(request.spec, request.cluster, request.settings, usual.grid(), usual.partition())
    )
    assert again.predicted == usual.predicted
