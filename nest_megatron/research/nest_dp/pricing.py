"""The recurrence's problems, priced by the shared cost model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators import ACT
from nest_megatron.research.nest_dp.downsets import LayerDag, downsets_of
from nest_megatron.research.nest_dp.job import ResearchJob, Strategy
from nest_megatron.research.nest_dp.layers import LayerPrices
from nest_megatron.research.nest_dp.records import PricedStrategy, Problem, ZeroOption
from nest_megatron.research.nest_dp.topology import (
    GroupShapes,
    LinkLevel,
    Replicas,
    Shape,
    common_unit,
    level_ends,
    link_levels,
    send_ticks,
)
from nest_megatron.units import Ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Strategies that the stages of one pipeline may take, its replicas, a bound on its step."""

    strategies: tuple[Strategy, ...]
    replicas: Replicas
    num_microbatches: int
    least_total: Ticks

    @property
    def narrowest(self) -> int:
        """The fewest devices of a stage."""
        return min(strategy.block.num_devices for strategy in self.strategies)


class Pricer:
    """Prices the cases of one job; what cases share is worked out once."""

    def __init__(self, job: ResearchJob) -> None:
        self.job = job
        self.kinds = job.spec.layer_kinds()
        self.downsets = downsets_of(LayerDag.chain(node_names(self.kinds)))
        self.link_levels = link_levels(job.cluster, job.choices.topology)
        self.layers = LayerPrices(job)
        self._group_shapes = cache(partial(GroupShapes, job.cluster.group_sizes()))
        self._crossing = cache(self._crossing_bytes)
        self._send = cache(self._send_ticks)

    def lacks_memory(self, case: Case) -> bool:
        """Whether a replica's devices together hold less than its layers alone take.

        ZeRO divides over devices that the stage takes besides, so it changes nothing in the sum.
        """
        static = [self.layers.static_bytes(s, ZeroStage.NONE, 1)[0] for s in case.strategies]
        stage_devices = [strategy.block.num_devices for strategy in case.strategies]
        least = 0
        for layer in zip(*static, strict=True):
            least += min(num * width for num, width in zip(layer, stage_devices, strict=True))
        return least > case.replicas.stride * self.layers.capacity_bytes

    def problem(self, case: Case, most_stages: int) -> Problem:
        """A case as a problem."""
        possible = [level.num_devices for level in self.link_levels if self._may_link(level, case)]
        sizes = [*self.job.cluster.group_sizes(), *possible]
        stage_devices = [strategy.block.num_devices for strategy in case.strategies]
        unit = common_unit(sizes, case.replicas, stage_devices)
        shapes = self._group_shapes(case.replicas)
        ends = self._ends(case, unit)
        return Problem(
            downsets=self.downsets,
            ends=tuple(ends.values()),
            strategies=tuple(
                PricedStrategy(
                    label=strategy.label(),
                    options=tuple(self._options(strategy, shapes, unit)),
                    policies=self.layers.policies(strategy, self._crossing(strategy)),
                    send=tuple(self._send(strategy)[level] for level in ends),
                )
                for strategy in case.strategies
            ),
            num_microbatches=case.num_microbatches,
            schedule=self.job.choices.schedule,
            capacity_bytes=self.layers.capacity_bytes,
            most_stages=most_stages,
            least_stages=self.job.choices.fixed.get("pipeline_model_parallel_size", 1),
            unit=unit,
            level_names=tuple(level.name for level in ends),
        )

    def _ends(self, case: Case, unit: int) -> dict[LinkLevel, Shape]:
        """Stretches of the levels that a link can have.

        Left out are levels too small for two stages, and of those that join the same devices all
        but the nearest.
        """
        found: dict[LinkLevel, Shape] = {}
        blocks = [level.num_devices for level in self.link_levels]
        all_ends = level_ends(blocks, case.replicas, unit)
        for level, ends in zip(self.link_levels, all_ends, strict=True):
            if self._may_link(level, case) and ends not in found.values():
                found[level] = ends
        return found

    def _may_link(self, level: LinkLevel, case: Case) -> bool:
        """Whether a block of it holds two stages; the last one always counts."""
        return level.num_devices >= 2 * case.narrowest or level is self.link_levels[-1]

    def _crossing_bytes(self, strategy: Strategy) -> tuple[int, ...]:
        """Bytes that a device takes in for each downset: the residual stream between layers."""
        shard, spec = self.layers.shard(strategy), self.job.spec
        size = math.ceil(shard.tokens_between_blocks(spec) * spec.hidden_size * ACT)
        return tuple(self.downsets.cut_bytes([size] * len(self.kinds)))

    def _send_ticks(self, strategy: Strategy) -> dict[LinkLevel, tuple[Ticks, ...]]:
        """For each level, ticks of what crosses into each downset."""
        crossing = self._crossing(strategy)
        known = {size: send_ticks(self.link_levels, size) for size in set(crossing)}
        levels = zip(*(known[size] for size in crossing), strict=True)
        return dict(zip(self.link_levels, levels, strict=True))

    def _options(self, strategy: Strategy, shapes: GroupShapes, unit: int) -> Iterator[ZeroOption]:
        """No ZeRO, then degrees 2, 4, 8, ... as devices allow, each from stage 1 to 3."""
        yield self._option(strategy, shapes, unit, ZeroStage.NONE, 1)
        most = shapes.replicas.stride // strategy.block.num_devices if self.job.choices.zero else 1
        for power in range(1, most.bit_length()):
            for zero in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS, ZeroStage.WEIGHTS):
                yield self._option(strategy, shapes, unit, zero, 1 << power)

    def _option(
        self, strategy: Strategy, shapes: GroupShapes, unit: int, zero: ZeroStage, degree: int
    ) -> ZeroOption:
        distinct, numbers = shapes.along(strategy.block, degree, unit)
        static, reserved = self.layers.static_bytes(strategy, zero, degree)
        return ZeroOption(
            zero_stage=zero,
            zero_degree=degree,
            num_devices=strategy.block.num_devices * degree // unit,
            static_bytes=static,
            reserved_bytes=reserved,
            times_at=numbers,
            times=tuple(self.layers.times(strategy, each, zero, degree) for each in distinct),
        )


def node_names(kinds: Sequence[LayerKind]) -> list[str]:
    """Names of the layers of a model.

    >>> node_names([LayerKind.EMBEDDING, LayerKind.DENSE, LayerKind.DENSE, LayerKind.HEAD])
    ['embedding', 'layer 0', 'layer 1', 'head']
    """
    layers = iter(range(len(kinds)))
    return [f"layer {next(layers)}" if kind.is_layer else str(kind) for kind in kinds]
