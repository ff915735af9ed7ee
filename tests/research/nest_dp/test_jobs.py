"""Jobs of the catalogue: where groups lie, what memory holds, and what the outer loops choose."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.paper.ablation import table7_row
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.rank_order import GroupKind, group_shape
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.research.nest_artifact.search import NoSolution
from nest_megatron.research.nest_dp.job import (
    Division,
    MemoryRule,
    PaperOptimizer,
    RecomputeChoice,
    ResearchJob,
)
from nest_megatron.research.nest_dp.records import PricedStrategy, Schedule
from nest_megatron.research.nest_dp.run import ResearchPlan, described
from nest_megatron.research.nest_dp.search import (
    Pricer,
    RecurrenceSolution,
    best_pipeline,
    cases,
    solve,
)
from nest_megatron.research.nest_dp.topology import (
    Block,
    GroupShapes,
    Replicas,
    Topology,
    common_unit,
    link_levels,
    send_ticks,
    stretches,
)
from tests.research.nest_dp.brute_force import least_total
from tests.research.nest_dp.jobs import research_job, tiny_job, with_memory


def solved(job: ResearchJob) -> RecurrenceSolution:
    found = solve(job)
    assert isinstance(found, RecurrenceSolution)
    return found


@pytest.mark.parametrize("choices", [{}, {"strategy_per_stage": True}, {"divide": "loosely"}])
def test_the_outer_loops_lose_nothing(choices: dict[str, object]) -> None:
    """Every case solved without a limit, and by brute force."""
    if "divide" in choices:
        choices = {"divide": Division.LOOSELY}
    job = tiny_job(
        num_gpus=3 if "divide" in choices else 2, fixed={"context_parallel_size": 1}, **choices
    )
    job = with_memory(job, 60 * 10**9)
    pricer = Pricer(job)
    totals, brute = [], []
    for case in cases(pricer):
        problem = pricer.problem(case, min(3, case.replicas.stride))
        found = best_pipeline(problem)
        totals.extend([found.total] if found else [])
        brute.append(least_total(problem))
        assert found is None or found.total >= case.least_total
    assert solved(job).pipeline.total == min(totals) == min(filter(None, brute))


def test_a_stage_that_fills_the_order_lies_as_megatron_lays_it() -> None:
    """The shapes of aligned groups are those of the rank order."""
    sizes = (8, 32, 64)
    places = GroupShapes(sizes, Replicas(count=8, stride=8))
    found = places.of(Block(tp=2, cp=4, ep=1), 1, 0)
    dims = ParallelDims(tensor_model_parallel_size=2, context_parallel_size=4, data_parallel_size=8)
    kinds = (GroupKind.TP, GroupKind.CP, GroupKind.DP_CP)
    assert (found.inner[0], found.inner[1], found.dense) == tuple(
        group_shape(dims, kind, sizes) for kind in kinds
    )
    experts = places.of(Block(tp=2, cp=1, ep=4), 1, 0)
    dims = ParallelDims(
        tensor_model_parallel_size=2,
        data_parallel_size=32,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=2,
    )
    assert (experts.inner[2], experts.expert) == (
        group_shape(dims, GroupKind.EP, sizes),
        group_shape(dims, GroupKind.EDP, sizes),
    )


def test_a_group_across_two_nodes_is_priced_there() -> None:
    places = GroupShapes((4, 16), Replicas(count=1, stride=16))
    block = Block(tp=4, cp=1, ep=1)
    assert places.of(block, 1, 0).inner[0] == (4, 1)
    assert places.of(block, 1, 2).inner[0] == (2, 2)
    assert places.of(block, 1, 3).inner[0] == (1, 4)
    assert places.of(block, 2, 0).zero == (1, 2)


@pytest.mark.parametrize(("count", "stride"), [(1, 24), (2, 12), (3, 8), (3, 7), (5, 5)])
def test_stretches_are_what_all_replicas_have_in_common(count: int, stride: int) -> None:
    replicas = Replicas(count=count, stride=stride)
    unit = common_unit([4], replicas, [1])
    ends = stretches(4, replicas, unit)
    for one in range(stride):
        for other in range(one, stride):
            together = all(
                (one + copy * stride) // 4 == (other + copy * stride) // 4 for copy in range(count)
            )
            assert (ends[one // unit] * unit > other) is together


def test_a_coarser_unit_changes_nothing() -> None:
    job = tiny_job(num_gpus=8, fixed={"tensor_model_parallel_size": 2}, zero=False)
    found = solved(job)
    assert found.problem.unit > 1
    pricer = Pricer(job)
    for case in cases(pricer):
        problem = pricer.problem(case, case.replicas.stride // 2)
        unit = problem.unit
        spread = dataclasses.replace(
            problem,
            ends=tuple(tuple(e * unit for e in row for _ in range(unit)) for row in problem.ends),
            strategies=tuple(_spread(strategy, unit) for strategy in problem.strategies),
        )
        totals = [p and p.total for p in (best_pipeline(problem), best_pipeline(spread))]
        assert totals[0] == totals[1]


def _spread(strategy: PricedStrategy, unit: int) -> PricedStrategy:
    options = tuple(
        dataclasses.replace(
            option,
            num_devices=option.num_devices * unit,
            times_at=tuple(place for place in option.times_at for _ in range(unit)),
        )
        for option in strategy.options
    )
    return dataclasses.replace(strategy, options=options)


def test_replicas_that_do_not_divide_are_found_where_allowed() -> None:
    fixed = {"tensor_model_parallel_size": 1, "context_parallel_size": 1}
    fixed |= {"pipeline_model_parallel_size": 3, "micro_batch_size": 1}
    exactly = solved(tiny_job(num_gpus=8, fixed=fixed))
    loosely = solved(tiny_job(num_gpus=8, fixed=fixed, divide=Division.LOOSELY))
    assert loosely.pipeline.total <= exactly.pipeline.total
    fixed |= {"pipeline_model_parallel_size": 1, "data_parallel_size": 5}
    odd = solved(tiny_job(num_gpus=8, fixed=fixed, divide=Division.LOOSELY))
    assert odd.case.replicas == Replicas(count=5, stride=1)
    with pytest.raises(UserInputError, match="no strategy fits"):
        solve(tiny_job(num_gpus=8, fixed=fixed))


def test_classes_of_a_torus_and_a_mesh() -> None:
    cluster = research_job("model=llama3_8b", "cluster=torus_3d", "cluster.num_gpus=64").cluster
    torus, mesh = (link_levels(cluster, kind) for kind in (Topology.TORUS, Topology.MESH))
    assert [level.name for level in torus] == ["x 2", "x 4", "y 2", "y 4", "z 2", "z 4"]
    assert [level.num_devices for level in torus] == [2, 4, 8, 16, 32, 64]
    assert [level.hops for level in torus] == [1, 2, 3, 4, 5, 6]
    assert [level.hops for level in mesh] == [1, 3, 4, 6, 7, 9]
    near, far = send_ticks(torus, 1e6)[0], send_ticks(torus, 1e6)[-1]
    assert near < far < send_ticks(mesh, 1e6)[-1]
    assert list(send_ticks(torus, 1e6)) == sorted(send_ticks(torus, 1e6))


def test_links_of_a_torus_are_named_by_class() -> None:
    job = tiny_job(
        num_gpus=16,
        cluster="torus_3d",
        topology=Topology.TORUS,
        fixed={
            "tensor_model_parallel_size": 1,
            "context_parallel_size": 1,
            "pipeline_model_parallel_size": 3,
            "data_parallel_size": 4,
        },
    )
    plan = described(job, solved(job))
    assert {stage.link_in for stage in plan.stages} <= {"", "x 2", "x 4", "y 2"}
    assert any(stage.link_in.startswith("x") for stage in plan.stages)


def test_the_papers_account_of_memory() -> None:
    """2 W + O + A + (s - 1) S, looked up for each stage of a found plan."""
    fixed = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
    job = tiny_job(
        num_gpus=2, fixed=fixed, memory=MemoryRule.PAPER, recompute=RecomputeChoice.ON, zero=False
    )
    found = solved(job)
    pricer = Pricer(job)
    strategy, stages = found.case.strategies[0], found.pipeline.stages
    layers = pricer.layers.layers(strategy)
    kept = pricer.layers.policies(strategy, (0,) * 7)[0].first_bytes
    for position, stage in zip((2, 1), stages, strict=True):
        weights = sum(layers[at].parameters.total for at in stage.nodes)
        activations = sum(kept[at] for at in stage.nodes)
        boundary = 8192 * 4096 * 2 * strategy.micro_batch_size if position == 2 else 0
        entry = 0 if stage.nodes[0] == 0 else boundary
        assert stage.memory_bytes == 16 * weights + activations + (position - 1) * entry


def test_gpipe_needs_more_memory_than_1f1b() -> None:
    fixed = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
    fixed |= {"micro_batch_size": 1, "context_parallel_size": 1}
    peaks = {
        schedule: max(
            stage.memory_bytes
            for stage in solved(
                tiny_job(num_gpus=2, fixed=fixed, schedule=schedule, zero=False)
            ).pipeline.stages
        )
        for schedule in Schedule
    }
    assert peaks[Schedule.GPIPE] > peaks[Schedule.ONE_F_ONE_B]


def test_zero_finds_a_plan_where_none_exists_without() -> None:
    """Table 7 of the paper in small: BERT-Large on 120 MB."""
    job = research_job("model=bert_large", "cluster=tpuv4_fat_tree", "cluster.num_gpus=64")
    row = table7_row(job.spec, job.cluster, job.settings, PaperOptimizer.SGD)
    assert isinstance(row.without, NoSolution)
    assert row.without.missing_bytes > 0
    assert isinstance(row.with_zero, ResearchPlan)
    assert all(stage.memory_bytes <= row.memory_bytes for stage in row.with_zero.stages)
    assert any(stage.zero_stage >= ZeroStage.GRADIENTS for stage in row.with_zero.stages)


def test_what_is_missing_is_named() -> None:
    found = solve(with_memory(tiny_job(zero=False), 8 * 10**9))
    assert isinstance(found, NoSolution)
    assert "head alone lacks" in found.reason
    assert found.missing_bytes > 0


def test_recomputation_is_a_choice_of_each_stage() -> None:
    fixed = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
    fixed |= {"micro_batch_size": 8, "context_parallel_size": 1}
    off, auto, on = (
        solve(
            with_memory(tiny_job(num_gpus=2, fixed=fixed, zero=False, recompute=choice), 80 * 10**9)
        )
        for choice in (RecomputeChoice.OFF, RecomputeChoice.AUTO, RecomputeChoice.ON)
    )
    assert isinstance(off, NoSolution)
    assert isinstance(auto, RecurrenceSolution)
    assert isinstance(on, RecurrenceSolution)
    assert [stage.policy for stage in auto.pipeline.stages] == [1, 0]
    assert auto.pipeline.total <= on.pipeline.total
