"""What rank 0 decides and every rank carries out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.plain import from_plain, to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan in the form that a rank carries out.

    Args:
        values: what to set in Megatron's arguments, by destination.
        environment: variables to set, ``None`` to unset.
        ranks: new global rank of each launched rank; ``None`` leaves them.
    """

    plan: ParallelPlan
    values: Mapping[str, Any]
    environment: Mapping[str, str | None]
    ranks: tuple[int, ...] | None = None

    def to_text(self) -> str:
        """As text for the other ranks."""
        return json.dumps(to_plain(self))


def read_decision(text: str) -> Decision:
    """The decision that ``Decision.to_text`` wrote."""
    return from_plain(Decision, json.loads(text))
