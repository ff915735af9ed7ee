"""Small random problems of the recurrence."""

from __future__ import annotations

import random

from nest_megatron.layout.zero import ZeroStage
from nest_megatron.research.nest_dp.records import (
    CheckpointPolicy,
    Downsets,
    LayerDag,
    NodeTimes,
    PricedStrategy,
    Problem,
    Schedule,
    ZeroOption,
    downsets_of,
)


def random_dag(draw: random.Random, num_nodes: int) -> LayerDag:
    """A chain, or a graph with branches, skips and ends of its own."""
    names = tuple(f"n{node}" for node in range(num_nodes))
    if draw.random() < 0.4:
        return LayerDag.chain(names)
    pairs = [(a, b) for b in range(num_nodes) for a in range(b)]
    return LayerDag(names=names, edges=tuple(p for p in pairs if draw.random() < 0.55))


def nested_ends(draw: random.Random, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Stretches of one to three levels, not all of one size."""
    cuts = set(range(1, num_devices))
    levels = []
    for _ in range(draw.randrange(3)):
        cuts = {cut for cut in cuts if draw.random() < 0.6}
        bounds = sorted(cuts | {num_devices})
        levels.append(tuple(min(b for b in bounds if b > at) for at in range(num_devices)))
    return (*levels, (num_devices,) * num_devices)


def random_problem(seed: int, *, most_nodes: int = 4, most_devices: int = 5) -> Problem:
    """A problem that brute force can answer."""
    draw = random.Random(seed)
    downsets = downsets_of(random_dag(draw, draw.randint(1, most_nodes)))
    ends = nested_ends(draw, draw.randint(1, most_devices))
    count = draw.randint(1, 2)
    return Problem(
        downsets=downsets,
        ends=ends,
        strategies=tuple(_strategy(draw, downsets, ends) for _ in range(count)),
        num_microbatches=draw.randint(1, 5),
        schedule=draw.choice(list(Schedule)),
        capacity_bytes=draw.randint(10, 90),
        most_stages=min(len(downsets.dag.names), len(ends[0]), draw.randint(1, 5)),
        least_stages=draw.choice([1, 1, 1, 2]),
    )


def _strategy(
    draw: random.Random, downsets: Downsets, ends: tuple[tuple[int, ...], ...]
) -> PricedStrategy:
    n, width = len(downsets.dag.names), draw.choice([1, 1, 2])
    outputs = [draw.randint(0, 6) for _ in range(n)]
    crossing = tuple(downsets.cut_bytes(outputs))
    weights, rates = [draw.randint(1, 15) for _ in range(n)], [1]
    for _ in ends[1:]:
        rates.append(rates[-1] + draw.randint(0, 3))
    degrees = [1] if draw.random() < 0.4 else [1, 2, 4]
    return PricedStrategy(
        label=f"width {width}",
        options=tuple(
            _option(draw, weights, len(ends[0]), width, degree, stage)
            for degree in degrees
            for stage in (ZeroStage(0),) * (degree == 1) + tuple(ZeroStage)[1:] * (degree > 1)
            if degree * width <= len(ends[0]) or degree == 1
        ),
        policies=tuple(
            _policy(draw, n, crossing, recompute=recompute)
            for recompute in draw.choice([(False,), (True,), (False, True)])
        ),
        send=tuple(tuple(rate * num for num in crossing) for rate in rates),
    )


def _option(
    draw: random.Random,
    weights: list[int],
    num_devices: int,
    width: int,
    degree: int,
    stage: ZeroStage,
) -> ZeroOption:
    n, share = len(weights), {0: 6, 1: 4, 2: 2, 3: 0}[stage]
    times = tuple(_times(draw, n) for _ in range(draw.randint(1, 3)))
    return ZeroOption(
        zero_stage=stage,
        zero_degree=degree,
        num_devices=width * degree,
        static_bytes=tuple(w * (share + (6 - share) // degree) // 2 for w in weights),
        times_at=tuple(draw.randrange(len(times)) for _ in range(num_devices)),
        times=times,
        reserved_bytes=draw.randint(0, 4) if stage == 3 else 0,
    )


def _times(draw: random.Random, n: int) -> NodeTimes:
    forward = tuple(draw.randint(1, 9) for _ in range(n))
    return NodeTimes(
        forward=forward,
        recompute=forward,
        backward=tuple(draw.randint(1, 9) for _ in range(n)),
        sync=tuple(draw.randint(0, 12) for _ in range(n)),
    )


def _policy(
    draw: random.Random, n: int, crossing: tuple[int, ...], *, recompute: bool
) -> CheckpointPolicy:
    first = tuple(draw.randint(1, 6) for _ in range(n))
    return CheckpointPolicy(
        recompute=recompute,
        first_bytes=first,
        further_bytes=(0,) * n if recompute else first,
        entry_bytes=crossing if recompute else (0,) * len(crossing),
        peak_bytes=tuple(draw.choice([0, 0, 9]) for _ in range(n)),
    )
