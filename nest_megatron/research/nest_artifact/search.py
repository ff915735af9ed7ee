"""The best plan of the artifact's space: tensor degree, depth, replicas and stage boundaries.

Exact: for every tensor degree and depth the boundary table holds the least bottleneck for each
first stage (whose weights are what the sum over replicas depends on; where a rule sums the heaviest
stage there is a table for each weight that it may have), and every number of replicas is priced
that could still win. Stages stand packed, the last one first; expert and context parallel
degrees, micro batch and recompute are the instance's. ZeRO is not in it: the artifact prices its
collectives by running a network simulator, and no recorded instance needs it.

The boundary table is filled by the compiled kernel or by its reference, the dullest program that
can be right. Loop order and ties, which the kernel follows: positions from the end, starts
ascending, ends ascending; the first least bottleneck stays.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import accumulate, combinations, pairwise
from operator import attrgetter
from typing import NamedTuple

from nest_megatron.packages import is_built
from nest_megatron.plain import frozen
from nest_megatron.research.nest_artifact.price import (
    AS_ARTIFACT,
    ArtifactRule,
    Chain,
    Instance,
    Price,
    Stage,
    StagePlacement,
    links_of,
    price,
    recomputed_forward,
    stage_memory,
    stage_time,
    sync_time,
    weights_of,
)

has_kernel = partial(
    is_built,
    "nest_megatron.research.nest_artifact._stage_boundaries",
    "the search of stage boundaries is slower",
)
#: Bottlenecks, each with the end of the first stage that it comes with.
FirstStages = list[tuple[float, int]]


@frozen
class BoundaryTable:
    """For every depth, the least bottleneck of the chain divided into so many stages.

    Args:
        num_layers: of the chain.
        firsts: [depth, end of the first stage], the slowest stage's time; infinite where memory
            does not hold the stages.
        ends: [position from the end, start of a stage], where that stage ends.
    """

    num_layers: int
    firsts: array[float]
    ends: array[int]

    def first_stages(self, depth: int) -> FirstStages:
        """Bottleneck and end of the first stage, for each end that can be had."""
        size = self.num_layers + 1
        row = self.firsts[depth * size : (depth + 1) * size]
        return [(value, end) for end, value in enumerate(row) if value < math.inf]

    def boundaries(self, depth: int, first_end: int) -> tuple[int, ...]:
        """Where the stages begin and end: depth + 1 numbers from 0 to that of layers."""
        found = [0, first_end]
        for position in range(depth - 1, 0, -1):
            found.append(self.ends[position * (self.num_layers + 1) + found[-1]])
        return tuple(found)


def deepest(instance: Instance, tensor_model_parallel_size: int) -> int:
    """The most stages that layers and devices allow."""
    devices = instance.num_devices // instance.devices_per_stage(tensor_model_parallel_size)
    return min(len(instance.chains[tensor_model_parallel_size].layers), devices)


def boundary_table(
    instance: Instance,
    tp: int,
    rule: ArtifactRule,
    *,
    most_weight_bytes: float = math.inf,
    compiled: bool | None = None,
) -> BoundaryTable:
    """All depths of one tensor degree, stages packed on the devices, the last one first.

    Args:
        most_weight_bytes: stages with more weights are left out.
        compiled: whether the kernel or the reference answers; they agree bit for bit. The kernel
            where it is built, by default.
    """
    num_stages, num_layers = deepest(instance, tp), len(instance.chains[tp].layers)
    size = (num_stages + 1) * (num_layers + 1)
    firsts, ends = array("d", [math.inf]) * size, array("i", [0]) * size
    uses_kernel = has_kernel() if compiled is None else compiled
    fill = _fill_by_kernel if uses_kernel else _fill_by_reference
    fill(instance, tp, rule, most_weight_bytes, firsts, ends)
    return BoundaryTable(num_layers=num_layers, firsts=firsts, ends=ends)


def _link_levels(instance: Instance, tp: int) -> list[int]:
    """The level of the link before the stage at each position from the end; [0] stands for none.

    Stages are packed: position s is on devices (s - 1) a to s a - 1.
    """
    devices, between = instance.devices_per_stage(tp), instance.network.level_between
    inner = [between((s - 1) * devices, s * devices) for s in range(1, deepest(instance, tp))]
    return [0, *inner, 0]


def _fill_by_kernel(
    instance: Instance,
    tp: int,
    rule: ArtifactRule,
    most_weight_bytes: float,
    firsts: array[float],
    ends: array[int],
) -> None:
    from nest_megatron.research.nest_artifact import _stage_boundaries

    chain, links = instance.chains[tp], links_of(instance, rule)
    layers, n = chain.layers, len(chain.layers)
    scratch = len(firsts) + (3 + 2 * len(links)) * n * n + n
    edges = array("d", [-1.0]) * (n * n)  # bytes from each layer to each, -1 without an edge
    for source, outgoing in enumerate(chain.outgoing):
        for target, num_bytes in outgoing:
            edges[source * n + target] = num_bytes
    _stage_boundaries.fill(
        deepest(instance, tp),
        _column(layers, "forward"),
        _column(layers, "backward"),
        array("d", [recomputed_forward(layer, rule) for layer in layers]),
        _column(layers, "weight_bytes"),
        _column(layers, "activation_bytes"),
        edges,
        _column(links, "bandwidth"),
        _column(links, "latency"),
        _column(links, "factor"),
        array("i", _link_levels(instance, tp)),
        instance.memory_bytes,
        instance.optimizer.state_bytes_per_weight_byte,
        most_weight_bytes,
        instance.num_devices,
        instance.recompute,
        firsts,
        ends,
        array("d", [math.inf]) * scratch,
        array("i", [0]) * (n * n),
    )


def _column(records: Iterable[object], field: str) -> array[float]:
    return array("d", map(attrgetter(field), records))


def _fill_by_reference(
    instance: Instance,
    tp: int,
    rule: ArtifactRule,
    most_weight_bytes: float,
    firsts: array[float],
    ends: array[int],
) -> None:
    n, num_stages = len(instance.chains[tp].layers), deepest(instance, tp)
    price = _pricer(instance, tp, rule, most_weight_bytes)
    row = [price(x, n, 1) for x in range(n)]
    for x in range(n):
        ends[n + 1 + x] = n
    firsts[n + 1 + n] = row[0]
    for s in range(2, num_stages + 1):
        before, row = row, [math.inf] * n
        for x in range(n - s + 1):
            for y in range(x + 1, n - s + 2):
                found = max(price(x, y, s), before[y])
                if x == 0:
                    firsts[s * (n + 1) + y] = found
                if found < row[x]:
                    row[x], ends[s * (n + 1) + x] = found, y


def _pricer(
    instance: Instance, tp: int, rule: ArtifactRule, most_weight_bytes: float
) -> Callable[[int, int, int], float]:
    """A stage's time by its first layer, end and position; infinite where memory lacks.

    Each stage is timed once for each pair of links.
    """
    chain, links = instance.chains[tp], links_of(instance, rule)
    levels = _link_levels(instance, tp)

    @cache
    def last_position(first: int, end: int) -> int:
        if weights_of(chain, first, end) > most_weight_bytes:
            return 0
        memory = stage_memory(instance, chain, first, end)
        return memory.last_position(instance.memory_bytes, instance.num_devices)

    @cache
    def time(first: int, end: int, before: int, after: int, recompute: bool) -> float:
        ends = (links[before], links[after])
        return stage_time(chain, first, end, ends, rule, recompute=recompute)

    def price(first: int, end: int, position: int) -> float:
        if last_position(first, end) < position:
            return math.inf
        recompute = instance.recompute and position > 1
        return time(first, end, levels[position], levels[position - 1], recompute)

    return price


class ArtifactSolution(NamedTuple):
    """The best plan and its price."""

    placement: StagePlacement
    price: Price


@frozen
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
        # what replicas sum, by where the first stage ends: its weights, or the most allowed
        weights = (layer.weight_bytes for layer in chain.layers)
        first = accumulate(weights, initial=0.0)
        summed = [most if most < math.inf else num_bytes for num_bytes in first]
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
    heavier than its heaviest.
    """
    if rule.sync_first_stage_only:
        return [math.inf]
    ends = range(len(chain.layers) + 1)
    return sorted({weights_of(chain, a, b) for a, b in combinations(ends, 2)}, reverse=True)


def _front(first_stages: FirstStages, summed: list[float]) -> FirstStages:
    """Bottlenecks that no smaller sum has as small, least first; sums grow with the end."""
    front: FirstStages = []
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
    front: FirstStages,
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
    if not any(deepest(instance, tp) for tp in instance.chains):
        least = instance.devices_per_stage(min(instance.chains))
        reason = f"a stage takes {least} devices, and there are {instance.num_devices}"
        return NoSolution(reason=reason, missing_bytes=0.0)
    missing, tp, node_id = min(  # what the largest layer lacks alone in the last stage
        max(
            (stage_memory(instance, chain, at, at + 1).resident - instance.memory_bytes, tp, node)
            for at, node in enumerate(layer.node_id for layer in chain.layers)
        )
        for tp, chain in instance.chains.items()
        if deepest(instance, tp)
    )
    reason = "every layer fits alone, but not in the depth that the devices allow"
    if missing > 0:
        reason = (
            f"node {node_id} alone lacks {missing:.0f} bytes at tensor degree {tp}; the artifact "
            "would try ZeRO now, priced by its network simulator, which is left out here"
        )
    return NoSolution(reason=reason, missing_bytes=max(missing, 0.0))
