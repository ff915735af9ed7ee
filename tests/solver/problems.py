"""Random small stage problems, ties and infeasible ones among them."""

from __future__ import annotations

import random

from nest_megatron.cost_model.pipeline import PipelineProblem, UnitCost


def random_unit(rng: random.Random, scale: int) -> UnitCost:
    forward, backward = rng.randint(1, scale), rng.randint(1, 2 * scale)
    saved = rng.randint(0, 6)
    return UnitCost(
        forward=forward,
        backward=backward,
        block_backward=backward + forward,
        gather_unhidden=rng.randint(0, 2),
        gather_hideable=rng.randint(-4, 4),
        reduce_unhidden=rng.randint(0, 2),
        reduce_hideable=rng.randint(-6, 6),
        optimizer=rng.randint(0, 4),
        static_bytes=rng.randint(0, 20),
        saved_bytes=saved,
        block_saved_bytes=rng.randint(0, saved),
        working_bytes=rng.randint(0, 5),
        block_working_bytes=rng.randint(0, 8),
    )


def random_problem(seed: int) -> PipelineProblem:
    """A problem that brute force can solve; small numbers, so that ties are common."""
    rng = random.Random(seed)
    virtual = rng.choice([1, 1, 2, 3])
    stages = rng.randint(1, 5) if virtual == 1 else rng.randint(2, 4)
    has_mtp = rng.random() < 0.3
    extra = 3 if has_mtp else 2
    if virtual == 1:
        layers = rng.randint(max(1, stages - extra), 8)
        microbatches = rng.randint(1, 9)
    else:
        chunks = stages * virtual
        layers = chunks - 2 + rng.randint(0, 6)
        microbatches = stages * rng.randint(1, 4)
    kinds = [random_unit(rng, rng.choice([3, 10, 100])) for _ in range(rng.randint(3, 5))]
    middle = [rng.randrange(len(kinds)) if rng.random() < 0.3 else 0 for _ in range(layers)]
    units = [1, *middle, *([2] if has_mtp else []), rng.randrange(len(kinds))]
    count = stages * virtual
    return PipelineProblem(
        num_stages=stages,
        num_virtual=virtual,
        num_microbatches=microbatches,
        unit_kinds=bytes(units),
        costs=tuple(kinds),
        num_layers=layers,
        block_num_layers=rng.choice([0, 0, 1, 2]),
        send_forward=tuple(rng.randint(0, 3) for _ in range(count)),
        send_backward=tuple(rng.randint(0, 3) for _ in range(count)),
        overlap_p2p=virtual > 1 and rng.random() < 0.7,
        capacity_bytes=rng.choice([10, 40, 80, 120, 200, 10_000]),
        constant=rng.randint(0, 5),
    )
