"""Variables that hang on a layout follow the planned one."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.integrations.nemo_run.task import DividedRanks, adapt, divided_ranks
from nest_megatron.layout.plan import ParallelPlan
from tests.altered import altered
from tests.contract.test_adapters import laid_out

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
WHOLE, DIVIDED = (
    DividedRanks(splits=False, pipelined=False),
    DividedRanks(splits=True, pipelined=True),
)


def _plan(*, tp: int = 1, pp: int = 1, fsdp: bool = False, gpu: str = "H100") -> ParallelPlan:
    plan = laid_out()
    plan = altered(
        plan,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=1,
        use_megatron_fsdp=fsdp,
    )
    device = dataclasses.replace(plan.cluster.accelerator, name=gpu)
    cluster = dataclasses.replace(plan.cluster, accelerator=device)
    return dataclasses.replace(plan, cluster=cluster)


@pytest.mark.parametrize(
    ("given", "before", "plan", "left"),
    [
        ({}, WHOLE, {"tp": 2}, {CONNECTIONS: "1"}),
        ({}, WHOLE, {"tp": 2, "gpu": "B300-SXM"}, {CONNECTIONS: "32"}),
        ({CONNECTIONS: "1"}, DIVIDED, {}, {}),
        ({CONNECTIONS: "8"}, WHOLE, {}, {CONNECTIONS: "8"}),  # the user's own
        ({CONNECTIONS: "1"}, WHOLE, {"fsdp": True}, {}),
        ({"NCCL_P2P_NET_CHUNKSIZE": "2"}, DIVIDED, {}, {}),
        ({"NCCL_P2P_NET_CHUNKSIZE": "2"}, DIVIDED, {"pp": 2}, {"NCCL_P2P_NET_CHUNKSIZE": "2"}),
    ],
)
def test_variables_follow_the_plan(
    given: dict[str, str], before: DividedRanks, plan: dict[str, Any], left: dict[str, str]
) -> None:
    variables = dict(given)
    told = adapt(variables, before, _plan(**plan))
    assert variables == left
    assert bool(told) == (given != left)


def test_what_another_plugin_may_undo_is_said() -> None:
    (told,) = adapt({}, WHOLE, _plan(tp=2, fsdp=True))
    assert "put it before NestPlugin" in told
    (told,) = adapt({"TORCH_NCCL_HIGH_PRIORITY": "1"}, WHOLE, _plan(pp=2))
    assert "put it behind NestPlugin" in told


def test_a_recipes_own_layout() -> None:
    strategy = SimpleNamespace(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=4, context_parallel_size=2
    )
    recipe = SimpleNamespace(trainer=SimpleNamespace(strategy=strategy))
    assert divided_ranks(recipe) == DIVIDED
    assert divided_ranks(SimpleNamespace()) == WHOLE
