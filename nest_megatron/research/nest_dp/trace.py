"""The plan behind a state of a filled table.

Ties: the state's stage ends on the first device that gives the value; then the largest inner
downset, the first strategy, policy and level of the link behind it win, in the order of
``reference``.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from nest_megatron.research.nest_dp.records import FoundPipeline, FoundStage, Problem
from nest_megatron.research.nest_dp.reference import StageChoice, choices, links, sync_of
from nest_megatron.research.nest_dp.tables import Tables
from nest_megatron.units import Ticks


class _State(NamedTuple):
    stages: int
    level: int
    outer: int
    device: int


class _Step(NamedTuple):
    pair: int
    choice: StageChoice
    place: int
    after: int
    time: Ticks


def pipeline_of(
    problem: Problem, t: Tables, table: array[int], stages: int, sync_cap: int, steps: int
) -> FoundPipeline:
    """The pipeline of so many stages that the whole graph's state stands for.

    Args:
        sync_cap: as the table was filled with.
        steps: times that the bottleneck is paid in a step of training.
    """
    state = _State(stages, t.num_levels - 1, t.num_downsets - 1, t.num_devices)
    found: list[FoundStage] = []
    while state.stages:
        end = _first_end(t, table, state)
        step = _step(t, table, state, end, sync_cap)
        found.append(_stage(problem, t, state, step))
        state = _State(state.stages - 1, step.after, t.nested[step.pair], step.place)
    bottleneck, sync = max(s.time for s in found), max(s.sync for s in found)
    return FoundPipeline(
        stages=tuple(found),
        bottleneck=bottleneck,
        sync=sync,
        total=steps * bottleneck + sync,
    )


def _first_end(t: Tables, table: array[int], state: _State) -> int:
    """The first device behind the stage at which the state's value is reached."""
    row = t.at(state.stages, state.level, state.outer)
    value, end = table[row + state.device], state.device
    while table[row + end - 1] == value:
        end -= 1
    return end


def _step(t: Tables, table: array[int], state: _State, end: int, sync_cap: int) -> _Step:
    stages, level, outer, _ = state
    value = table[t.at(stages, level, outer, end)]
    for pair in range(t.nested_first[outer], t.nested_first[outer + 1]):
        for choice in choices(t, stages, outer, pair):
            place = end - t.option_devices[choice.option]
            if place < 0 or sync_of(t, choice, outer, pair, place) >= sync_cap:
                continue
            for at, after, time, before in links(t, stages, outer, pair, choice, place, table):
                if at == level and max(time, before) == value:
                    return _Step(pair, choice, place, after, time)
    raise AssertionError("a state of the table has a stage that gives its value")


def _stage(problem: Problem, t: Tables, state: _State, step: _Step) -> FoundStage:
    choice, masks = step.choice, problem.downsets.masks
    nodes = masks[state.outer] & ~masks[t.nested[step.pair]]
    return FoundStage(
        nodes=tuple(v for v in range(nodes.bit_length()) if nodes >> v & 1),
        strategy=choice.strategy,
        option=choice.option - t.options_first[choice.strategy],
        policy=choice.policy - t.policies_first[choice.strategy],
        first_device=step.place,
        level_in=state.level,
        time=step.time,
        sync=sync_of(t, choice, state.outer, step.pair, step.place),
        memory_bytes=choice.memory_bytes,
    )
