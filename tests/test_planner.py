"""What planning leaves behind in the process that asked for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.planner import PlanRequest, plan
from nest_megatron.solver.space import SearchSpace
from tests import catalogue


def request(model: str, *, num_gpus: int = 16, **changes: object) -> PlanRequest:
    return PlanRequest(
        spec=catalogue.model(model),
        cluster=catalogue.cluster("dgx_h100", num_gpus),
        global_batch_size=32,
        **changes,  # type: ignore[arg-type]
    )


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize("model", ["llama3_8b", "mixtral_8x7b"])
def test_planning_makes_no_reference_cycles(model: str) -> None:
    plan(request(model))
    assert gc.collect() == 0
    assert not gc.isenabled()


@pytest.mark.parametrize("name", ["disable", "enable", "freeze", "set_threshold", "collect"])
def test_planning_leaves_the_collector_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the process: Megatron collects by hand while another thread plans."""
    impossible = SearchSpace(fixed={"tensor_model_parallel_size": 3})
    called = []
    with monkeypatch.context() as watched:
        watched.setattr(gc, name, lambda *_: called.append(name))
        with ThreadPoolExecutor(1) as threads:
            threads.submit(plan, request("llama3_8b")).result()
        with pytest.raises(UserInputError):
            plan(request("llama3_8b", space=impossible))
    assert called == []
