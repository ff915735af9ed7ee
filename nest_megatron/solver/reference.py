"""The stage problem solved in plain Python: what ``cython_ext/_stage_dp.pyx`` must return.

With one chunk a rank:

1. *Memory.* Stage ``k`` may hold units ``x .. y`` only if they fit beside the micro batches that stage
   ``k`` keeps alive.
2. *Stage bound.* Two paths through the schedule's precedence graph run through stage ``k`` alone and
   otherwise through one pass of each other stage, so their length is known from ``(k, x, y)`` up to
   sums that a prefix sum or a dynamic program bounds from below (``_StageBounds``).
3. *Bottleneck program.* ``bottleneck[k][x]`` is the least that the largest stage bound can be for
   units ``x ..`` on stages ``k ..``. Its value at the origin bounds every partition from below; the
   partition that attains it, simulated, bounds the answer from above.
4. *Search.* Depth first over the stages' ends, largest stage first, through stages whose bound is
   below the threshold. Each simulated partition that is not an improvement leaves a *cut*: its critical
   path, as a sum over stages, is a lower bound for every partition; the least it can still grow by
   is tabulated by a dynamic program over (stage, unit). A branch dies when any cut reaches the threshold.

The makespan is the longest path of a graph whose node weights are sums over units, so each path
bounds it from below, whatever the partition; ticks are whole numbers, so no rounding can spoil a proof.

With virtual stages the declared space is a list; its members are bounded by each rank's own work
and simulated while they may win.

A search that the node limit ends still proves something: the bottleneck at the origin, and of every cut
the least length it can have. A node limit of 0 ends it before anything is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nest_megatron.cost_model.pipeline import (
    ChunkCost,
    Evaluation,
    PipelineProblem,
    chunk_cost,
    chunk_times,
    evaluate,
    fits_in_memory,
)
from nest_megatron.cost_model.schedule import Op
from nest_megatron.solver.chunk_space import Boundaries, interleaved_partitions
from nest_megatron.solver.outcome import (
    DEFAULT_NODE_LIMIT,
    NO_THRESHOLD,
    StageSolution,
    Status,
)
from nest_megatron.units import Ticks

MAX_CUTS = 64


def solve(
    problem: PipelineProblem,
    threshold: Ticks = NO_THRESHOLD,
    node_limit: int = DEFAULT_NODE_LIMIT,
) -> StageSolution:
    """The first fastest partition that fits and takes less than ``threshold`` ticks.

    Args:
        threshold: an iteration time to beat; the search proves that none does, or finds the best.
        node_limit: partial partitions after which the search gives up with what it has. 0 asks for
            memory and the lower bound alone: nothing is simulated.
    """
    if problem.num_virtual > 1:
        return _solve_interleaved(problem, threshold, node_limit)
    return _Search(problem, threshold, node_limit).run()


@dataclass(slots=True)
class _Cut:
    """A critical path as weights of each stage's sums: a lower bound on every partition."""

    forward: list[int]
    backward: list[int]
    head: tuple[int, str]
    tail: tuple[int, str]
    optimizer: int
    constant: Ticks
    remaining: list[list[Ticks]] = field(default_factory=list)
    so_far: list[Ticks] = field(default_factory=list)


