"""A problem as flat arrays of int64: sums over downsets, so that a stage is a difference of two."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add

from nest_megatron.errors import UserInputError
from nest_megatron.research.nest_dp.downsets import Downsets
from nest_megatron.research.nest_dp.records import Problem, ZeroOption

#: Largest table of states that is filled.
_MOST_TABLE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What the kernel and its reference read, in the kernel's order; the last index moves fastest.

    Args:
        nested_first: [downsets + 1], where a downset's pairs begin.
        nested: [pairs], the inner downset of each pair.
        ends: [levels, devices].
        options_first: [strategies + 1], where a strategy's options begin.
        option_devices: [options].
        reserved: [options], bytes on a device whatever the nodes are.
        rows: [options, devices], the row of ``times`` that holds where a stage begins; -1 where it
            would not end on the devices.
        times: [rows, 4, downsets], sums of forward, recompute, backward and sync ticks.
        least_work: [strategies, downsets], sums of the fewest forward and backward ticks anywhere.
        static: [options, downsets], sums of bytes.
        policies_first: [strategies + 1].
        recomputes: [policies], 0 or 1.
        kept: [policies, 3, downsets], sums of first and further bytes, and the entry bytes.
        peaks: [policies, pairs], most working bytes of a stage's nodes.
        send: [strategies, levels, downsets].
        in_flight: [most_stages + 1], by position from the end.
    """

    num_downsets: int
    num_levels: int
    num_devices: int
    most_stages: int
    capacity_bytes: int
    nested_first: array[int]
    nested: array[int]
    ends: array[int]
    options_first: array[int]
    option_devices: array[int]
    reserved: array[int]
    rows: array[int]
    times: array[int]
    least_work: array[int]
    static: array[int]
    policies_first: array[int]
    recomputes: array[int]
    kept: array[int]
    peaks: array[int]
    send: array[int]
    in_flight: array[int]

    @property
    def table_size(self) -> int:
        """States: stages, levels, downsets, devices."""
        return self.at(self.most_stages + 1, 0, 0)

    def at(self, stages: int, level: int, downset: int, device: int = 0) -> int:
        """Where a state stands in the table."""
        row = (stages * self.num_levels + level) * self.num_downsets + downset
        return row * (self.num_devices + 1) + device


def tables_of(problem: Problem) -> Tables:
    """Pack a problem.

    Raises:
        UserInputError: if the table of states would be too large.
    """
    options = [option for s in problem.strategies for option in s.options]
    policies = [policy for s in problem.strategies for policy in s.policies]
    downsets, positions = problem.downsets, range(1, problem.most_stages + 1)
    nested_first, nested = _pairs(downsets)
    rows, times = _times(problem, options)
    flights = (problem.schedule.in_flight(at, problem.num_microbatches) for at in positions)
    saved = (
        (_sums(downsets, p.first_bytes), _sums(downsets, p.further_bytes), p.entry_bytes)
        for p in policies
    )
    tables = Tables(
        num_downsets=len(downsets),
        num_levels=len(problem.ends),
        num_devices=problem.num_devices,
        most_stages=problem.most_stages,
        capacity_bytes=problem.capacity_bytes,
        nested_first=nested_first,
        nested=nested,
        ends=_flat(problem.ends),
        options_first=_starts(len(s.options) for s in problem.strategies),
        option_devices=array("q", [option.num_devices for option in options]),
        reserved=array("q", [option.reserved_bytes for option in options]),
        rows=rows,
        times=times,
        least_work=_flat(downsets.sums(_least_work(s.options)) for s in problem.strategies),
        static=_flat(_sums(downsets, option.static_bytes) for option in options),
        policies_first=_starts(len(s.policies) for s in problem.strategies),
        recomputes=array("q", [policy.recompute for policy in policies]),
        kept=_flat(row for rows in saved for row in rows),
        peaks=_flat(_peaks(downsets, policy.peak_bytes) for policy in policies),
        send=_flat(level for s in problem.strategies for level in s.send),
        in_flight=array("q", [0, *flights]),
    )
    if (size := 8 * tables.table_size) > _MOST_TABLE_BYTES:
        raise UserInputError(
            "table of states",
            value=size,
            limit=f"it takes at most {_MOST_TABLE_BYTES} bytes",
            fix="Use fewer devices, contract layers, or allow more replicas.",
        )
    return tables


def _flat(rows: Iterable[Iterable[int]]) -> array[int]:
    found = array("q")
    for row in rows:
        found.extend(row)
    return found


def _starts(counts: Iterable[int]) -> array[int]:
    found = array("q", [0])
    for count in counts:
        found.append(found[-1] + count)
    return found


@lru_cache(maxsize=1 << 12)
def _sums(downsets: Downsets, values: tuple[int, ...]) -> array[int]:
    """Sums over downsets; a search asks for the same layers many times."""
    return array("q", downsets.sums(values))


@lru_cache(maxsize=4)
def _pairs(downsets: Downsets) -> tuple[array[int], array[int]]:
    inner = [downsets.nested(at) for at in range(len(downsets))]
    return _starts(map(len, inner)), _flat(inner)


def _times(problem: Problem, options: Sequence[ZeroOption]) -> tuple[array[int], array[int]]:
    rows, times, before = array("q"), array("q"), 0
    for option in options:
        last = problem.num_devices - option.num_devices
        rows.extend(before + p if at <= last else -1 for at, p in enumerate(option.times_at))
        for place in option.times:
            for ticks in (place.forward, place.recompute, place.backward, place.sync):
                times.extend(_sums(problem.downsets, ticks))
        before += len(option.times)
    return rows, times


def _least_work(options: Sequence[ZeroOption]) -> list[int]:
    """For each node, the fewest ticks of its forward and backward pass in any place."""
    places = [times for option in options for times in option.times]
    work = [map(add, times.forward, times.backward) for times in places]
    return [min(ticks) for ticks in zip(*work, strict=True)]


@lru_cache(maxsize=64)
def _peaks(downsets: Downsets, values: tuple[int, ...]) -> array[int]:
    """The largest of the nodes' values in each pair's stage."""
    first, nested = _pairs(downsets)
    if not any(values):
        return array("q", [0]) * len(nested)
    largest, masks = {0: 0}, downsets.masks

    def of(nodes: int) -> int:
        if nodes not in largest:
            rest = nodes & (nodes - 1)
            largest[nodes] = max(values[(nodes ^ rest).bit_length() - 1], of(rest))
        return largest[nodes]

    return array(
        "q",
        [
            of(mask & ~masks[inner])
            for outer, mask in enumerate(masks)
            for inner in nested[first[outer] : first[outer + 1]]
        ],
    )
