"""Times of a unit's layer blocks on one rank; each depends on fewer degrees than the whole unit.

Where a profile timed a block, its analytic compute time is scaled by what was measured over it.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.compute import operator_times
from nest_megatron.cost_model.graph_times import GraphTimes, Scale, graph_times
from nest_megatron.cost_model.keys import GroupPlaces, dense_shape, unit_key
from nest_megatron.cost_model.layer_cost import NO_WORK, UnitTimes, unit_times
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.execution import OF_EXPERTS, OF_GRAPH, OF_TOKENS, OUTSIDE_EXPERTS
from nest_megatron.model.graph import Group, LayerGraph, OperatorKind
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.operators import block_graph
from nest_megatron.model.operators.common import dispatch_buffer_bytes
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.profile.lookup import LayerTimes, point_of, shard_of
from nest_megatron.profile.records import Source, Timing
from nest_megatron.units import Seconds

_GROUPS = (Group.TENSOR, Group.CONTEXT, Group.EXPERT, Group.EXPERT_TENSOR)
#: Blocks without experts in which no token meets another.
_ON_EACH_TOKEN = (LayerBlock.DENSE, LayerBlock.EMBEDDING, LayerBlock.MTP, LayerBlock.HEAD)
#: Blocks without experts that work while the dispatcher holds its buffers.
_BESIDE_BUFFERS = (LayerBlock.DENSE, LayerBlock.HEAD)


class BlockTimes(Caching):
    """Times of a job's layer blocks, each worked out once.

    A timing's ratio is taken against the analytic time of the same operators under the same
    settings, balanced routing excepted: an imbalance factor lengthens measured times too. Layers
    are timed with all their weights trained: a frozen one has the ratio of such a layer.
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
        self._units = {kind: spec.unit_blocks(kind) for kind in dict.fromkeys(spec.layer_kinds())}
        pairs = [pair for blocks in self._units.values() for pair in pairwise((None, *blocks))]
        self._before_experts = {before for before, block in pairs if block is LayerBlock.EXPERTS}

    def sources(self, shard: LayerShard) -> dict[LayerBlock, Source]:
        """Where the compute time of each of the model's blocks comes from."""
        return {block: self._scale(block, shard).source for block in self.spec.blocks}

    def attention_time(self, shard: LayerShard) -> Seconds:
        """Attention's own kernels of all layers, forward and backward, for one micro batch."""
        accelerator, settings = self.cluster.accelerator, self.settings
        return math.fsum(
            sum(operator_times(operator, accelerator, settings))
            for kind in self.spec.layer_kinds()
            for block in self._units[kind]
            for operator in self.graph(block, shard).operators
            if operator.kind is OperatorKind.ATTENTION
        )

    @cached_by(lambda self, places, shard: unit_key(self.spec, LayerKind.MOE, places, shard))
    def of_units(
        self, places: GroupPlaces, shard: LayerShard
    ) -> dict[LayerKind, tuple[UnitTimes, ...]]:
        """The blocks of each kind of unit, at least one."""
        outside = self._outside_experts(places, shard)
        experts = {
            before: self.of_block(LayerBlock.EXPERTS, places, shard, before)
            for before in self._before_experts
        }
        return {
            kind: tuple(
                experts[before] if block is LayerBlock.EXPERTS else outside[block]
                for before, block in pairwise((None, *blocks))
                if block is not None
            )
            or (NO_WORK,)
            for kind, blocks in self._units.items()
        }

    @cached_by(
        lambda self, places, shard: (
            OUTSIDE_EXPERTS.of(shard.execution),
            dispatch_buffer_bytes(self.spec, shard),
            dense_shape(places, shard),
        )
    )
    def _outside_experts(
        self, places: GroupPlaces, shard: LayerShard
    ) -> dict[LayerBlock, UnitTimes]:
        """The blocks that expert degrees do not change."""
        blocks = (block for block in self.spec.blocks if block is not LayerBlock.EXPERTS)
        return {block: self.of_block(block, places, shard) for block in blocks}

    def _overlap_limit_s(
        self,
        block: LayerBlock,
        places: GroupPlaces,
        shard: LayerShard,
        before: LayerBlock | None = None,
    ) -> Seconds:
        """What of a layer's first half the travel of its tokens can overlap."""
        overlaps = shard.execution.overlap_moe_expert_parallel_comm
        if block is not LayerBlock.EXPERTS or before is None or not overlaps:
            return 0.0
        attention = self.of_block(before, places, shard)
        return attention.whole_forward.compute + attention.backward.compute

    def _shape(
        self, block: LayerBlock, places: GroupPlaces, shard: LayerShard
    ) -> tuple[object, ...]:
        """What a block's graph depends on, apart from its execution.

        Without experts it is no expert degree. Where no token meets another, of micro batch and
        context size only their number matters. Measured times follow: ``profile.lookup.point_of``
        knows no more of the two either.
        """
        if block.base in _ON_EACH_TOKEN or block is LayerBlock.EXPERTS:
            tp, tokens = shard.tensor_model_parallel_size, shard.tokens(self.spec)
            shape: tuple[object, ...] = (block, tokens, tp, shard.sequence_parallel, places[0])
        else:
            shape = (block, *dense_shape(places, shard))
        if block.base in _BESIDE_BUFFERS:
            shape = (*shape, dispatch_buffer_bytes(self.spec, shard))
        if block is LayerBlock.EXPERTS:
            ep, etp = shard.expert_model_parallel_size, shard.expert_tensor_parallel_size
            shape = (*shape, ep, etp, places[2:])
        return shape

    def _key(
        self, block: LayerBlock, places: GroupPlaces, shard: LayerShard, *before: LayerBlock | None
    ) -> tuple[object, ...]:
        shape, execution = self._shape(block, places, shard), shard.execution
        if block is not LayerBlock.EXPERTS:
            reads = OF_TOKENS if block.base in _ON_EACH_TOKEN else OUTSIDE_EXPERTS
            return shape, reads.of(execution)
        return shape, OF_EXPERTS.of(execution), self._overlap_limit_s(block, places, shard, *before)

    @cached_by(_key)
    def of_block(
        self,
        block: LayerBlock,
        places: GroupPlaces,
        shard: LayerShard,
        before: LayerBlock | None = None,
    ) -> UnitTimes:
        """A block behind another."""
        return unit_times(
            self._priced_graph(block, places, shard),
            self.cluster.accelerator,
            self.settings,
            shard.execution,
            self._overlap_limit_s(block, places, shard, before),
        )

    @cached_by(
        lambda self, block, places, shard: (
            self._shape(block, places, shard),
            None if block.base in _ON_EACH_TOKEN else OF_GRAPH.of(shard.execution),
        )
    )
    def _priced_graph(
        self, block: LayerBlock, places: GroupPlaces, shard: LayerShard
    ) -> GraphTimes:
        return graph_times(
            self.graph(block, shard),
            dict(zip(_GROUPS, places, strict=True)),
            self.cluster,
            self.settings,
            self._scale(block, shard),
            shard.execution,
        )

    @cached_by(lambda _, block, shard: (block, shard))
    def graph(self, block: LayerBlock, shard: LayerShard) -> LayerGraph:
        """The work of a block, which no figure of a cluster changes."""
        return block_graph(self.spec, block, shard)

    @cached_by(lambda self, block, shard: (block, point_of(self.spec, block, shard)))
    def _scale(self, block: LayerBlock, shard: LayerShard) -> Scale:
        """The mean of the neighbours' ratios, which for a shape's own timing is its ratio."""
        if self.times is None:
            return Scale()
        source, neighbours = self.times.find(block, shard)
        if not neighbours:
            return Scale(source=source)
        ratios = [self._ratio(near.timing, shard) for near in neighbours]
        forward, backward = ratios[0]
        if len(ratios) > 1:
            weights = [near.weight for near in neighbours]
            forward, backward = (
                _weighted_mean(each, weights) for each in zip(*ratios, strict=True)
            )
        return Scale(forward, backward, source)

    @cached_by(lambda _, timing, shard: timing)
    def _ratio(self, timing: Timing, shard: LayerShard) -> tuple[float, float]:
        """Measured over analytic time of a timing's own shape, forward and backward."""
        trained = dataclasses.replace(self.spec, adapters=None)
        graph = block_graph(trained, timing.block, shard_of(timing, shard))
        accelerator, settings = self.cluster.accelerator, self.settings
        both = [operator_times(op, accelerator, settings) for op in graph.operators]
        forward, backward = map(math.fsum, zip(*both, strict=True))
        return timing.forward_s / forward, timing.backward_s / backward


def _weighted_mean(ratios: tuple[float, ...], weights: list[float]) -> float:
    return math.exp(math.fsum(w * math.log(r) for w, r in zip(weights, ratios, strict=True)))