class _Search:
    """Branch and bound over contiguous partitions, one chunk a rank."""

    def __init__(self, problem: PipelineProblem, threshold: Ticks, node_limit: int) -> None:
        self.problem = problem
        self.p, self.m, self.n = problem.num_stages, problem.num_microbatches, problem.num_units
        self.threshold, self.node_limit = threshold, node_limit
        self.costs: dict[tuple[int, int], ChunkCost] = {}
        self.best: Boundaries = ()
        self.nodes = self.simulations = self.num_cuts = 0
        self.cuts: list[_Cut] = []
        self.path = [0] * (self.p + 1)

    def run(self) -> StageSolution:
        if not self._tabulate_memory():
            return self._solution(Status.INFEASIBLE, NO_THRESHOLD)
        self._tabulate_bounds()
        self.lower = self.bottleneck[0][0]
        if self.lower >= self.threshold:
            return self._solution(Status.BOUNDED, self.lower)
        if self.node_limit == 0:
            return self._solution(Status.LIMIT, self.lower)
        self._simulate_first_guess()
        finished = self._descend(0)
        if not finished:
            return self._solution(Status.LIMIT, min(self.lower, self.threshold))
        status = Status.OPTIMAL if self.best else Status.BOUNDED
        return self._solution(status, self.threshold)

    def _solution(self, status: Status, lower_bound: Ticks) -> StageSolution:
        return StageSolution(
            status=status,
            iteration=self.threshold if self.best else NO_THRESHOLD,
            boundaries=self.best,
            lower_bound=lower_bound,
            nodes=self.nodes,
            simulations=self.simulations,
        )

    def _cost(self, x: int, y: int) -> ChunkCost:
        if (x, y) not in self.costs:
            self.costs[x, y] = chunk_cost(self.problem, x, y)
        return self.costs[x, y]

    def _forward(self, k: int, x: int, y: int) -> Ticks:
        return self._cost(x, y).forward + self.problem.send_forward[k]

    def _backward(self, k: int, x: int, y: int) -> Ticks:
        return self._cost(x, y).backward + self.problem.send_backward[k]

    def _fits(self, k: int, x: int, y: int) -> bool:
        cost = self._cost(x, y)
        live = min(self.m, self.p - k)
        peak = cost.static_bytes + live * cost.saved_bytes + cost.working_bytes
        return peak <= self.problem.capacity_bytes

    def _ends(self, k: int, x: int) -> range:
        """Ends that stage ``k`` starting at ``x`` can have, largest first."""
        if k == self.p - 1:
            return range(self.n, self.n - 1, -1)
        last = self.n - (self.p - 1 - k)
        if k == 0:  # Megatron keeps MTP layers off the first of several ranks
            last = min(last, self.problem.num_layers + 1)
        return range(last, x, -1)

    def _starts(self, k: int) -> range:
        """Units at which stage ``k`` can start."""
        return range(1) if k == 0 else range(k, self.n - (self.p - k) + 1)

    def _tabulate_memory(self) -> bool:
        """Least backward time of the stages before and from each place, through stages that fit."""
        self.after = [[NO_THRESHOLD] * (self.n + 1) for _ in range(self.p + 1)]
        self.before = [[NO_THRESHOLD] * (self.n + 1) for _ in range(self.p + 1)]
        self.after[self.p][self.n] = self.before[0][0] = 0
        self.fit: dict[tuple[int, int], list[int]] = {}
        for k in range(self.p - 1, -1, -1):
            for x in self._starts(k):
                fit = [
                    y
                    for y in self._ends(k, x)
                    if self.after[k + 1][y] < NO_THRESHOLD and self._fits(k, x, y)
                ]
                self.fit[k, x] = fit
                for y in fit:
                    time = self._backward(k, x, y) + self.after[k + 1][y]
                    self.after[k][x] = min(self.after[k][x], time)
        for k in range(self.p):
            for x in self._starts(k):
                for y in self.fit[k, x] if self.before[k][x] < NO_THRESHOLD else ():
                    time = self.before[k][x] + self._backward(k, x, y)
                    self.before[k + 1][y] = min(self.before[k + 1][y], time)
        return self.after[0][0] < NO_THRESHOLD

    def _tabulate_bounds(self) -> None:
        """Stage bounds, and the bottleneck program over them."""
        whole = self._cost(0, self.n)
        self.all_forward = whole.forward + sum(self.problem.send_forward[: self.p])
        self.least_optimizer = -(-whole.optimizer // self.p)
        self.bound: dict[tuple[int, int, int], Ticks] = {}
        self.bottleneck = [[NO_THRESHOLD] * (self.n + 1) for _ in range(self.p + 1)]
        self.bottleneck[self.p][self.n] = 0
        for k in range(self.p - 1, -1, -1):
            for x in self._starts(k):
                if self.before[k][x] >= NO_THRESHOLD:
                    continue
                for y in self.fit[k, x]:
                    bound = self.bound[k, x, y] = self._stage_bound(k, x, y)
                    worst = max(bound, self.bottleneck[k + 1][y])
                    self.bottleneck[k][x] = min(self.bottleneck[k][x], worst)

    def _stage_bound(self, k: int, x: int, y: int) -> Ticks:
        """Longest of the paths that pass through stage ``k`` alone, with units ``x .. y``."""
        cost = self._cost(x, y)
        forward, backward = self._forward(k, x, y), self._backward(k, x, y)
        ends = max(cost.tail_least, cost.tail_rest, 0, self.before[k][x])
        first_return = self.all_forward + backward + self.after[k + 1][y]
        after_return = (self.m - 1) * backward + max(0, self.m - self.p + k) * forward
        reached = (self._cost(0, x).forward if x else 0) + sum(self.problem.send_forward[:k])
        started = max(cost.head_least, cost.head_rest, 0, reached)
        work = self.m * (forward + backward)
        optimizer = max(cost.optimizer, self.least_optimizer)
        longest = max(first_return + after_return, started + work) + ends
        return self.problem.constant + longest + optimizer

    def _simulate_first_guess(self) -> None:
        """The bottleneck program's partition, largest stages first, gives a first upper bound."""
        marks = [0]
        for k in range(self.p):
            x, target = marks[-1], self.bottleneck[0][0]
            marks.append(
                next(
                    y
                    for y in self.fit[k, x]
                    if max(self.bound[k, x, y], self.bottleneck[k + 1][y]) <= target
                )
            )
        evaluation = evaluate(self.problem, tuple(marks))
        self.simulations += 1
        if evaluation.iteration < self.threshold:
            self.threshold = evaluation.iteration + 1
        self._add_cut(evaluation, marks, depth=0)

    def _descend(self, k: int) -> bool:
        """Try every end of stage ``k``; false if the node limit was hit."""
        if k == self.p:
            self._visit_leaf()
            return True
        x = self.path[k]
        for y in self.fit[k, x]:
            if max(self.bound[k, x, y], self.bottleneck[k + 1][y]) >= self.threshold:
                continue
            self.nodes += 1
            if self.nodes > self.node_limit:
                return False
            if self._cut_off(k, x, y):
                continue
            self.path[k + 1] = y
            if not self._descend(k + 1):
                return False
        return True

    def _cut_off(self, k: int, x: int, y: int) -> bool:
        """Whether a cut proves that nothing below this branch wins; else extend the running sums."""
        for cut in self.cuts:
            so_far = cut.so_far[k] + self._weight(cut, k, x, y)
            if so_far + cut.remaining[k + 1][y] >= self.threshold:
                return True
            cut.so_far[k + 1] = so_far
        return False

    def _visit_leaf(self) -> None:
        evaluation = evaluate(self.problem, tuple(self.path))
        self.simulations += 1
        if evaluation.iteration < self.threshold:
            self.threshold, self.best = evaluation.iteration, tuple(self.path)
        self._add_cut(evaluation, self.path, depth=self.p)

    def _add_cut(self, evaluation: Evaluation, marks: list[int], depth: int) -> None:
        """Keep the critical path of a simulated partition; the oldest makes room."""
        cut = critical_path(self.problem, evaluation, marks)
        cut.remaining = [[NO_THRESHOLD] * (self.n + 1) for _ in range(self.p + 1)]
        cut.remaining[self.p][self.n] = 0
        for k in range(self.p - 1, -1, -1):
            for x in self._starts(k):
                for y in self.fit[k, x] if self.before[k][x] < NO_THRESHOLD else ():
                    if self.bound[k, x, y] < self.threshold:
                        rest = self._weight(cut, k, x, y) + cut.remaining[k + 1][y]
                        cut.remaining[k][x] = min(cut.remaining[k][x], rest)
        self.lower = max(self.lower, cut.constant + cut.remaining[0][0])
        cut.so_far = [cut.constant] * (self.p + 1)
        for k in range(depth):
            weight = self._weight(cut, k, self.path[k], self.path[k + 1])
            cut.so_far[k + 1] = cut.so_far[k] + weight
        if self.num_cuts < MAX_CUTS:
            self.cuts.append(cut)
        else:
            self.cuts[self.num_cuts % MAX_CUTS] = cut
        self.num_cuts += 1

    def _weight(self, cut: _Cut, k: int, x: int, y: int) -> Ticks:
        """What stage ``k`` with units ``x .. y`` adds to a cut."""
        cost = self._cost(x, y)
        weight = cut.forward[k] * self._forward(k, x, y) + cut.backward[k] * self._backward(k, x, y)
        for rank, name in (cut.head, cut.tail):
            if rank == k and name:
                weight += int(getattr(cost, name))
        return weight + (cost.optimizer if cut.optimizer == k else 0)


def critical_path(problem: PipelineProblem, evaluation: Evaluation, marks: list[int]) -> _Cut:
    """The longest path of a simulated schedule, read backwards from the last pass to end.

    Of two passes that a pass waited for, the one on the other rank is followed.
    """
    p, m = problem.num_stages, problem.num_microbatches
    costs = [chunk_cost(problem, a, b) for a, b in zip(marks, marks[1:], strict=False)]
    passes = {timed.op: timed for rank in evaluation.timeline for timed in rank}
    previous = {
        later.op: earlier.op
        for rank in evaluation.timeline
        for earlier, later in zip(rank, rank[1:], strict=False)
    }
    ends = [
        rank[-1].end + tail
        for rank, tail in zip(evaluation.timeline, evaluation.tails, strict=True)
    ]
    last = ends.index(max(ends))
    forward, backward = [0] * p, [0] * p
    op: Op | None = Op(False, last, m - 1)
    rank = last
    while op is not None:
        rank = op.chunk
        (forward if op.is_forward else backward)[rank] += 1
        start = passes[op].start
        source = _source(op, p)
        if source is not None and passes[source].end == start:
            op = source
        else:
            op = previous.get(op) if start > evaluation.heads[rank] else None
    slowest = evaluation.optimizers.index(max(evaluation.optimizers))
    return _Cut(
        forward=forward,
        backward=backward,
        head=(rank, _active(costs[rank], "head")),
        tail=(last, _active(costs[last], "tail")),
        optimizer=slowest,
        constant=problem.constant,
    )


def _source(op: Op, p: int) -> Op | None:
    """The pass on another rank (or the last rank's own forward) whose result a pass needs."""
    if op.is_forward:
        return Op(True, op.chunk - 1, op.microbatch) if op.chunk else None
    if op.chunk == p - 1:
        return Op(True, op.chunk, op.microbatch)
    return Op(False, op.chunk + 1, op.microbatch)


def _active(cost: ChunkCost, name: str) -> str:
    """Which of the two sums of a head or tail counts, or "" if neither is above zero."""
    least, rest = f"{name}_least", f"{name}_rest"
    larger = least if getattr(cost, least) >= getattr(cost, rest) else rest
    return larger if getattr(cost, larger) > 0 else ""


def _solve_interleaved(
    problem: PipelineProblem, threshold: Ticks, node_limit: int
) -> StageSolution:
    """Bound every member of the declared space, simulate the most promising, then all that may win."""
    members = [b for b in interleaved_partitions(problem) if fits_in_memory(problem, b)]
    bounds = [_work_bound(problem, b) for b in members]
    lower = min(bounds, default=NO_THRESHOLD)
    best: Boundaries = ()
    simulations = 0
    if lower < threshold and node_limit == 0:
        return StageSolution(
            status=Status.LIMIT,
            iteration=NO_THRESHOLD,
            boundaries=(),
            lower_bound=lower,
            nodes=0,
            simulations=0,
        )
    if lower < threshold:
        guess = evaluate(problem, members[bounds.index(lower)]).iteration
        simulations += 1
        threshold = min(threshold, guess + 1)
        for partition, bound in zip(members, bounds, strict=True):
            if bound < threshold:
                iteration = evaluate(problem, partition).iteration
                simulations += 1
                if iteration < threshold:
                    threshold, best = iteration, partition
        lower = threshold
    status = Status.OPTIMAL if best else Status.BOUNDED if members else Status.INFEASIBLE
    return StageSolution(
        status=status,
        iteration=threshold if best else NO_THRESHOLD,
        boundaries=best,
        lower_bound=lower,
        nodes=len(members),
        simulations=simulations,
    )


def _work_bound(problem: PipelineProblem, boundaries: Boundaries) -> Ticks:
    """Longest, over the ranks, of: reach the rank, do all its work without a pause, drain."""
    p, m = problem.num_stages, problem.num_microbatches
    chunks = [chunk_cost(problem, a, b) for a, b in zip(boundaries, boundaries[1:], strict=False)]
    times = [chunk_times(problem, k, chunk) for k, chunk in enumerate(chunks)]
    longest = reach = drain = 0
    for rank in range(p):
        held = chunks[rank::p]
        head = max(sum(c.head_least for c in held), sum(c.head_rest for c in held))
        tail = max(sum(c.tail_least for c in held), sum(c.tail_rest for c in held))
        work = m * sum(t.forward + t.backward for t in times[rank::p])
        longest = max(longest, max(head, reach) + work + max(tail, drain))
        reach += times[rank].forward + times[rank].forward_delay
        drain += times[rank].backward + times[rank + 1].backward_delay
    optimizer = max(sum(c.optimizer for c in chunks[rank::p]) for rank in range(p))
    return problem.constant + longest + optimizer
