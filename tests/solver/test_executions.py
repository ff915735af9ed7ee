"""How layers are carried out is searched like all else: nothing is missed, nothing illegal."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import product
from typing import Any

import pytest

from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.stage_problems import share_kept_early, stage_problem
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.layout.rulebook.execution import allows_execution
from nest_megatron.layout.rulebook.facts import LaunchRequest
from nest_megatron.model.execution import (
    PLAIN,
    ContextTraffic,
    Execution,
    FlexBackend,
    GraphImpl,
    TokenDispatcher,
)
from nest_megatron.solver.bounds import Bounds, MemoryBounds
from nest_megatron.solver.executions import with_stages_and_zero
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.memory_shortage import fits
from nest_megatron.solver.outcome import NO_THRESHOLD, Status
from nest_megatron.solver.recompute_bounds import RecomputeBounds
from nest_megatron.solver.search import UNLIMITED, Search
from nest_megatron.solver.space import SearchSpace
from tests import catalogue
from tests.solver import brute_force
from tests.solver.jobs import KERNEL, small_cluster, small_spec
from tests.solver.test_search import look_at_everything

FREE = {
    "moe_token_dispatcher_type": (TokenDispatcher.FLEX, TokenDispatcher.ALLGATHER),
    "moe_flex_dispatcher_backend": (FlexBackend.DEEPEP, FlexBackend.HYBRIDEP),
    "moe_shared_expert_overlap": (True,),
    "overlap_moe_expert_parallel_comm": (True,),
    "tp_comm_overlap": (True,),
    "cp_comm_type": (ContextTraffic.ALL_GATHER, ContextTraffic.A2A),
}
SETTINGS = CostSettings(
    memory_reserve_bytes=0, tp_overlap=0.6, ep_overlap=0.5, alltoall_slowdown=1.4, host_kernel_s=0.0
)
SPACE = SearchSpace(
    limits={"micro_batch_size": 2, "virtual_pipeline_model_parallel_size": 2},
    executions=FREE,
)
#: A host that is slower than the small jobs' layers, and graphs of what has fixed shapes.
GRAPHS = {
    "overlap_moe_expert_parallel_comm": (True,),
    "cuda_graph_impl": (GraphImpl.TRANSFORMER_ENGINE, GraphImpl.NONE),
    "cuda_graph_scope": (("attn", "mlp", "moe_router"), ()),
}
#: Modules that wait on the host, over a link that is not always fast enough.
OFFLOADED = {
    "offload_modules": (("qkv_linear", "core_attn", "attn_proj"), ()),
    "moe_shared_expert_overlap": (True,),
}
SLOW_HOST = dataclasses.replace(SETTINGS, host_kernel_s=1e-4)
OVERLAPPING = Execution(overlap_moe_expert_parallel_comm=True)


def job(seed: int, space: SearchSpace = SPACE, settings: CostSettings = SETTINGS) -> Search:
    rng = random.Random(seed)
    spec, cluster = small_spec(rng), small_cluster(rng)
    if not spec.is_moe:
        space = dataclasses.replace(space, limits={**space.limits, "context_parallel_size": 2})
    cluster = cluster.resized(min(4, cluster.num_gpus))
    model = CostModel(spec, cluster, settings)
    return Search(model, rng.choice([4, 8]), space, KERNEL, num_layouts=4)


@pytest.mark.parametrize("seed", [4, 8, 18, 21, 101])
def test_search_is_brute_force_over_executions(seed: int) -> None:
    found = job(seed).run()
    expected, count = look_at_everything(job(seed))
    assert list(found.plans) == expected[:4]
    assert found.candidates >= count  # those not worth a candidate are ruled out
    assert fits(job(seed)) == bool(expected)


@pytest.mark.parametrize("seed", [4, 8, 21])
def test_search_is_brute_force_over_graphs(seed: int) -> None:
    space = dataclasses.replace(SPACE, executions=GRAPHS)
    found = job(seed, space, SLOW_HOST).run()
    expected, _ = look_at_everything(job(seed, space, SLOW_HOST))
    assert list(found.plans) == expected[:4]
    assert found.plans[0].layout.execution.cuda_graph_impl is GraphImpl.TRANSFORMER_ENGINE
    fast = job(seed, space).run()
    assert all(plan.layout.execution.cuda_graph_impl is GraphImpl.NONE for plan in fast.plans)


@pytest.mark.parametrize(("seed", "link"), [(4, 1e8), (8, 1e10), (21, 1e13)])
def test_search_is_brute_force_over_offloaded_modules(seed: int, link: float) -> None:
    space = dataclasses.replace(SPACE, executions=OFFLOADED)

    def asked() -> Search:
        one = job(seed, space)
        device = dataclasses.replace(one.model.cluster.accelerator, host_bandwidth_bytes_per_s=link)
        cluster = dataclasses.replace(one.model.cluster, accelerator=device)
        model = CostModel(one.model.spec, cluster, SETTINGS)
        return Search(model, one.bounds.global_batch_size, space, KERNEL, num_layouts=4)

    expected, _ = look_at_everything(asked())
    assert list(asked().run().plans) == expected[:4]


@pytest.mark.parametrize("seed", [4, 8, 18, 21])
def test_what_a_job_has_can_be_left_out(seed: int) -> None:
    """With what goes with it alone, though that is no choice."""
    own = Execution(
        overlap_moe_expert_parallel_comm=True,
        delay_wgrad_compute=True,
        cuda_graph_impl=GraphImpl.TRANSFORMER_ENGINE,
        cuda_graph_scope=("attn",),
    )
    choices = {
        "overlap_moe_expert_parallel_comm": (True, False),
        "cuda_graph_impl": (GraphImpl.TRANSFORMER_ENGINE, GraphImpl.NONE),
    }
    grids = job(seed, dataclasses.replace(SPACE, execution=own, executions=choices)).grids
    for shard in grids.shards():
        assert NO_RECOMPUTE in grids.executions.possible(shard)[PLAIN]


@pytest.mark.parametrize("seed", [8, 18])
def test_what_is_left_out_is_no_better(seed: int) -> None:
    """Every way that Megatron accepts, and not only those worth a candidate."""
    asked = job(seed)
    plain = dataclasses.replace(asked.grids.space, executions={})
    grids = GridSpace(asked.model, asked.bounds.global_batch_size, plain)
    best = NO_THRESHOLD
    for family in (
        f for shard in grids.shards() for grid in grids.grids(shard) for f in grids.families(grid)
    ):
        for recompute in grids.recompute_settings(family):
            for way in accepted(asked, dataclasses.replace(family, recompute=recompute)):
                best = min(best, brute_force.solve(stage_problem(asked.model, way), best).iteration)
    plans = asked.run().plans
    assert best == (plans[0].iteration if plans else NO_THRESHOLD)


def accepted(asked: Search, grid: PartialLayout) -> list[PartialLayout]:
    """A grid in every way in which its layers run."""
    values = [dict.fromkeys((getattr(PLAIN, name), *FREE[name])) for name in FREE]
    found = [grid]
    for chosen in product(*values):
        try:
            each = Execution(**dict(zip(FREE, chosen, strict=True)))
        except UserInputError:
            continue
        way = allowed_execution(each, grid)
        launch = LaunchRequest(
            spec=asked.model.spec,
            dims=grid.dims,
            micro_batch_size=grid.micro_batch_size,
            global_batch_size=grid.global_batch_size,
            recompute=grid.recompute,
            zero=grid.zero,
            sequence_parallel=grid.sequence_parallel,
            version="0.20",
            execution=way,
        )
        if allows_execution(launch):
            found.append(dataclasses.replace(grid, execution=way))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("seed", [18, 21])
def test_what_the_job_has_is_kept_wherever_it_can_be(seed: int) -> None:
    space = dataclasses.replace(SPACE, executions={}, execution=OVERLAPPING)
    found = job(seed, space).run()
    for plan in found.plans:
        assert plan.layout.execution == allowed_execution(OVERLAPPING, plan.layout)
    expected, count = look_at_everything(job(seed, space))
    assert list(found.plans) == expected[:4]
    assert found.candidates == count


@pytest.mark.parametrize(("free", "settings"), [(FREE, SETTINGS), (GRAPHS, SLOW_HOST)])
def test_bounds_hold_whatever_is_chosen(free: dict[str, Any], settings: CostSettings) -> None:
    spec = catalogue.model("deepseek_v3")
    model = CostModel(spec, catalogue.cluster("dgx_h100", 64), settings)
    limits = {
        "micro_batch_size": 1,
        "context_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    }
    space = dataclasses.replace(SPACE, limits=limits, executions=free)
    grids = GridSpace(model, 128, space)
    bounds = Bounds(model, 128, grids.micro_batches)
    memory = MemoryBounds(model, grids)
    recomputing = RecomputeBounds(bounds, memory)
    ways, raised = set(), 0
    for shard in list(grids.shards())[::9]:
        even = min(map(bounds.even, grids.fastest(shard)))
        for family in (f for grid in grids.grids(shard) for f in grids.families(grid)):
            needed, zeros = int(memory.of_family(family)), [family.zero]
            free, capacity = bounds.pipeline(family), int(1.3 * needed)
            least = recomputing.of_grid(family, zeros, capacity, 0)
            least = max(least, recomputing.of_family(family, capacity))
            raised += least > free
            for recompute in grids.recompute_settings(family)[::9]:
                candidate = dataclasses.replace(family, recompute=recompute)
                problem = stage_problem(model, candidate)
                roomy = problem._replace(capacity_bytes=UNLIMITED)
                assert max(even, free) <= KERNEL(roomy, NO_THRESHOLD, 2_000).iteration
                enough = problem._replace(capacity_bytes=capacity)
                assert not KERNEL(enough, least, 2_000).boundaries
                tight = problem._replace(capacity_bytes=needed - 1)
                assert KERNEL(tight, 0, 2_000).status is Status.INFEASIBLE
                ways.add(family.execution)
    assert len(ways) > 2
    assert raised > 10


def test_what_forbids_whole_layers_needs_what_they_would_free() -> None:
    """The bound on a grid's memory counts the recomputation that its execution allows."""
    spec = catalogue.model("deepseek_v3")
    model = CostModel(spec, catalogue.cluster("dgx_h100", 256), SETTINGS)
    grids = GridSpace(model, 512, SPACE)
    dims = ParallelDims(
        pipeline_model_parallel_size=8,
        virtual_pipeline_model_parallel_size=2,
        data_parallel_size=32,
        expert_model_parallel_size=32,
    )
    laid = PartialLayout(
        dims=dims, global_batch_size=512, micro_batch_size=1, sequence_parallel=False
    )
    needed = {False: 0.0, True: 0.0}
    for grid in grids.executed(laid):
        overlaps = grid.execution.overlap_moe_expert_parallel_comm
        needed[overlaps] = MemoryBounds(model, grids).of_family(grid)
    assert needed[True] > 1.5 * needed[False] > 0


