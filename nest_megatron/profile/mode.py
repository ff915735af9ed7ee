"""What a user asks of profiles."""

from __future__ import annotations

from nest_megatron.names import Name


class ProfileMode(Name):
    """Where layer times may come from.

    ``auto`` takes a stored profile if there is one, else data sheets; ``measure`` measures what is
    missing first; ``require`` refuses a plan with a block that no timing speaks for; ``analytic``
    uses data sheets alone.
    """

    AUTO = "auto"
    MEASURE = "measure"
    REQUIRE = "require"
    ANALYTIC = "analytic"
