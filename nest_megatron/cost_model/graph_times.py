"""Time of a unit's operators and of its traffic, each by itself: nothing runs beside another yet.

What only decides what runs beside what (``Execution.of_graph`` leaves it out) changes none of it,
so that a search prices a graph once for all such choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from nest_megatron.cluster.communication import collective_time, split_group
from nest_megatron.cluster.records import Cluster, CollectiveKind
from nest_megatron.cost_model.compute import operator_times
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.execution import Execution
from nest_megatron.model.graph import Group, LayerCollective, LayerGraph, Part
from nest_megatron.profile.records import Source
from nest_megatron.units import Seconds

#: Parts whose load follows the tokens that the router sends; the busiest rank sets the pace.
ROUTED = frozenset({Part.DISPATCH, Part.EXPERTS, Part.EXPERT_ACTIVATION})

#: Shape of each group inside a layer: its fan-out at each network level.
GroupShapes = Mapping[Group, tuple[int, ...]]


class Scale(NamedTuple):
    """What a block's analytic compute time is multiplied by, in each direction."""

    forward: float = 1.0
    backward: float = 1.0
    source: Source = Source.ANALYTIC


class GraphTimes(NamedTuple):
    """A unit's graph, priced: seconds of operators (forward, backward) by name, and their sums.

    ``traffic`` holds the seconds of all calls of each collective in balance;
    ``tokens_cross_nodes`` says whether tokens leave their node for an expert.
    """

    graph: LayerGraph
    source: Source
    imbalance: float
    operators: Mapping[str, tuple[Seconds, Seconds]]
    forward: Mapping[Part, Seconds]
    backward: Seconds
    traffic: tuple[Seconds, ...]
    saved_bytes: Mapping[Part, float]
    tokens_cross_nodes: bool

    def pace(self, part: Part) -> float:
        """Load of the busiest rank over the mean one."""
        return self.imbalance if part in ROUTED else 1.0


def graph_times(
    graph: LayerGraph,
    shapes: GroupShapes,
    cluster: Cluster,
    settings: CostSettings,
    scale: Scale,
    execution: Execution,
) -> GraphTimes:
    """Price a unit's graph on a cluster.

    Args:
        shapes: where the layer's groups lie.
        scale: what a profile makes of the operators' time; a measured time contains its launches.
        execution: of which only what changes a graph is read.
    """
    imbalance = settings.expert_load(math.prod(shapes[Group.EXPERT]))
    operators: dict[str, tuple[Seconds, Seconds]] = {}
    forward: dict[Part, Seconds] = {}
    backward = 0.0
    for op in graph.operators:
        ahead, back = operator_times(op, cluster.accelerator, settings)
        ahead, back = ahead * scale.forward, back * scale.backward
        if op.part in ROUTED:
            ahead, back = ahead * imbalance, back * imbalance
        operators[op.name] = (ahead, back)
        forward[op.part] = forward.get(op.part, 0.0) + ahead
        backward += back
    saved: dict[Part, float] = {}
    for part, num_bytes in graph.saved_bytes:
        factor = imbalance if part in ROUTED else 1.0
        saved[part] = saved.get(part, 0.0) + factor * num_bytes
    once = execution.is_node_limited
    traffic = (_traffic_time(call, shapes, cluster, once) for call in graph.collectives)
    return GraphTimes(
        graph,
        scale.source,
        imbalance,
        operators,
        forward,
        backward,
        tuple(traffic),
        saved,
        tokens_cross_nodes=any(
            call.part is Part.DISPATCH and math.prod(shapes[call.group][1:]) > 1
            for call in graph.collectives
        ),
    )


def _traffic_time(
    call: LayerCollective, shapes: GroupShapes, cluster: Cluster, once: bool
) -> Seconds:
    """Time of all calls of a collective; ``once``: a token goes to each node once."""
    kind, shape = CollectiveKind(call.kind), shapes[call.group]
    if call.within:
        shape = split_group(shape, call.within)[0]
    elif call.across:
        shape = split_group(shape, call.across)[1]
    copies = call.copies if once else 1
    return call.num_calls * collective_time(kind, call.message_bytes, shape, cluster.levels, copies)
