"""The recurrence's problems, priced by the shared cost model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from nest_megatron.cost_model.memory import capacity_bytes
from nest_megatron.model.operators import ACT
from nest_megatron.model.spec import LayerKind
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.research.nest_dp.downsets import LayerDag, downsets_of
from nest_megatron.research.nest_dp.group_shapes import GroupShapes
from nest_megatron.research.nest_dp.job import ResearchJob
from nest_megatron.research.nest_dp.layers import LayerPrices
from nest_megatron.research.nest_dp.links import (
    LinkLevel,
    Replicas,
    common_unit,
    level_ends,
    link_levels,
    send_ticks,
)
from nest_megatron.research.nest_dp.memory import MemoryRule
from nest_megatron.research.nest_dp.records import PricedStrategy, Problem, ZeroOption
from nest_megatron.research.nest_dp.strategies import Strategy
from nest_megatron.units import Bytes, Ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Strategies that the stages of one pipeline may take, and its replicas.

    Args:
        num_microbatches: of one replica.
        least_total: no plan of the case takes less.
    """

    strategies: tuple[Strategy, ...]
    replicas: Replicas
    num_microbatches: int
    least_total: Ticks


class Priced(NamedTuple):
    """A problem, how many devices it counts as one, and its levels."""

    problem: Problem
    unit: int
    link_levels: tuple[LinkLevel, ...]


