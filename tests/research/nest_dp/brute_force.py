"""The oracle: every plan of the space, priced one by one. Exponential; for tests.

It knows nothing of tables, promises or sums: stages are sets of nodes, devices are looked up in
the groups that they lie in, and levels are found by looking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from nest_megatron.research.nest_dp.records import (
    UNREACHABLE,
    CheckpointPolicy,
    NodeTimes,
    PricedStrategy,
    Problem,
    ZeroOption,
)
from nest_megatron.units import Ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A stage's nodes, how they are run, and its first device."""

    nodes: frozenset[int]
    strategy: PricedStrategy
    option: ZeroOption
    policy: CheckpointPolicy
    place: int

    @property
    def end(self) -> int:
        """The first device behind it."""
        return self.place + self.option.num_devices

    @property
    def times(self) -> NodeTimes:
        """Its nodes' times where it lies."""
        return self.option.times[self.option.times_at[self.place]]


def least_total(problem: Problem) -> Ticks | None:
    """The least time of a step over all plans, if there is a plan."""
    found = min((total_of(problem, plan) for plan in plans(problem)), default=UNREACHABLE)
    return None if found >= UNREACHABLE else found


def plans(problem: Problem) -> Iterator[tuple[Run, ...]]:
    """Every plan that memory holds, last stage first."""
    for division in divisions(problem, frozenset(), problem.most_stages):
        if len(division) >= problem.least_stages:
            yield from _placed(problem, division, 0)


def divisions(
    problem: Problem, done: frozenset[int], most: int
) -> Iterator[tuple[frozenset[int], ...]]:
    """Every ordered division of the nodes that are not done, each stage's readers before it."""
    nodes = frozenset(range(len(problem.downsets.dag.names)))
    if done == nodes:
        yield ()
        return
    left = sorted(nodes - done)
    for size in range(1, len(left) + 1) if most else ():
        for chosen in combinations(left, size):
            after = done | set(chosen)
            if all(b in after for a, b in problem.downsets.dag.edges if a in after):
                for rest in divisions(problem, after, most - 1):
                    yield frozenset(chosen), *rest


def _placed(
    problem: Problem, division: Sequence[frozenset[int]], position: int, free: int = 0
) -> Iterator[tuple[Run, ...]]:
    """Every way to run the stages from ``position`` on, on the devices from ``free`` on."""
    if position == len(division):
        yield ()
        return
    for strategy, option, policy in _ways(problem, division, position):
        for place in range(free, problem.num_devices - option.num_devices + 1):
            nodes = division[position]
            run = Run(nodes=nodes, strategy=strategy, option=option, policy=policy, place=place)
            for rest in _placed(problem, division, position + 1, run.end):
                yield run, *rest


def _ways(
    problem: Problem, division: Sequence[frozenset[int]], position: int
) -> Iterator[tuple[PricedStrategy, ZeroOption, CheckpointPolicy]]:
    for strategy in problem.strategies:
        for policy in strategy.policies:
            for option in strategy.options:
                if _memory(problem, division, position, option, policy) <= problem.capacity_bytes:
                    yield strategy, option, policy
                    break


def _memory(
    problem: Problem,
    division: Sequence[frozenset[int]],
    position: int,
    option: ZeroOption,
    policy: CheckpointPolicy,
) -> int:
    nodes, rest = division[position], frozenset().union(*division[: position + 1])
    further = problem.schedule.in_flight(position + 1, problem.num_microbatches) - 1
    each = sum(policy.further_bytes[v] for v in nodes) + policy.entry_bytes[_index(problem, rest)]
    first = sum(option.static_bytes[v] + policy.first_bytes[v] for v in nodes)
    held = option.reserved_bytes + max(policy.peak_bytes[v] for v in nodes)
    return first + further * each + held


def _index(problem: Problem, nodes: frozenset[int]) -> int:
    return problem.downsets.masks.index(sum(1 << v for v in nodes))


def total_of(problem: Problem, plan: Sequence[Run]) -> Ticks:
    """The time of a step: the slowest stage for every step of the pipeline, the slowest sum."""
    times, behind = [], frozenset[int]()
    for at, run in enumerate(plan):
        after = None if at == 0 else _link(problem, plan[at - 1], run)
        before = None if at + 1 == len(plan) else _link(problem, run, plan[at + 1])
        times.append(_time(problem, run, behind, before, after))
        behind |= run.nodes
    sync = max(sum(run.times.sync[v] for v in run.nodes) for run in plan)
    return max(times) * (problem.num_microbatches + len(plan) - 1) + sync


def _link(problem: Problem, one: Run, other: Run) -> int:
    """The innermost level with a stretch that holds both stages."""
    for level, ends in enumerate(problem.ends):
        if len({ends[device] for device in (one.place, other.end - 1)}) == 1:
            return level
    raise AssertionError("the outermost level holds all devices")


def _time(
    problem: Problem, run: Run, behind: frozenset[int], before: int | None, after: int | None
) -> Ticks:
    send, times, nodes = run.strategy.send, run.times, run.nodes
    coming = 0 if before is None else send[before][_index(problem, behind | nodes)]
    going = 0 if after is None else send[after][_index(problem, behind)]
    if run.policy.recompute:
        going = max(going, sum(times.recompute[v] for v in nodes))
    return coming + going + sum(times.forward[v] + times.backward[v] for v in nodes)
