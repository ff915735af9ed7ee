"""When a piece of work has to end."""

from __future__ import annotations

import math
import time

from nest_megatron.plain import frozen
from nest_megatron.units import Seconds


@frozen
class Deadline:
    """A stretch of time on the monotonic clock of this process.

    Args:
        begun_s: when it began.
        seconds: how long it is.
    """

    begun_s: Seconds
    seconds: Seconds

    def passed(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() - self.begun_s >= self.seconds

    def without(self, seconds: Seconds) -> Deadline:
        """The same, ending earlier."""
        return Deadline(begun_s=self.begun_s, seconds=self.seconds - seconds)

    def within(self, seconds: Seconds) -> Deadline:
        """The same, or so many seconds from now where that is earlier."""
        now = time.monotonic()
        return Deadline(begun_s=now, seconds=min(seconds, self.begun_s + self.seconds - now))

    def part(self, share: float) -> Deadline:
        """From now on, a share of the time that is left."""
        return self.within(share * self.within(math.inf).seconds)
