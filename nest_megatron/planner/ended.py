"""The answer of a search that time ended before it had a plan."""

from __future__ import annotations

from dataclasses import dataclass

from nest_megatron.parallel.plan import SearchRecord
from nest_megatron.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedEarly:
    """Time ran out before a plan was found; whether there is one is not known.

    Args:
        lower_bound_s: no plan of the searched space has a shorter step.
        max_seconds: the limit that was given.
        search: what was looked at; its certificate is ``ended-early``.
    """

    lower_bound_s: Seconds
    max_seconds: Seconds
    search: SearchRecord
