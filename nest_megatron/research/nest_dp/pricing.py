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
from nest_megatron.research.nest_dp.job import ResearchJob
from nest_megatron.research.nest_dp.layers import LayerPrices
from nest_megatron.research.nest_dp.links import (
    Replicas,
    Tier,
    common_unit,
    level_ends,
    send_ticks,
    tiers,
)
from nest_megatron.research.nest_dp.memory import MemoryRule
from nest_megatron.research.nest_dp.places import Places
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
    """A problem, how many devices it counts as one, and its levels as tiers."""

    problem: Problem
    unit: int
    tiers: tuple[Tier, ...]


class Pricer:
    """Prices the cases of one job; what cases share is worked out once."""

    def __init__(self, job: ResearchJob) -> None:
        self.job = job
        self.kinds = job.spec.layer_kinds()
        self.downsets = downsets_of(LayerDag.chain(node_names(self.kinds)))
        self.tiers = tiers(job.cluster, job.choices.topology)
        self.layers = LayerPrices(job)
        self._places: dict[Replicas, Places] = {}
        self._crossings: dict[Strategy, tuple[int, ...]] = {}
        self._sent: dict[Strategy, dict[Tier, tuple[Ticks, ...]]] = {}

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
        held = [self.layers.held(strategy, ZeroStage.NONE, 1)[0] for strategy in case.strategies]
        widths = [strategy.block.num_devices for strategy in case.strategies]
        for layer in zip(*held, strict=True):
            least += min(num * width for num, width in zip(layer, widths, strict=True))
        return least > case.replicas.stride * self.capacity_bytes

    def problem(self, case: Case, most_stages: int) -> Priced:
        """A case as a problem."""
        widths = [strategy.block.num_devices for strategy in case.strategies]
        sizes = self.job.cluster.group_sizes()
        possible = [tier.num_devices for tier in self.tiers if self._may_link(tier, min(widths))]
        unit = common_unit([*sizes, *possible], case.replicas, widths)
        if case.replicas not in self._places:
            self._places[case.replicas] = Places(sizes, case.replicas)
        places = self._places[case.replicas]
        ends = self._ends(case.replicas, unit, min(widths))
        problem = Problem(
            downsets=self.downsets,
            ends=tuple(ends.values()),
            strategies=tuple(self._priced(s, places, unit, list(ends)) for s in case.strategies),
            num_microbatches=case.num_microbatches,
            schedule=self.job.choices.schedule,
            capacity_bytes=self.capacity_bytes,
            most_stages=most_stages,
            least_stages=self.job.choices.fixed.get("pipeline_model_parallel_size", 1),
        )
        return Priced(problem, unit, tuple(ends))

    def _ends(self, replicas: Replicas, unit: int, narrowest: int) -> dict[Tier, tuple[int, ...]]:
        """Stretches of the tiers that a link can have.

        Left out are tiers too small for two stages, and of those that join the same devices all
        but the nearest.
        """
        found: dict[Tier, tuple[int, ...]] = {}
        blocks = [tier.num_devices for tier in self.tiers]
        for tier, ends in zip(self.tiers, level_ends(blocks, replicas, unit), strict=True):
            if self._may_link(tier, narrowest) and ends not in found.values():
                found[tier] = ends
        return found

    def _may_link(self, tier: Tier, narrowest: int) -> bool:
        """Whether a block of it holds two stages; the last one is always kept."""
        return tier.num_devices >= 2 * narrowest or tier is self.tiers[-1]

    def _priced(
        self, strategy: Strategy, places: Places, unit: int, levels: Sequence[Tier]
    ) -> PricedStrategy:
        return PricedStrategy(
            label=strategy.label(),
            options=tuple(self._options(strategy, places, unit)),
            keepings=self.layers.keepings(strategy, self._crossing(strategy)),
            send=tuple(self._sends(strategy)[tier] for tier in levels),
        )

    def _crossing(self, strategy: Strategy) -> tuple[int, ...]:
        """Bytes that a device takes in for each downset: the residual stream between layers."""
        if strategy not in self._crossings:
            shard, spec = self.layers.shard(strategy), self.job.spec
            size = math.ceil(shard.tokens_between_blocks(spec) * spec.hidden_size * ACT)
            self._crossings[strategy] = tuple(self.downsets.cut_bytes([size] * len(self.kinds)))
        return self._crossings[strategy]

    def _sends(self, strategy: Strategy) -> dict[Tier, tuple[Ticks, ...]]:
        if strategy not in self._sent:
            crossing = self._crossing(strategy)
            known = {size: send_ticks(self.tiers, size) for size in set(crossing)}
            levels = zip(*(known[size] for size in crossing), strict=True)
            self._sent[strategy] = dict(zip(self.tiers, levels, strict=True))
        return self._sent[strategy]

    def _options(self, strategy: Strategy, places: Places, unit: int) -> Iterator[ZeroOption]:
        """No ZeRO, then degrees 2, 4, 8, ... as devices allow, each from stage 1 to 3."""
        width, devices = strategy.block.num_devices, places.replicas.stride
        yield self._option(strategy, places, unit, ZeroStage.NONE, 1)
        degree = 2
        while self.job.choices.zero and degree * width <= devices:
            for zero in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS, ZeroStage.WEIGHTS):
                yield self._option(strategy, places, unit, zero, degree)
            degree *= 2

    def _option(
        self, strategy: Strategy, places: Places, unit: int, zero: ZeroStage, degree: int
    ) -> ZeroOption:
        block = strategy.block
        line = places.along(block, degree, unit)
        static, reserved = self.layers.held(strategy, zero, degree)
        return ZeroOption(
            zero_stage=zero,
            zero_degree=degree,
            num_devices=block.num_devices * degree // unit,
            static_bytes=static,
            reserved_bytes=reserved,
            places=line.numbers,
            times=tuple(
                self.layers.times(strategy, place, zero, degree) for place in line.distinct
            ),
        )


def node_names(kinds: Sequence[LayerKind]) -> list[str]:
    """Names of the layers of a model.

    >>> node_names([LayerKind.EMBEDDING, LayerKind.DENSE, LayerKind.DENSE, LayerKind.HEAD])
    ['embedding', 'layer 0', 'layer 1', 'head']
    """
    layers = iter(range(len(kinds)))
    between = (LayerKind.DENSE, LayerKind.MOE)
    return [f"layer {next(layers)}" if kind in between else str(kind) for kind in kinds]
