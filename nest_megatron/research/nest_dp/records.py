"""The recurrence's question and its answer, in whole ticks, bytes and devices."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from nest_megatron.names import Name
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.research.nest_dp.downsets import Downsets
from nest_megatron.units import Bytes, Ticks

#: Stands for "cannot be had"; far above any sum of ticks, and small enough to add to.
UNREACHABLE = 1 << 61


class Schedule(Name):
    """How many micro batches a stage has in flight."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"

    def in_flight(self, position: int, num_microbatches: int) -> int:
        """Micro batches of the stage at a position from the end, the last being 1."""
        return min(position, num_microbatches) if self is Schedule.ONE_F_ONE_B else num_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTimes:
    """Ticks of each node for one micro batch, its groups lying in one kind of place.

    ``sync`` is of the sum of its gradients over the replicas, once a step.
    """

    forward: tuple[Ticks, ...]
    recompute: tuple[Ticks, ...]
    backward: tuple[Ticks, ...]
    sync: tuple[Ticks, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOption:
    """A strategy with one ZeRO setting.

    Args:
        num_devices: of a stage, in units of the problem; ``zero_degree`` times the strategy's own.
        static_bytes: of each node on one device, for as long as training runs.
        reserved_bytes: on a device whatever the stage's nodes are.
        times_at: for each first device of a stage, which of ``times`` holds there.
    """

    zero_stage: ZeroStage
    zero_degree: int
    num_devices: int
    static_bytes: tuple[Bytes, ...]
    times_at: tuple[int, ...]
    times: tuple[NodeTimes, ...]
    reserved_bytes: Bytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """What a stage saves for its backward passes.

    Args:
        first_bytes: of each node, for the first micro batch in flight.
        further_bytes: of each node, for every further one.
        entry_bytes: of each downset as the rest that begins with the stage: its input, saved for
            every further micro batch.
        peak_bytes: of each node while its backward pass runs; the largest of a stage counts.
    """

    recompute: bool
    first_bytes: tuple[Bytes, ...]
    further_bytes: tuple[Bytes, ...]
    entry_bytes: tuple[Bytes, ...]
    peak_bytes: tuple[Bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStrategy:
    """A way to divide layers over the devices of a stage.

    Args:
        label: for tables.
        options: ZeRO settings in the order in which memory asks for them, none first. A stage takes
            the first that fits where it stands.
        policies: without recomputation first, if both are allowed.
        send: [level][downset], ticks of the stage's devices to take in, or give back, what crosses
            into the downset. Never less on a higher level.
    """

    label: str
    options: tuple[ZeroOption, ...]
    policies: tuple[CheckpointPolicy, ...]
    send: tuple[tuple[Ticks, ...], ...]

    def __post_init__(self) -> None:
        assert _rising(self.send), "farther is slower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One pipeline and its replicas.

    Args:
        ends: [level][device], the first device behind the stretch in which this one lies; devices
            of a stretch share a group of the level in every replica. The last level has one
            stretch. All in units of devices.
        strategies: what each stage may take, whatever others take.
        num_microbatches: of one replica.
        least_stages, most_stages: a pipeline is no shorter, and no longer.
        unit: devices that count as one.
        level_names: of ``ends``.
    """

    downsets: Downsets
    ends: tuple[tuple[int, ...], ...]
    strategies: tuple[PricedStrategy, ...]
    num_microbatches: int
    schedule: Schedule
    capacity_bytes: Bytes
    most_stages: int
    least_stages: int = 1
    unit: int = 1
    level_names: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """Devices of a replica, in units of the problem."""
        return len(self.ends[0])

    def __post_init__(self) -> None:
        assert set(self.ends[-1]) == {self.num_devices}, "the last level joins all devices"
        assert _rising(self.ends), "levels are nested"
        for strategy in self.strategies:
            levels = {len(self.downsets)}, len(self.ends)
            assert ({len(row) for row in strategy.send}, len(strategy.send)) == levels
            for option in strategy.options:
                assert len(option.times_at) == self.num_devices, "a stage may begin anywhere"


def _rising(rows: tuple[tuple[int, ...], ...]) -> bool:
    pairs = (zip(one, other, strict=True) for one, other in pairwise(rows))
    return all(a <= b for pair in pairs for a, b in pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStage:
    """A stage of a found pipeline: nodes by their places in the graph, times, bytes.

    Args:
        first_device: within a replica, in the problem's units.
        level_in: network level of the link to the stage before it; the last for the first stage.
    """

    nodes: tuple[int, ...]
    strategy: int
    option: int
    policy: int
    first_device: int
    level_in: int
    time: Ticks
    sync: Ticks
    memory_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPipeline:
    """A found pipeline, first stage to last, and the time of a step."""

    stages: tuple[FoundStage, ...]
    bottleneck: Ticks
    sync: Ticks
    total: Ticks
