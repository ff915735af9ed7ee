"""What a solve of one stage problem says, whichever backend did it."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from nest_megatron.cost_model.pipeline import PipelineProblem
from nest_megatron.plain import frozen
from nest_megatron.units import Ticks

#: Larger than any time on the clock; as a threshold it means "find the best there is".
NO_THRESHOLD: Ticks = 1 << 61
#: Partial partitions that a solver looks at before it gives up with a proven bound.
DEFAULT_NODE_LIMIT = 2_000_000
#: Partial partitions between two looks at whether time has run out.
PAUSE_NODES = 1 << 12
#: Says whether a search has to end.
OutOfTime = Callable[[], bool]


class Status(IntEnum):
    """How a solve ended."""

    OPTIMAL = 0
    """The best partition was found, and proven best."""
    BOUNDED = 1
    """Proven: no partition beats the threshold."""
    INFEASIBLE = 2
    """Proven: no partition fits in memory."""
    LIMIT = 3
    """The node limit or the time ended the search: the partition is the best so far."""


class StageSolution(NamedTuple):
    """Result of one solve.

    Args:
        lower_bound: proven: no partition is faster than this.
        iteration: time of the best partition in ticks (``NO_THRESHOLD`` if there is none).
        boundaries: the partition, or empty.
        nodes: partial partitions looked at.
        simulations: schedules simulated.
    """

    status: Status
    lower_bound: Ticks
    iteration: Ticks = NO_THRESHOLD
    boundaries: tuple[int, ...] = ()
    nodes: int = 0
    simulations: int = 0


#: Solves a stage problem: the problem, the time to beat, the most partial partitions to look at.
StageSolver = Callable[[PipelineProblem, Ticks, int], StageSolution]


@frozen
class Learning:
    """What the search keeps of what it has seen: how long a proof takes, never what it says.

    Args:
        max_path_bounds: critical paths kept; the oldest is replaced.
        nogoods_after: partial partitions after which the search also keeps why branches died.
            Most problems are solved before, without the bookkeeping.
        max_nogoods: reasons kept of each (stage, first unit); the oldest is replaced.
        max_needs: conditions that a reason may have and still be kept.
    """

    max_path_bounds: int = 256
    nogoods_after: int = 1_000
    max_nogoods: int = 16
    max_needs: int = 64

    def __post_init__(self) -> None:
        assert min(self.max_path_bounds, self.max_nogoods) >= 1
        assert min(self.nogoods_after, self.max_needs) >= 0


DEFAULT_LEARNING = Learning()
