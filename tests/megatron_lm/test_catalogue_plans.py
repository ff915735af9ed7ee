"""Every catalogue plan of the contract tests through Megatron-LM's own parser and validation.

Set ``MEGATRON_LM_HOME`` to a Megatron-LM checkout (core_v0.16.1 or newer).
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from nest_megatron.integrations.megatron_lm.attach import launch_request
from tests.contract.test_catalogue_plans import JOBS, every_job, planned
from tests.megatron_lm.ask import ask_megatron, checkout_version, megatron_case, planned_stages

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(
        not os.environ.get("MEGATRON_LM_HOME"),
        reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout",
    ),
]


@pytest.fixture(scope="module")
def answers() -> dict[int, dict[str, Any]]:
    """What Megatron says of each plan whose model its command line can state, in its own words."""
    version = checkout_version()
    plans = {index: planned(index) for index in range(len(JOBS))}
    stated = {i: plan for i, plan in plans.items() if not plan.model.heterogeneous_layers}
    said = ask_megatron(
        [megatron_case(launch_request(plan, version=version)) for plan in stated.values()]
    )
    return dict(zip(stated, said["answers"], strict=True))


@every_job
def test_megatron_accepts_the_plan(index: int, answers: dict[int, dict[str, Any]]) -> None:
    plan = planned(index)
    if plan.model.heterogeneous_layers:
        pytest.skip("Megatron-LM reads such layers from a file of the user's")
    assert "accepted" in answers[index], answers[index]
    answer, chosen = answers[index]["accepted"], plan.arguments
    for field in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "data_parallel_size",
        "expert_model_parallel_size",
        "sequence_parallel",
    ):
        assert answer[field] == chosen[field], field
    assert answer["num_layers"] == plan.model.num_layers
    if chosen["pipeline_model_parallel_size"] > 1:
        assert answer["stages"] == planned_stages(plan.model, plan.layout.partition)
