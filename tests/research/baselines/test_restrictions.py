"""What each docstring says that a method does not have, or does not see."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.pipeline import evaluate
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.recompute import FULL_RECOMPUTE, NO_RECOMPUTE, RecomputeGranularity
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.research.baselines import aceso, alpa_e, autoconfigurator, manual, mcmc
from nest_megatron.research.baselines.aceso import Resource, bottleneck
from nest_megatron.research.baselines.job import (
    BaselineChoice,
    ComparisonJob,
    Layouts,
    balanced_partition,
    even_partition,
    nearest,
    pipeline_of,
    restricted,
    shard_of,
    with_network_levels,
)
from nest_megatron.research.baselines.manual import published
from nest_megatron.research.baselines.network_blind import find_mist, find_phaze
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.solver.space import SearchSpace
from tests.catalogue import cluster, model
from tests.research.baselines.jobs import job_of, named_job, oversubscribed

LLAMA = ("llama3_70b", "h100_spine_leaf", 128, 256)


def found(plan: SolvedLayout | None) -> SolvedLayout:
    assert plan is not None
    return plan


@pytest.mark.parametrize("find", [find_phaze, find_mist], ids=["phaze", "mist"])
def test_methods_blind_to_the_network_choose_alike_on_any(
    find: Callable[[ComparisonJob], BaselineChoice],
) -> None:
    machines = cluster("h100_spine_leaf", 128)
    plans = [
        found(find(job_of(model("llama3_70b"), oversubscribed(machines, times), 256)).plan)
        for times in (1.0, 8.0)
    ]
    assert plans[0].layout == plans[1].layout
    assert plans[0].layout.partition.boundaries == plans[1].layout.partition.boundaries
    assert plans[0].iteration < plans[1].iteration  # priced on the real cluster all the same


def test_a_method_that_sees_the_network_does_not() -> None:
    machines = cluster("h100_spine_leaf", 128)
    job = job_of(model("llama3_70b"), oversubscribed(machines, 64.0), 256)
    flat = found(find_mist(job).plan)
    walked = found(mcmc.find(job, seeds=3, steps=150).plan)
    assert walked.iteration < flat.iteration


def test_networks_as_they_are_seen() -> None:
    seen = with_network_levels(named_job(*LLAMA).model, 1).cluster
    assert [level.num_devices for level in seen.levels] == [None]
    real = cluster("h100_spine_leaf", 128)
    assert seen.levels[0].bandwidth_bytes_per_s == real.levels[0].bandwidth_bytes_per_s
    mesh = with_network_levels(named_job(*LLAMA).model, 2).cluster
    assert [level.num_devices for level in mesh.levels] == [8, None]
    assert mesh.levels[1].bandwidth_bytes_per_s == real.levels[1].bandwidth_bytes_per_s


def test_phaze_has_no_zero_no_context_no_virtual_stages() -> None:
    grid = found(find_phaze(named_job(*LLAMA)).plan).layout
    assert grid.zero is ZeroStage.NONE
    assert grid.dims.context_parallel_size == grid.dims.virtual_pipeline_model_parallel_size == 1
    assert grid.recompute in (NO_RECOMPUTE, FULL_RECOMPUTE)


def test_phaze_recomputes_all_where_memory_asks() -> None:
    tight = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 8}
    job = named_job(*LLAMA, SearchSpace(fixed={**tight, "micro_batch_size": 2}))
    assert found(find_phaze(job).plan).layout.recompute == FULL_RECOMPUTE


def test_alpa_shards_by_traffic_alone_inside_one_pipeline() -> None:
    job = named_job("llama3_8b", "dgx_h100", 16, 64)
    plan = found(alpa_e.find(job).plan)
    mesh, chosen = with_network_levels(job.model, 2), plan.layout
    assert chosen.dims.rank_order is RankOrder.TP_CP_EP_DP_PP  # replicas inside the sub-mesh
    assert chosen.dims.ranks_per_stage * chosen.dims.pipeline_model_parallel_size == 16
    bare = dataclasses.replace(chosen, recompute=NO_RECOMPUTE)
    rivals = [
        grid
        for grid in Layouts(job, restricted(job, ("context_parallel_size",))).grids.shards()
        if grid.micro_batch_size == chosen.micro_batch_size
    ]
    assert rivals
    least = alpa_e.communication(mesh, bare)
    job_grids = job.grids(
        restricted(
            job,
            ("context_parallel_size", "virtual_pipeline_model_parallel_size"),
            zero_stages=(ZeroStage.NONE,),
        )
    )
    same = [
        family
        for shard in job_grids.shards()
        for grid in job_grids.grids(shard)
        for family in job_grids.families(grid)
        if pipeline_of(family).stages == pipeline_of(chosen).stages
        and family.micro_batch_size == chosen.micro_batch_size
    ]
    assert min(alpa_e.communication(mesh, grid) for grid in same) == least


def test_alpa_drops_what_does_not_fit() -> None:
    choice = alpa_e.find(named_job("llama3_70b", "h100_spine_leaf", 128, 128))
    assert choice.plan is not None
    assert "faster ones do not" in choice.reason


def test_mist_has_no_virtual_stages_and_no_context() -> None:
    dims = found(find_mist(named_job(*LLAMA)).plan).layout.dims
    assert dims.context_parallel_size == dims.virtual_pipeline_model_parallel_size == 1


def test_walks_repeat_and_more_of_them_are_no_worse() -> None:
    job = named_job("llama3_8b", "dgx_h100", 16, 64)
    few, many = (found(mcmc.find(job, seeds=n, steps=60).plan) for n in (2, 4))
    assert many.iteration <= few.iteration
    assert found(mcmc.find(job, seeds=2, steps=60).plan) == few


def test_aceso_stays_within_its_budget_and_improves_on_its_starts() -> None:
    job = named_job(*LLAMA)
    choice = aceso.find(job, evaluations=300)
    stages = 8  # 1 to 64 in powers of two, and one start each
    assert choice.candidates <= 300 + stages
    plan = found(choice.plan)
    assert plan.layout.zero is ZeroStage.NONE
    assert plan.layout.recompute.granularity is not RecomputeGranularity.SELECTIVE
    layouts = Layouts(job, restricted(job, ("context_parallel_size",)))
    start = layouts.state(nearest(layouts.families(min(layouts.shards)), plan.layout)[0])
    assert start.plan is None or plan.iteration < start.iteration


def test_bottlenecks() -> None:
    job = named_job(*LLAMA)
    layouts = Layouts(job, restricted(job, ("context_parallel_size",)))
    tp8 = next(s for s in sorted(layouts.shards) if s.tensor == 8 and s.micro_batch == 1)
    grid = next(
        g
        for g in layouts.families(tp8)
        if (pipeline_of(g).stages, pipeline_of(g).virtual) == (4, 1)
    )
    units = len(job.model.spec.layer_kinds())
    uneven = layouts.state(grid, (0, 50, 60, 70, units))
    stage, resources = bottleneck(job.model, uneven)
    assert stage == 0
    assert Resource.COMPUTE in resources
    stage, resources = bottleneck(job.model, layouts.state(grid, (0, 75, 78, 80, units)))
    assert (stage, resources[0]) == (0, Resource.MEMORY)


def test_manual_takes_nvidias_recipe_and_scales_it() -> None:
    """Llama 3.1 70B in bf16 on H100: TP 4, PP 4 x 5, CP 2, published for 64 to 2,048 GPUs."""
    for num_gpus in (128, 512):
        choice = manual.find(named_job("llama3_70b", "h100_spine_leaf", num_gpus, 2 * num_gpus))
        grid = found(choice.plan).layout
        assert "NVIDIA's recipe" in choice.reason
        assert f"for {num_gpus} GPUs" in choice.reason
        assert tuple(shard_of(grid))[:4] == (4, 2, 1, 1)
        assert (pipeline_of(grid).stages, pipeline_of(grid).virtual) == (4, 5)
        assert grid.dims.data_parallel_size == num_gpus // 32


def test_recipes_are_for_the_device_the_length_and_the_size() -> None:
    spec, bf16 = model("llama3_70b"), Precision.BF16
    assert published(spec, cluster("h100_spine_leaf", 512), bf16)[0].precision is bf16
    assert not published(spec, cluster("dgx_a100", 512), bf16)
    assert not published(spec, cluster("h100_spine_leaf", 8), bf16)
    longer = dataclasses.replace(spec, seq_length=4096)
    assert not published(longer, cluster("h100_spine_leaf", 512), bf16)


def test_manual_without_a_recipe_follows_the_rule() -> None:
    """GPT-3 on A100: tensor parallelism fills the node, then come stages with virtual ones."""
    choice = manual.find(named_job("gpt3_175b", "dgx_a100", 256, 512))
    grid = found(choice.plan).layout
    assert choice.reason == "Megatron's rule of thumb"
    assert grid.dims.tensor_model_parallel_size == 8
    assert grid.dims.pipeline_model_parallel_size > 1
    assert grid.dims.virtual_pipeline_model_parallel_size == 3
    assert grid.zero is ZeroStage.OPTIMIZER
    small = found(manual.find(named_job("bert_large", "dgx_a100", 16, 512)).plan).layout
    assert (small.dims.tensor_model_parallel_size, small.dims.data_parallel_size) == (1, 16)


def test_a_wish_against_the_recipe_leads_to_the_rule() -> None:
    space = SearchSpace(fixed={"tensor_model_parallel_size": 8})
    choice = manual.find(named_job(*LLAMA, space))
    assert "no published recipe fits" in choice.reason
    assert found(choice.plan).layout.dims.tensor_model_parallel_size == 8


def test_autoconfigurator_follows_its_table() -> None:
    a100_40gb, h100 = 40 * 10**9, 85 * 10**9
    gpt = model("gpt3_175b")
    row = autoconfigurator.row_for(gpt, h100)
    assert (row.tensor, row.pipeline, row.model_parallel) == ((8,), (4, 16), (32, 256))
    assert autoconfigurator.row_for(gpt, a100_40gb).tensor == (4, 8)
    outside = autoconfigurator.row_for(model("llama3_70b"), h100)
    assert (outside.tensor, outside.pipeline) == ((1, 2, 4, 8), (1, 1))  # its gap
    grid = found(autoconfigurator.find(named_job("gpt3_175b", "dgx_a100", 256, 512)).plan).layout
    assert grid.recompute == NO_RECOMPUTE
    assert grid.zero is ZeroStage.OPTIMIZER
    layers_of_rank = 96 // pipeline_of(grid).stages
    assert pipeline_of(grid).virtual in (layers_of_rank, 12)


def test_cuts() -> None:
    llama = model("llama3_8b")
    assert even_partition(llama, 4) == (0, 9, 17, 25, 34)
    assert even_partition(llama, 17) == (0, *range(2, 34, 2), 34)  # ends count as layers
    assert even_partition(llama, 5) is None
    assert balanced_partition(llama, 5) == (0, 8, 15, 21, 27, 34)
    assert balanced_partition(llama, 34) == tuple(range(35))
    assert balanced_partition(llama, 1) == (0, 34)
    assert set(mcmc.shifted(llama.num_layers, (0, 9, 34))) == {(0, 8, 34), (0, 10, 34)}
    assert mcmc.shifted(llama.num_layers, (0, 34)) == []


def test_what_is_missing_is_what_the_whole_schedule_lacks() -> None:
    """A walk counts memory over two rounds of micro batches; the solver over all of them."""
    job = named_job("llama3_8b", "dgx_h100", 16, 256)
    layouts = Layouts(job, restricted(job))
    lacking = 0
    for shard in list(layouts.shards)[::7]:
        for grid in layouts.families(shard)[::9]:
            state = layouts.state(grid)
            problem = stage_problem(job.model, grid)
            needed = max(rank.total for rank in evaluate(problem, state.boundaries).memory)
            assert state.missing_bytes == max(0, needed - problem.capacity_bytes)
            lacking += state.missing_bytes > 0
    assert lacking > 3
