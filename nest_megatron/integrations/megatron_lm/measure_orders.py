"""What a job's ranks and their children are told to measure, and what they answer, as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

from nest_megatron.cluster.records import Precision
from nest_megatron.integrations.megatron_lm.own_layers import JobArguments
from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.implementation import Implementation
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.profile.records import Machine, Timing
from nest_megatron.profile.session import Task
from nest_megatron.units import Seconds

#: Longest with one piece; a session of many pieces and little time gives each less.
_LONGEST_PIECE_S, _SHORTEST_PIECE_S = 10.0, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """A session of measuring, the same for all ranks.

    Args:
        spec: the whole model.
        tasks: all pieces to time, in order; each rank takes its share.
        job: what the layers are made from.
        max_seconds: after this no further piece is begun.
    """

    spec: TransformerSpec
    precision: Precision
    tasks: tuple[Task, ...]
    job: JobArguments
    implementation: Implementation
    where: Where
    max_seconds: Seconds

    def to_text(self) -> str:
        """The orders as JSON."""
        return json.dumps(to_plain(self))


def read_orders(text: str) -> Orders:
    """The orders of ``Orders.to_text``."""
    return from_plain(Orders, json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOrders:
    """What one child is told.

    Args:
        orders: with this rank's share of the tasks alone.
        num_threads: of torch, where the pieces run on the CPU.
        parent: the process that started it; the child ends with it.
    """

    orders: Orders
    num_threads: int
    parent: int

    @property
    def piece_seconds(self) -> Seconds:
        """Time for the repetitions of one piece."""
        each = self.orders.max_seconds / max(1, len(self.orders.tasks))
        return min(_LONGEST_PIECE_S, max(_SHORTEST_PIECE_S, each))


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A piece that was not timed, and why.

    Args:
        is_too_large: it does not fit on the device.
    """

    task: Task
    reason: str
    is_too_large: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rank has measured.

    Args:
        machine: ``None`` of a rank that had nothing to do.
        seconds: from the start of its child to its end.
    """

    machine: Machine | None = None
    timings: tuple[Timing, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    seconds: Seconds = 0.0

    def to_text(self) -> str:
        """The answer as JSON."""
        return json.dumps(to_plain(self))


def read_answer(text: str) -> Answer:
    """The answer of ``Answer.to_text``."""
    return from_plain(Answer, json.loads(text))
