"""The recurrence's question and its answer, in whole ticks, bytes and devices.

The layers are a graph; what a pipeline can still have before it are its downsets.

``Tables`` are a question as flat arrays of int64: sums over downsets, so that a stage is a
difference of two.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import add

from nest_megatron.errors import UserInputError
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.plain import Name, frozen
from nest_megatron.units import Bytes, Ticks

#: Most downsets that are listed; the work grows with the square of their number.
MOST_DOWNSETS = 2048
#: Where counting stops when there are more.
_MOST_COUNTED = 100_000


@frozen
class LayerDag:
    """Nodes in an order in which they can run; edges are pairs (maker, reader) of their places.

    Raises:
        UserInputError: for an edge that does not lead on in the order.
    """

    names: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for maker, reader in self.edges:
            if not 0 <= maker < reader < len(self.names):
                limit = "an edge leads from a node to a later one"
                fix = "Put the nodes in the order in which they run."
                raise UserInputError("edges", (maker, reader), limit, fix)

    @classmethod
    def chain(cls, names: Sequence[str]) -> LayerDag:
        """Each node reads the one before it."""
        edges = tuple((at, at + 1) for at in range(len(names) - 1))
        return cls(names=tuple(names), edges=edges)

    def readers(self) -> list[int]:
        """For each node the set of those that read it, as bits."""
        found = [0] * len(self.names)
        for maker, reader in self.edges:
            found[maker] |= 1 << reader
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Downsets:
    """Every set of nodes that holds all readers of its members, smaller ones first.

    Known by identity, so that results for one can be cached by it.

    Args:
        masks: bit ``v`` of a mask stands for node ``v``; the first is empty, the last is all nodes.
        parents: for each, a downset that lacks one node of it, and that node; (0, -1) for the
            empty one.
    """

    dag: LayerDag
    masks: tuple[int, ...]
    parents: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.masks)

    def sums(self, values: Sequence[int]) -> list[int]:
        """The sum of the nodes' values over each downset.

        >>> downsets_of(LayerDag.chain("abc")).sums([1, 10, 100])
        [0, 100, 110, 111]
        """
        found = [0]
        for parent, node in self.parents[1:]:
            found.append(found[parent] + values[node])
        return found

    def nested(self, at: int) -> list[int]:
        """The smaller downsets inside one, largest first."""
        outside = ~self.masks[at]
        return [inner for inner in range(at - 1, -1, -1) if not self.masks[inner] & outside]

    def cut_bytes(self, output_bytes: Sequence[int]) -> Iterator[int]:
        """What crosses into each downset: every output that is read inside it and made outside.

        A tensor that skips stages is handed on by each stage between.
        """
        makers = list(zip(self.dag.readers(), output_bytes, strict=True))
        for mask in self.masks:
            yield sum(
                num
                for node, (readers, num) in enumerate(makers)
                if not mask >> node & 1 and readers & mask
            )


def downsets_of(dag: LayerDag) -> Downsets:
    """All downsets of a graph; a chain of n nodes has n + 1.

    Raises:
        UserInputError: if there are more than ``MOST_DOWNSETS``, naming how many, and the nodes
            that can run side by side and are to be contracted.
    """
    readers = dag.readers()
    found = {0: (0, -1)}
    masks, widest = [0], list[int]()
    for mask in masks:  # which grows on the way
        ready = [v for v, after in enumerate(readers) if not mask >> v & 1 and not after & ~mask]
        widest = max(widest, ready, key=len)
        for node in ready:
            if (grown := mask | 1 << node) not in found:
                found[grown] = (mask, node)
                masks.append(grown)
        if len(masks) > _MOST_COUNTED:
            break
    if len(masks) > MOST_DOWNSETS:
        more = "more than " if len(masks) > _MOST_COUNTED else ""
        names = ", ".join(dag.names[node] for node in widest)
        raise UserInputError(
            "downsets of the layer graph",
            f"{more}{min(len(masks), _MOST_COUNTED)}",
            f"at most {MOST_DOWNSETS} are searched",
            f"Contract branches that run side by side into one node each: {names}.",
        )
    masks.sort(key=lambda mask: (mask.bit_count(), mask))
    index = {mask: at for at, mask in enumerate(masks)}
    parents = tuple((index[parent], node) for parent, node in map(found.__getitem__, masks))
    return Downsets(dag=dag, masks=tuple(masks), parents=parents)


#: Stands for "cannot be had"; far above any sum of ticks, and small enough to add to.
UNREACHABLE = 1 << 61


class Schedule(Name):
    """How many micro batches a stage has in flight."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"

    def in_flight(self, position: int, num_microbatches: int) -> int:
        """Micro batches of the stage at a position from the end, the last being 1."""
        return min(position, num_microbatches) if self is Schedule.ONE_F_ONE_B else num_microbatches


