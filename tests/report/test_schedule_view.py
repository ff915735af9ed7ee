"""The schedule that the pictures show is the one that the plan was priced by."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.settings import CostSettings, restored_settings
from nest_megatron.errors import UserInputError
from nest_megatron.layout import plan_file
from nest_megatron.report.schedule_view import SpanKind, schedule_view, windows
from tests.report.plans import SHAPES, hand_plan


@pytest.mark.parametrize("shape", SHAPES)
def test_schedule_is_the_predicted_one(shape: str) -> None:
    plan = SHAPES[shape]()
    view = schedule_view(plan)
    assert view.iteration_time_s == plan.predicted.iteration_time_s
    ends = [span.end for spans in view.ranks for span in spans]
    assert max(ends) == pytest.approx(view.iteration_time_s)
    for spans in view.ranks:
        assert all(before.end <= after.start + 1e-12 for before, after in pairwise(spans))


def test_settings_survive_the_plan_file() -> None:
    settings = CostSettings(precision=Precision.FP8, memory_reserve_bytes=3 << 30, dp_overlap=0.0)
    plan = hand_plan(4, settings=settings)
    assert restored_settings(plan_file.load(plan_file.dump(plan)).provenance.settings) == settings


def test_unknown_settings_are_named() -> None:
    plan = hand_plan(4)
    made = dataclasses.replace(plan.provenance, settings={"gremlins": 1.0})
    with pytest.raises(UserInputError, match="gremlins"):
        schedule_view(dataclasses.replace(plan, provenance=made))


@pytest.mark.parametrize("shape", SHAPES)
def test_windows_are_in_order_and_inside_the_step(shape: str) -> None:
    view = schedule_view(SHAPES[shape]())
    shown = windows(view)
    assert shown[0].start == 0.0
    assert shown[-1].end == view.iteration_time_s
    assert all(window.length > 0 for window in shown)
    assert all(before.end < after.start for before, after in pairwise(shown))


def test_a_long_step_is_cut_and_a_short_one_is_not() -> None:
    names = [window.name for window in windows(schedule_view(hand_plan(4, microbatches=512)))]
    assert names == ["warm-up", "steady", "drain"]
    assert len(windows(schedule_view(hand_plan(4, microbatches=8)))) == 1


def test_warm_up_shows_the_first_backward_pass_of_every_rank() -> None:
    view = schedule_view(hand_plan(4, microbatches=512))
    warm = windows(view)[0]
    for spans in view.ranks:
        first = next(span for span in spans if span.kind is SpanKind.BACKWARD)
        assert first.end <= warm.end


@pytest.mark.parametrize("shape", SHAPES)
def test_exposed_communication_is_that_of_the_prediction(shape: str) -> None:
    """Summed over the passes of the rank that the terms are about."""
    plan = SHAPES[shape]()
    view, terms = schedule_view(plan), plan.predicted.terms
    rank = view.ranks[plan.predicted.critical_rank]
    for name in ("tp_communication", "cp_communication", "ep_communication"):
        drawn = sum(view.communication(span).get(name, 0.0) for span in rank)
        assert drawn == pytest.approx(terms[name], abs=1e-12), name
    for spans in view.ranks:
        for span in spans:
            spent = sum(view.communication(span).values())
            assert 0.0 <= spent <= span.end - span.start + 1e-12
