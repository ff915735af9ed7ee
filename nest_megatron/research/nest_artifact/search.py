"""The best plan of the artifact's own space: tensor degree, depth, replicas and stage boundaries.

Exact: for every tensor degree and depth the boundary table holds the least bottleneck for each
first stage (whose weights are what the sum over replicas depends on; where a rule sums the heaviest
stage there is a table for each weight that it may have), and every number of replicas is priced
that could still win. Stages stand packed, the last one first; expert and context parallel
degrees, micro batch and recompute are the instance's. ZeRO is not in it: the artifact prices its
collectives by running a network simulator, and no recorded instance needs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

from nest_megatron.research.nest_artifact.boundaries import boundary_table, deepest
from nest_megatron.research.nest_artifact.price import (
    Price,
    price,
    stage_memory,
    sync_time,
    weights_of,
)
from nest_megatron.research.nest_artifact.records import (
    AS_ARTIFACT,
    ArtifactRule,
    Chain,
    Instance,
    Stage,
    StagePlacement,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactSolution:
    """The best plan and its price."""

    placement: StagePlacement
    price: Price


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSolution:
    """Why there is no plan.

    Args:
        missing_bytes: what the layer that is worst off lacks on its devices, alone in the last
            stage; 0 where every layer fits so and it is stages or devices that are short.
    """

    reason: str
    missing_bytes: float


class _Candidate(NamedTuple):
    time: float
    tp: int
    replicas: int
    boundaries: tuple[int, ...]


def solve(
    instance: Instance, rule: ArtifactRule = AS_ARTIFACT, *, compiled: bool | None = None
) -> ArtifactSolution | NoSolution:
    """The fastest plan under a rule, or why there is none.

    Ties go to the smaller tensor degree, then to fewer stages, then to more replicas.

    Args:
        compiled: as for ``boundary_table``.
    """
    best = _Candidate(math.inf, 0, 0, ())
    for tp in instance.chains:
        best = [best, *_improvements(instance, rule, tp, best.time, compiled)][-1]
    if not best.boundaries:
        return _no_solution(instance)
    devices, ends = instance.devices_per_stage(best.tp), pairwise(best.boundaries)
    placement = StagePlacement(
        stages=tuple(Stage(first=a, end=b, num_devices=devices) for a, b in ends),
        data_parallel_size=best.replicas,
        tensor_model_parallel_size=best.tp,
    )
    return ArtifactSolution(placement=placement, price=price(instance, placement, rule))


def _improvements(
    instance: Instance, rule: ArtifactRule, tp: int, limit: float, compiled: bool | None
) -> Iterator[_Candidate]:
    """Plans of one tensor degree that take less than ``limit``, each less than the one before."""
    chain, deepest_here = instance.chains[tp], deepest(instance, tp)
    for most in _most_weights(chain, rule) if deepest_here else ():
        table = boundary_table(instance, tp, rule, most_weight_bytes=most, compiled=compiled)
        # what replicas sum, by where the first stage ends: its own weights, or the most allowed
        weights = (layer.weight_bytes for layer in chain.layers)
        own = accumulate(weights, initial=0.0)
        summed = [most if most < math.inf else num_bytes for num_bytes in own]
        fronts = [_front(table.first_stages(depth), summed) for depth in range(deepest_here + 1)]
        if not any(fronts):
            return  # with lighter stages there are no boundaries either
        for depth, front in enumerate(fronts):
            stride = depth * instance.devices_per_stage(tp)
            for time, replicas, end in _faster(instance, rule, front, summed, stride, depth, limit):
                limit = time
                yield _Candidate(time, tp, replicas, table.boundaries(depth, end))


def _most_weights(chain: Chain, rule: ArtifactRule) -> list[float]:
    """What the heaviest stage may weigh, in turns: anything, where only the first one is summed.

    Otherwise every weight that a stage can have: the best plan is among those with stages no
    heavier than its own heaviest.
    """
    if rule.sync_first_stage_only:
        return [math.inf]
    ends = range(len(chain.layers) + 1)
    return sorted({weights_of(chain, a, b) for a, b in combinations(ends, 2)}, reverse=True)


def _front(first_stages: list[tuple[float, int]], summed: list[float]) -> list[tuple[float, int]]:
    """Bottlenecks that no smaller sum has as small, least first; sums grow with the end."""
    front: list[tuple[float, int]] = []
    for bottleneck, end in first_stages:
        if front and bottleneck >= front[-1][0]:
            continue
        if front and summed[end] == summed[front[-1][1]]:
            front.pop()
        front.append((bottleneck, end))
    return front[::-1]


def _faster(
    instance: Instance,
    rule: ArtifactRule,
    front: list[tuple[float, int]],
    summed: list[float],
    stride: int,
    depth: int,
    limit: float,
) -> Iterator[tuple[float, int, int]]:
    """Times below ``limit``, each below the one before it, with replicas and first stage's end."""
    micro_batches = instance.num_micro_batches
    most = min(instance.num_devices // stride, micro_batches) if front else 0
    for replicas in range(most, 0, -1):
        steps = -(-micro_batches // replicas) + depth - 1
        if front[0][0] * steps >= limit:
            return  # with fewer replicas it only takes more steps
        for bottleneck, end in front:
            if bottleneck * steps >= limit:
                break
            time = bottleneck * steps + sync_time(instance, rule, replicas, stride, summed[end])
            if time < limit:
                limit = time
                yield time, replicas, end


def _no_solution(instance: Instance) -> NoSolution:
    degrees = [tp for tp in instance.chains if deepest(instance, tp)]
    if not degrees:
        least = instance.devices_per_stage(min(instance.chains))
        reason = f"a stage takes {least} devices, and there are {instance.num_devices}"
        return NoSolution(reason=reason, missing_bytes=0.0)
    missing, tp, node_id = min(_largest_layer(instance, tp) for tp in degrees)
    reason = "every layer fits alone, but not in the depth that the devices allow"
    if missing > 0:
        reason = (
            f"node {node_id} alone lacks {missing:.0f} bytes at tensor degree {tp}; the artifact "
            "would try ZeRO now, priced by its network simulator, which is left out here"
        )
    return NoSolution(reason=reason, missing_bytes=max(missing, 0.0))


def _largest_layer(instance: Instance, tp: int) -> tuple[float, int, int]:
    """What the largest layer lacks at a tensor degree, alone in the last stage; degree; node."""
    chain, memory = instance.chains[tp], instance.memory_bytes
    return max(
        (stage_memory(instance, chain, at, at + 1).resident - memory, tp, layer.node_id)
        for at, layer in enumerate(chain.layers)
    )
