"""What the recurrence can choose: each test fails where the choice is taken away."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.research.nest_dp.records import (
    CheckpointPolicy,
    Downsets,
    FoundPipeline,
    LayerDag,
    NodeTimes,
    PricedStrategy,
    Problem,
    Schedule,
    ZeroOption,
    downsets_of,
)
from nest_megatron.research.nest_dp.search import best_pipeline
from tests.research.nest_dp.brute_force import least_total


def option(n: int, devices: int, static: int = 1, work: int = 10, sync: int = 0) -> ZeroOption:
    """Equal nodes, everywhere alike; up to eight places."""
    times = NodeTimes(
        forward=(work,) * n, recompute=(work,) * n, backward=(work,) * n, sync=(sync,) * n
    )
    return ZeroOption(
        zero_stage=ZeroStage.NONE,
        zero_degree=1,
        num_devices=devices,
        static_bytes=(static,) * n,
        times_at=(0,) * 16,
        times=(times,),
    )


def policy(downsets: Downsets, saved: int = 1, *, recompute: bool = False) -> CheckpointPolicy:
    n = len(downsets.dag.names)
    return CheckpointPolicy(
        recompute=recompute,
        first_bytes=(saved,) * n,
        further_bytes=(0 if recompute else saved,) * n,
        entry_bytes=(0,) * len(downsets),
        peak_bytes=(0,) * n,
    )


def problem(
    downsets: Downsets,
    strategies: tuple[PricedStrategy, ...],
    ends: tuple[tuple[int, ...], ...],
    **more: object,
) -> Problem:
    given = {
        "num_microbatches": 4,
        "schedule": Schedule.ONE_F_ONE_B,
        "capacity_bytes": 100,
        "most_stages": len(downsets.dag.names),
    }
    fitted = tuple(
        dataclasses.replace(
            s,
            options=tuple(
                dataclasses.replace(o, times_at=o.times_at[: len(ends[0])]) for o in s.options
            ),
        )
        for s in strategies
    )
    return Problem(downsets=downsets, strategies=fitted, ends=ends, **{**given, **more})  # type: ignore[arg-type]


def strategy(downsets: Downsets, rates: tuple[int, ...], *options: ZeroOption) -> PricedStrategy:
    """Whose links take ``rate`` ticks at each level for whatever crosses."""
    crossing = list(downsets.cut_bytes([1] * len(downsets.dag.names)))
    return PricedStrategy(
        label="",
        options=options,
        policies=(policy(downsets),),
        send=tuple(tuple(rate * num for num in crossing) for rate in rates),
    )


def solved(question: Problem) -> FoundPipeline:
    found = best_pipeline(question)
    assert found is not None
    assert found.total == least_total(question)
    return found


def chain(n: int) -> Downsets:
    return downsets_of(LayerDag.chain([f"n{at}" for at in range(n)]))


def test_devices_are_left_idle_where_a_stage_then_stays_inside_a_node() -> None:
    """Nodes of three: two stages of two devices each would otherwise lie across two nodes."""
    downsets = chain(2)
    inside, across = (option(2, 2, work=work).times[0] for work in (10, 20))
    wide = ZeroOption(
        zero_stage=ZeroStage.NONE,
        zero_degree=1,
        num_devices=2,
        static_bytes=(60, 60),
        times_at=(0, 0, 1, 0, 0, 1),
        times=(inside, across),
    )
    found = solved(
        problem(downsets, (strategy(downsets, (0, 0), wide),), ((3, 3, 3, 6, 6, 6), (6,) * 6))
    )
    assert [stage.first_device for stage in found.stages] == [3, 0]


def test_a_slow_level_moves_the_cut() -> None:
    """Three nodes on two devices: the outer link is dear, and the first stage pays it twice."""
    dag = LayerDag(names=("a", "b", "c"), edges=((0, 1), (1, 2)))
    downsets = downsets_of(dag)
    near = strategy(downsets, (0, 50), option(3, 1, static=30))
    inside = solved(problem(downsets, (near,), ((2, 2), (2, 2))))
    outside = solved(problem(downsets, (near,), ((1, 2), (2, 2))))
    assert len(inside.stages) == 2
    assert inside.stages[1].level_in == 0
    assert len(outside.stages) == 1


def test_gpipe_keeps_every_micro_batch() -> None:
    downsets = chain(4)
    one = strategy(downsets, (0,), option(4, 1))
    ends = ((4,) * 4,)
    tight = {"capacity_bytes": 8, "num_microbatches": 8}
    found = solved(problem(downsets, (one,), ends, **tight))
    assert max(stage.memory_bytes for stage in found.stages) <= 8
    gpipe = problem(downsets, (one,), ends, **tight, schedule=Schedule.GPIPE)
    assert best_pipeline(gpipe) is None
    assert least_total(gpipe) is None


def test_stages_may_differ_in_strategy() -> None:
    """Three devices: a stage of two and a stage of one."""
    downsets = chain(3)
    narrow = strategy(downsets, (0,), option(3, 1, static=60))
    wide = strategy(downsets, (0,), option(3, 2, static=30, work=5))
    ends = ((3,) * 3,)
    both = solved(problem(downsets, (narrow, wide), ends))
    assert {stage.strategy for stage in both.stages} == {0, 1}
    assert best_pipeline(problem(downsets, (narrow,), ends, most_stages=2)) is None
    alone = best_pipeline(problem(downsets, (wide,), ends))
    assert alone is None or alone.total > both.total


def test_zero_rises_only_where_memory_asks() -> None:
    downsets = chain(2)
    plain, divided = option(2, 1, static=70), option(2, 2, static=35)
    ends = ((4,) * 4,)
    roomy = solved(problem(downsets, (strategy(downsets, (0,), plain, divided),), ends))
    assert [stage.option for stage in roomy.stages] == [0, 0]
    tight = problem(downsets, (strategy(downsets, (0,), plain, divided),), ends, capacity_bytes=50)
    assert [stage.option for stage in solved(tight).stages] == [1, 1]
    without = problem(downsets, (strategy(downsets, (0,), plain),), ends, capacity_bytes=50)
    assert best_pipeline(without) is None


def test_the_slowest_sum_of_gradients_counts() -> None:
    """An even cut is best for the stages alone; a dear sum moves it."""
    downsets = chain(4)
    even = option(4, 1)
    times = NodeTimes(
        forward=(10,) * 4, recompute=(0,) * 4, backward=(10,) * 4, sync=(500, 500, 0, 0)
    )
    dear = ZeroOption(
        zero_stage=ZeroStage.NONE,
        zero_degree=1,
        num_devices=1,
        static_bytes=(1,) * 4,
        times_at=(0, 0),
        times=(times,),
    )
    ends = ((2, 2),)
    plain = solved(problem(downsets, (strategy(downsets, (0,), even),), ends))
    moved = solved(problem(downsets, (strategy(downsets, (0,), dear),), ends))
    assert [len(stage.nodes) for stage in plain.stages] == [2, 2]
    assert [len(stage.nodes) for stage in moved.stages] == [1, 3]


def test_branches_may_lie_in_different_stages() -> None:
    """Two equal branches between a first and a last node."""
    dag = LayerDag(names=("in", "left", "right", "out"), edges=((0, 1), (0, 2), (1, 3), (2, 3)))
    downsets = downsets_of(dag)
    assert len(downsets) == 6
    found = solved(
        problem(downsets, (strategy(downsets, (0,), option(4, 1, static=50)),), ((4,) * 4,))
    )
    assert len(found.stages) == 4


def test_a_tensor_that_skips_stages_crosses_every_cut_between() -> None:
    dag = LayerDag(names=("a", "b", "c"), edges=((0, 1), (1, 2), (0, 2)))
    crossing = list(downsets_of(dag).cut_bytes([100, 10, 1]))
    assert crossing == [0, 110, 100, 0]


def test_too_many_downsets_are_refused_with_what_to_contract() -> None:
    branches = 12
    names = ("in", *(f"branch {at}" for at in range(branches)), "out")
    edges = tuple((0, at + 1) for at in range(branches))
    edges += tuple((at + 1, branches + 1) for at in range(branches))
    with pytest.raises(UserInputError) as refused:
        downsets_of(LayerDag(names=names, edges=edges))
    assert str(refused.value.value) == str(2**branches + 2)
    assert "branch 0, branch 1, " in refused.value.fix
    assert "branch 11" in refused.value.fix


def test_an_edge_back_is_refused() -> None:
    with pytest.raises(UserInputError, match="leads from a node to a later one"):
        LayerDag(names=("a", "b"), edges=((1, 0),))