class Pricer:
    """Prices the cases of one job; what cases share is worked out once."""

    def __init__(self, job: ResearchJob) -> None:
        self.job = job
        self.kinds = job.spec.layer_kinds()
        self.downsets = downsets_of(LayerDag.chain(node_names(self.kinds)))
        self.link_levels = link_levels(job.cluster, job.choices.topology)
        self.layers = LayerPrices(job)
        self._group_shapes: dict[Replicas, GroupShapes] = {}
        self._crossings: dict[Strategy, tuple[int, ...]] = {}
        self._sent: dict[Strategy, dict[LinkLevel, tuple[Ticks, ...]]] = {}

    @cached_property
    def capacity_bytes(self) -> Bytes:
        """What a stage may fill: all of the device by the paper's rule."""
        accelerator = self.job.cluster.accelerator
        if self.job.choices.memory is MemoryRule.PAPER:
            return accelerator.memory_bytes
        return capacity_bytes(accelerator, self.job.settings)

    def lacks_memory(self, case: Case) -> bool:
        """Whether a replica's devices together hold less than its layers alone take.

        ZeRO divides over devices that the stage takes besides, so it changes nothing in the sum.
        """
        least = 0
        static = [self.layers.static_bytes(s, ZeroStage.NONE, 1)[0] for s in case.strategies]
        stage_devices = [strategy.block.num_devices for strategy in case.strategies]
        for layer in zip(*static, strict=True):
            least += min(num * width for num, width in zip(layer, stage_devices, strict=True))
        return least > case.replicas.stride * self.capacity_bytes

    def problem(self, case: Case, most_stages: int) -> Priced:
        """A case as a problem."""
        stage_devices = [strategy.block.num_devices for strategy in case.strategies]
        sizes = self.job.cluster.group_sizes()
        narrowest = min(stage_devices)
        possible = [
            level.num_devices for level in self.link_levels if self._may_link(level, narrowest)
        ]
        unit = common_unit([*sizes, *possible], case.replicas, stage_devices)
        if case.replicas not in self._group_shapes:
            self._group_shapes[case.replicas] = GroupShapes(sizes, case.replicas)
        shapes = self._group_shapes[case.replicas]
        ends = self._ends(case.replicas, unit, narrowest)
        problem = Problem(
            downsets=self.downsets,
            ends=tuple(ends.values()),
            strategies=tuple(self._priced(s, shapes, unit, list(ends)) for s in case.strategies),
            num_microbatches=case.num_microbatches,
            schedule=self.job.choices.schedule,
            capacity_bytes=self.capacity_bytes,
            most_stages=most_stages,
            least_stages=self.job.choices.fixed.get("pipeline_model_parallel_size", 1),
        )
        return Priced(problem, unit, tuple(ends))

    def _ends(
        self, replicas: Replicas, unit: int, narrowest: int
    ) -> dict[LinkLevel, tuple[int, ...]]:
        """Stretches of the levels that a link can have.

        Left out are levels too small for two stages, and of those that join the same devices all
        but the nearest.
        """
        found: dict[LinkLevel, tuple[int, ...]] = {}
        blocks = [level.num_devices for level in self.link_levels]
        for level, ends in zip(self.link_levels, level_ends(blocks, replicas, unit), strict=True):
            if self._may_link(level, narrowest) and ends not in found.values():
                found[level] = ends
        return found

    def _may_link(self, level: LinkLevel, narrowest: int) -> bool:
        """Whether a block of it holds two stages; the last one is always kept."""
        return level.num_devices >= 2 * narrowest or level is self.link_levels[-1]

    def _priced(
        self, strategy: Strategy, shapes: GroupShapes, unit: int, levels: Sequence[LinkLevel]
    ) -> PricedStrategy:
        return PricedStrategy(
            label=strategy.label(),
            options=tuple(self._options(strategy, shapes, unit)),
            policies=self.layers.policies(strategy, self._crossing(strategy)),
            send=tuple(self._sends(strategy)[level] for level in levels),
        )

    def _crossing(self, strategy: Strategy) -> tuple[int, ...]:
        """Bytes that a device takes in for each downset: the residual stream between layers."""
        if strategy not in self._crossings:
            shard, spec = self.layers.shard(strategy), self.job.spec
            size = math.ceil(shard.tokens_between_blocks(spec) * spec.hidden_size * ACT)
            self._crossings[strategy] = tuple(self.downsets.cut_bytes([size] * len(self.kinds)))
        return self._crossings[strategy]

    def _sends(self, strategy: Strategy) -> dict[LinkLevel, tuple[Ticks, ...]]:
        if strategy not in self._sent:
            crossing = self._crossing(strategy)
            known = {size: send_ticks(self.link_levels, size) for size in set(crossing)}
            levels = zip(*(known[size] for size in crossing), strict=True)
            self._sent[strategy] = dict(zip(self.link_levels, levels, strict=True))
        return self._sent[strategy]

    def _options(self, strategy: Strategy, shapes: GroupShapes, unit: int) -> Iterator[ZeroOption]:
        """No ZeRO, then degrees 2, 4, 8, ... as devices allow, each from stage 1 to 3."""
        width, devices = strategy.block.num_devices, shapes.replicas.stride
        yield self._option(strategy, shapes, unit, ZeroStage.NONE, 1)
        degree = 2
        while self.job.choices.zero and degree * width <= devices:
            for zero in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS, ZeroStage.WEIGHTS):
                yield self._option(strategy, shapes, unit, zero, degree)
            degree *= 2

    def _option(
        self, strategy: Strategy, shapes: GroupShapes, unit: int, zero: ZeroStage, degree: int
    ) -> ZeroOption:
        block = strategy.block
        line = shapes.along(block, degree, unit)
        static, reserved = self.layers.static_bytes(strategy, zero, degree)
        return ZeroOption(
            zero_stage=zero,
            zero_degree=degree,
            num_devices=block.num_devices * degree // unit,
            static_bytes=static,
            reserved_bytes=reserved,
            times_at=line.numbers,
            times=tuple(self.layers.times(strategy, each, zero, degree) for each in line.distinct),
        )


def node_names(kinds: Sequence[LayerKind]) -> list[str]:
    """Names of the layers of a model.

    >>> node_names([LayerKind.EMBEDDING, LayerKind.DENSE, LayerKind.DENSE, LayerKind.HEAD])
    ['embedding', 'layer 0', 'layer 1', 'head']
    """
    layers = iter(range(len(kinds)))
    between = (LayerKind.DENSE, LayerKind.MOE)
    return [f"layer {next(layers)}" if kind in between else str(kind) for kind in kinds]
