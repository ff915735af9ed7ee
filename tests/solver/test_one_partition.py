"""One stage partition: the joined problem costs the same, the search misses nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from itertools import islice, pairwise

import pytest

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.pipeline import PipelineProblem, UnitCost, evaluate
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.errors import UserInputError
from nest_megatron.layout.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.layout.rulebook.schedule import (
    decoder_layers,
    lets_nemo_build_mtp,
    mtp_chunk,
    mtp_chunk_fits,
)
from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner.layouts import describe_space
from nest_megatron.solver import backend
from nest_megatron.solver.backend import Backend
from nest_megatron.solver.memory_shortage import least_memory
from nest_megatron.solver.one_partition import (
    join_chunks,
    solver_of_partition,
    solver_with_mtp_at_head,
)
from nest_megatron.solver.outcome import DEFAULT_NODE_LIMIT, NO_THRESHOLD, Status
from nest_megatron.solver.ranking import SolvedLayout, layout_of, preference
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace
from tests.solver.brute_force import partitions
from tests.solver.jobs import KERNEL, search, small_cluster, small_spec
from tests.solver.problems import random_problem
from tests.solver.structured import edge_problem, long_problem

REFERENCE = backend.solver_of(Backend.REFERENCE)
PROBLEMS: tuple[Callable[[int], PipelineProblem], ...] = (
    random_problem,
    edge_problem,
    long_problem,
)


def cut(pp: int, *marks: int) -> StagePartition:
    return StagePartition(boundaries=marks, pipeline_model_parallel_size=pp)


def random_marks(rng: random.Random, units: int, chunks: int) -> tuple[int, ...]:
    return (0, *sorted(rng.sample(range(1, units), chunks - 1)), units)


def random_cut(rng: random.Random, spec: TransformerSpec, num_gpus: int) -> StagePartition:
    """Any cut that Megatron builds: uneven, with up to three virtual stages."""
    units = len(spec.layer_kinds())
    while True:
        pp = rng.choice([p for p in (1, 2, 4, 8) if p <= min(num_gpus, units)])
        virtual = rng.choice([1, 2, 2, 3]) if pp > 1 else 1
        if pp * virtual > units:
            continue
        found = cut(pp, *random_marks(rng, units, pp * virtual))
        chunk = mtp_chunk(spec, found)
        if chunk is None or mtp_chunk_fits(chunk, pp, virtual):
            return found


@pytest.mark.parametrize("generate", PROBLEMS, ids=lambda f: f.__name__)
def test_a_joined_problem_costs_the_same(generate: Callable[[int], PipelineProblem]) -> None:
    for seed in range(60):
        problem = generate(seed)
        marks = random_marks(random.Random(seed), problem.num_units, problem.num_chunks)
        once = join_chunks(problem, marks)
        assert list(partitions(once)) == [tuple(range(problem.num_chunks + 1))]
        ours, theirs = evaluate(once, next(partitions(once))), evaluate(problem, marks)
        assert ours == theirs, seed


@pytest.mark.parametrize("generate", PROBLEMS, ids=lambda f: f.__name__)
def test_both_backends_judge_one_partition(generate: Callable[[int], PipelineProblem]) -> None:
    for seed in range(10 if generate is long_problem else 40):
        problem = generate(seed)
        marks = random_marks(random.Random(seed), problem.num_units, problem.num_chunks)
        partition = cut(problem.num_stages, *marks)
        cost = evaluate(problem, marks)
        for threshold in (cost.iteration, cost.iteration + 1, NO_THRESHOLD):
            found = solver_of_partition(KERNEL, partition)(problem, threshold, DEFAULT_NODE_LIMIT)
            assert found == solver_of_partition(REFERENCE, partition)(
                problem, threshold, DEFAULT_NODE_LIMIT
            )
            wins = cost.iteration < threshold
            nothing = Status.BOUNDED if cost.fits else Status.INFEASIBLE
            assert found.status is (Status.OPTIMAL if cost.fits and wins else nothing), seed
            assert found.boundaries == (marks if cost.fits and wins else ())
            if found.boundaries:
                assert found.iteration == found.lower_bound == cost.iteration
        quick = solver_of_partition(KERNEL, partition)(problem, NO_THRESHOLD, 0)
        assert quick.status is (Status.LIMIT if cost.fits else Status.INFEASIBLE)
        assert not cost.fits or quick.lower_bound <= cost.iteration


def price_everything(everything: Search) -> tuple[list[SolvedLayout], int, int]:
    """Every candidate priced: the best of each layout, how many there are, how many fit not."""
    best: dict[object, SolvedLayout] = {}
    count = infeasible = 0
    partition = everything.grids.space.partition
    assert partition is not None
    for shard in everything.grids.shards():
        for grid in everything.grids.grids(shard):
            for family in everything.grids.families(grid):
                assert family.dims.num_chunks == partition.num_chunks
                for recompute in everything.grids.recompute_settings(family):
                    candidate = dataclasses.replace(family, recompute=recompute)
                    cost = evaluate(
                        stage_problem(everything.model, candidate), partition.boundaries
                    )
                    count += 1
                    infeasible += not cost.fits
                    plan = SolvedLayout(
                        layout=candidate.with_stages(partition),
                        iteration=cost.iteration,
                    )
                    known = best.get(layout_of(candidate), plan)
                    if cost.fits and plan.rank <= known.rank:
                        best[layout_of(candidate)] = plan
    return sorted(best.values(), key=lambda plan: plan.rank), count, infeasible


def assert_search_is_brute_force(
    spec: TransformerSpec, cluster: Cluster, batch: int, space: SearchSpace, solver: object = KERNEL
) -> bool:
    """Compare plans, ties and counts; whether anything fits."""
    found = search(spec, cluster, batch, space, num_layouts=4, solver=solver).run()
    expected, count, infeasible = price_everything(search(spec, cluster, batch, space))
    proof = found
    assert list(found.plans) == expected[:4]
    assert proof.candidates == count
    assert min(proof.bounded, proof.solved) >= 0
    assert sum(proof.infeasible.values()) <= infeasible
    assert proof.optimal == bool(expected)
    if expected:
        assert proof.lower_bound == expected[0].iteration
    else:
        assert proof.bounded == proof.solved == 0
        assert sum(proof.infeasible.values()) == infeasible == count
    return bool(expected)


def small_job(seed: int) -> tuple[TransformerSpec, Cluster, int, StagePartition]:
    rng = random.Random(seed)
    spec, cluster = small_spec(rng), small_cluster(rng).resized(rng.choice([2, 4, 8]))
    return spec, cluster, rng.choice([4, 8, 24]), random_cut(rng, spec, cluster.num_gpus)


@pytest.mark.parametrize("first", range(0, 120, 12))
def test_search_with_one_partition_is_brute_force(first: int) -> None:
    feasible, shapes = 0, set()
    for seed in range(first, first + 12):
        spec, cluster, batch, partition = small_job(seed)
        space = SearchSpace(limits={"micro_batch_size": 2}, partition=partition)
        feasible += assert_search_is_brute_force(spec, cluster, batch, space)
        shapes.add(partition.num_chunks // partition.pipeline_model_parallel_size)
    assert 0 < feasible < 12
    assert len(shapes) > 1


@pytest.mark.parametrize("seed", range(8))
def test_reference_backend_finds_the_same(seed: int) -> None:
    spec, cluster, batch, partition = small_job(seed)
    space = SearchSpace(limits={"micro_batch_size": 2}, partition=partition)
    assert_search_is_brute_force(spec, cluster, batch, space, REFERENCE)
    ours = search(spec, cluster, batch, space).run()
    assert search(spec, cluster, batch, space, solver=REFERENCE).run() == ours


def large_job(seed: int) -> tuple[TransformerSpec, Cluster, int, SearchSpace]:
    """Layers with enough parameters that a reduction hides, experts in one or two of them."""
    rng = random.Random(seed)
    layers = rng.randint(3, 7)
    pattern = [0] * layers
    for _ in range(rng.choice([1, 1, 2])):
        pattern[rng.randrange(layers)] = 1
    spec = TransformerSpec(
        name="large",
        num_layers=layers,
        hidden_size=4096,
        ffn_hidden_size=rng.choice([4096, 16384, 32768]),
        num_attention_heads=32,
        seq_length=rng.choice([256, 1024, 4096]),
        vocab_size=rng.choice([1000, 50_000]),
        num_experts=4,
        moe_layer_pattern=tuple(pattern),
        moe_ffn_hidden_size=rng.choice([1024, 4096]),
    )
    cluster = small_cluster(rng, memory_bytes=10**13).resized(rng.choice([4, 8]))
    levels = tuple(
        dataclasses.replace(level, bandwidth_bytes_per_s=10 ** rng.uniform(9, 13))
        for level in cluster.levels
    )
    partition = cut(2, *random_marks(rng, layers + 2, 4))
    fixed = {"tensor_model_parallel_size": 1, "micro_batch_size": 1}
    space = SearchSpace(fixed=fixed, partition=partition)
    return spec, dataclasses.replace(cluster, levels=levels), rng.choice([8, 16]), space


@pytest.mark.parametrize("seed", range(12))
def test_recomputation_beside_a_given_partition_is_brute_force(seed: int) -> None:
    assert_search_is_brute_force(*large_job(seed))


def test_recomputation_that_hides_a_reduction_is_found() -> None:
    """With virtual stages a rank's slack can hold recomputation that shortens its tail."""
    hiding = (
        seed
        for seed in range(2000)
        if any(p.layout.recompute != NO_RECOMPUTE for p in search(*large_job(seed)).run().plans)
    )
    found = list(islice(hiding, 4))
    assert len(found) == 4
    for seed in found:
        assert_search_is_brute_force(*large_job(seed))


