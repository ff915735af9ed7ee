"""What the ranks of a job and their children tell each other, as records and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from nest_megatron.cluster.records import Precision
from nest_megatron.integrations.megatron_lm.own_layers import JobArguments
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.implementation import Implementation
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.profile.records import Machine, Timing
from nest_megatron.profile.session import Skipped, Task
from nest_megatron.units import Seconds

Message = TypeVar("Message", "Decision", "Orders", "Answer")

#: Longest with one block; a session of many blocks and little time gives each less.
_LONGEST_BLOCK_S, _SHORTEST_BLOCK_S = 10.0, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan in the form that a rank carries out: from rank 0 to all.

    Args:
        values: of Megatron's arguments, by destination.
        environment: variables to set, ``None`` to unset.
        ranks: new global rank of each launched rank; ``None`` leaves them.
    """

    plan: ParallelPlan
    values: Mapping[str, Any]
    environment: Mapping[str, str | None]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """A session of measuring: from rank 0 to all, and from each to its child.

    Args:
        spec: the whole model.
        tasks: all blocks to time, in order; a rank's child has the rank's share alone.
        max_seconds: after this no further block is begun.
    """

    spec: TransformerSpec
    precision: Precision
    tasks: tuple[Task, ...]
    job: JobArguments
    implementation: Implementation
    where: Where
    max_seconds: Seconds

    @property
    def block_seconds(self) -> Seconds:
        """Time for the repetitions of one block."""
        each = self.max_seconds / max(1, len(self.tasks))
        return min(_LONGEST_BLOCK_S, max(_SHORTEST_BLOCK_S, each))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rank has measured, for rank 0; no ``machine`` where it had nothing to do."""

    machine: Machine | None = None
    timings: tuple[Timing, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    seconds: Seconds = 0.0


def to_json(message: Decision | Orders | Answer) -> str:
    """A message as text."""
    return json.dumps(to_plain(message))


def from_json(kind: type[Message], text: str) -> Message:
    """The message that ``to_json`` wrote."""
    return from_plain(kind, json.loads(text))
