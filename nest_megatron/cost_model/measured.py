"""How far measured layer times lie from analytic ones, for every block in every shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.compute import operator_times
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.graph import LayerGraph
from nest_megatron.model.operators import (
    around_mtp_graph,
    attention_graph,
    embedding_graph,
    feed_forward_graph,
    head_graph,
)
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import LayerKind, TransformerSpec
from nest_megatron.profile.lookup import Found, LayerTimes, Point, point_of, shard_of
from nest_megatron.profile.records import LayerBlock, Source, Timing
from nest_megatron.units import Seconds

_GRAPHS: dict[LayerBlock, Callable[[TransformerSpec, LayerShard], LayerGraph]] = {
    LayerBlock.ATTENTION: attention_graph,
    LayerBlock.DENSE: lambda spec, shard: feed_forward_graph(spec, LayerKind.DENSE, shard),
    LayerBlock.EXPERTS: lambda spec, shard: feed_forward_graph(spec, LayerKind.MOE, shard),
    LayerBlock.EMBEDDING: embedding_graph,
    LayerBlock.MTP: around_mtp_graph,
    LayerBlock.HEAD: head_graph,
}


class Scale(NamedTuple):
    """What a block's analytic compute time is multiplied by, in each direction."""

    forward: float = 1.0
    backward: float = 1.0
    source: Source = Source.ANALYTIC


#: Of a block that no timing speaks for.
AS_ANALYTIC = Scale()


def block_graph(spec: TransformerSpec, block: LayerBlock, shard: LayerShard) -> LayerGraph:
    """The work of a block in closed form."""
    return _GRAPHS[block](spec, shard)


class MeasuredTimes:
    """Scales of a job's blocks, each worked out once.

    A timing's ratio is taken against the analytic time of the same operators under the same
    settings, balanced routing excepted: an imbalance factor lengthens measured times too.
    """

    def __init__(
        self,
        spec: TransformerSpec,
        cluster: Cluster,
        settings: CostSettings,
        times: LayerTimes | None,
    ) -> None:
        self.spec = spec
        self.cluster = cluster
        self.settings = settings
        self.times = times
        self._scales: dict[tuple[LayerBlock, Point], Scale] = {}
        self._ratios: dict[Timing, tuple[float, float]] = {}

    def scale(self, block: LayerBlock, shard: LayerShard) -> Scale:
        """The scale of a block in a shape."""
        if self.times is None:
            return AS_ANALYTIC
        key = (block, point_of(self.spec, block, shard))
        if key not in self._scales:
            self._scales[key] = self._joined(self.times.find(block, shard), shard)
        return self._scales[key]

    def _joined(self, found: Found, shard: LayerShard) -> Scale:
        """The mean of the neighbours' ratios, which for a shape's own timing is its ratio."""
        if not found.neighbours:
            return AS_ANALYTIC
        ratios = [self._ratio(near.timing, shard) for near in found.neighbours]
        if len(ratios) == 1:
            return Scale(*ratios[0], found.source)
        weights = [near.weight for near in found.neighbours]
        forward, backward = (
            math.exp(math.fsum(w * math.log(ratio) for w, ratio in zip(weights, side, strict=True)))
            for side in zip(*ratios, strict=True)
        )
        return Scale(forward, backward, found.source)

    def _ratio(self, timing: Timing, shard: LayerShard) -> tuple[float, float]:
        """Measured over analytic time of a timing's own shape, forward and backward."""
        if timing not in self._ratios:
            graph = block_graph(self.spec, timing.block, shard_of(timing, shard))
            forward, backward = self._analytic(graph)
            self._ratios[timing] = (timing.forward_s / forward, timing.backward_s / backward)
        return self._ratios[timing]

    def _analytic(self, graph: LayerGraph) -> tuple[Seconds, Seconds]:
        accelerator, settings = self.cluster.accelerator, self.settings
        both = [operator_times(op, accelerator, settings) for op in graph.operators]
        return math.fsum(ahead for ahead, _ in both), math.fsum(back for _, back in both)
