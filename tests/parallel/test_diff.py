"""What a plan changes, and why, in words."""

from __future__ import annotations

import pytest

from nest_megatron.parallel.diff import plan_diff, plan_values, reason
from tests.report.plans import SHAPES, hand_plan, searched_plan


def test_a_job_that_agrees_is_unchanged() -> None:
    plan = searched_plan()
    assert plan_diff(plan_values(plan), plan) == ()


def test_only_what_differs_is_listed() -> None:
    plan = hand_plan(8, 4)
    before = {**plan_values(plan), "tensor_model_parallel_size": 2, "micro_batch_size": 4}
    changes = {change.field: (change.before, change.after) for change in plan_diff(before, plan)}
    assert changes == {"tensor_model_parallel_size": (2, 8), "micro_batch_size": (4, 1)}


def test_missing_fields_have_megatrons_defaults() -> None:
    plan = hand_plan(1, model="bert_large")
    fields = {change.field for change in plan_diff({}, plan)}
    assert fields == {"use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"}


def test_what_the_layout_replaces_is_listed() -> None:
    plan = hand_plan(8, 4)
    before = {**plan_values(plan), "num_virtual_stages_per_pipeline_rank": 2}
    (change,) = plan_diff(before, plan)
    assert (change.field, change.after) == ("num_virtual_stages_per_pipeline_rank", None)


def test_text_and_enums_compare_alike() -> None:
    plan = hand_plan(4)
    before = {**plan_values(plan), "recompute_modules": [], "recompute_granularity": None}
    assert plan_diff(before, plan) == ()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_field_has_a_reason(shape: str) -> None:
    plan = SHAPES[shape]()
    for name in plan_values(plan):
        assert len(reason(plan, name)) > 10


def test_only_groups_that_there_are_cross_something() -> None:
    alone = reason(hand_plan(1, model="bert_large"), "use_tp_pp_dp_mapping")
    assert alone == "without a pipeline both orders of ranks are the same"
    assert "data-parallel" not in reason(hand_plan(8), "use_tp_pp_dp_mapping")
