"""The stage problem solved in plain Python: what ``cython_ext/_stage_dp.pyx`` must return.

With one chunk a rank:

1. *Memory.* Stage ``k`` may hold units ``x .. y`` only if they fit beside the micro batches that
   stage ``k`` keeps alive.
2. *Stage bound.* Two paths through the schedule's precedence graph run through stage ``k`` alone
   and otherwise through one pass of each other stage, so their length is known from ``(k, x, y)``
   up to sums that a dynamic program bounds from below (``_Search._stage_bound``).
3. *Bottleneck program.* ``bottleneck[k, x]`` is the least that the largest stage bound can be for
   units ``x ..`` on stages ``k ..``. Its value at the origin bounds every partition from below; the
   partition that attains it, simulated, bounds the answer from above.
4. *Search.* Depth first over the stages' ends, largest stage first, through stages whose bound is
   below the threshold. Each simulated partition leaves a *path bound*: its critical path, as a sum
   over stages, is a lower bound for every partition; the least it can still grow by is tabulated by
   a dynamic program over (stage, unit). A branch dies when any path bound reaches the threshold.
5. *Nogoods.* In a search that takes long, a (stage, unit) below which all died keeps how long each
   path bound at fault must be there for all to die again; a prefix that meets this dies on arrival
   (``Nogoods``). A branch that several path bounds kill is charged to one that asks nothing new of
   its level, or else to the one with the largest margin, the first in the ring of several.

The makespan is the longest path of a graph whose node weights are sums over units, so each path
bounds it from below, whatever the partition; ticks are whole numbers, so no rounding can spoil a
proof.

With virtual stages the declared space is a list; its members are bounded by each rank's own work
and simulated while they may win.

A search that the node limit ends still proves something: the bottleneck at the origin, and of every
path bound the least length it can have. A node limit of 0 ends it before anything is simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from nest_megatron.cost_model.critical_path import summarize_reference
from nest_megatron.cost_model.pipeline import (
    Evaluation,
    PipelineProblem,
    chunk_cost,
    chunk_times,
    chunks_of,
    evaluate,
    fits_in_memory,
)
from nest_megatron.solver.chunk_space import Boundaries, interleaved_partitions
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
from nest_megatron.solver.path_bounds import Needs, Nogoods, PathBound, Table, critical_path
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
        out_of_time: called every ``PAUSE_NODES`` partial partitions, when nogoods begin to be kept,
            and after each simulation of a layout with virtual stages; once true the search gives up
            with what it has.
    """
    stopped = out_of_time or (lambda: False)
    if problem.num_virtual > 1:
        return _solve_interleaved(problem, threshold, node_limit, stopped)
    return _Search(problem, threshold, node_limit, learning, stopped).run()


