"""Times and bytes of a model's layers under a strategy, each distinct layer priced once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.cost_model.communication import collective_time
from nest_megatron.cost_model.keys import GroupPlaces
from nest_megatron.cost_model.layer_cost import UnitTimes
from nest_megatron.cost_model.memory import WEIGHT_BYTES
from nest_megatron.cost_model.model import CostModel
from nest_megatron.model.parameters import ParameterCount, unit_parameters
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import LayerKind
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.research.nest_dp.group_shapes import StageGroupShapes
from nest_megatron.research.nest_dp.job import ResearchJob
from nest_megatron.research.nest_dp.memory import (
    bytes_per_parameter,
    checkpoint_policy,
    gradient_bytes,
    recompute_time,
    reserved_bytes,
)
from nest_megatron.research.nest_dp.records import CheckpointPolicy, NodeTimes
from nest_megatron.research.nest_dp.strategies import Strategy
from nest_megatron.units import Bytes, Seconds, Ticks, to_ticks

Value = TypeVar("Value")


class _Layer(NamedTuple):
    """What tells one layer from another: its kind and its parameters on a rank."""

    kind: LayerKind
    parameters: ParameterCount


class _LayerTicks(NamedTuple):
    forward: Ticks
    recompute: Ticks
    backward: Ticks
    sync: Ticks


class LayerPrices:
    """Prices layers for one job."""

    def __init__(self, job: ResearchJob) -> None:
        self.job = job
        self.model = CostModel(job.spec, job.cluster, job.settings, job.times)
        self.kinds = job.spec.layer_kinds()
        self._alone: GroupPlaces = ((1,) * len(job.cluster.levels),) * 4
        self._layers: dict[Strategy, tuple[_Layer, ...]] = {}
        self._distinct: dict[Strategy, tuple[tuple[_Layer, ...], tuple[int, ...]]] = {}
        self._policies: dict[Strategy, tuple[CheckpointPolicy, ...]] = {}
        self._static: dict[object, tuple[tuple[Bytes, ...], Bytes]] = {}
        self._times: dict[object, NodeTimes] = {}

    def shard(self, strategy: Strategy) -> LayerShard:
        """What one rank computes."""
        fused = self.job.cluster.accelerator.flash_attention
        return strategy.shard(
            self.job.spec,
            flash_attention=fused and self.job.choices.flash_attention,
            loss_bytes=self.job.settings.traits.loss_bytes,
        )

    def layers(self, strategy: Strategy) -> tuple[_Layer, ...]:
        """All layers; a tied head has a copy of the embedding, as in a pipeline."""
        if strategy not in self._layers:
            spec, tp = self.job.spec, strategy.tensor_model_parallel_size
            ep, etp = strategy.expert_model_parallel_size, tp if spec.is_moe else 1
            counts = unit_parameters(spec, tp, ep, etp, single_stage=False)
            self._layers[strategy] = tuple(map(_Layer, self.kinds, counts))
        return self._layers[strategy]

    def least(self, strategy: Strategy) -> tuple[Ticks, ...]:
        """What each layer takes at least: its own work, without any traffic.

        Rounded down by a tick for each direction that is rounded by itself elsewhere.
        """

        def work(layer: _Layer) -> Ticks:
            times = self._unit(strategy, layer, self._alone)
            seconds = times.whole_forward.compute + times.backward.compute
            if self.job.choices.recomputes == (True,):
                seconds += recompute_time(self.job.choices.memory, layer.kind, times)
            return max(0, to_ticks(seconds) - 3)

        return self._each(strategy, work)

    def policies(
        self, strategy: Strategy, entry_bytes: Sequence[int]
    ) -> tuple[CheckpointPolicy, ...]:
        """What is kept of each layer, without and with recomputation, as allowed.

        Args:
            entry_bytes: what crosses into each downset.
        """
        if strategy not in self._policies:
            choices, layers = self.job.choices, self.layers(strategy)
            self._policies[strategy] = tuple(
                checkpoint_policy(
                    choices.memory,
                    [(layer.kind, self._unit(strategy, layer, self._alone)) for layer in layers],
                    entry_bytes,
                    recompute=recompute,
                    latent_attention=self.job.spec.multi_latent_attention,
                )
                for recompute in choices.recomputes
            )
        return self._policies[strategy]

    def static_bytes(
        self, strategy: Strategy, zero: ZeroStage, degree: int
    ) -> tuple[tuple[Bytes, ...], Bytes]:
        """Bytes of each layer for as long as training runs, and those reserved beside them."""
        key = (strategy, zero, degree)
        if key not in self._static:
            choices, layers = self.job.choices, self.layers(strategy)
            each = bytes_per_parameter(
                choices.memory, choices.optimizer, zero, degree, self.job.settings
            )
            most = max(layer.parameters.total for layer in layers)
            static = tuple(math.ceil(layer.parameters.total * each) for layer in layers)
            self._static[key] = (
                static,
                reserved_bytes(choices.memory, zero, most, self.job.settings),
            )
        return self._static[key]

    def times(
        self, strategy: Strategy, shapes: StageGroupShapes, zero: ZeroStage, degree: int
    ) -> NodeTimes:
        """Ticks of each layer where its groups lie."""
        key = (strategy, shapes, zero, degree)
        if key not in self._times:

            def price(layer: _Layer) -> _LayerTicks:
                return self._ticks(strategy, layer, shapes, zero, degree)

            columns = zip(*self._each(strategy, price), strict=True)
            forward, recompute, backward, sync = columns
            self._times[key] = NodeTimes(
                forward=forward, recompute=recompute, backward=backward, sync=sync
            )
        return self._times[key]

    def _each(self, strategy: Strategy, price: Callable[[_Layer], Value]) -> tuple[Value, ...]:
        """A price for every layer, each distinct one asked for once."""
        if strategy not in self._distinct:
            layers = self.layers(strategy)
            index = {layer: number for number, layer in enumerate(dict.fromkeys(layers))}
            self._distinct[strategy] = tuple(index), tuple(index[layer] for layer in layers)
        distinct, numbers = self._distinct[strategy]
        known = [price(layer) for layer in distinct]
        return tuple(known[number] for number in numbers)

    def _unit(self, strategy: Strategy, layer: _Layer, inner: GroupPlaces) -> UnitTimes:
        return self.model.unit_time(layer.kind, inner, self.shard(strategy))

    def _ticks(
        self,
        strategy: Strategy,
        layer: _Layer,
        shapes: StageGroupShapes,
        zero: ZeroStage,
        degree: int,
    ) -> _LayerTicks:
        """One layer; ZeRO scatters gradients and gathers weights for every micro batch."""
        times, count = self._unit(strategy, layer, shapes.inner), layer.parameters
        rule = self.job.choices.memory
        scatter = gather = 0.0
        if zero >= ZeroStage.GRADIENTS:
            gradients = count.total * gradient_bytes(rule, self.job.settings)
            scatter = self._collective(CollectiveKind.REDUCE_SCATTER, gradients, shapes.zero)
        if zero >= ZeroStage.WEIGHTS:
            weights = count.total * WEIGHT_BYTES
            gather = self._collective(CollectiveKind.ALL_GATHER, weights, shapes.zero)
        share = degree if zero >= ZeroStage.GRADIENTS else 1
        return _LayerTicks(
            forward=to_ticks(times.whole_forward.total + gather),
            recompute=to_ticks(recompute_time(rule, layer.kind, times)),
            backward=to_ticks(times.backward.total + scatter + gather),
            sync=to_ticks(self._sync(count, shapes, share)),
        )

    def _sync(self, count: ParameterCount, shapes: StageGroupShapes, share: int) -> Seconds:
        """The sum of a layer's gradients over all copies of its parameters."""
        width = gradient_bytes(self.job.choices.memory, self.job.settings) / share
        reduce = CollectiveKind.ALL_REDUCE
        dense = self._collective(reduce, count.dense * width, shapes.dense)
        return dense + self._collective(reduce, count.expert * width, shapes.expert)

    def _collective(
        self, kind: CollectiveKind, num_bytes: float, shape: tuple[int, ...]
    ) -> Seconds:
        return collective_time(kind, num_bytes, shape, self.job.cluster.levels)
