"""Path bounds: the critical path of a simulated partition, as a lower bound on all others."""

from __future__ import annotations

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
from nest_megatron.units import Ticks

#: A time for each place: stage, first unit.
Table = dict[tuple[int, int], Ticks]


@dataclass(slots=True)
class PathBound:
    """A critical path as weights of each stage's sums: a lower bound on every partition.

    ``remaining[k, x]`` is the least it can grow by from there on, ``so_far[k]`` its length over the
    stages before ``k`` that the search is at.
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
    unhidden, hideable = f"{name}_unhidden", f"{name}_hideable"
    larger = unhidden if getattr(cost, unhidden) >= getattr(cost, hideable) else hideable
    return larger if getattr(cost, larger) > 0 else ""
