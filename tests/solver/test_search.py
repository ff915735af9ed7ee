"""The search over grids: equal to looking at everything, and monotone in what it is given."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator

import pytest

from nest_megatron.cluster.records import Cluster, Precision
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import PeakLimit
from nest_megatron.cost_model.pipeline import evaluate
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.cost_model.traits import ExecutionTraits, Fp8Recipe
from nest_megatron.errors import UserInputError
from nest_megatron.layout.layout import Layout, PartialLayout
from nest_megatron.layout.recompute import (
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.layout.stage_layout import is_uniform, uniform_partition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.solver import backend
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.outcome import NO_THRESHOLD
from nest_megatron.solver.ranking import SearchResult, SolvedLayout, layout_of
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace
from tests import catalogue
from tests.solver import brute_force
from tests.solver.jobs import KERNEL, families, search, small_cluster, small_settings, small_spec


def all_candidates(everything: Search) -> Iterator[PartialLayout]:
    for family in families(everything.grids):
        for recompute in everything.grids.recompute_settings(family):
            yield dataclasses.replace(family, recompute=recompute)


def look_at_everything(
    everything: Search, limit: PeakLimit | None = None
) -> tuple[list[SolvedLayout], int]:
    """Every candidate solved by brute force; the best of each layout, fastest first."""
    best: dict[object, SolvedLayout] = {}
    count = 0
    for candidate in all_candidates(everything):
        count += 1
        problem = stage_problem(everything.model, candidate)
        if limit is not None:
            problem = problem._replace(capacity_bytes=limit.of(candidate))
        found = brute_force.solve(problem)
        if found.boundaries:
            plan = SolvedLayout.of(candidate, candidate.recompute, found, None)
            layout = layout_of(candidate)
            if layout not in best or plan.rank < best[layout].rank:
                best[layout] = plan
    return sorted(best.values(), key=lambda plan: plan.rank), count


SMALL_SPACE = SearchSpace(limits={"micro_batch_size": 2, "virtual_pipeline_model_parallel_size": 2})


@pytest.mark.parametrize("seed", range(40))
def test_search_is_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    spec, cluster = small_spec(rng), small_cluster(rng)
    batch = rng.choice([4, 8, 12])
    found = search(spec, cluster, batch, SMALL_SPACE, num_layouts=4).run()
    expected, count = look_at_everything(search(spec, cluster, batch, SMALL_SPACE))
    assert list(found.plans) == expected[:4]
    proof = found
    assert proof.candidates == count
    assert proof.bounded >= 0
    assert proof.optimal == bool(expected)
    if expected:
        assert proof.lower_bound == expected[0].iteration
    else:
        assert proof.bounded == proof.solved == 0


def test_layers_that_take_nothing_beside_what_they_save_are_searched() -> None:
    """Fused attention of a hybrid model, where no layer may be recomputed as a whole."""
    spec = TransformerSpec(
        name="attention",
        num_layers=3,
        hybrid_layer_pattern="***",
        hidden_size=128,
        ffn_hidden_size=256,
        num_attention_heads=2,
        seq_length=256,
        vocab_size=1000,
    )
    cluster = small_cluster(random.Random(0), 40 * 10**6).resized(4)
    space = dataclasses.replace(SMALL_SPACE, full_recompute=False)
    expected, count = look_at_everything(search(spec, cluster, 8, space))
    found = search(spec, cluster, 8, space, num_layouts=4).run()
    assert list(found.plans) == expected[:4]
    assert found.candidates == count


def _full(method: RecomputeMethod, num_layers: int) -> Recompute:
    full = RecomputeGranularity.FULL
    return Recompute(granularity=full, method=method, num_layers=num_layers)


@pytest.mark.parametrize("memory", [20, 60])
@pytest.mark.parametrize(
    ("own", "full"),
    [
        (_full(RecomputeMethod.BLOCK, 1), True),
        (_full(RecomputeMethod.BLOCK, 9), True),
        (_full(RecomputeMethod.UNIFORM, 2), False),
    ],
)
def test_recomputation_of_today_is_one_candidate(own: Recompute, full: bool, memory: int) -> None:
    rng = random.Random(8)
    spec, cluster = small_spec(rng), small_cluster(rng, memory * 10**6).resized(4)
    space = dataclasses.replace(SMALL_SPACE, present_recompute=own, full_recompute=full)
    expected, count = look_at_everything(search(spec, cluster, 8, space))
    found = search(spec, cluster, 8, space, num_layouts=4).run()
    assert list(found.plans) == expected[:4]
    assert found.candidates == count
    assert bool(expected) or sum(found.infeasible.values()) == count


class HalfOfTheDevice(PeakLimit):
    """Half of the device for ZeRO-2 and 3, four fifths of it for others; or a share of that."""

    share = 1.0

    def of(self, grid: PartialLayout) -> int:
        return self.at_most(grid.zero)

    def at_most(self, zero: ZeroStage) -> int:
        share = 0.8 if zero < ZeroStage.GRADIENTS else 0.5
        return int(self._model.capacity_bytes * self.share * share)


@pytest.mark.parametrize("seed", range(20))
def test_plans_keep_to_the_limit_on_their_peak(seed: int) -> None:
    rng = random.Random(seed)
    spec, cluster = small_spec(rng), small_cluster(rng)
    model = CostModel(spec, cluster, small_settings())
    limit = HalfOfTheDevice(model)
    found = Search(model, 8, SMALL_SPACE, KERNEL, limit=limit, num_layouts=4).run()
    expected, count = look_at_everything(search(spec, cluster, 8, SMALL_SPACE), limit)
    assert list(found.plans) == expected[:4]
    assert found.candidates == count


def all_ties(everything: Search, percent: float) -> dict[tuple[object, ...], int]:
    """The least step of each layout, number of virtual stages, and kind of stages that ties."""
    spec, best = everything.model.spec, dict[tuple[object, ...], int]()
    for candidate in all_candidates(everything):
        name = (*layout_of(candidate), candidate.dims.virtual_pipeline_model_parallel_size)
        problem = stage_problem(everything.model, candidate)
        step = brute_force.solve(problem).iteration
        best[*name, False] = min(step, best.get((*name, False), NO_THRESHOLD))
        if spec.num_layers % candidate.dims.num_chunks == 0:
            cut = uniform_partition(spec, problem.num_stages, problem.num_virtual).boundaries
            even = evaluate(problem, cut)
            if even.fits:
                best[*name, True] = min(even.iteration, best.get((*name, True), NO_THRESHOLD))
    most = math.floor(min(best.values(), default=0) * (1 + percent / 100))
    return {name: step for name, step in best.items() if step <= min(most, NO_THRESHOLD - 1)}


def check_ties(spec: TransformerSpec, cluster: Cluster, percent: float) -> None:
    model = CostModel(spec, cluster, small_settings())
    found: dict[tuple[object, ...], int] = {}
    for plan in (
        Search(model, 8, SMALL_SPACE, KERNEL, tie_percent=percent, num_layouts=2).run().ties
    ):
        is_even = is_uniform(spec, plan.layout.partition)
        virtual = plan.layout.dims.virtual_pipeline_model_parallel_size
        for kind in {False, is_even}:
            name = (*layout_of(plan.layout), virtual, kind)
            found[name] = min(plan.iteration, found.get(name, NO_THRESHOLD))
    assert found == all_ties(search(spec, cluster, 8, SMALL_SPACE), percent)


@pytest.mark.parametrize("percent", [0.0, 2.0, 20.0])
@pytest.mark.parametrize("seed", range(20))
def test_ties_are_those_of_looking_at_everything(seed: int, percent: float) -> None:
    rng = random.Random(seed)
    check_ties(small_spec(rng), small_cluster(rng), percent)


def test_even_stages_tie_although_they_have_to_recompute() -> None:
    """Uneven stages fit here without recomputation, and are as fast as in any memory."""
    rng = random.Random(17)
    spec, cluster = small_spec(rng), small_cluster(rng)
    accelerator = dataclasses.replace(cluster.accelerator, memory_bytes=90 * 10**6)
    check_ties(spec, dataclasses.replace(cluster, accelerator=accelerator), 20.0)


@pytest.mark.parametrize("seed", range(8))
def test_reference_backend_finds_the_same_plans(seed: int) -> None:
    rng = random.Random(seed)
    spec, cluster = small_spec(rng), small_cluster(rng)
    reference = backend.solver_of(backend.Backend.REFERENCE)
    ours = search(spec, cluster, 8, SMALL_SPACE).run()
    theirs = search(spec, cluster, 8, SMALL_SPACE, solver=reference).run()
    assert ours == theirs


def best_time(result: SearchResult) -> int:
    return result.plans[0].iteration if result.plans else NO_THRESHOLD


@pytest.mark.parametrize("seed", range(12))
def test_more_memory_is_never_worse(seed: int) -> None:
    rng = random.Random(seed)
    spec, cluster = small_spec(rng), small_cluster(rng)
    times = []
    for memory in (50, 100, 200, 1000):
        accelerator = dataclasses.replace(cluster.accelerator, memory_bytes=memory * 10**6)
        roomier = dataclasses.replace(cluster, accelerator=accelerator)
        times.append(best_time(search(spec, roomier, 8, SMALL_SPACE, num_layouts=1).run()))
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("seed", range(12))
def test_more_bandwidth_is_never_worse(seed: int) -> None:
    rng = random.Random(seed)
    spec, cluster = small_spec(rng), small_cluster(rng)
    times = []
    for factor in (1, 2, 8):
        levels = tuple(
            dataclasses.replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * factor)
            for level in cluster.levels
        )
        faster = dataclasses.replace(cluster, levels=levels)
        times.append(best_time(search(spec, faster, 8, SMALL_SPACE, num_layouts=1).run()))
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("seed", range(12))
def test_more_gpus_are_never_worse_where_some_may_idle(seed: int) -> None:
    rng = random.Random(seed)
    spec, cluster = small_spec(rng), small_cluster(rng)
    space = dataclasses.replace(SMALL_SPACE, use_all_gpus=False)
    times = [
        best_time(search(spec, cluster.resized(size), 8, space, num_layouts=1).run())
        for size in (1, 2, 4, 6, 8)
    ]
    assert times == sorted(times, reverse=True)


def test_a_fixed_degree_is_kept_and_a_limit_is_not_passed() -> None:
    rng = random.Random(3)
    spec, cluster = small_spec(rng), small_cluster(rng, memory_bytes=10**10).resized(8)
    space = SearchSpace(
        fixed={"pipeline_model_parallel_size": 2}, limits={"tensor_model_parallel_size": 1}
    )
    plans = search(spec, cluster, 8, space).run().plans
    assert plans
    for plan in plans:
        assert plan.layout.dims.pipeline_model_parallel_size == 2
        assert plan.layout.dims.tensor_model_parallel_size == 1


def test_time_running_out_is_a_proven_gap() -> None:
    rng = random.Random(5)
    spec, cluster = small_spec(rng), small_cluster(rng, memory_bytes=10**10).resized(8)
    asked = 0

    def out_of_time() -> bool:
        nonlocal asked
        asked += 1
        return asked > 40

    model = CostModel(spec, cluster, small_settings())
    cut = Search(model, 8, SMALL_SPACE, KERNEL, out_of_time=out_of_time).run()
    whole = Search(model, 8, SMALL_SPACE, KERNEL).run()
    assert whole.optimal
    assert cut.lower_bound <= whole.plans[0].iteration
    if cut.plans:
        assert cut.plans[0].iteration >= whole.plans[0].iteration


def ends_after(asked: int) -> Callable[[], bool]:
    """Time that runs out when it was asked for so often."""
    left = iter(range(asked))
    return lambda: next(left, None) is None


def timed(
    seed: int,
    *,
    slowest: int = NO_THRESHOLD,
    present: Layout | None = None,
    **clocks: Callable[[], bool],
) -> Search:
    rng = random.Random(seed)
    model = CostModel(small_spec(rng), small_cluster(rng), small_settings())
    solve = backend.solver_of(backend.backend_to_run(), clocks.get("out_of_time"))
    return Search(
        *(model, rng.choice([4, 8, 12]), SMALL_SPACE, solve),
        num_layouts=4,
        slowest=slowest,
        present=present,
        **clocks,
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_search_that_ended_early_claims_nothing_more(seed: int) -> None:
    whole = timed(seed).run()
    assert whole.finished
    for asked in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144):
        cut = timed(seed, out_of_time=ends_after(asked)).run()
        proof = cut
        assert proof.lower_bound <= best_time(whole)
        decided = proof.bounded + sum(proof.infeasible.values()) + proof.solved
        assert proof.bounded >= 0
        assert decided <= proof.candidates <= whole.candidates
        if proof.finished:
            assert cut.plans == whole.plans
        elif not cut.plans:
            assert proof.lower_bound < NO_THRESHOLD
            assert decided < proof.candidates or proof.candidates == 0


@pytest.mark.parametrize("seed", range(40))
def test_what_is_told_on_the_way_holds_at_the_end(seed: int) -> None:
    told: list[tuple[int, int | None, int]] = []
    asked = timed(seed)
    asked.on_progress = lambda *each: told.append(each)
    found = asked.run()
    assert [solved for solved, _, _ in told] == list(range(1, found.solved + 1))
    bests = [best for _, best, _ in told if best is not None]
    assert bests == sorted(bests, reverse=True)
    assert all(bound <= best_time(found) for _, _, bound in told)
    assert not told or told[-1][1] == best_time(found)


@pytest.mark.parametrize("seed", range(40))
def test_a_first_plan_changes_no_answer(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = timed(seed).run()
    monkeypatch.setattr("nest_megatron.solver.search.first_plan", lambda *_: None)
    whole = timed(seed).run()
    assert found.plans == whole.plans
    assert found.optimal == whole.optimal
    assert found.candidates == whole.candidates
    assert found.illegal == whole.illegal


@pytest.mark.parametrize("seed", range(20))
def test_plans_that_are_of_no_interest_are_left_out(seed: int) -> None:
    whole = timed(seed).run().plans
    slowest = whole[len(whole) // 2].iteration if whole else 0
    found = timed(seed, slowest=slowest).run().plans
    assert list(found) == [plan for plan in whole if plan.iteration <= slowest]


def test_a_search_goes_on_with_more_memory() -> None:
    gained = 0
    for seed in range(100):
        rng = random.Random(seed)
        model = CostModel(small_spec(rng), small_cluster(rng), small_settings())
        job = model, rng.choice([4, 8, 12]), SMALL_SPACE, KERNEL
        limit = HalfOfTheDevice(model)
        limit.share = rng.choice([1.0, 0.3])
        less = Search(*job, limit=limit, num_layouts=3)
        best = best_time(less.run())
        whole = Search(*job, num_layouts=1, slowest=best - 1).run().plans
        found = Search(*job, num_layouts=1, slowest=best - 1, like=less).run().plans
        assert found == whole
        gained += bool(found)
    assert gained > 10


@pytest.mark.parametrize("seed", range(20))
def test_some_plan_is_found_before_time_runs_out(seed: int) -> None:
    whole = timed(seed).run()
    cut = timed(seed, out_of_time=lambda: True).run()
    assert not cut.candidates
    if cut.plans:
        assert cut.plans[0].iteration >= best_time(whole)
    elif whole.plans:  # no grid that a rule of thumb tries fits
        assert cut.lower_bound <= best_time(whole)


def a_slow_plan(seed: int) -> SolvedLayout | None:
    """A legal plan of a seed's job that is far from its best one."""
    bare = timed(seed)
    bare.plans.num_layouts = 1000
    plans = bare.run().plans
    return plans[-1] if plans else None


