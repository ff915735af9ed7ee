"""The recurrence in plain Python, which the kernel repeats; never tuned.

``table[stages][level][downset][device]`` is the least bottleneck of a downset in so many stages,
where the next stage may begin at the device and be linked through the level: the stage before it
ends at that device or earlier, leaving devices idle, inside the same stretch of the level. Values
are whole ticks, so the order of the loops changes nothing; ties are broken in ``pipeline_of``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nest_megatron.research.nest_dp.records import (
    UNREACHABLE,
    FoundPipeline,
    FoundStage,
    Problem,
    Tables,
)
from nest_megatron.units import Ticks

FORWARD, RECOMPUTE, BACKWARD, SYNC = range(4)


class _Stage(NamedTuple):
    """A stage between two downsets: its strategy, policy, and the first ZeRO option that fits."""

    outer: int
    pair: int
    strategy: int
    policy: int
    option: int
    memory_bytes: int


def filled(t: Tables, caps: Sequence[int], sync_cap: int) -> array[int]:
    """The table of states.

    Args:
        caps: [most_stages + 1], a state of so many stages counts only below this.
        sync_cap: a stage is used only where its gradients are summed in less.
    """
    table = array("q", [UNREACHABLE]) * t.table_size
    for device in range(t.num_devices + 1):  # without a stage, everything may begin anywhere
        table[t.at(0, t.num_levels - 1, 0, device)] = 0
    for stages in range(1, t.most_stages + 1):
        for outer in range(1, t.num_downsets):
            for level, row in enumerate(_ending(t, stages, outer, sync_cap, table)):
                _store(t, row, caps[stages], t.at(stages, level, outer), level, table)
    return table


def _ending(
    t: Tables, stages: int, outer: int, sync_cap: int, table: Sequence[int]
) -> list[list[int]]:
    """The least bottleneck for each level and device at which the first stage ends."""
    found = [[UNREACHABLE] * (t.num_devices + 1) for _ in range(t.num_levels)]
    for stage in _choices(t, stages, outer):
        for place in range(t.num_devices - t.option_devices[stage.option] + 1):
            end = place + t.option_devices[stage.option]
            if _sum(t, stage, SYNC, place) >= sync_cap:
                continue
            for level, _, time, before in _links(t, stages, stage, place, table):
                found[level][end] = min(found[level][end], max(time, before))
    return found


def _choices(t: Tables, stages: int, outer: int) -> Iterator[_Stage]:
    """Every stage that begins a downset; for each checkpoint policy the first option that fits.

    Recomputing is never faster, so it is left out where it comes to the same option.
    """
    for pair in range(t.nested_first[outer], t.nested_first[outer + 1]):
        for strategy in range(len(t.options_first) - 1):
            taken = -1
            for policy in range(t.policies_first[strategy], t.policies_first[strategy + 1]):
                for option in range(t.options_first[strategy], t.options_first[strategy + 1]):
                    memory = _memory(t, stages, outer, pair, option, policy)
                    if memory <= t.capacity_bytes:
                        if option != taken:
                            yield _Stage(outer, pair, strategy, policy, option, memory)
                        taken = option
                        break


def _memory(t: Tables, stages: int, outer: int, pair: int, option: int, policy: int) -> int:
    """Bytes on a device of the stage between two downsets, at its position from the end."""
    d, inner, further = t.num_downsets, t.nested[pair], t.in_flight[stages] - 1
    static = t.reserved[option] + t.static[option * d + outer] - t.static[option * d + inner]
    base = policy * 3 * d
    first = t.kept[base + outer] - t.kept[base + inner]
    each = t.kept[base + d + outer] - t.kept[base + d + inner] + t.kept[base + 2 * d + outer]
    return static + first + further * each + t.peaks[policy * len(t.nested) + pair]


def _links(
    t: Tables, stages: int, stage: _Stage, place: int, table: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """For all levels of both links: level in, level out, the stage's time, what lies behind it."""
    end, inner = place + t.option_devices[stage.option], t.nested[stage.pair]
    for after in range(t.num_levels):
        before = table[t.at(stages - 1, after, inner, place)]
        if before >= UNREACHABLE or t.ends[after * t.num_devices + place] < end:
            continue
        for level in range(t.num_levels):
            if t.ends[level * t.num_devices + place] >= end:
                yield level, after, _time(t, stage, place, level, after), before