def test_one_bound_holds_for_several_numbers_of_virtual_stages() -> None:
    spec = catalogue.model("deepseek_v3")
    model = CostModel(spec, catalogue.cluster("dgx_h100", 256), SETTINGS)
    grids = GridSpace(model, 512, SPACE)
    memory = MemoryBounds(model, grids)
    dims = ParallelDims(
        pipeline_model_parallel_size=8,
        virtual_pipeline_model_parallel_size=2,
        data_parallel_size=32,
        expert_model_parallel_size=32,
    )
    laid = PartialLayout(
        dims=dims, global_batch_size=512, micro_batch_size=1, sequence_parallel=False
    )
    for first in grids.executed(laid):
        families = [with_stages_and_zero(first, virtual, first.zero) for virtual in (2, 3, 4, 6)]
        bounds: dict[float, set[float]] = {}
        for each in families:
            bounds.setdefault(share_kept_early(each), set()).add(memory.of_family(each))
        assert len(bounds) == (4 if first.execution.overlap_moe_expert_parallel_comm else 1)
        assert all(len(found) == 1 for found in bounds.values())


def test_a_choice_that_is_none_is_named() -> None:
    with pytest.raises(UserInputError, match="tp_comm_overlap"):
        SearchSpace(executions={"tp_com_overlap": (True,)})


def test_an_overlapped_exchange_keeps_one_forward_pass_more() -> None:
    """Megatron runs it before the first backward pass, so that both are independent."""
    model = CostModel(catalogue.model("mixtral_8x7b"), catalogue.cluster("dgx_h100", 64), SETTINGS)
    for pp, virtual, alive in ((1, 1, 1), (4, 2, 5)):
        dims = ParallelDims(
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=virtual,
            data_parallel_size=64 // pp,
            expert_model_parallel_size=8,
        )
        grid = PartialLayout(
            dims=dims, global_batch_size=512, micro_batch_size=1, sequence_parallel=False
        )
        plain = stage_problem(model, grid)
        overlapped = stage_problem(model, dataclasses.replace(grid, execution=OVERLAPPING))
        for one, more in zip(plain.costs, overlapped.costs, strict=True):
            assert more.saved_bytes == math.ceil(one.saved_bytes * (1 + 1 / alive))