def test_of_equals_the_one_that_recomputes_less_is_preferred() -> None:
    spec, cluster, batch, partition = small_job(0)
    space = SearchSpace(partition=partition)
    grids = search(spec, cluster, batch, space).grids
    grid = next(g for shard in grids.shards() for g in grids.grids(shard))
    settings = (
        NO_RECOMPUTE,
        Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=(RecomputeModule.CORE_ATTN,)),
        Recompute(
            granularity=RecomputeGranularity.FULL, method=RecomputeMethod.BLOCK, num_layers=1
        ),
    )
    ranks = [preference(dataclasses.replace(grid, recompute=each)) for each in settings]
    assert all(less < more for less, more in pairwise(ranks))


def dense_spec(layers: int = 6, mtp: int | None = None) -> TransformerSpec:
    return TransformerSpec(
        name="dense",
        num_layers=layers,
        hidden_size=128,
        ffn_hidden_size=256,
        num_attention_heads=2,
        seq_length=256,
        vocab_size=1000,
        mtp_num_layers=mtp,
    )


def test_blocks_go_up_to_the_largest_chunk() -> None:
    cluster = small_cluster(random.Random(0)).resized(2)
    space = SearchSpace(partition=cut(2, 0, 6, 8))
    grids = search(dense_spec(), cluster, 4, space).grids
    grid = next(g for shard in grids.shards() for g in grids.grids(shard))
    family = next(grids.families(grid))
    blocks = [r.num_layers for r in grids.recompute_settings(family) if r.method == "block"]
    assert blocks == [1, 2, 3, 4, 5]
    assert decoder_layers(dense_spec(), cut(2, 0, 6, 8)) == (5, 1)