@pytest.mark.parametrize("seed", range(20))
def test_what_runs_today_is_the_first_plan_and_changes_no_better_answer(seed: int) -> None:
    own = a_slow_plan(seed)
    if own is None:
        return
    present = own.layout
    never = timed(seed, slowest=NO_THRESHOLD - 1, out_of_time=lambda: True, present=present).run()
    assert never.plans == (own,)
    assert never.present == own
    whole = timed(seed, present=present).run()
    assert whole.plans == timed(seed).run().plans
    assert whole.fastest == whole.plans[0]


def test_rules_of_thumb_are_priced_beside_what_runs_today() -> None:
    faster = 0
    for seed in range(20):
        if (own := a_slow_plan(seed)) is None:
            continue
        ruled = timed(seed, out_of_time=lambda: True).run().plans
        cut = timed(seed, out_of_time=lambda: True, present=own.layout).run()
        best = min([own.iteration, *(plan.iteration for plan in ruled)])
        assert cut.plans[0].iteration == best
        faster += best < own.iteration
    assert faster > 5


@pytest.mark.parametrize("seed", range(20))
def test_what_runs_today_wins_where_the_space_holds_nothing_better(seed: int) -> None:
    whole = timed(seed).run().plans
    micro = {plan.layout.micro_batch_size for plan in whole}
    if len(micro) < 2 or whole[0].layout.micro_batch_size != max(micro):
        return
    present = whole[0].layout
    search = timed(seed, present=present)
    search.space = dataclasses.replace(search.space, limits={"micro_batch_size": min(micro)})
    search.__post_init__(None, NO_THRESHOLD, None)
    found = search.run()
    assert found.plans[0] == found.present == found.fastest == whole[0]


