"""Brute force, the Python reference and the compiled kernel say the same of every stage problem."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron.cost_model.critical_path import summarize_reference
from nest_megatron.cost_model.pipeline import (
    PipelineProblem,
    chunk_cost,
    evaluate,
    fits_in_memory,
)
from nest_megatron.errors import UserInputError
from nest_megatron.packages import is_built
from nest_megatron.solver import backend, reference
from nest_megatron.solver.backend import Backend, solve_compiled
from nest_megatron.solver.outcome import DEFAULT_NODE_LIMIT, NO_THRESHOLD, Learning, Status
from nest_megatron.solver.path_bounds import PathBound, critical_path
from tests.solver import brute_force
from tests.solver.brute_force import partitions
from tests.solver.problems import random_problem
from tests.solver.structured import (
    PLAIN,
    deep_problem,
    edge_problem,
    equal_layers,
    long_problem,
    tie_problem,
)

pytest.importorskip("nest_megatron.solver._stage_dp", reason="the compiled kernel is not built")

Generator = Callable[[int], PipelineProblem]
SMALL: tuple[Generator, ...] = (random_problem, tie_problem, edge_problem)
BATCH = 100

NO_NOGOODS = Learning(nogoods_after=DEFAULT_NODE_LIMIT)
#: Nogoods from the first node on; and so few that path bounds and nogoods are replaced all the
#: time.
LEARNINGS = (
    Learning(nogoods_after=0),
    Learning(nogoods_after=2, max_path_bounds=1, max_nogoods=1, max_needs=1),
    Learning(nogoods_after=0, max_path_bounds=3, max_nogoods=2, max_needs=2),
    Learning(nogoods_after=5, max_path_bounds=6, max_nogoods=1, max_needs=4),
)


def assert_same(problem: PipelineProblem, *limits: int) -> None:
    expected = reference.solve(problem, *limits)
    assert solve_compiled(problem, *limits) == expected


@pytest.mark.parametrize("generate", SMALL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("start", range(0, 800, BATCH))
def test_all_three_agree(generate: Generator, start: int) -> None:
    for seed in range(start, start + BATCH):
        problem = generate(seed)
        oracle = brute_force.solve(problem, run=summarize_reference)
        solved = reference.solve(problem)
        answer = (oracle.status, oracle.iteration, oracle.boundaries)
        assert (solved.status, solved.iteration, solved.boundaries) == answer, seed
        assert solve_compiled(problem) == solved, seed
        if solved.boundaries:
            assert evaluate(problem, solved.boundaries).iteration == solved.iteration


@pytest.mark.parametrize("generate", [*SMALL, long_problem], ids=lambda f: f.__name__)
def test_thresholds_and_node_limits(generate: Generator) -> None:
    for seed in range(1000, 1020):
        problem = generate(seed)
        best = reference.solve(problem)
        assert solve_compiled(problem) == best, seed
        for threshold in {
            0,
            best.lower_bound - 1,
            best.iteration,
            best.iteration + 1,
            NO_THRESHOLD,
        }:
            if threshold <= NO_THRESHOLD:
                for node_limit in (0, 1, 5, DEFAULT_NODE_LIMIT):
                    assert_same(problem, threshold, node_limit)


def after(asked: int) -> Callable[[], bool]:
    """Time that runs out when it was asked for so often."""
    left = iter(range(asked))
    return lambda: next(left, None) is None


@pytest.mark.parametrize("nogoods_after", [1, 7])
@pytest.mark.parametrize("generate", [*SMALL, deep_problem], ids=lambda f: f.__name__)
def test_time_that_runs_out_ends_both_alike(generate: Generator, nogoods_after: int) -> None:
    learning, ended = Learning(nogoods_after=nogoods_after), 0
    for seed in range(3000, 3015):
        problem = generate(seed)
        best = solve_compiled(problem)
        for asked in range(3):
            limits = (problem, NO_THRESHOLD, DEFAULT_NODE_LIMIT, learning)
            found = solve_compiled(*limits, out_of_time=after(asked))
            assert found == reference.solve(*limits, out_of_time=after(asked)), (seed, asked)
            assert found.lower_bound <= best.lower_bound
            if found.status is Status.LIMIT:
                ended += 1
                assert found.iteration >= best.iteration
            else:
                assert found.status is best.status
    assert ended


@pytest.mark.parametrize("generate", [*SMALL, long_problem], ids=lambda f: f.__name__)
def test_a_limit_of_nothing_gives_the_bound_alone(generate: Generator) -> None:
    for seed in range(2000, 2150):
        problem = generate(seed)
        best = solve_compiled(problem)
        for threshold in {NO_THRESHOLD, 0, -1, min(best.iteration, NO_THRESHOLD)}:
            found = reference.solve(problem, threshold, 0)
            assert solve_compiled(problem, threshold, 0) == found, (seed, threshold)
            assert found.lower_bound <= best.lower_bound
            assert (found.simulations, found.boundaries) == (0, ())
            if best.status is Status.INFEASIBLE:
                assert found.status is Status.INFEASIBLE
            elif found.lower_bound >= threshold:
                assert found.status is Status.BOUNDED
            else:
                assert (found.status, found.nodes) == (Status.LIMIT, 0)


@pytest.mark.parametrize("generate", SMALL, ids=lambda f: f.__name__)
def test_a_threshold_of_nothing_asks_for_memory_alone(generate: Generator) -> None:
    for seed in range(2500, 2600):
        problem = generate(seed)
        fits = any(fits_in_memory(problem, partition) for partition in partitions(problem))
        for threshold in (0, -1):
            found = solve_compiled(problem, threshold)
            assert reference.solve(problem, threshold) == found, seed
            assert found.status is (Status.BOUNDED if fits else Status.INFEASIBLE)
            assert found.lower_bound == (0 if fits else NO_THRESHOLD)
            assert (found.nodes, found.simulations) == (0, 0)


@pytest.mark.parametrize("generate", [tie_problem, edge_problem, long_problem])
def test_what_a_limit_leaves_is_proven(generate: Generator) -> None:
    for seed in range(3000, 3060):
        problem = generate(seed)
        best = solve_compiled(problem)
        bounds = [solve_compiled(problem, NO_THRESHOLD, limit).lower_bound for limit in range(4)]
        assert bounds == sorted(bounds)
        assert bounds[-1] <= best.lower_bound


@pytest.mark.parametrize("learning", LEARNINGS, ids=["eager", "one", "three", "six"])
@pytest.mark.parametrize("generate", [*SMALL, long_problem, deep_problem], ids=lambda f: f.__name__)
def test_nogoods_change_no_answer(generate: Generator, learning: Learning) -> None:
    fewer = 0
    for seed in range(4000, 4060 if learning is LEARNINGS[0] else 4010):
        problem = generate(seed)
        plain = solve_compiled(problem, NO_THRESHOLD, DEFAULT_NODE_LIMIT, NO_NOGOODS)
        found = reference.solve(problem, NO_THRESHOLD, DEFAULT_NODE_LIMIT, learning)
        assert solve_compiled(problem, NO_THRESHOLD, DEFAULT_NODE_LIMIT, learning) == found, seed
        answer = (plain.status, plain.iteration, plain.boundaries, plain.lower_bound)
        assert (found.status, found.iteration, found.boundaries, found.lower_bound) == answer, seed
        fewer += found.nodes < plain.nodes
        for threshold, limit in ((found.iteration, 7), (found.lower_bound - 1, DEFAULT_NODE_LIMIT)):
            limited = reference.solve(problem, threshold, limit, learning)
            assert solve_compiled(problem, threshold, limit, learning) == limited, seed
    assert fewer > 20 or generate is not deep_problem or learning is not LEARNINGS[0]


@pytest.mark.parametrize(
    ("stages", "microbatches", "layers", "options", "times_fewer"),
    [
        (12, 4, 30, {}, 4),
        (12, 12, 34, {"block_num_layers": 1}, 9),
        (16, 4, 34, {}, 14),
        (16, 8, 34, {"head_layers": 3.4, "slow_link_every": 2}, 2.5),
    ],
)
def test_nogoods_prune(
    stages: int, microbatches: int, layers: int, options: dict[str, float], times_fewer: float
) -> None:
    problem = equal_layers(stages=stages, microbatches=microbatches, layers=layers, **options)  # type: ignore[arg-type]
    plain = solve_compiled(problem, NO_THRESHOLD, DEFAULT_NODE_LIMIT, NO_NOGOODS)
    for learning in LEARNINGS[:1], ():
        found = reference.solve(problem, NO_THRESHOLD, DEFAULT_NODE_LIMIT, *learning)
        assert solve_compiled(problem, NO_THRESHOLD, DEFAULT_NODE_LIMIT, *learning) == found
        assert (found.iteration, found.boundaries) == (plain.iteration, plain.boundaries)
    eager = solve_compiled(problem, NO_THRESHOLD, DEFAULT_NODE_LIMIT, LEARNINGS[0])
    assert eager.nodes * times_fewer < plain.nodes


def test_nogoods_prove_what_path_bounds_alone_do_not() -> None:
    problem = equal_layers(stages=16, microbatches=4)
    plain = solve_compiled(problem, NO_THRESHOLD, 200_000, NO_NOGOODS)
    found = solve_compiled(problem, NO_THRESHOLD, 200_000)
    assert (plain.status, found.status) == (Status.LIMIT, Status.OPTIMAL)
    assert plain.lower_bound <= found.iteration <= plain.iteration
    assert reference.solve(problem) == found


@pytest.mark.parametrize("generate", [*SMALL, long_problem, deep_problem], ids=lambda f: f.__name__)
def test_a_path_bounds_every_partition_and_meets_its_own(generate: Generator) -> None:
    for seed in range(5000, 5060):
        problem = generate(seed)
        if problem.num_virtual > 1:
            continue
        rng = random.Random(seed)
        partitions = [random_partition(problem, rng) for _ in range(4)]
        for boundaries in partitions:
            bound = critical_path(
                problem, evaluate(problem, boundaries), list(boundaries), number=0
            )
            assert length_of(problem, bound, boundaries) == evaluate(problem, boundaries).iteration
            for other in partitions:
                assert length_of(problem, bound, other) <= evaluate(problem, other).iteration


def random_partition(problem: PipelineProblem, rng: random.Random) -> tuple[int, ...]:
    inner = rng.sample(range(1, problem.num_units), problem.num_stages - 1)
    return (0, *sorted(inner), problem.num_units)


def length_of(problem: PipelineProblem, bound: PathBound, boundaries: tuple[int, ...]) -> int:
    stages = enumerate(pairwise(boundaries))
    weights = (bound.weight(problem, k, chunk_cost(problem, *xy)) for k, xy in stages)
    return bound.constant + sum(weights)


@pytest.mark.parametrize("threshold_change", [-1, 0, 1])
def test_a_threshold_at_the_optimum(threshold_change: int) -> None:
    problem = equal_layers(stages=4, microbatches=8)
    best = solve_compiled(problem)
    again = solve_compiled(problem, best.iteration + threshold_change)
    if threshold_change > 0:
        assert (again.status, again.boundaries) == (Status.OPTIMAL, best.boundaries)
    else:
        assert (again.status, again.iteration) == (Status.BOUNDED, NO_THRESHOLD)
        assert again.lower_bound == best.iteration + threshold_change


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(4, 8), (4, 64), (8, 8), (8, 64), (8, 256), (16, 64), (16, 128)]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"edges": False, "head_layers": 0.0},
        {"head_layers": 3.4, "slow_link_every": 2},
        {"light_layers": 3, "block_num_layers": 1, "capacity_bytes": 60_000},
    ],
    ids=["heavy-head", "equal", "slow-links", "block-tight"],
)
def test_structured(stages: int, microbatches: int, options: dict[str, float]) -> None:
    problem = equal_layers(stages=stages, microbatches=microbatches, layers=34, **options)  # type: ignore[arg-type]
    nodes = 3000 if stages * microbatches < 1000 else 300  # the reference visits them in Python
    assert_same(problem, NO_THRESHOLD, nodes)
    best = solve_compiled(problem, NO_THRESHOLD, nodes)
    for threshold in (best.lower_bound, best.lower_bound + 1, best.lower_bound + 50):
        assert_same(problem, min(threshold, NO_THRESHOLD), nodes)


@pytest.mark.parametrize("microbatches", [8, 64, 512])
def test_eighty_layers(microbatches: int) -> None:
    assert_same(equal_layers(stages=4, microbatches=microbatches), NO_THRESHOLD, 300)
    assert_same(equal_layers(stages=16, microbatches=microbatches), NO_THRESHOLD, 30)


@pytest.mark.parametrize(
    ("stages", "virtual", "microbatches"),
    [(2, 2, 64), (4, 2, 8), (4, 5, 32), (8, 2, 64), (3, 3, 3)],
)
@pytest.mark.parametrize("capacity_bytes", [10**9, 40_000, 25_000])
def test_virtual_stages(stages: int, virtual: int, microbatches: int, capacity_bytes: int) -> None:
    problem = equal_layers(
        stages=stages,
        virtual=virtual,
        microbatches=microbatches,
        layers=20,
        capacity_bytes=capacity_bytes,
    )
    assert_same(problem)
    assert_same(problem._replace(overlap_p2p=False))


@pytest.mark.parametrize("boundaries", [(0, 1, 4), (0, 2, 4), (0, 3, 4)])
@pytest.mark.parametrize("microbatches", [1, 2, 900, 5000])
def test_long_schedules(boundaries: tuple[int, ...], microbatches: int) -> None:
    """Two ranks of nearly the same speed: the slower one decides only after many micro batches."""
    problem = PipelineProblem(
        num_stages=2,
        num_virtual=1,
        num_microbatches=microbatches,
        unit_kinds=bytes([0, 1, 1, 2]),
        costs=(
            PLAIN._replace(forward=1000, gather_hideable=3000),
            PLAIN._replace(forward=1003 - boundaries[1], reduce_hideable=-5),
            PLAIN._replace(forward=1001, backward=19, reduce_unhidden=2500),
        ),
        num_layers=2,
        block_num_layers=0,
        send_forward=(1, 0),
        send_backward=(0, 1),
        overlap_p2p=False,
        capacity_bytes=1000,
        constant=0,
    )
    assert_same(problem)
    assert_same(problem, evaluate(problem, boundaries).iteration)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), more=st.integers(0, 50))
def test_more_memory_is_never_worse(seed: int, more: int) -> None:
    problem = random_problem(seed)
    larger = problem._replace(capacity_bytes=problem.capacity_bytes + more)
    assert solve_compiled(larger).iteration <= solve_compiled(problem).iteration


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_faster_links_are_never_worse(seed: int) -> None:
    problem = random_problem(seed)
    faster = problem._replace(
        send_forward=tuple(max(0, t - 1) for t in problem.send_forward),
        send_backward=tuple(t // 2 for t in problem.send_backward),
    )
    assert solve_compiled(faster).iteration <= solve_compiled(problem).iteration


def replaced(**fields: object) -> PipelineProblem:
    problem = equal_layers(stages=4, microbatches=8, layers=10)
    return problem._replace(**fields)  # type: ignore[arg-type]


BAD_PROBLEMS = {
    "more stages than units": equal_layers(stages=16, microbatches=4, layers=10),
    "one virtual stage overlaps": replaced(overlap_p2p=True),
    "micro batches": equal_layers(stages=4, virtual=2, microbatches=8, layers=10)._replace(
        num_microbatches=9
    ),
    "no micro batch": replaced(num_microbatches=0),
    "micro batches beyond int64": replaced(num_microbatches=1 << 62),
    "sends": replaced(send_forward=(1, 2)),
    "unknown kind": replaced(unit_kinds=bytes([1, *[7] * 10, 2])),
    "negative time": replaced(costs=(PLAIN._replace(forward=-1),) * 4),
    "negative memory": replaced(costs=(PLAIN._replace(block_saved_bytes=-1),) * 4),
    "negative send": replaced(send_backward=(0, 1, -1, 1)),
    "sum leaves int64": replaced(costs=(PLAIN._replace(backward=1 << 54),) * 4),
    "value leaves int64": replaced(costs=(PLAIN._replace(static_bytes=1 << 70),) * 4),
    "rest leaves int64": replaced(costs=(PLAIN._replace(reduce_hideable=-(1 << 63)),) * 4),
    "capacity leaves int64": replaced(capacity_bytes=1 << 63),
    "layers": replaced(num_layers=12),
}


@pytest.mark.parametrize("problem", BAD_PROBLEMS.values(), ids=BAD_PROBLEMS.keys())
def test_both_refuse_alike(problem: PipelineProblem) -> None:
    messages = []
    for choice in Backend:
        with pytest.raises(UserInputError) as caught:
            backend.solver_of(choice)(problem, NO_THRESHOLD, DEFAULT_NODE_LIMIT)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("limits", [(NO_THRESHOLD + 1, 1), (0, -1)])
def test_both_refuse_limits_alike(limits: tuple[int, int]) -> None:
    for choice in Backend:
        with pytest.raises(UserInputError):
            backend.solver_of(choice)(replaced(), *limits)


def test_backend_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backend.ENVIRONMENT_VARIABLE, raising=False)
    assert backend.backend_to_run() is Backend.KERNEL
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "reference")
    assert backend.backend_to_run() is Backend.REFERENCE
    assert backend.backend_to_run(Backend.KERNEL) is Backend.KERNEL
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "kernelx")
    with pytest.raises(UserInputError, match="Did you mean kernel"):
        backend.backend_to_run()


def test_a_missing_kernel_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(backend.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "nest_megatron.solver._stage_dp", None)
    monkeypatch.delattr("nest_megatron.solver._stage_dp", raising=False)
    is_built.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [backend.backend_to_run(), backend.backend_to_run()] == [Backend.REFERENCE] * 2
    assert len(caplog.records) == 1
    with pytest.raises(ImportError):
        solve_compiled(replaced())
    is_built.cache_clear()
