"""Times and bytes of a model's layers under a strategy, each distinct layer priced once.

Memory is counted by one of two rules. The paper's (its section 3.3, as its artifact computes it):
``2 W + O + A + (s - 1) S`` with weights and gradients of 2 bytes a parameter, Adam's states of 12
bytes or none for SGD, the activations ``A`` of one micro batch, and for every further one in flight
``S``: all of ``A``, or where the stage is recomputed its input alone. All of the device may be
used. Ours: what Megatron holds (``cost_model/memory.py``), each layer saving its input where it
is recomputed, with the working memory of the largest layer, in what the reserve and margin leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple, TypeVar

from nest_megatron.cluster.communication import collective_time
from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.cost_model.fsdp_memory import RankParameters, unsharded_bytes
from nest_megatron.cost_model.keys import GroupPlaces
from nest_megatron.cost_model.layer_cost import UnitTimes
from nest_megatron.cost_model.memory import (
    WEIGHT_BYTES,
    capacity_bytes,
    static_bytes,
)
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.unit_run import run_unit
from nest_megatron.layout.recompute import FULL_RECOMPUTE, NO_RECOMPUTE
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.block_parameters import ParameterCount
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.parameters import unit_parameters
from nest_megatron.model.shard import LayerShard
from nest_megatron.research.nest_dp.job import (
    MemoryRule,
    PaperOptimizer,
    ResearchChoices,
    ResearchJob,
    Strategy,
)
from nest_megatron.research.nest_dp.records import CheckpointPolicy, NodeTimes
from nest_megatron.research.nest_dp.topology import Shape, StageGroupShapes
from nest_megatron.units import Bytes, Seconds, Ticks, to_ticks

Value = TypeVar("Value")


class _Layer(NamedTuple):
    """What tells one layer from another: its kind and its parameters on a rank."""

    kind: LayerKind
    parameters: ParameterCount


class LayerPrices:
    """Prices layers for one job.

    Attributes:
        capacity_bytes: what a stage may fill.
        layers: all layers under a strategy; a tied head has a copy of the embedding, as in a
            pipeline.
        policies: what is saved of each layer, without and with recomputation, as allowed; by
            strategy and what crosses into each downset.
        static_bytes: bytes of each layer for as long as training runs, and those that ZeRO-3
            gathers beside them (the paper's rule has no such term); by strategy, stage and degree.
        times: ticks of each layer by strategy, shapes of its groups, ZeRO stage and degree.
    """

    def __init__(self, job: ResearchJob) -> None:
        self.job = job
        self.is_paper = job.choices.memory is MemoryRule.PAPER
        self.model = CostModel(job.spec, job.cluster, job.settings, job.times)
        self._alone: GroupPlaces = ((1,) * len(job.cluster.levels),) * 4
        accelerator = job.cluster.accelerator
        self.capacity_bytes: Bytes = (
            accelerator.memory_bytes if self.is_paper else capacity_bytes(accelerator, job.settings)
        )
        self.layers = cache(self._layers)
        self.policies = cache(self._policies)
        self.static_bytes = cache(self._static_bytes)
        self.times = cache(self._times)

    def shard(self, strategy: Strategy) -> LayerShard:
        """What one rank computes; experts are split over the tensor ranks as well."""
        tp, cp, ep = strategy.block
        fused = self.job.cluster.accelerator.flash_attention
        return LayerShard(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=tp if self.job.spec.is_moe else 1,
            micro_batch_size=strategy.micro_batch_size,
            sequence_parallel=strategy.sequence_parallel,
            flash_attention=fused and self.job.choices.flash_attention,
            loss_bytes=self.job.settings.traits.loss_bytes,
            loss_traffic_bytes=self.job.settings.traits.loss_traffic_bytes,
        )

    def _layers(self, strategy: Strategy) -> tuple[_Layer, ...]:
        spec, (tp, _, ep) = self.job.spec, strategy.block
        counts = unit_parameters(spec, tp, ep, tp if spec.is_moe else 1, single_stage=False)
        return tuple(map(_Layer, spec.layer_kinds(), counts))

    def least(self, strategy: Strategy) -> tuple[Ticks, ...]:
        """What each layer takes at least: its work, without any traffic.

        Rounded down by a tick for each direction that is rounded by itself elsewhere.
        """

        def work(layer: _Layer) -> Ticks:
            times = self._unit(strategy, layer, self._alone)
            seconds = times.whole_forward.compute + times.backward.compute
            if self.job.choices.recomputes == (True,):
                seconds += self._recompute_time(layer.kind, times)
            return max(0, to_ticks(seconds) - 3)

        return self._each(strategy, work)

    def _policies(
        self, strategy: Strategy, entry_bytes: tuple[int, ...]
    ) -> tuple[CheckpointPolicy, ...]:
        units = [(at.kind, self._unit(strategy, at, self._alone)) for at in self.layers(strategy)]
        latent, found = self.job.spec.multi_latent_attention, []
        for recompute in self.job.choices.recomputes:
            setting = FULL_RECOMPUTE if recompute else NO_RECOMPUTE
            if self.is_paper:
                saved = [times.input_bytes + sum(times.saved_bytes.values()) for _, times in units]
                working = [0.0] * len(units)
            else:
                runs = [run_unit(t, kind, setting, latent_attention=latent) for kind, t in units]
                saved, working = [r.saved_bytes for r in runs], [r.working_bytes for r in runs]
            first = tuple(map(math.ceil, saved))
            input_alone = self.is_paper and recompute
            policy = CheckpointPolicy(
                recompute=recompute,
                first_bytes=first,
                further_bytes=(0,) * len(units) if input_alone else first,
                entry_bytes=entry_bytes if input_alone else (0,) * len(entry_bytes),
                peak_bytes=tuple(map(math.ceil, working)),
            )
            found.append(policy)
        return tuple(found)

    def _recompute_time(self, kind: LayerKind, times: UnitTimes) -> Seconds:
        """A layer's forward pass where it is recomputed: by the paper's rule all of a stage is."""
        if not self.is_paper and kind.is_end:
            return 0.0
        return times.whole_forward.total

    def _static_bytes(
        self, strategy: Strategy, zero: ZeroStage, degree: int
    ) -> tuple[tuple[Bytes, ...], Bytes]:
        choices, settings = self.job.choices, self.job.settings
        each = bytes_per_parameter(choices, zero, degree, settings)
        counts = [layer.parameters for layer in self.layers(strategy)]
        largest = max(counts, key=lambda count: count.total)
        held = sum(counts, ParameterCount())
        rank = RankParameters((degree, degree), held, largest, settings)
        whole = unsharded_bytes(largest, rank, zero, in_layer=True)
        gathered = 0 if self.is_paper else whole
        return tuple(math.ceil(count.total * each) for count in counts), gathered

    def _times(
        self, strategy: Strategy, shapes: StageGroupShapes, zero: ZeroStage, degree: int
    ) -> NodeTimes:
        price = partial(self._ticks, strategy, shapes, zero, degree)
        forward, recompute, backward, sync = zip(*self._each(strategy, price), strict=True)
        return NodeTimes(forward=forward, recompute=recompute, backward=backward, sync=sync)

    def _each(self, strategy: Strategy, price: Callable[[_Layer], Value]) -> tuple[Value, ...]:
        """A price for every layer, each distinct one priced once."""
        layers = self.layers(strategy)
        prices = {layer: price(layer) for layer in set(layers)}
        return tuple(prices[layer] for layer in layers)

    def _unit(self, strategy: Strategy, layer: _Layer, inner: GroupPlaces) -> UnitTimes:
        return self.model.unit_time(layer.kind, inner, self.shard(strategy))

    def _ticks(
        self,
        strategy: Strategy,
        shapes: StageGroupShapes,
        zero: ZeroStage,
        degree: int,
        layer: _Layer,
    ) -> tuple[Ticks, ...]:
        """Forward, recompute, backward and sync of one layer.

        ZeRO scatters gradients and gathers weights for every micro batch.
        """
        times, count = self._unit(strategy, layer, shapes.inner), layer.parameters
        width = WEIGHT_BYTES if self.is_paper else self.job.settings.traits.gradient_bytes
        scatter = gather = 0.0
        share = float(width)
        if zero >= ZeroStage.GRADIENTS:
            scatter = self._collective(
                CollectiveKind.REDUCE_SCATTER, count.total * width, shapes.zero
            )
            share = width / degree
        if zero >= ZeroStage.WEIGHTS:
            weights = count.total * WEIGHT_BYTES
            gather = self._collective(CollectiveKind.ALL_GATHER, weights, shapes.zero)
        reduce = CollectiveKind.ALL_REDUCE
        sync = self._collective(reduce, count.dense * share, shapes.dense)
        sync += self._collective(reduce, count.expert * share, shapes.expert)
        return (
            to_ticks(times.whole_forward.total + gather),
            to_ticks(self._recompute_time(layer.kind, times)),
            to_ticks(times.backward.total + scatter + gather),
            to_ticks(sync),
        )

    def _collective(self, kind: CollectiveKind, num_bytes: float, shape: Shape) -> Seconds:
        return collective_time(kind, num_bytes, shape, self.job.cluster.levels)


def bytes_per_parameter(
    choices: ResearchChoices, zero: ZeroStage, degree: int, settings: CostSettings
) -> float:
    """Weights, gradients and states of one parameter, where ZeRO divides over so many devices.

    >>> choices = ResearchChoices(memory=MemoryRule.PAPER, optimizer=PaperOptimizer.SGD)
    >>> bytes_per_parameter(choices, ZeroStage.WEIGHTS, 8, CostSettings())
    0.5
    """
    if choices.memory is MemoryRule.OURS:
        return static_bytes(zero, degree, settings, in_layer=False).total
    states = 12.0 if choices.optimizer is PaperOptimizer.ADAM else 0.0
    weights = WEIGHT_BYTES / (degree if zero >= ZeroStage.WEIGHTS else 1)
    gradients = WEIGHT_BYTES / (degree if zero >= ZeroStage.GRADIENTS else 1)
    return weights + gradients + states / (degree if zero >= ZeroStage.OPTIMIZER else 1)