def test_a_layout_of_today_that_does_not_fit_is_none() -> None:
    rng = random.Random(3)
    spec, cluster = small_spec(rng), small_cluster(rng)
    model = CostModel(spec, cluster, small_settings())
    grid = next(g for s in GridSpace(model, 8, SMALL_SPACE).shards() for g in [s])
    grid = dataclasses.replace(grid, global_batch_size=grid.dims.data_parallel_size * 64)
    grid = dataclasses.replace(grid, micro_batch_size=64)
    present = grid.with_stages(uniform_partition(spec, 1))
    found = Search(model, 8, SMALL_SPACE, KERNEL, present=present).run()
    assert found.present is None
    assert found.plans == Search(model, 8, SMALL_SPACE, KERNEL).run().plans


def test_a_growing_batch_divides_at_every_size() -> None:
    rng = random.Random(3)
    spec, cluster = small_spec(rng), small_cluster(rng, memory_bytes=10**10).resized(8)
    free = search(spec, cluster, 8, SMALL_SPACE).run().plans
    assert any(
        plan.layout.micro_batch_size * plan.layout.dims.data_parallel_size > 2 for plan in free
    )
    growing = dataclasses.replace(SMALL_SPACE, batch_unit=2)
    plans = search(spec, cluster, 8, growing).run().plans
    assert plans
    for plan in plans:
        dims = plan.layout.dims
        least, rest = divmod(2, plan.layout.micro_batch_size * dims.data_parallel_size)
        assert rest == 0
        if dims.virtual_pipeline_model_parallel_size > 1:
            assert least % dims.pipeline_model_parallel_size == 0


def test_a_limit_below_a_fixed_degree_is_refused() -> None:
    with pytest.raises(UserInputError, match="fixed at 8"):
        SearchSpace(
            fixed={"tensor_model_parallel_size": 8}, limits={"tensor_model_parallel_size": 4}
        )


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_only_delayed_scaling_of_fp8_keeps_modules_from_being_recomputed(recipe: str) -> None:
    traits = ExecutionTraits(fp8_recipe=Fp8Recipe(recipe))
    settings = CostSettings(precision=Precision.FP8, traits=traits)
    spec, cluster = catalogue.model("mixtral_8x7b"), catalogue.cluster("dgx_h100", 8)
    grids = GridSpace(CostModel(spec, cluster, settings), 8, SearchSpace())
    family = next(
        family
        for shard in grids.shards()
        for grid in grids.grids(shard)
        for family in grids.families(grid)
    )
    tried = {module for each in grids.recompute_settings(family) for module in each.modules}
    both = {RecomputeModule.LAYERNORM, RecomputeModule.MOE_ACT}
    assert tried & both == (set() if recipe == "delayed" else both)