def test_a_chunk_for_every_unit() -> None:
    cluster = small_cluster(random.Random(0), memory_bytes=10**10).resized(8)
    spec = dense_spec(5, mtp=1)
    space = SearchSpace(partition=cut(4, *range(9)))
    assert assert_search_is_brute_force(spec, cluster, 8, space)


def test_more_kinds_of_chunk_than_a_problem_can_name() -> None:
    sizes = range(1, 258)
    units = sum(sizes)
    problem = PipelineProblem(
        num_stages=257,
        num_virtual=1,
        num_microbatches=1,
        unit_kinds=bytes(units),
        costs=(UnitCost(1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),),
        num_layers=units - 2,
        block_num_layers=0,
        send_forward=(0,) * 257,
        send_backward=(0,) * 257,
        overlap_p2p=False,
        capacity_bytes=0,
        constant=0,
    )
    marks = [0]
    for size in sizes:
        marks.append(marks[-1] + size)
    with pytest.raises(UserInputError, match="different cost"):
        join_chunks(problem, tuple(marks))


def test_what_does_not_fit_is_said_with_the_least_it_needs() -> None:
    cluster = small_cluster(random.Random(0), memory_bytes=1000).resized(4)
    space = SearchSpace(partition=cut(2, 0, 2, 3, 6, 8))
    assert not assert_search_is_brute_force(dense_spec(), cluster, 8, space)
    short = least_memory(search(dense_spec(), cluster, 8, space))
    assert short is not None
    model = search(dense_spec(), cluster, 8, space).model
    cost = evaluate(stage_problem(model, short.grid), (0, 2, 3, 6, 8))
    assert max(rank.total for rank in cost.memory) == short.needed_bytes


