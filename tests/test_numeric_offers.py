"""Choices that change numbers are priced beside a plan, and never taken."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.model import CostModel
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner import plan
from nest_megatron.planner.request import PlanRequest

JOB = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=16", "train.global_batch_size=32")
FIXED = (
    "parallel.tensor_model_parallel_size=2",
    "parallel.pipeline_model_parallel_size=2",
    "parallel.zero_stage=1",
    "search.num_alternatives=0",
)


def asked(*words: str) -> PlanRequest:
    return request_of(compose(parse([*JOB, *FIXED, *words])))


def found(request: PlanRequest) -> ParallelPlan:
    answer = plan(request)
    assert isinstance(answer, ParallelPlan)
    return answer


def test_the_price_is_that_of_the_plans_own_layout() -> None:
    request = asked()
    planned = found(request)
    (bf16,) = (o for o in request.numeric_offers if "grad-reduce-in-bf16" in o.knob.flags)
    assert bf16.settings.traits.gradient_bytes == 2
    assert request.settings.traits.gradient_bytes == 4  # never taken
    other = CostModel(request.spec, request.cluster, bf16.settings, request.times)
    step = estimate(other, planned.grid(), planned.partition())
    freed = planned.predicted.peak_memory_bytes - max(
        stage.peak_memory_bytes for stage in step.stages
    )
    (said,) = (text for text in planned.offers if "--grad-reduce-in-bf16" in text)
    assert f"free {freed / 2**30:.1f} GiB" in said
    assert said.endswith("gradients are summed over replicas and micro batches in bf16")


def test_what_the_job_has_chosen_is_not_offered() -> None:
    bridge = [offer.knob.flags for offer in asked("target=megatron_bridge_0.3").numeric_offers]
    assert "--grad-reduce-in-bf16" not in bridge  # its recipes do so
    names = [offer.knob.flags for offer in asked().numeric_offers]
    assert not any("fp8" in name for name in names)
    fp8 = [offer.knob.flags for offer in asked("train.precision=fp8").numeric_offers]
    assert "--fp8-param-gather" in fp8


@pytest.mark.parametrize("stage", [0, 3])
def test_moments_belong_to_the_distributed_optimizer(stage: int) -> None:
    words = ("parallel.pipeline_model_parallel_size=1", f"parallel.zero_stage={stage}")
    planned = found(asked(*words))
    assert not any("exp-avg" in text for text in planned.offers)


def test_without_offers_nothing_is_said() -> None:
    request = dataclasses.replace(asked(), numeric_offers=())
    assert found(request).offers == ()
