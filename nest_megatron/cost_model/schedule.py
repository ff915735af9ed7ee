"""The order of work of Megatron's pipeline schedules, and an event simulator of it.

``tests/contract`` records what megatron-core's own schedule functions execute and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from nest_megatron.plain import frozen
from nest_megatron.units import Ticks


class Op(NamedTuple):
    """One forward or backward pass of one micro batch through one chunk.

    ``chunk`` counts along the model: chunk ``k`` lies on pipeline rank ``k % p``.
    """

    is_forward: bool
    chunk: int
    microbatch: int


def num_warmup(p: int, v: int, m: int, rank: int) -> int:
    """Forward passes of a rank before it alternates.

    Source: ``megatron.core.pipeline_parallel.schedules.get_pp_rank_microbatches``.
    """
    if p == 1:
        return 0
    return min(p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p, m * v)


def pass_at(p: int, v: int, m: int, rank: int, place: int) -> Op:
    """The pass that a rank runs after ``place`` others, in Megatron's order.

    With ``p`` pipeline ranks, ``v`` chunks on each and ``m`` micro batches; with ``v > 1``, ``p``
    divides ``m``.

    Source: ``forward_backward_no_pipelining``, ``..._without_interleaving``,
    ``..._with_interleaving`` with groups of ``p`` micro batches.
    """
    warmup, total = num_warmup(p, v, m, rank), m * v
    pair, is_second = divmod(place - warmup, 2)
    index, is_forward = pair + (0 if is_second else warmup), not is_second
    if place < warmup:
        index, is_forward = place, True
    elif place >= 2 * total - warmup:
        index, is_forward = place - total, False
    # groups of p micro batches, chunk by chunk
    group, within = divmod(index, p * v)
    virtual, offset = divmod(within, p)
    if not is_forward:
        virtual = v - 1 - virtual
    return Op(is_forward, virtual * p + rank, group * p + offset)


def place_of(p: int, v: int, m: int, op: Op) -> int:
    """How many passes its rank runs before a pass: the inverse of ``pass_at``."""
    virtual, rank = divmod(op.chunk, p)
    group, offset = divmod(op.microbatch, p)
    index = (group * v + (virtual if op.is_forward else v - 1 - virtual)) * p + offset
    warmup, total = num_warmup(p, v, m, rank), m * v
    if op.is_forward:
        return index + max(0, index - warmup)
    return index + min(total, warmup + index + 1)


@frozen
class ChunkTimes:
    """What one chunk costs in the schedule, in ticks: its rank's time for one micro batch.

    A result travels to the next (previous) chunk for a ``delay`` while the rank works on.
    """

    forward: Ticks
    backward: Ticks
    forward_delay: Ticks = 0
    backward_delay: Ticks = 0


class TimedOp(NamedTuple):
    """A pass with its place in time, in ticks, and whether its rank waited for its input."""

    op: Op
    start: Ticks
    end: Ticks
    waited: bool


def run(
    p: int, v: int, m: int, chunks: Sequence[ChunkTimes], releases: Sequence[Ticks]
) -> Iterator[TimedOp]:
    """Run the schedule: each rank does its passes in order, each as soon as its input is there.

    No rank starts before its release. Every pass comes after the one that makes its input, those
    of a rank in its order.
    """
    arrivals: dict[Op, Ticks] = {}
    places, clock = [0] * p, list(releases)
    remaining = 2 * p * v * m
    while remaining:
        before = remaining
        for rank in range(p):
            while places[rank] < 2 * v * m:
                op = pass_at(p, v, m, rank, places[rank])
                source = source_of(op, p * v)
                if source is not None and source not in arrivals:
                    break
                ready = clock[rank] if source is None else arrivals.pop(source)
                start, times = max(clock[rank], ready), chunks[op.chunk]
                if op.is_forward:
                    end = start + times.forward  # the last chunk turns round by itself
                    arrivals[op] = end + (times.forward_delay if op.chunk < p * v - 1 else 0)
                else:
                    end = start + times.backward
                    if op.chunk:
                        arrivals[op] = end + times.backward_delay
                yield TimedOp(op, start, end, ready > clock[rank])
                clock[rank] = end
                places[rank] += 1
                remaining -= 1
        assert remaining < before, "the schedule waits for itself"


def source_of(op: Op, num_chunks: int) -> Op | None:
    """The pass that makes the input of a pass, if one does."""
    if op.is_forward:
        return Op(True, op.chunk - 1, op.microbatch) if op.chunk else None
    if op.chunk == num_chunks - 1:
        return Op(True, op.chunk, op.microbatch)
    return Op(False, op.chunk + 1, op.microbatch)


def simulate(
    p: int, v: int, m: int, chunks: Sequence[ChunkTimes], releases: Sequence[Ticks]
) -> tuple[tuple[TimedOp, ...], ...]:
    """All passes of each rank with their times: what ``run`` yields, rank by rank."""
    timeline: list[list[TimedOp]] = [[] for _ in range(p)]
    for timed in run(p, v, m, chunks, releases):
        timeline[timed.op.chunk % p].append(timed)
    return tuple(tuple(passes) for passes in timeline)


@lru_cache(maxsize=4096)
def peak_live_chunks(p: int, v: int, m: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Distinct numbers of micro batches whose activations a rank's chunks have, at each peak.

    After the warm-up a rank alternates, and has the same chunks alive again after ``p * v`` passes
    each way. Between two changes of chunk the numbers lie on a line, so whatever a chunk saves, the
    most is saved at an end of one: the peaks do not grow with ``m``. None exceeds another in every
    entry, of which there is one for each of the rank's ``v`` chunks.
    """
    warmup, total = num_warmup(p, v, m, rank), m * v
    live = [0] * v
    for index in range(warmup):
        live[index // p % v] += 1
    peaks = {tuple(live)}
    most = min(p * v, total - warmup)
    for index in range(most):
        live[(warmup + index) // p % v] += 1
        # A line ends where the chunk of the backward pass before, or of the forward pass to come,
        # is another.
        if index % p == 0 or (warmup + index + 1) % p == 0 or index == most - 1:
            peaks.add(tuple(live))
        live[v - 1 - index // p % v] -= 1
    return tuple(
        sorted(
            peak
            for peak in peaks
            if not any(peak != other and all(map(ge, other, peak)) for other in peaks)
        )
    )
