"""What a plan changes, and why, in words."""

from __future__ import annotations

import pytest

from nest_megatron.layout.diff import plan_values, reason
from nest_megatron.layout.dims import RankOrder
from tests.altered import altered
from tests.report.plans import SHAPES, hand_plan


@pytest.mark.parametrize("shape", SHAPES)
def test_every_field_has_a_reason(shape: str) -> None:
    plan = SHAPES[shape]()
    for name in plan_values(plan):
        assert len(reason(plan, name)) > 10


def test_only_groups_that_there_are_cross_something() -> None:
    alone = reason(hand_plan(1, model="bert_large"), "use_tp_pp_dp_mapping")
    assert alone == "without a pipeline both orders of ranks are the same"
    assert "data-parallel" not in reason(hand_plan(8), "use_tp_pp_dp_mapping")


def test_groups_of_experts_of_a_dense_model_are_said_to_be_megatrons() -> None:
    plan = hand_plan(4)
    assert reason(plan, "expert_tensor_parallel_size") == "the model has no experts"
    moved = altered(plan, context_parallel_size=2, rank_order=RankOrder.TP_CP_EP_PP_DP)
    assert "this rank order needs" in reason(moved, "expert_tensor_parallel_size")
