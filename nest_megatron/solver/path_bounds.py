"""What a search learns: path bounds of simulated partitions, and nogoods of branches that died.

A *path bound* is the critical path of a simulated partition, as a lower bound on all others.

A *nogood* says that no later prefix has to look below a (stage, unit) again. Say the search is
below stage ``k`` at unit ``x``. A branch dies there because some path bound, ``so_far`` long over
the stages before ``k``, reaches the threshold with a margin to spare. It would have died of the
same bound after any other prefix on which that is at least ``so_far - margin`` long: this is what
the branch *needs*. An open level keeps, for each path bound, the most that any of its branches
needs. Once all branches are dead these needs are a *nogood* of ``(k, x)``: another prefix that
comes there and meets them all is dead too, with nothing looked at. One level up the stage between
lies behind the prefix instead of in it, so its weight is taken off.

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
from dataclasses import dataclass, field
from itertools import pairwise

from nest_megatron.cost_model.pipeline import (
    Evaluation,
    PipelineProblem,
    UnitCost,
    chunks_of,
    timeline,
)
from nest_megatron.cost_model.schedule import Op, source_of
from nest_megatron.solver.outcome import Learning
from nest_megatron.units import Ticks

#: For each path bound, by its number, the least length of it that a prefix must have.
Needs = dict[int, Ticks]
#: A time for each place: stage, first unit.
Table = dict[tuple[int, int], Ticks]


@dataclass(slots=True)
class PathBound:
    """A critical path as weights of each stage's sums: a lower bound on every partition.

    Args:
        forward, backward: passes of each stage that the path runs through.
        gather, reduction: stage whose gather or reduction it runs through, and the field of
            ``UnitCost`` that counts; empty where that takes no time.
        optimizer: stage whose optimizer step it runs through.
        remaining: at ``k, x``, the least that it grows by from stage ``k`` with units ``x ..`` on.
        so_far: at ``k``, its length over the stages before ``k`` that the search is at.
    """

    number: int
    forward: list[int]
    backward: list[int]
    gather: tuple[int, str]
    reduction: tuple[int, str]
    optimizer: int
    constant: Ticks
    remaining: Table = field(default_factory=dict)
    so_far: list[Ticks] = field(default_factory=list)

    def weight(self, problem: PipelineProblem, k: int, cost: UnitCost) -> Ticks:
        """What stage ``k`` adds to the path if it holds the units of ``cost``."""
        weight = self.forward[k] * (cost.forward + problem.send_forward[k])
        weight += self.backward[k] * (cost.backward + problem.send_backward[k])
        for rank, name in (self.gather, self.reduction):
            if rank == k and name:
                weight += int(getattr(cost, name))
        return weight + (cost.optimizer if self.optimizer == k else 0)


def critical_path(
    problem: PipelineProblem, evaluation: Evaluation, boundaries: list[int], number: int
) -> PathBound:
    """The longest path of a simulated schedule, read backwards from the last pass to end.

    Of two passes that a pass waited for, the one on the other rank is followed.
    """
    p, m = problem.num_stages, problem.num_microbatches
    costs = chunks_of(problem, boundaries)
    ranks = timeline(problem, evaluation)
    passes = {timed.op: timed for rank in ranks for timed in rank}
    previous = {later.op: earlier.op for rank in ranks for earlier, later in pairwise(rank)}
    ends = list(map(sum, zip(evaluation.path.ends, evaluation.reductions, strict=True)))
    last = rank = ends.index(max(ends))
    forward, backward = [0] * p, [0] * p
    op: Op | None = Op(False, last, m - 1)
    while op is not None:
        rank = op.chunk
        (forward if op.is_forward else backward)[rank] += 1
        start = passes[op].start
        source = source_of(op, p)
        if source is not None and passes[source].end == start:
            op = source
        else:
            op = previous.get(op) if start > evaluation.gathers[rank] else None
    return PathBound(
        number=number,
        forward=forward,
        backward=backward,
        gather=(rank, _active(costs[rank], "gather")),
        reduction=(last, _active(costs[last], "reduce")),
        optimizer=evaluation.optimizers.index(max(evaluation.optimizers)),
        constant=problem.constant,
    )


def _active(cost: UnitCost, name: str) -> str:
    """Which of the two sums of a gather or reduction counts, or "" if neither is above zero."""
    sums = (f"{name}_unhidden", f"{name}_hideable")
    larger = max(sums, key=lambda each: getattr(cost, each))
    return larger if getattr(cost, larger) > 0 else ""


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