def _time(t: Tables, stage: _Stage, place: int, level: int, after: int) -> int:
    """Ticks of one micro batch: input, forward, output's gradient, backward.

    A gradient from the next stage arrives while the forward pass is recomputed.
    """
    send = stage.strategy * t.num_levels
    coming = t.send[(send + level) * t.num_downsets + stage.outer]
    going = t.send[(send + after) * t.num_downsets + t.nested[stage.pair]]
    forward, backward = (_sum(t, stage, kind, place) for kind in (FORWARD, BACKWARD))
    if t.recomputes[stage.policy]:
        going = max(going, _sum(t, stage, RECOMPUTE, place))
    return coming + forward + going + backward


def _sum(t: Tables, stage: _Stage, kind: int, place: int) -> int:
    """Ticks of one kind over the stage's nodes."""
    row = t.rows[stage.option * t.num_devices + place]
    sums = (4 * row + kind) * t.num_downsets
    return t.times[sums + stage.outer] - t.times[sums + t.nested[stage.pair]]


def _store(
    t: Tables, ending: Sequence[int], cap: int, at: int, level: int, table: array[int]
) -> None:
    """From where stages end to where the next may begin: least so far inside each stretch."""
    least = UNREACHABLE
    for device in range(1, t.num_devices + 1):
        if device < t.num_devices and t.ends[level * t.num_devices + device - 1] == device:
            least = UNREACHABLE
            continue
        least = min(least, ending[device] if ending[device] < cap else UNREACHABLE)
        table[at + device] = least


def pipeline_of(
    problem: Problem, t: Tables, table: Sequence[int], num_stages: int, sync_cap: int
) -> FoundPipeline:
    """The pipeline of so many stages that the whole graph's state stands for.

    Ties: a stage ends on the first device that gives the state's value; then the largest inner
    downset, the first strategy, policy and level of the link behind it win.

    Args:
        sync_cap: as the table was filled with.
    """
    level, outer, device = t.num_levels - 1, t.num_downsets - 1, t.num_devices
    found = []
    for stages in range(num_stages, 0, -1):
        row = t.at(stages, level, outer)
        end, value = device, table[row + device]
        while table[row + end - 1] == value:
            end -= 1
        stage, device, after, time = _stage_behind(t, stages, level, outer, end, sync_cap, table)
        nodes = problem.downsets.masks[outer] & ~problem.downsets.masks[t.nested[stage.pair]]
        found.append(
            FoundStage(
                nodes=tuple(v for v in range(nodes.bit_length()) if nodes >> v & 1),
                strategy=stage.strategy,
                option=stage.option - t.options_first[stage.strategy],
                policy=stage.policy - t.policies_first[stage.strategy],
                first_device=device,
                level_in=level,
                time=time,
                sync=_sum(t, stage, SYNC, device),
                memory_bytes=stage.memory_bytes,
            )
        )
        level, outer = after, t.nested[stage.pair]
    bottleneck, sync = max(s.time for s in found), max(s.sync for s in found)
    total = problem.num_steps(num_stages) * bottleneck + sync
    return FoundPipeline(stages=tuple(found), bottleneck=bottleneck, sync=sync, total=total)


def _stage_behind(
    t: Tables, stages: int, level: int, outer: int, end: int, sync_cap: int, table: Sequence[int]
) -> tuple[_Stage, int, int, Ticks]:
    """The stage that gives a state's value, its first device, the level behind it and its time."""
    value = table[t.at(stages, level, outer, end)]
    for stage in _choices(t, stages, outer):
        place = end - t.option_devices[stage.option]
        if place < 0 or _sum(t, stage, SYNC, place) >= sync_cap:
            continue
        for at, after, time, before in _links(t, stages, stage, place, table):
            if at == level and max(time, before) == value:
                return stage, place, after, time
    raise AssertionError("a state of the table has a stage that gives its value")
