"""Choices that change numbers are priced beside a plan, and never taken."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.execution_flags import execution_traits
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.traits import Fp8Recipe
from nest_megatron.layout.estimate import Estimate
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.planner import plan
from nest_megatron.planner.offers import numeric_offers
from nest_megatron.planner.request import Request
from nest_megatron.units import format_seconds

JOB = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=16", "train.global_batch_size=32")
FIXED = (
    "parallel.tensor_model_parallel_size=2",
    "parallel.pipeline_model_parallel_size=2",
    "parallel.zero_stage=1",
    "search.num_alternatives=1",
)


def asked(*words: str) -> Request:
    return request_of(compose(parse([*JOB, *FIXED, *words])))


def found(request: Request) -> ParallelPlan:
    answer = plan(request)
    assert isinstance(answer, ParallelPlan)
    return answer


def test_the_price_is_that_of_the_plans_own_layout() -> None:
    request = asked()
    planned = found(request)
    (bf16,) = (o for o in request.numeric_offers if "grad-reduce-in-bf16" in o.words[0])
    assert bf16.settings.traits.gradient_bytes == 2
    assert request.settings.traits.gradient_bytes == 4  # never taken
    other = CostModel(request.spec, request.cluster, bf16.settings, request.times)
    step = estimate(other, planned.layout)
    freed = planned.predicted.peak_memory_bytes - max(
        stage.peak_memory_bytes for stage in step.stages
    )
    (said,) = (text for text in planned.offers if "--grad-reduce-in-bf16" in text)
    assert f"free {freed / 2**30:.1f} GiB" in said
    assert said.endswith("gradients are summed over replicas and micro batches in bf16")


def test_the_price_is_that_of_the_layout_which_the_freed_memory_allows() -> None:
    """Here bf16 moments end the recomputation."""
    request = asked("cluster=dgx_a100", "cluster.num_gpus=4", "memory.margin=0.4")
    planned = found(request)
    assert planned.layout.recompute != NO_RECOMPUTE
    (said,) = (text for text in planned.offers if "--exp-avg-dtype bf16" in text)
    (offer,) = (o for o in request.numeric_offers if "--exp-avg-dtype bf16" in o.words[0])
    changed = dataclasses.replace(
        request,
        settings=offer.settings,
        tie_percent=0.0,
        numeric_offers=(),
    )
    best = found(changed)
    assert best.layout.recompute == NO_RECOMPUTE
    step_s = best.predicted.iteration_time_s
    gain_percent = 100 * (planned.predicted.iteration_time_s / step_s - 1)
    assert gain_percent > 10
    assert f", or make the job {gain_percent:.1f} % faster ({format_seconds(step_s)})" in said
    assert " would free " in said
    assert "recompute none" in said


def test_what_the_job_has_chosen_is_not_offered() -> None:
    bridge = flags("target=megatron_bridge_0.3")
    assert "--grad-reduce-in-bf16" not in bridge  # its recipes do so
    assert "--fp8-param-gather" not in flags()
    fp8 = flags("train.precision=fp8")
    assert "--fp8-param-gather" in fp8
    assert not any("nvfp4" in each or "capacity" in each for each in fp8)


def flags(*words: str) -> list[str]:
    return [offer.words[0] for offer in asked(*words).numeric_offers]


@pytest.mark.parametrize(
    ("cluster", "recipes"),
    [
        ("dgx_h100", {"tensorwise", "blockwise"}),
        ("b200", {"tensorwise", "mxfp8", "nvfp4"}),
        ("dgx_a100", set()),
    ],
)
def test_formats_are_offered_where_the_device_has_them(cluster: str, recipes: set[str]) -> None:
    said = {text.split("-recipe ")[1] for text in flags(f"cluster={cluster}") if "recipe" in text}
    assert said == recipes


def test_a_format_is_priced_in_its_own_precision() -> None:
    alone = "train.micro_batch_size=1"  # with which no other layout gains by it
    planned = found(asked(alone))
    (said,) = (text for text in planned.offers if "--fp8-recipe" in text)  # the best of two
    other = asked(alone, "train.precision=fp8")
    traits = dataclasses.replace(other.settings.traits, fp8_recipe=Fp8Recipe.TENSORWISE)
    settings = dataclasses.replace(other.settings, traits=traits)
    step = estimate(CostModel(other.spec, other.cluster, settings), planned.layout)
    assert f"--fp8-recipe tensorwise would make this layout {gain(planned, step):.1f} %" in said


def gain(planned: ParallelPlan, other: Estimate) -> float:
    return 100 * (planned.predicted.iteration_time_s / other.iteration_time_s - 1)


def test_a_choice_that_does_not_fit_is_no_offer() -> None:
    request = asked()
    planned = found(request)
    (offer,) = (o for o in request.numeric_offers if "grad-reduce" in o.words[0])
    settings = dataclasses.replace(offer.settings, memory_margin=0.9)
    tight = dataclasses.replace(offer, settings=settings)
    asked_again = dataclasses.replace(request, numeric_offers=(tight,))
    assert numeric_offers(planned, asked_again, lambda *_: None) == ()


def test_dropped_tokens_are_offered_where_experts_are_uneven() -> None:
    words = ("model=mixtral_8x7b", "parallel.expert_model_parallel_size=8")
    uneven = found(asked(*words, "cost.expert_imbalance=1.5"))
    assert any("--moe-expert-capacity-factor" in text for text in uneven.offers)
    even = found(asked(*words))
    assert not any("--moe-expert-capacity-factor" in text for text in even.offers)


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        ("model=mixtral_8x7b", True),
        ("model=mixtral_8x7b cost.expert_imbalance=1.2", False),
        ("model=llama3_8b", False),
    ],
)
def test_even_routing_is_said_to_be_assumed(words: str, *, is_said: bool) -> None:
    said = [note for note in asked(*words.split()).notes if "spread evenly" in note]
    assert len(said) == is_said


def test_a_jobs_own_capacity_is_priced() -> None:
    own = {"moe_expert_capacity_factor": 1.25}
    plain = CostSettings(expert_imbalance=2.0)
    capped = dataclasses.replace(plain, traits=execution_traits(own, Precision.BF16))
    assert (plain.expert_load(8), capped.expert_load(8), capped.expert_load(1)) == (2, 1.25, 1)
    filled = {**own, "moe_pad_expert_input_to_capacity": True}
    padded = dataclasses.replace(plain, traits=execution_traits(filled, Precision.BF16))
    assert padded.expert_load(1) == 1.25


@pytest.mark.parametrize("stage", [0, 3])
def test_moments_belong_to_the_distributed_optimizer(stage: int) -> None:
    words = ("parallel.pipeline_model_parallel_size=1", f"parallel.zero_stage={stage}")
    words += ("memory.max_oom_chance=0.5",)
    planned = found(asked(*words))
    assert not any("exp-avg" in text for text in planned.offers)


def test_without_offers_nothing_is_said() -> None:
    request = dataclasses.replace(asked(), numeric_offers=())
    assert found(request).offers == ()
