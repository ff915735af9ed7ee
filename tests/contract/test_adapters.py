"""Every launcher takes the same legal plans, and refuses the same illegal ones untouched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import pytest

from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError
from nest_megatron.integrations import megatron_bridge, nemo
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, with_launch
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import FULL_RECOMPUTE, NO_RECOMPUTE, Recompute
from nest_megatron.layout.stage_layout import StagePartition, uniform_partition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import PLAIN, Execution
from tests import catalogue
from tests.altered import altered
from tests.estimates import estimate_plan
from tests.integrations.frameworks import bridge_config, nemo_recipe

_BATCH = 512
_DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "recompute_granularity",
)


@cache
def laid_out(
    model: str = "llama3_8b",
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    cp: int = 1,
    ep: int = 1,
    micro: int = 1,
    zero: ZeroStage = ZeroStage.OPTIMIZER,
    recompute: Recompute = NO_RECOMPUTE,
    first: int | None = None,
    execution: Execution = PLAIN,
) -> ParallelPlan:
    """A model over 64 GPUs."""
    spec = catalogue.model(model)
    dims = ParallelDims(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        data_parallel_size=64 // (tp * pp * cp),
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1 if spec.is_moe else tp,
    )
    grid = PartialLayout(
        dims=dims,
        global_batch_size=_BATCH,
        micro_batch_size=micro,
        sequence_parallel=tp > 1,
        recompute=recompute,
        zero=zero,
        execution=execution,
    )
    partition = uniform_partition(spec, pp, vpp, first=first)
    cluster = catalogue.cluster("dgx_h100", 64)
    return estimate_plan(spec, cluster, CostSettings(), grid.with_stages(partition))


LEGAL: dict[str, Callable[[], ParallelPlan]] = {
    "data parallel": laid_out,
    "tensor and sequence parallel": lambda: laid_out(tp=4),
    "pipeline": lambda: laid_out(pp=4, micro=2),
    "uneven pipeline": lambda: laid_out(pp=4, first=5),
    "virtual stages": lambda: laid_out(tp=2, pp=4, vpp=4),
    "context parallel": lambda: laid_out(cp=2),
    "weights shared": lambda: laid_out(zero=ZeroStage.WEIGHTS),
    "nothing shared": lambda: laid_out(tp=2, zero=ZeroStage.NONE),
    "recomputed": lambda: laid_out(recompute=FULL_RECOMPUTE),
    "experts": lambda: laid_out("mixtral_8x7b", ep=8),
    "experts in a pipeline": lambda: laid_out("mixtral_8x7b", tp=2, pp=4, vpp=2, ep=8),
}


#: What megatron-core refuses, or lets pass and fails on; ``facts`` of both frameworks.
ILLEGAL: dict[str, Callable[[], ParallelPlan]] = {
    "tensor ranks do not divide the heads": lambda: altered(
        laid_out(tp=4),
        tensor_model_parallel_size=3,
        expert_tensor_parallel_size=3,
        data_parallel_size=16,
    ),
    "more tensor ranks than the cluster has for them": lambda: altered(
        laid_out(tp=4), tensor_model_parallel_size=8
    ),
    "sequence parallel without tensor ranks": lambda: altered(laid_out(), sequence_parallel=True),
    "experts of a dense model": lambda: altered(laid_out(), expert_model_parallel_size=8),
    "more expert ranks than experts": lambda: altered(
        laid_out("mixtral_8x7b", ep=8), expert_model_parallel_size=16
    ),
    "experts under tensor ranks without sequence parallel": lambda: altered(
        laid_out("mixtral_8x7b", tp=2, ep=4), sequence_parallel=False
    ),
    "more context ranks than the sequence has pieces": lambda: altered(
        laid_out(), context_parallel_size=24, data_parallel_size=2
    ),
    "virtual stages without a pipeline": lambda: altered(
        laid_out(), virtual_pipeline_model_parallel_size=4
    ),
    "a layout of another number of stages": lambda: altered(
        laid_out(pp=4),
        partition=StagePartition(boundaries=(0, 17, 34), pipeline_model_parallel_size=2),
    ),
    "a layout that lacks a layer": lambda: altered(
        laid_out(pp=4),
        partition=StagePartition(boundaries=(0, 8, 16, 24, 33), pipeline_model_parallel_size=4),
    ),
    "weights shared in a pipeline": lambda: altered(
        laid_out(pp=4), use_megatron_fsdp=True, zero=ZeroStage.WEIGHTS
    ),
}


class Adapter(Protocol):
    """A launcher as the suite sees it."""

    def job(self, plan: ParallelPlan) -> Any:
        """A job of the plan's model, laid out otherwise."""

    def write(self, job: Any, plan: ParallelPlan) -> Any:
        """Write the plan into the job; what is returned is read by ``degrees``."""

    def degrees(self, written: Any) -> dict[str, Any]:
        """Choices as they are written, by Megatron's names."""


class MegatronLm:
    """Flags of a command."""

    def job(self, plan: ParallelPlan) -> Any:
        return ["pretrain_gpt.py"]

    def write(self, job: Any, plan: ParallelPlan) -> Any:
        return with_launch(plan).launch[LAUNCHER].argv

    def degrees(self, written: Any) -> dict[str, Any]:
        values = read_command(["pretrain_gpt.py", *written]).values
        layout = values["pipeline_model_parallel_layout"]
        virtual = values["num_virtual_stages_per_pipeline_rank"]
        if layout is not None:
            stages = len(megatron_stages(layout))
            virtual = stages // values["pipeline_model_parallel_size"]
        virtual = virtual if virtual != 1 else None
        return {**values, "virtual_pipeline_model_parallel_size": virtual}


class Nemo:
    """Fields of a recipe."""

    def job(self, plan: ParallelPlan) -> Any:
        return nemo_recipe(plan.model, batch=_BATCH)

    def write(self, job: Any, plan: ParallelPlan) -> Any:
        nemo.apply_plan(job, plan)
        return job

    def degrees(self, written: Any) -> dict[str, Any]:
        return {**vars(written.model.config), **vars(written.trainer.strategy)}


class Bridge:
    """Fields of a configuration."""

    def job(self, plan: ParallelPlan) -> Any:
        return bridge_config(plan.model, batch=_BATCH)

    def write(self, job: Any, plan: ParallelPlan) -> Any:
        megatron_bridge.apply_plan(job, plan, environment={})
        return job

    def degrees(self, written: Any) -> dict[str, Any]:
        return vars(written.model)


def megatron_stages(layout: str) -> tuple[str, ...]:
    """Stages of a layout string."""
    from nest_megatron.layout.stage_layout import expand_layout

    return expand_layout(layout)


ADAPTERS: dict[str, Adapter] = {
    "Megatron-LM": MegatronLm(),
    "NeMo": Nemo(),
    "Megatron-Bridge": Bridge(),
}


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return ADAPTERS[request.param]


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_plan_is_written_as_it_is(adapter: Adapter, name: str) -> None:
    plan = LEGAL[name]()
    degrees = adapter.degrees(adapter.write(adapter.job(plan), plan))
    for field in _DEGREES:
        assert degrees[field] == plan.arguments[field], field
    if plan.model.is_moe:
        wanted = plan.layout.dims.expert_model_parallel_size
        assert degrees["expert_model_parallel_size"] == wanted


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_plan_is_refused_and_nothing_is_written(adapter: Adapter, name: str) -> None:
    plan = ILLEGAL[name]()
    job = adapter.job(plan)
    before = copy.deepcopy(job)
    with pytest.raises(UserInputError) as refusal:
        adapter.write(job, plan)
    assert refusal.value.fix
    assert job == before