@dataclass(eq=False)
class _Search:
    """Branch and bound over contiguous partitions, one chunk a rank."""

    problem: PipelineProblem
    threshold: Ticks
    node_limit: int
    learning: Learning
    out_of_time: OutOfTime

    def __post_init__(self) -> None:
        problem = self.problem
        self.p, self.m, self.n = problem.num_stages, problem.num_microbatches, problem.num_units
        self.nogoods = Nogoods(self.p, self.learning)
        self.cost = cache(partial(chunk_cost, problem))
        self.best: Boundaries = ()
        self.iteration = NO_THRESHOLD
        self.nodes = self.simulations = self.num_path_bounds = 0
        self.path_bounds: list[PathBound] = []
        self.path = [0] * (self.p + 1)

    def run(self) -> StageSolution:
        self._tabulate_memory()
        if self.after[0, 0] >= NO_THRESHOLD:
            return self._solution(Status.INFEASIBLE, NO_THRESHOLD)
        if self.threshold <= 0:
            return self._solution(Status.BOUNDED, 0)
        self._tabulate_bounds()
        self.lower = self.bottleneck[0, 0]
        if self.lower >= self.threshold:
            return self._solution(Status.BOUNDED, self.lower)
        if self.node_limit == 0:
            return self._solution(Status.LIMIT, self.lower)
        self._simulate_first_guess()
        if not self._descend(0):
            return self._solution(Status.LIMIT, min(self.lower, self.threshold))
        return self._solution(Status.OPTIMAL if self.best else Status.BOUNDED, self.threshold)

    def _solution(self, status: Status, lower: Ticks) -> StageSolution:
        return StageSolution(status, lower, self.iteration, self.best, self.nodes, self.simulations)

    def _forward(self, k: int, x: int, y: int) -> Ticks:
        return self.cost(x, y).forward + self.problem.send_forward[k]

    def _backward(self, k: int, x: int, y: int) -> Ticks:
        return self.cost(x, y).backward + self.problem.send_backward[k]

    def _fits(self, k: int, x: int, y: int) -> bool:
        cost, live = self.cost(x, y), min(self.m, self.p - k)
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

    def _least(self, length: Callable[[int, int, int, Ticks], Ticks]) -> Table:
        """The least that stages ``k ..`` with units ``x ..`` come to, last stage first.

        Args:
            length: of stage ``k`` with units ``x .. y`` and of the suffix behind it.
        """
        least = defaultdict(lambda: NO_THRESHOLD, {(self.p, self.n): 0})
        for (k, x), ends in reversed(self.fit.items()):
            lengths = [length(k, x, y, least[k + 1, y]) for y in ends]
            least[k, x] = min([NO_THRESHOLD, *lengths])
        return least

    def _tabulate_memory(self) -> None:
        """Ends that fit; least backward time of the stages before and from each place."""
        places = [(0, 0)]
        places += [(k, x) for k in range(1, self.p) for x in range(k, self.n - self.p + k + 1)]
        self.fit = {(k, x): [y for y in self._ends(k, x) if self._fits(k, x, y)] for k, x in places}
        self.after = self._least(lambda k, x, y, rest: self._backward(k, x, y) + rest)
        self.before: Table = defaultdict(lambda: NO_THRESHOLD, {(0, 0): 0})
        for (k, x), fit in [*self.fit.items()]:
            ends = [y for y in fit if self.after[k + 1, y] < NO_THRESHOLD]
            self.fit[k, x] = ends if self.before[k, x] < NO_THRESHOLD else []
            for y in self.fit[k, x]:
                time = self.before[k, x] + self._backward(k, x, y)
                self.before[k + 1, y] = min(self.before[k + 1, y], time)

    def _tabulate_bounds(self) -> None:
        """The bottleneck program; ``bound`` is the least that a stage and those behind it allow."""
        whole = self.cost(0, self.n)
        self.all_forward = whole.forward + sum(self.problem.send_forward[: self.p])
        self.least_optimizer = -(-whole.optimizer // self.p)
        self.bound: dict[tuple[int, int, int], Ticks] = {}

        def bound(k: int, x: int, y: int, rest: Ticks) -> Ticks:
            return self.bound.setdefault((k, x, y), max(self._stage_bound(k, x, y), rest))

        self.bottleneck = self._least(bound)

    def _stage_bound(self, k: int, x: int, y: int) -> Ticks:
        """Longest of the paths that pass through stage ``k`` alone, with units ``x .. y``."""
        cost = self.cost(x, y)
        forward, backward = self._forward(k, x, y), self._backward(k, x, y)
        ends = max(cost.reduce_unhidden, cost.reduce_hideable, 0, self.before[k, x])
        first_return = self.all_forward + backward + self.after[k + 1, y]
        after_return = (self.m - 1) * backward + max(0, self.m - self.p + k) * forward
        reached = (self.cost(0, x).forward if x else 0) + sum(self.problem.send_forward[:k])
        started = max(cost.gather_unhidden, cost.gather_hideable, 0, reached)
        work = self.m * (forward + backward)
        optimizer = max(cost.optimizer, self.least_optimizer)
        longest = max(first_return + after_return, started + work) + ends
        return self.problem.constant + longest + optimizer

    def _simulate_first_guess(self) -> None:
        """The bottleneck program's partition, largest stages first, gives a first upper bound.

        One that takes as long may come earlier, so the search must beat a tick more.
        """
        boundaries, target = [0], self.bottleneck[0, 0]
        for k in range(self.p):
            x = boundaries[-1]
            boundaries.append(next(y for y in self.fit[k, x] if self.bound[k, x, y] <= target))
        evaluation = self._simulate(boundaries)
        if self.best:
            self.threshold += 1
        self._add_path_bound(evaluation, boundaries, depth=0)

    def _simulate(self, boundaries: list[int]) -> Evaluation:
        """Simulate a partition; it is kept if it beats the threshold, which it is then."""
        evaluation = _evaluate(self.problem, tuple(boundaries))
        self.simulations += 1
        if evaluation.iteration < self.threshold:
            self.threshold = self.iteration = evaluation.iteration
            self.best = tuple(boundaries)
        return evaluation

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
            margins.append(bound.so_far[k + 1] + bound.remaining[k + 1, y] - self.threshold)
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
        """What stage ``k`` needs of the prefix before it, required one stage earlier."""
        weight = {bound.number: bound.so_far[k] - bound.so_far[k - 1] for bound in self.path_bounds}
        needed = (needs or {}).items()
        self.nogoods.ask(k - 1, {number: length - weight[number] for number, length in needed})

    def _visit_leaf(self) -> None:
        evaluation = self._simulate(self.path)
        bound = self._add_path_bound(evaluation, self.path, depth=self.p)
        margin = bound.so_far[self.p] - self.threshold
        self.nogoods.ask(self.p - 1, {bound.number: bound.so_far[self.p - 1] - margin})

    def _add_path_bound(
        self, evaluation: Evaluation, boundaries: list[int], depth: int
    ) -> PathBound:
        """Keep the critical path of a simulated partition; the oldest makes room."""
        bound = critical_path(self.problem, evaluation, boundaries, number=self.num_path_bounds)

        def length(k: int, x: int, y: int, rest: Ticks) -> Ticks:
            is_open = self.bound[k, x, y] < self.threshold
            return self._weight(bound, k, x, y) + rest if is_open else NO_THRESHOLD

        bound.remaining = self._least(length)
        self.lower = max(self.lower, bound.constant + bound.remaining[0, 0])
        bound.so_far = [bound.constant] * (self.p + 1)
        for k in range(depth):
            weight = self._weight(bound, k, self.path[k], self.path[k + 1])
            bound.so_far[k + 1] = bound.so_far[k] + weight
        place = bound.number % self.learning.max_path_bounds
        for old in self.path_bounds[place : place + 1]:
            self.nogoods.forget_path_bound(old.number)
        self.path_bounds[place : place + 1] = [bound]
        self.num_path_bounds += 1
        return bound

    def _weight(self, bound: PathBound, k: int, x: int, y: int) -> Ticks:
        """What stage ``k`` with units ``x .. y`` adds to a path bound."""
        return bound.weight(self.problem, k, self.cost(x, y))


def _solve_interleaved(
    problem: PipelineProblem, threshold: Ticks, node_limit: int, out_of_time: OutOfTime
) -> StageSolution:
    """Bound every member of the declared space, simulate the most promising, then all that may win.

    ``nodes`` counts the members that fit.
    """
    members = [b for b in interleaved_partitions(problem) if fits_in_memory(problem, b)]
    if not members:
        return StageSolution(Status.INFEASIBLE, NO_THRESHOLD)
    if threshold <= 0:
        return StageSolution(Status.BOUNDED, 0)
    bounds = [_work_bound(problem, b) for b in members]
    lower, count = min(bounds), len(members)
    best: Boundaries = ()
    if lower >= threshold:
        return StageSolution(Status.BOUNDED, lower, nodes=count)
    if node_limit == 0:
        return StageSolution(Status.LIMIT, lower)
    guess = _evaluate(problem, members[bounds.index(lower)]).iteration
    threshold, simulations, ended = min(threshold, guess + 1), 1, False
    for partition, bound in zip(members, bounds, strict=True):
        if bound < threshold and not ended:
            iteration = _evaluate(problem, partition).iteration
            simulations += 1
            if iteration < threshold:
                threshold, best = iteration, partition
            ended = out_of_time()
    status = Status.LIMIT if ended else Status.OPTIMAL if best else Status.BOUNDED
    iteration = threshold if best else NO_THRESHOLD
    lower = min(lower, threshold) if ended else threshold
    return StageSolution(status, lower, iteration, best, count, simulations)


def _work_bound(problem: PipelineProblem, boundaries: Boundaries) -> Ticks:
    """Longest, over the ranks, of: reach the rank, do all its work without a pause, drain."""
    p, m = problem.num_stages, problem.num_microbatches
    chunks = chunks_of(problem, boundaries)
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
