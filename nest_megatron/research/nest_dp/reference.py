"""The recurrence in plain Python, which the kernel repeats; never tuned.

``table[stages][level][downset][device]`` is the least bottleneck of a downset in so many stages,
where the next stage may begin at the device and be linked through the level: the stage before it
ends at that device or earlier, leaving devices idle, inside the same stretch of the level. Values
are whole ticks, so the order of the loops changes nothing; ties are broken in ``trace``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nest_megatron.research.nest_dp.records import UNREACHABLE
from nest_megatron.research.nest_dp.tables import Tables

FORWARD, RECOMPUTE, BACKWARD, SYNC = range(4)


class StageChoice(NamedTuple):
    """How a stage is run: its strategy, what it keeps, and the first ZeRO option that fits."""

    strategy: int
    policy: int
    option: int
    memory_bytes: int


def fill(t: Tables, caps: Sequence[int], sync_cap: int, table: array[int]) -> None:
    """Fill the table of states.

    Args:
        caps: [most_stages + 1], a state of so many stages counts only below this.
        sync_cap: a stage is used only where its gradients are summed in less.
        table: from ``empty_table``.
    """
    for stages in range(1, t.most_stages + 1):
        for outer in range(1, t.num_downsets):
            found = _ending(t, stages, outer, sync_cap, table)
            for level, row in enumerate(found):
                _store(t, row, caps[stages], t.at(stages, level, outer), level, table)


def _ending(
    t: Tables, stages: int, outer: int, sync_cap: int, table: array[int]
) -> list[list[int]]:
    """The least bottleneck for each level and device at which the first stage ends."""
    found = [[UNREACHABLE] * (t.num_devices + 1) for _ in range(t.num_levels)]
    for pair in range(t.nested_first[outer], t.nested_first[outer + 1]):
        for choice in choices(t, stages, outer, pair):
            for place in range(t.num_devices - t.option_devices[choice.option] + 1):
                end = place + t.option_devices[choice.option]
                if sync_of(t, choice, outer, pair, place) >= sync_cap:
                    continue
                for level, _, value, before in links(t, stages, outer, pair, choice, place, table):
                    found[level][end] = min(found[level][end], max(value, before))
    return found


def choices(t: Tables, stages: int, outer: int, pair: int) -> Iterator[StageChoice]:
    """Every strategy, and for each checkpoint policy the first ZeRO option that fits.

    Computing again is never faster, so it is left out where it comes to the same option.
    """
    for strategy in range(len(t.options_first) - 1):
        taken = -1
        for policy in range(t.policies_first[strategy], t.policies_first[strategy + 1]):
            found = _first_that_fits(t, stages, outer, pair, strategy, policy)
            if found is not None and found.option != taken:
                yield found
                taken = found.option


def _first_that_fits(
    t: Tables, stages: int, outer: int, pair: int, strategy: int, policy: int
) -> StageChoice | None:
    for option in range(t.options_first[strategy], t.options_first[strategy + 1]):
        memory = memory_of(t, stages, outer, pair, option, policy)
        if memory <= t.capacity_bytes:
            return StageChoice(strategy, policy, option, memory)
    return None


def memory_of(t: Tables, stages: int, outer: int, pair: int, option: int, policy: int) -> int:
    """Bytes on a device of the stage between two downsets, at its position from the end."""
    d, inner, further = t.num_downsets, t.nested[pair], t.in_flight[stages] - 1
    static = t.reserved[option] + t.static[option * d + outer] - t.static[option * d + inner]
    base = policy * 3 * d
    first = t.kept[base + outer] - t.kept[base + inner]
    each = t.kept[base + d + outer] - t.kept[base + d + inner] + t.kept[base + 2 * d + outer]
    return static + first + further * each + t.peaks[policy * len(t.nested) + pair]


def links(
    t: Tables,
    stages: int,
    outer: int,
    pair: int,
    choice: StageChoice,
    place: int,
    table: array[int],
) -> Iterator[tuple[int, int, int, int]]:
    """For all levels of both links: level in, level out, the stage's time, what lies behind it."""
    end, inner = place + t.option_devices[choice.option], t.nested[pair]
    for after in range(t.num_levels):
        before = table[t.at(stages - 1, after, inner, place)]
        if before >= UNREACHABLE or t.ends[after * t.num_devices + place] < end:
            continue
        for level in range(t.num_levels):
            if t.ends[level * t.num_devices + place] >= end:
                time = stage_time(t, choice, outer, pair, place, level, after)
                yield level, after, time, before


def stage_time(
    t: Tables, choice: StageChoice, outer: int, pair: int, place: int, level: int, after: int
) -> int:
    """Ticks of one micro batch: input, forward, output's gradient, backward.

    A gradient from the next stage arrives while the forward pass is recomputed.
    """
    inner = t.nested[pair]
    send = choice.strategy * t.num_levels
    coming = t.send[(send + level) * t.num_downsets + outer]
    going = t.send[(send + after) * t.num_downsets + inner]
    forward, backward = (
        _work(t, choice, kind, outer, inner, place) for kind in (FORWARD, BACKWARD)
    )
    if t.recomputes[choice.policy]:
        going = max(going, _work(t, choice, RECOMPUTE, outer, inner, place))
    return coming + forward + going + backward


def sync_of(t: Tables, choice: StageChoice, outer: int, pair: int, place: int) -> int:
    """Ticks of the sum of a stage's gradients over the replicas."""
    return _work(t, choice, SYNC, outer, t.nested[pair], place)


def _work(t: Tables, choice: StageChoice, kind: int, outer: int, inner: int, place: int) -> int:
    row = t.rows[choice.option * t.num_devices + place]
    sums = (4 * row + kind) * t.num_downsets
    return t.times[sums + outer] - t.times[sums + inner]


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
