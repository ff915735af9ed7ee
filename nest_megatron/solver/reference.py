"""The stage problem solved in plain Python: what ``cython_ext/_stage_dp.pyx`` must return.

With one chunk a rank:

1. *Memory.* Stage ``k`` may hold units ``x .. y`` only if they fit beside the micro batches that
   stage ``k`` keeps alive.
2. *Stage bound.* Two paths through the schedule's precedence graph run through stage ``k`` alone
   and otherwise through one pass of each other stage, so their length is known from ``(k, x, y)``
   up to sums that a prefix sum or a dynamic program bounds from below (``_Search._stage_bound``).
3. *Bottleneck program.* ``bottleneck[k][x]`` is the least that the largest stage bound can be for
   units ``x ..`` on stages ``k ..``. Its value at the origin bounds every partition from below; the
   partition that attains it, simulated, bounds the answer from above.
4. *Search.* Depth first over the stages' ends, largest stage first, through stages whose bound is
   below the threshold. Each simulated partition leaves a *path bound*: its critical path, as a sum
   over stages, is a lower bound for every partition; the least it can still grow by is tabulated by
   a dynamic program over (stage, unit). A branch dies when any path bound reaches the threshold.
5. *Nogoods.* In a search that takes long, a (stage, unit) below which all died keeps how long each
   path bound at fault must be there for all to die again; a prefix that meets this dies on arrival
   (``nogoods.py``). A branch that several path bounds kill is charged to one that asks nothing new
   of its level, or else to the one with the largest margin, the first in the ring of several.

The makespan is the longest path of a graph whose node weights are sums over units, so each path
bounds it from below, whatever the partition; ticks are whole numbers, so no rounding can spoil a
proof.

With virtual stages the declared space is a list; its members are bounded by each rank's own work
and simulated while they may win.

A search that the node limit ends still proves something: the bottleneck at the origin, and of every
path bound the least length it can have. A node limit of 0 ends it before anything is simulated.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from nest_megatron.cost_model.critical_path import summarize_reference
from nest_megatron.cost_model.pipeline import (
    Evaluation,
    PipelineProblem,
    UnitCost,
    chunk_cost,
    chunk_times,
    evaluate,
    fits_in_memory,
)
from nest_megatron.solver.chunk_space import Boundaries, interleaved_partitions
from nest_megatron.solver.nogoods import Needs, Nogoods
from nest_megatron.solver.outcome import (
    DEFAULT_LEARNING,
    DEFAULT_NODE_LIMIT,
    NO_THRESHOLD,
    PAUSE_NODES,
    Learning,
    OutOfTime,
    StageSolution,
    Status,
)
from nest_megatron.solver.path_bounds import PathBound, critical_path
from nest_megatron.units import Ticks

_evaluate = partial(evaluate, run=summarize_reference)


def solve(
    problem: PipelineProblem,
    threshold: Ticks = NO_THRESHOLD,
    node_limit: int = DEFAULT_NODE_LIMIT,
    learning: Learning = DEFAULT_LEARNING,
    out_of_time: OutOfTime | None = None,
) -> StageSolution:
    """The first fastest partition that fits and takes less than ``threshold`` ticks.

    Args:
        threshold: an iteration time to beat; the search proves that none does, or finds the best.
            No time beats 0, so 0 or less asks for memory alone: nothing is bounded.
        node_limit: partial partitions after which the search gives up with what it has. 0 asks for
            memory and the lower bound alone: nothing is simulated.
        learning: what the search keeps of what it has seen.
        out_of_time: asked every ``PAUSE_NODES`` partial partitions, when nogoods begin to be kept,
            and after each simulation of a layout with virtual stages; once true the search gives up
            with what it has.
    """
    stopped = out_of_time or (lambda: False)
    if problem.num_virtual > 1:
        return _solve_interleaved(problem, threshold, node_limit, stopped)
    return _Search(problem, threshold, node_limit, learning, stopped).run()


class _Search:
    """Branch and bound over contiguous partitions, one chunk a rank."""

    def __init__(
        self,
        problem: PipelineProblem,
        threshold: Ticks,
        node_limit: int,
        learning: Learning,
        out_of_time: OutOfTime,
    ) -> None:
        self.problem = problem
        self.p, self.m, self.n = problem.num_stages, problem.num_microbatches, problem.num_units
        self.threshold, self.node_limit, self.learning = threshold, node_limit, learning
        self.out_of_time = out_of_time
        self.nogoods = Nogoods(self.p, learning)
        self.costs: dict[tuple[int, int], UnitCost] = {}
        self.best: Boundaries = ()
        self.iteration = NO_THRESHOLD
        self.nodes = self.simulations = self.num_path_bounds = 0
        self.path_bounds: list[PathBound] = []
        self.path = [0] * (self.p + 1)

    def run(self) -> StageSolution:
        if not self._tabulate_memory():
            return self._solution(Status.INFEASIBLE, NO_THRESHOLD)
        if self.threshold <= 0:
            return self._solution(Status.BOUNDED, 0)
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
            iteration=self.iteration,
            boundaries=self.best,
            lower_bound=lower_bound,
            nodes=self.nodes,
            simulations=self.simulations,
        )

    def _cost(self, x: int, y: int) -> UnitCost:
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
        """The bottleneck program; ``bound`` is the least that a stage and those behind it allow."""
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
                    bound = max(self._stage_bound(k, x, y), self.bottleneck[k + 1][y])
                    self.bound[k, x, y] = bound
                    self.bottleneck[k][x] = min(self.bottleneck[k][x], bound)

    def _stage_bound(self, k: int, x: int, y: int) -> Ticks:
        """Longest of the paths that pass through stage ``k`` alone, with units ``x .. y``."""
        cost = self._cost(x, y)
        forward, backward = self._forward(k, x, y), self._backward(k, x, y)
        ends = max(cost.reduce_unhidden, cost.reduce_hideable, 0, self.before[k][x])
        first_return = self.all_forward + backward + self.after[k + 1][y]
        after_return = (self.m - 1) * backward + max(0, self.m - self.p + k) * forward
        reached = (self._cost(0, x).forward if x else 0) + sum(self.problem.send_forward[:k])
        started = max(cost.gather_unhidden, cost.gather_hideable, 0, reached)
        work = self.m * (forward + backward)
        optimizer = max(cost.optimizer, self.least_optimizer)
        longest = max(first_return + after_return, started + work) + ends
        return self.problem.constant + longest + optimizer

    def _simulate_first_guess(self) -> None:
        """The bottleneck program's partition, largest stages first, gives a first upper bound.

        One that takes as long may come earlier, so the search must beat a tick more.
        """
        boundaries = [0]
        for k in range(self.p):
            x, target = boundaries[-1], self.bottleneck[0][0]
            boundaries.append(next(y for y in self.fit[k, x] if self.bound[k, x, y] <= target))
        evaluation = _evaluate(self.problem, tuple(boundaries))
        self.simulations += 1
        if evaluation.iteration < self.threshold:
            self.iteration, self.best = evaluation.iteration, tuple(boundaries)
            self.threshold = evaluation.iteration + 1
        self._add_path_bound(evaluation, boundaries, depth=0)

    def _descend(self, k: int) -> bool:
        """Try every end of stage ``k``; false if the node limit or the time ended the search."""
        x = self.path[k]
        self.nogoods.open_level(k, barred=self.nodes <= self.learning.nogoods_after)
        for y in self.fit[k, x]:
            if self.bound[k, x, y] >= self.threshold:
                continue
            self.nodes += 1
            if self.nodes > self.node_limit:
                return False
            alive = not (self._cut_off(k, x, y) or self._known_dead(k + 1, y))
            self.path[k + 1] = y
            if alive and k == self.p - 1:
                self._visit_leaf()
            if self._has_to_end():
                return False
            if alive and k < self.p - 1:
                if not self._descend(k + 1):
                    return False
                self._ask_above(k + 1, self.nogoods.close_level(k + 1, y))
        return True

    def _has_to_end(self) -> bool:
        pauses = self.nodes % PAUSE_NODES == 0 or self.nodes == self.learning.nogoods_after
        return pauses and self.out_of_time()

    def _cut_off(self, k: int, x: int, y: int) -> bool:
        """Whether a path bound proves that nothing below wins; extends the sums so far."""
        margins = []
        for bound in self.path_bounds:
            bound.so_far[k + 1] = bound.so_far[k] + self._weight(bound, k, x, y)
            margins.append(bound.so_far[k + 1] + bound.remaining[k + 1][y] - self.threshold)
        most = max(margins)
        if most < 0:
            return False
        pairs = zip(self.path_bounds, margins, strict=True)
        needs = {bound.number: bound.so_far[k] - margin for bound, margin in pairs if margin >= 0}
        if not self.nogoods.asks_already(k, needs):
            number = self.path_bounds[margins.index(most)].number
            self.nogoods.ask(k, {number: needs[number]})
        return True

    def _known_dead(self, k: int, x: int) -> bool:
        """Whether all died below stage ``k`` at ``x`` once, and must again after this prefix."""
        lengths = {bound.number: bound.so_far[k] for bound in self.path_bounds}
        needs = self.nogoods.met(k, x, lengths)
        self._ask_above(k, needs)
        return needs is not None

    def _ask_above(self, k: int, needs: Needs | None) -> None:
        """What stage ``k`` needs of the prefix before it, asked one stage earlier."""
        weight = {bound.number: bound.so_far[k] - bound.so_far[k - 1] for bound in self.path_bounds}
        asked = (needs or {}).items()
        self.nogoods.ask(k - 1, {number: length - weight[number] for number, length in asked})

    def _visit_leaf(self) -> None:
        evaluation = _evaluate(self.problem, tuple(self.path))
        self.simulations += 1
        if evaluation.iteration < self.threshold:
            self.iteration, self.best = evaluation.iteration, tuple(self.path)
            self.threshold = evaluation.iteration
        self._add_path_bound(evaluation, self.path, depth=self.p)
        bound = self.path_bounds[(self.num_path_bounds - 1) % self.learning.max_path_bounds]
        margin = bound.so_far[self.p] - self.threshold
        self.nogoods.ask(self.p - 1, {bound.number: bound.so_far[self.p - 1] - margin})

    def _add_path_bound(self, evaluation: Evaluation, boundaries: list[int], depth: int) -> None:
        """Keep the critical path of a simulated partition; the oldest makes room."""
        bound = critical_path(self.problem, evaluation, boundaries, number=self.num_path_bounds)
        bound.remaining = [[NO_THRESHOLD] * (self.n + 1) for _ in range(self.p + 1)]
        bound.remaining[self.p][self.n] = 0
        for k in range(self.p - 1, -1, -1):
            for x in self._starts(k):
                for y in self.fit[k, x] if self.before[k][x] < NO_THRESHOLD else ():
                    if self.bound[k, x, y] < self.threshold:
                        rest = self._weight(bound, k, x, y) + bound.remaining[k + 1][y]
                        bound.remaining[k][x] = min(bound.remaining[k][x], rest)
        self.lower = max(self.lower, bound.constant + bound.remaining[0][0])
        bound.so_far = [bound.constant] * (self.p + 1)
        for k in range(depth):
            weight = self._weight(bound, k, self.path[k], self.path[k + 1])
            bound.so_far[k + 1] = bound.so_far[k] + weight
        if self.num_path_bounds < self.learning.max_path_bounds:
            self.path_bounds.append(bound)
        else:
            self.path_bounds[self.num_path_bounds % self.learning.max_path_bounds] = bound
            self.nogoods.forget_path_bound(self.num_path_bounds - self.learning.max_path_bounds)
        self.num_path_bounds += 1

    def _weight(self, bound: PathBound, k: int, x: int, y: int) -> Ticks:
        """What stage ``k`` with units ``x .. y`` adds to a path bound."""
        return bound.weight(self.problem, k, self._cost(x, y))


def _solve_interleaved(
    problem: PipelineProblem, threshold: Ticks, node_limit: int, out_of_time: OutOfTime
) -> StageSolution:
    """Bound every member of the declared space, simulate the most promising, then all that may win.

    ``nodes`` counts the members that fit.
    """
    members = [b for b in interleaved_partitions(problem) if fits_in_memory(problem, b)]
    if members and threshold <= 0:
        return _nothing_simulated(Status.BOUNDED, 0)
    bounds = [_work_bound(problem, b) for b in members]
    lower = min(bounds, default=NO_THRESHOLD)
    best: Boundaries = ()
    simulations = 0
    status = Status.OPTIMAL
    if lower < threshold and node_limit == 0:
        return _nothing_simulated(Status.LIMIT, lower)
    if lower < threshold:
        guess = _evaluate(problem, members[bounds.index(lower)]).iteration
        simulations += 1
        threshold = min(threshold, guess + 1)
        for partition, bound in zip(members, bounds, strict=True):
            if bound < threshold:
                iteration = _evaluate(problem, partition).iteration
                simulations += 1
                if iteration < threshold:
                    threshold, best = iteration, partition
                if out_of_time():
                    status = Status.LIMIT
                    break
        lower = min(lower, threshold) if status is Status.LIMIT else threshold
    if status is not Status.LIMIT and not best:
        status = Status.BOUNDED if members else Status.INFEASIBLE
    return StageSolution(
        status=status,
        iteration=threshold if best else NO_THRESHOLD,
        boundaries=best,
        lower_bound=lower,
        nodes=len(members),
        simulations=simulations,
    )


def _nothing_simulated(status: Status, lower_bound: Ticks) -> StageSolution:
    return StageSolution(
        status=status,
        iteration=NO_THRESHOLD,
        boundaries=(),
        lower_bound=lower_bound,
        nodes=0,
        simulations=0,
    )


def _work_bound(problem: PipelineProblem, boundaries: Boundaries) -> Ticks:
    """Longest, over the ranks, of: reach the rank, do all its work without a pause, drain."""
    p, m = problem.num_stages, problem.num_microbatches
    chunks = [chunk_cost(problem, a, b) for a, b in pairwise(boundaries)]
    times = [chunk_times(problem, k, chunk) for k, chunk in enumerate(chunks)]
    longest = reach = drain = 0
    for rank in range(p):
        held = chunks[rank::p]
        gather = max(sum(c.gather_unhidden for c in held), sum(c.gather_hideable for c in held))
        reduction = max(sum(c.reduce_unhidden for c in held), sum(c.reduce_hideable for c in held))
        work = m * sum(t.forward + t.backward for t in times[rank::p])
        longest = max(longest, max(gather, reach) + work + max(reduction, drain))
        reach += times[rank].forward + times[rank].forward_delay
        drain += times[rank].backward + times[rank + 1].backward_delay
    optimizer = max(sum(c.optimizer for c in chunks[rank::p]) for rank in range(p))
    return problem.constant + longest + optimizer
