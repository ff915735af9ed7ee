"""A problem as flat arrays of int64: sums over downsets, so that a stage is a difference of two."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add

from nest_megatron.errors import UserInputError
from nest_megatron.research.nest_dp.downsets import Downsets
from nest_megatron.research.nest_dp.records import (
    UNREACHABLE,
    CheckpointPolicy,
    Problem,
    ZeroOption,
)

#: Largest table of states that is filled.
MOST_TABLE_BYTES = 2 << 30

_KINDS = ("forward", "recompute", "backward", "sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Arrays that the kernel and its reference read; row-major, the last index moves fastest.

    Args:
        nested_first: [downsets + 1], where a downset's pairs begin.
        nested: [pairs], the inner downset of each pair.
        ends: [levels, devices].
        options_first: [strategies + 1], where a strategy's options begin.
        option_devices: [options].
        reserved: [options], bytes held whatever the nodes are.
        rows: [options, devices], the row of ``times`` that holds where a stage begins; -1 where it
            would not end on the devices.
        times: [rows, 4, downsets], sums of forward, again, backward and sync ticks.
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
        states = self.num_levels * self.num_downsets * (self.num_devices + 1)
        return (self.most_stages + 1) * states

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
    downsets = problem.downsets
    nested_first, nested = _pairs(downsets)
    rows, times = _times(problem, options)
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
        least_work=_flat(downsets.sums(least_work(s.options)) for s in problem.strategies),
        static=_flat(_sums(downsets, option.static_bytes) for option in options),
        policies_first=_starts(len(s.policies) for s in problem.strategies),
        recomputes=array("q", [policy.recompute for policy in policies]),
        kept=_kept(problem, policies),
        peaks=_flat(_peaks(downsets, policy.peak_bytes) for policy in policies),
        send=_flat(level for s in problem.strategies for level in s.send),
        in_flight=_in_flight(problem),
    )
    _refuse_large(tables)
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
    """Sums over downsets; a search asks for the same layers again and again."""
    return array("q", downsets.sums(values))


@lru_cache(maxsize=4)
def _pairs(downsets: Downsets) -> tuple[array[int], array[int]]:
    inner = [list(downsets.nested(at)) for at in range(len(downsets))]
    return _starts(map(len, inner)), _flat(inner)


def _times(problem: Problem, options: Sequence[ZeroOption]) -> tuple[array[int], array[int]]:
    rows, times, before = array("q"), array("q"), 0
    for option in options:
        last = problem.num_devices - option.num_devices
        rows.extend(before + p if at <= last else -1 for at, p in enumerate(option.times_at))
        for place in option.times:
            for kind in _KINDS:
                times.extend(_sums(problem.downsets, getattr(place, kind)))
        before += len(option.times)
    return rows, times


def least_work(options: Sequence[ZeroOption]) -> list[int]:
    """For each node, the fewest ticks of its forward and backward pass in any place."""
    places = [times for option in options for times in option.times]
    work = [map(add, times.forward, times.backward) for times in places]
    return [min(ticks) for ticks in zip(*work, strict=True)]


def _kept(problem: Problem, policies: Sequence[CheckpointPolicy]) -> array[int]:
    found = array("q")
    for policy in policies:
        found.extend(_sums(problem.downsets, policy.first_bytes))
        found.extend(_sums(problem.downsets, policy.further_bytes))
        found.extend(policy.entry_bytes)
    return found


@lru_cache(maxsize=64)
def _peaks(downsets: Downsets, values: tuple[int, ...]) -> array[int]:
    """The largest of the nodes' values in each pair's stage."""
    first, nested = _pairs(downsets)
    if not any(values):
        return array("q", [0]) * len(nested)
    known, masks = {0: 0}, downsets.masks
    return array(
        "q",
        [
            _largest(mask & ~masks[inner], values, known)
            for outer, mask in enumerate(masks)
            for inner in nested[first[outer] : first[outer + 1]]
        ],
    )


def _largest(nodes: int, values: Sequence[int], known: dict[int, int]) -> int:
    if nodes not in known:
        rest = nodes & (nodes - 1)
        node = (nodes ^ rest).bit_length() - 1
        known[nodes] = max(values[node], _largest(rest, values, known))
    return known[nodes]


def _in_flight(problem: Problem) -> array[int]:
    positions = range(1, problem.most_stages + 1)
    count, schedule = problem.num_microbatches, problem.schedule
    return array("q", [0, *(schedule.in_flight(at, count) for at in positions)])


def _refuse_large(tables: Tables) -> None:
    size = 8 * tables.table_size
    if size > MOST_TABLE_BYTES:
        raise UserInputError(
            "table of states",
            value=size,
            limit=f"it takes at most {MOST_TABLE_BYTES} bytes",
            fix="Use fewer devices, contract layers, or allow more replicas.",
        )


class Scratch:
    """Memory for tables, kept from one problem to the next; whoever fills a table writes it all."""

    def __init__(self) -> None:
        self._table = array("q")

    def table(self, tables: Tables) -> array[int]:
        """At least as large as the problem needs, with anything in it."""
        if len(self._table) < tables.table_size:
            self._table = array("q", bytes(8 * tables.table_size))
        return self._table


def empty_table(tables: Tables) -> array[int]:
    """States before anything is known; without a stage, everything may begin anywhere."""
    found = array("q", [UNREACHABLE]) * tables.table_size
    top = tables.at(0, tables.num_levels - 1, 0)
    for device in range(tables.num_devices + 1):
        found[top + device] = 0
    return found