@frozen
class NodeTimes:
    """Ticks of each node for one micro batch, its groups lying in one kind of place.

    ``sync`` is of the sum of its gradients over the replicas, once a step.
    """

    forward: tuple[Ticks, ...]
    recompute: tuple[Ticks, ...]
    backward: tuple[Ticks, ...]
    sync: tuple[Ticks, ...]


@frozen
class ZeroOption:
    """A strategy with one ZeRO setting.

    Args:
        num_devices: of a stage, in units of the problem; ``zero_degree`` times the strategy's.
        static_bytes: of each node on one device, for as long as training runs.
        reserved_bytes: on a device whatever the stage's nodes are.
        times_at: for each first device of a stage, which of ``times`` holds there.
    """

    zero_stage: ZeroStage
    zero_degree: int
    num_devices: int
    static_bytes: tuple[Bytes, ...]
    times_at: tuple[int, ...]
    times: tuple[NodeTimes, ...]
    reserved_bytes: Bytes = 0


@frozen
class CheckpointPolicy:
    """What a stage saves for its backward passes.

    Args:
        first_bytes: of each node, for the first micro batch in flight.
        further_bytes: of each node, for every further one.
        entry_bytes: of each downset as the rest that begins with the stage: its input, saved for
            every further micro batch.
        peak_bytes: of each node while its backward pass runs; the largest of a stage counts.
    """

    recompute: bool
    first_bytes: tuple[Bytes, ...]
    further_bytes: tuple[Bytes, ...]
    entry_bytes: tuple[Bytes, ...]
    peak_bytes: tuple[Bytes, ...]


@frozen
class PricedStrategy:
    """A division of layers over the devices of a stage.

    Args:
        label: for tables.
        options: ZeRO settings in the order in which memory asks for them, none first. A stage takes
            the first that fits where it stands.
        policies: without recomputation first, if both are allowed.
        send: [level][downset], ticks of the stage's devices to take in, or give back, what crosses
            into the downset. Never less on a higher level.
    """

    label: str
    options: tuple[ZeroOption, ...]
    policies: tuple[CheckpointPolicy, ...]
    send: tuple[tuple[Ticks, ...], ...]

    def __post_init__(self) -> None:
        assert _rising(self.send), "farther is slower"


@frozen
class Problem:
    """One pipeline and its replicas.

    Args:
        ends: [level][device], the first device behind the stretch in which this one lies; devices
            of a stretch share a group of the level in every replica. The last level has one
            stretch. All in units of devices.
        strategies: what each stage may take, whatever others take.
        num_microbatches: of one replica.
        least_stages, most_stages: a pipeline is no shorter, and no longer.
        unit: devices that count as one.
        level_names: of ``ends``.
    """

    downsets: Downsets
    ends: tuple[tuple[int, ...], ...]
    strategies: tuple[PricedStrategy, ...]
    num_microbatches: int
    schedule: Schedule
    capacity_bytes: Bytes
    most_stages: int
    least_stages: int = 1
    unit: int = 1
    level_names: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """Devices of a replica, in units of the problem."""
        return len(self.ends[0])

    def num_steps(self, num_stages: int) -> int:
        """How often the slowest stage's time is paid in a step of training."""
        return self.num_microbatches + num_stages - 1

    def __post_init__(self) -> None:
        assert set(self.ends[-1]) == {self.num_devices}, "the last level joins all devices"
        assert _rising(self.ends), "levels are nested"
        for strategy in self.strategies:
            levels = {len(self.downsets)}, len(self.ends)
            assert ({len(row) for row in strategy.send}, len(strategy.send)) == levels
            for option in strategy.options:
                assert len(option.times_at) == self.num_devices, "a stage may begin anywhere"


def _rising(rows: tuple[tuple[int, ...], ...]) -> bool:
    pairs = (zip(one, other, strict=True) for one, other in pairwise(rows))
    return all(a <= b for pair in pairs for a, b in pair)


@frozen
class FoundStage:
    """A stage of a found pipeline: nodes by their places in the graph, times, bytes.

    Args:
        first_device: within a replica, in the problem's units.
        level_in: network level of the link to the stage before it; the last for the first stage.
    """

    nodes: tuple[int, ...]
    strategy: int
    option: int
    policy: int
    first_device: int
    level_in: int
    time: Ticks
    sync: Ticks
    memory_bytes: Bytes


@frozen
class FoundPipeline:
    """A found pipeline, first stage to last, and the time of a step."""

    stages: tuple[FoundStage, ...]
    bottleneck: Ticks
    sync: Ticks
    total: Ticks


#: Largest table of states that is filled.
_MOST_TABLE_BYTES = 2 << 30


@frozen
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
        fix = "Use fewer devices, contract layers, or allow more replicas."
        limit = f"it takes at most {_MOST_TABLE_BYTES} bytes"
        raise UserInputError("table of states", size, limit, fix)
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