def test_its_degrees_are_fixed() -> None:
    space = SearchSpace(fixed={"micro_batch_size": 1}, partition=cut(2, 0, 2, 3, 6, 8))
    assert space.fixed == {
        "micro_batch_size": 1,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    }
    assert dataclasses.replace(space, batch_unit=2).fixed == space.fixed
    words = describe_space(space, small_cluster(random.Random(0)), ())
    assert words["stage_layout"] == "as given"
    assert words["virtual_pipeline_model_parallel_size"] == "= 2"
    assert "stage_layout" not in describe_space(SearchSpace(), small_cluster(random.Random(0)), ())


@pytest.mark.parametrize("name", ["pipeline_model_parallel_size", "virtual_pipeline"])
def test_contradictions_are_refused(name: str) -> None:
    full = name if name.endswith("size") else f"{name}_model_parallel_size"
    with pytest.raises(UserInputError, match="stage partition has 2"):
        SearchSpace(fixed={full: 4}, partition=cut(2, 0, 2, 3, 6, 8))
    with pytest.raises(UserInputError, match="fixed at 2"):
        SearchSpace(limits={full: 1}, partition=cut(2, 0, 2, 3, 6, 8))


def test_partitions_that_are_none_of_the_model_are_refused() -> None:
    cluster = small_cluster(random.Random(0)).resized(4)
    with pytest.raises(UserInputError, match="at least 2 pipeline ranks"):
        SearchSpace(partition=cut(1, 0, 4, 8))
    with pytest.raises(UserInputError, match="has 8 units"):
        search(dense_spec(), cluster, 8, SearchSpace(partition=cut(2, 0, 4, 9)))
    with pytest.raises(UserInputError, match="MTP layers in virtual stage 0 of pipeline rank 0"):
        search(dense_spec(mtp=1), cluster, 8, SearchSpace(partition=cut(2, 0, 8, 9)))


def test_mtp_layers_that_are_built_of_a_layer_lie_beside_the_last() -> None:
    found = 0
    for seed in range(300):
        problem = random_problem(seed)._replace(block_num_layers=0)
        layers = problem.num_layers
        if problem.num_units != layers + 3 or layers < 2:
            continue
        spec, chunks = dense_spec(layers, mtp=1), problem.num_chunks
        solve = solver_with_mtp_at_head(KERNEL, spec, mtp_beside_layer=True)
        kept = solve(problem, NO_THRESHOLD, DEFAULT_NODE_LIMIT)
        if kept.boundaries:
            where = StagePartition(
                boundaries=kept.boundaries, pipeline_model_parallel_size=problem.num_stages
            )
            assert lets_nemo_build_mtp(spec, where), seed
            assert evaluate(problem, kept.boundaries).iteration == kept.iteration, seed
        if problem.num_virtual > 1:  # the declared families are others
            continue
        whole = [e for e in partitions(problem) if chunks == 1 or e[-2] <= layers]
        times = [known for each in whole if (known := evaluate(problem, each)).fits]
        assert kept.iteration == min((t.iteration for t in times), default=NO_THRESHOLD), seed
        found += bool(times)
    assert found > 10


def test_mtp_layers_that_no_layout_parts_lie_beside_the_head() -> None:
    found = 0
    for seed in range(300):
        problem = random_problem(seed)._replace(block_num_layers=0)
        layers = problem.num_layers
        if problem.num_units != layers + 3 or problem.num_virtual > 1 or problem.num_chunks == 1:
            continue
        solve = solver_with_mtp_at_head(KERNEL, dense_spec(layers, mtp=1), mtp_beside_head=True)
        kept = solve(problem, NO_THRESHOLD, DEFAULT_NODE_LIMIT)
        whole = [each for each in partitions(problem) if each[-2] <= layers + 1]
        times = [known for each in whole if (known := evaluate(problem, each)).fits]
        assert kept.iteration == min((t.iteration for t in times), default=NO_THRESHOLD), seed
        found += bool(times)
    assert found > 10
