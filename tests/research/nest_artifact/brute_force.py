"""The oracle of the artifact mode: price every plan of its space. Exponential; for tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

from nest_megatron.research.nest_artifact.price import (
    AS_ARTIFACT,
    ArtifactRule,
    Instance,
    Stage,
    StagePlacement,
    price,
)
from nest_megatron.research.nest_artifact.search import deepest


def placements(instance: Instance) -> Iterator[StagePlacement]:
    """Every tensor degree, division of its chain and number of replicas that devices allow."""
    for tp, chain in instance.chains.items():
        devices, n = instance.devices_per_stage(tp), len(chain.layers)
        for depth in range(1, deepest(instance, tp) + 1):
            for inner in combinations(range(1, n), depth - 1):
                stages = tuple(
                    Stage(first=first, end=end, num_devices=devices)
                    for first, end in pairwise((0, *inner, n))
                )
                most = min(instance.num_devices // (depth * devices), instance.num_micro_batches)
                for replicas in range(1, most + 1):
                    yield StagePlacement(
                        stages=stages,
                        data_parallel_size=replicas,
                        tensor_model_parallel_size=tp,
                    )


def least_time(instance: Instance, rule: ArtifactRule = AS_ARTIFACT) -> float | None:
    """The least time per batch of all plans that can run, if one can."""
    priced = (price(instance, placement, rule).time_per_batch for placement in placements(instance))
    return min((time for time in priced if time is not None), default=None)
