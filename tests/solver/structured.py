"""Stage problems built like real ones: equal layers, a heavy head, ties, tight memory."""

from __future__ import annotations

import random

from nest_megatron.cost_model.pipeline import PipelineProblem, UnitCost
from tests.solver.problems import random_problem

PLAIN = UnitCost(
    forward=10,
    backward=20,
    block_backward=30,
    gather_unhidden=0,
    gather_hideable=0,
    reduce_unhidden=0,
    reduce_hideable=0,
    optimizer=0,
    static_bytes=5,
    saved_bytes=2,
    block_saved_bytes=1,
    working_bytes=1,
    block_working_bytes=2,
)


def equal_layers(
    *,
    stages: int,
    microbatches: int,
    layers: int = 80,
    virtual: int = 1,
    forward: int = 1000,
    head_layers: float = 1.2,
    edges: bool = True,
    slow_link_every: int = 0,
    light_layers: int = 0,
    block_num_layers: int = 0,
    capacity_bytes: int = 10**9,
) -> PipelineProblem:
    """A model of equal layers under a light embedding and a heavy head.

    Args:
        edges: whether gathers, reductions and the optimizer cost time.
        slow_link_every: stages in a node; the link after the last of them is slower (0: none is).
        light_layers: layers at the front that take six tenths of the others' time.
    """
    layer, light = _unit(1.0, forward, edges), _unit(0.6, forward, edges)
    kinds = (layer, _unit(0.02, forward, edges), _unit(head_layers, forward, edges), light)
    middle = [3] * light_layers + [0] * (layers - light_layers)
    chunks = stages * virtual
    sends = tuple(
        60 if slow_link_every and k % slow_link_every == slow_link_every - 1 else 20
        for k in range(chunks - 1)
    )
    return PipelineProblem(
        num_stages=stages,
        num_virtual=virtual,
        num_microbatches=microbatches,
        unit_kinds=bytes([1, *middle, 2]),
        costs=kinds,
        num_layers=layers,
        block_num_layers=block_num_layers,
        send_forward=(*sends, 0),
        send_backward=(0, *sends),
        overlap_p2p=virtual > 1,
        capacity_bytes=capacity_bytes,
        constant=300,
    )


def _unit(layers: float, forward: int, edges: bool) -> UnitCost:
    time = round(layers * forward)
    sync = 1300 if edges else 0
    return UnitCost(
        forward=time,
        backward=2 * time,
        block_backward=3 * time,
        gather_unhidden=sync // 40,
        gather_hideable=sync - time * 4 // 5 if edges else 0,
        reduce_unhidden=sync // 20,
        reduce_hideable=2 * sync - time * 8 // 5 if edges else 0,
        optimizer=sync // 2,
        static_bytes=500 + time // 10,
        saved_bytes=100,
        block_saved_bytes=10,
        working_bytes=50 + time // 10,
        block_working_bytes=150 + time // 10,
    )


def tie_problem(seed: int) -> PipelineProblem:
    """Equal units, more stages than ``random_problem`` has, and nothing that breaks a tie."""
    rng = random.Random(seed)
    stages = rng.randint(2, 7)
    layers = rng.randint(max(1, stages - 2), 9)
    special = rng.random() < 0.5
    kinds = (
        PLAIN,
        PLAIN._replace(forward=rng.choice([0, 10, 15]), backward=rng.choice([0, 20, 30])),
    )
    return PipelineProblem(
        num_stages=stages,
        num_virtual=1,
        num_microbatches=rng.randint(1, 12),
        unit_kinds=bytes([int(special), *[0] * layers, int(special)]),
        costs=kinds,
        num_layers=layers,
        block_num_layers=rng.choice([0, 0, 1, 3]),
        send_forward=(rng.choice([0, 1]),) * stages,
        send_backward=(rng.choice([0, 1]),) * stages,
        overlap_p2p=False,
        capacity_bytes=rng.choice([30, 45, 60, 1000]),
        constant=0,
    )


def edge_problem(seed: int) -> PipelineProblem:
    """``random_problem`` with heads and tails that dwarf the work, negative rests and zeros."""
    rng = random.Random(seed)
    problem = random_problem(seed)
    costs = tuple(
        cost._replace(
            forward=rng.choice([0, cost.forward, 1]),
            backward=rng.choice([0, cost.backward]),
            gather_unhidden=rng.choice([0, 5, 300]),
            gather_hideable=rng.choice([-500, -50, 0, 40, 300]),
            reduce_unhidden=rng.choice([0, 5, 300]),
            reduce_hideable=rng.choice([-500, -50, 0, 40, 300]),
            optimizer=rng.choice([0, 0, 200]),
        )
        for cost in problem.costs
    )
    return problem._replace(costs=costs)


def long_problem(seed: int) -> PipelineProblem:
    """Few partitions but many micro batches, with stages of nearly the same speed."""
    rng = random.Random(seed)
    virtual = rng.choice([1, 1, 2])
    stages = rng.randint(2, 6)
    chunks = stages * virtual
    layers = chunks - 2 + rng.randint(0 if chunks > 2 else 1, 3)
    scale = rng.choice([3, 50, 1000])
    kinds = tuple(
        PLAIN._replace(
            forward=scale + rng.randint(0, 2),
            backward=2 * scale + rng.randint(0, 2),
            gather_hideable=rng.choice([0, 5 * scale]),
            reduce_hideable=rng.choice([0, 5 * scale]),
        )
        for _ in range(4)
    )
    return PipelineProblem(
        num_stages=stages,
        num_virtual=virtual,
        num_microbatches=stages * rng.randint(5, 60),
        unit_kinds=bytes(rng.randrange(4) for _ in range(layers + 2)),
        costs=kinds,
        num_layers=layers,
        block_num_layers=rng.choice([0, 0, 1]),
        send_forward=tuple(rng.randint(0, 2) for _ in range(chunks)),
        send_backward=tuple(rng.randint(0, 2) for _ in range(chunks)),
        overlap_p2p=virtual > 1 and rng.random() < 0.7,
        capacity_bytes=10_000,
        constant=1,
    )


def deep_problem(seed: int) -> PipelineProblem:
    """More stages than brute force bears and few micro batches: many prefixes meet in one place."""
    rng = random.Random(seed)
    stages = rng.randint(6, 10)
    return equal_layers(
        stages=stages,
        microbatches=rng.randint(2, 12),
        layers=stages + rng.randint(0, 16),
        forward=rng.choice([10, 1000]),
        head_layers=rng.choice([0.3, 1.2, 2.3, 3.4]),
        edges=rng.random() < 0.5,
        slow_link_every=rng.choice([0, 2, 4]),
        light_layers=rng.choice([0, 0, 3]),
        block_num_layers=rng.choice([0, 0, 1, 2]),
        capacity_bytes=rng.choice([10**9, 60_000]),
    )
