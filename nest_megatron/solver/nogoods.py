"""What a search learns from branches that died, so that no later prefix dies there again.

Say the search is below stage ``k`` at unit ``x``. A branch dies there because some path bound,
``so_far`` long over the stages before ``k``, reaches the threshold with a margin to spare. It would
have died of the same bound after any other prefix on which that is at least ``so_far - margin``
long: this is what the branch *needs*. An open level keeps, for each path bound, the most that any
of its branches needs. Once all branches are dead these needs are a *nogood* of ``(k, x)``: another
prefix that comes there and meets them all is dead too, with nothing looked at. One level up the
stage between lies behind the prefix instead of in it, so its weight is taken off.

That is exact, the tie rule included: weights and least rests do not depend on the prefix, and the
threshold only falls, so what died once dies again. Stages whose own bound reaches the threshold die
after every prefix and need nothing.

A path bound that was replaced is not known any more: nogoods that need it no longer apply, and an
open level that needed it is *barred*, as are the levels above it in their turn; a barred level
keeps nothing. So are the levels that were open when the bookkeeping began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from nest_megatron.solver.outcome import Learning
from nest_megatron.units import Ticks

#: For each path bound, by its number, the least length of it that a prefix must have.
Needs = dict[int, Ticks]


class Nogoods:
    """Needs of the open levels, and of the levels that have died."""

    def __init__(self, num_stages: int, learning: Learning) -> None:
        self.learning = learning
        self.open: list[Needs | None] = [None] * num_stages
        self.stored: dict[tuple[int, int], deque[Needs]] = {}

    def open_level(self, k: int, *, barred: bool) -> None:
        """Nothing has died below stage ``k`` yet."""
        self.open[k] = None if barred else {}

    def ask(self, k: int, needs: Mapping[int, Ticks]) -> None:
        """What died below stage ``k`` needs at least these lengths there."""
        level = self.open[k]
        if level is not None:
            for number, length in needs.items():
                level[number] = max(length, level.get(number, length))

    def asks_already(self, k: int, needs: Mapping[int, Ticks]) -> bool:
        """Whether stage ``k`` needs one of these lengths already; a barred one learns nothing."""
        level = self.open[k]
        if level is None:
            return True
        return any(number in level and level[number] >= needs[number] for number in needs)

    def close_level(self, k: int, x: int) -> Needs | None:
        """Keep and return the needs of stage ``k`` at ``x``, below which all has died."""
        needs = self.open[k]
        if needs is None:
            self.open[k - 1] = None
        elif len(needs) <= self.learning.max_needs:
            stored = self.stored.setdefault((k, x), deque(maxlen=self.learning.max_nogoods))
            stored.appendleft(needs)
        return needs

    def met(self, k: int, x: int, lengths: Mapping[int, Ticks]) -> Needs | None:
        """The newest nogood of stage ``k`` at ``x`` that path bounds of these lengths meet."""
        for needs in self.stored.get((k, x), ()):
            if all(number in lengths and lengths[number] >= needs[number] for number in needs):
                return needs
        return None

    def forget_path_bound(self, number: int) -> None:
        """A path bound is replaced: bar the open levels that need it."""
        for k, needs in enumerate(self.open):
            if needs is not None and number in needs:
                self.open[k] = None
