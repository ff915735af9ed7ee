"""The solver's clock at its edges."""

from __future__ import annotations

import pytest

from nest_megatron.errors import ProfileError
from nest_megatron.units import MAX_SECONDS, to_seconds, to_ticks


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e-9, 2 * MAX_SECONDS])
def test_a_time_that_is_no_time_is_refused(bad: float) -> None:
    with pytest.raises(ProfileError, match="layer 3 forward"):
        to_ticks(bad, what="layer 3 forward")


def test_ticks_are_picoseconds() -> None:
    assert to_ticks(1e-12) == 1
    assert to_ticks(0.0) == 0
    assert to_seconds(to_ticks(26.634)) == 26.634
