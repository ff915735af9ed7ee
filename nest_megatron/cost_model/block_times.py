"""Times of a unit's layer blocks on one rank; each depends on fewer degrees than the whole unit."""

from __future__ import annotations

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.graph_times import GraphTimes, graph_times
from nest_megatron.cost_model.keys import GroupPlaces, dense_shape
from nest_megatron.cost_model.layer_cost import UnitTimes, unit_times
from nest_megatron.cost_model.measured import MeasuredTimes, block_graph
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.graph import Group
from nest_megatron.model.parameters import last_layer_kind
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import LayerKind, TransformerSpec
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.profile.records import LayerBlock, Source, blocks_of
from nest_megatron.units import Seconds, Ticks, to_ticks

_GROUPS = (Group.TENSOR, Group.CONTEXT, Group.EXPERT, Group.EXPERT_TENSOR)
#: What a block's graph depends on: its name, degrees and places, as ``keys`` spells them.
_Shape = tuple[object, ...]
#: What it depends on of how the layers are carried out (``Execution.of_graph`` and the like).
_Way = tuple[object, ...]


class BlockTimes:
    """Times of a job's layer blocks, each worked out once.

    Args:
        times: measured times of the model's layers.
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
        self._measured = MeasuredTimes(spec, cluster, settings, times)
        self._times: dict[tuple[_Shape, _Way, Seconds], UnitTimes] = {}
        self._graph_times: dict[tuple[_Shape, _Way], GraphTimes] = {}

    def sources(self, shard: LayerShard) -> dict[LayerBlock, Source]:
        """Where the compute time of each of the model's blocks comes from."""
        return {p: self._measured.scale(p, shard).source for p in blocks_of(self.spec)}

    def of_unit(
        self, kind: LayerKind, places: GroupPlaces, shard: LayerShard
    ) -> tuple[UnitTimes, ...]:
        """The blocks of a unit."""
        if kind is LayerKind.EMBEDDING:
            return (self.outside_experts(LayerBlock.EMBEDDING, places, shard),)
        if kind is LayerKind.HEAD:
            return (self.outside_experts(LayerBlock.HEAD, places, shard),)
        if kind is LayerKind.MTP:
            around = self.outside_experts(LayerBlock.MTP, places, shard)
            layer = self.of_unit(last_layer_kind(self.spec), places, shard)
            return (around, *(self.spec.num_mtp_layers * layer))
        attention = self.outside_experts(LayerBlock.ATTENTION, places, shard)
        return (attention, self._feed_forward(kind, places, shard))

    def outside_experts(
        self, block: LayerBlock, places: GroupPlaces, shard: LayerShard
    ) -> UnitTimes:
        """A block that depends on no expert degree."""
        shape = (block, *dense_shape(places, shard))
        key = (shape, shard.execution.outside_experts, 0.0)
        if key not in self._times:
            self._times[key] = self._price(block, shape, places, shard)
        return self._times[key]

    def _feed_forward(self, kind: LayerKind, places: GroupPlaces, shard: LayerShard) -> UnitTimes:
        """Second half of a layer; of micro batch and context size only the tokens matter.

        Measured times follow: ``profile.lookup.point_of`` knows no more of the two either.
        """
        has_experts, how = kind is LayerKind.MOE, shard.execution
        expert = (shard.expert_model_parallel_size, shard.expert_tensor_parallel_size, places[2:])
        shape = (
            kind,
            shard.tokens(self.spec),
            shard.tensor_model_parallel_size,
            shard.sequence_parallel,
            places[0],
            expert if has_experts else (),
        )
        beside = 0.0
        if has_experts and how.overlap_moe_expert_parallel_comm:
            attention = self.outside_experts(LayerBlock.ATTENTION, places, shard)
            beside = attention.whole_forward.compute + attention.backward.compute
        key = (shape, how.of_experts if has_experts else how.outside_experts, beside)
        if key not in self._times:
            block = LayerBlock.EXPERTS if has_experts else LayerBlock.DENSE
            self._times[key] = self._price(block, shape, places, shard, beside)
        return self._times[key]

    def _price(
        self,
        block: LayerBlock,
        shape: tuple[object, ...],
        places: GroupPlaces,
        shard: LayerShard,
        beside_s: Seconds = 0.0,
    ) -> UnitTimes:
        execution = shard.execution
        key = (shape, execution.of_graph)
        if key not in self._graph_times:
            shapes = dict(zip(_GROUPS, places, strict=True))
            graph, scale = block_graph(self.spec, block, shard), self._measured.scale(block, shard)
            self._graph_times[key] = graph_times(
                graph, shapes, self.cluster, self.settings, scale, execution
            )
        times, accelerator = self._graph_times[key], self.cluster.accelerator
        return unit_times(times, accelerator, self.settings, execution, beside_s)


def least_sum(blocks: tuple[UnitTimes, ...]) -> tuple[Ticks, Ticks]:
    """Forward and backward ticks of blocks, unjoined: at least, to within one tick."""
    forward = sum(block.whole_forward.total for block in blocks)
    backward = sum(block.backward.total for block in blocks)
    return max(0, to_ticks(forward) - 1), max(0, to_ticks(backward) - 1)
