"""Plans to report on: small ones by hand, and one that was searched."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.planner import NoPlan, Request, plan
from tests import catalogue
from tests.estimates import estimate_plan


@cache
def hand_plan(
    pp: int,
    vpp: int = 1,
    *,
    microbatches: int = 16,
    model: str = "llama3_1_405b",
    settings: CostSettings | None = None,
) -> ParallelPlan:
    """A plan with one replica, eight tensor ranks where there is a pipeline, and an even layout."""
    spec, tp = catalogue.model(model), 8 if pp > 1 else 1
    dims = ParallelDims(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
    )
    grid = PartialLayout(
        dims=dims,
        global_batch_size=microbatches,
        micro_batch_size=1,
        sequence_parallel=tp > 1,
    )
    units = len(spec.layer_kinds())
    marks = tuple(round(k * units / (pp * vpp)) for k in range(pp * vpp + 1))
    assert all(a < b for a, b in pairwise(marks))
    partition = StagePartition(boundaries=marks, pipeline_model_parallel_size=pp)
    cluster = catalogue.cluster("dgx_h100", tp * pp)
    return estimate_plan(spec, cluster, settings or CostSettings(), grid.with_stages(partition))


@cache
def searched_plan() -> ParallelPlan:
    """A plan with runners-up, experts and search counts."""
    request = Request(
        spec=catalogue.model("mixtral_8x7b"),
        cluster=catalogue.cluster("h100_spine_leaf", 64),
        global_batch_size=128,
        num_alternatives=4,
    )
    found = plan(request)
    assert not isinstance(found, NoPlan)
    return found


#: One stage, several, virtual stages, and more stages than a screen has lines.
SHAPES = {
    "one stage": lambda: hand_plan(1, model="bert_large"),
    "plain": lambda: hand_plan(4),
    "interleaved": lambda: hand_plan(8, 4),
    "long": lambda: hand_plan(4, microbatches=512),
    "64 stages": lambda: hand_plan(64, microbatches=256),
    "hybrid": lambda: hand_plan(1, model="nemotron_h_4b"),
    "two stacks": lambda: hand_plan(1, model="t5_220m"),
    "searched": searched_plan,
}
