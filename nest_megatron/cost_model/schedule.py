"""The order of work of Megatron's pipeline schedules, and an event simulator of it.

``tests/contract`` records what megatron-core's own schedule functions execute and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

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
    warmup = p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p
    return min(warmup, m * v)


def rank_order_of_work(p: int, v: int, m: int, rank: int) -> list[Op]:
    """All passes of one pipeline rank in the order in which Megatron runs them.

    Args:
        p, v, m: pipeline ranks, chunks on each rank, micro batches; with ``v > 1``, ``p`` divides
            ``m``.
        rank: pipeline rank.

    Source: ``forward_backward_no_pipelining``, ``..._without_interleaving``,
    ``..._with_interleaving`` with groups of ``p`` micro batches.
    """
    warmup, total = num_warmup(p, v, m, rank), m * v
    forward = [_pass(p, v, rank, i, is_forward=True) for i in range(total)]
    backward = [_pass(p, v, rank, i, is_forward=False) for i in range(total)]
    order = forward[:warmup]
    for i in range(total - warmup):
        order += (forward[warmup + i], backward[i])
    return order + backward[total - warmup :]


def _pass(p: int, v: int, rank: int, index: int, *, is_forward: bool) -> Op:
    """The ``index``-th pass of a rank one way: groups of ``p`` micro batches, chunk by chunk."""
    group, within = divmod(index, p * v)
    virtual, offset = divmod(within, p)
    if not is_forward:
        virtual = v - 1 - virtual
    return Op(is_forward, virtual * p + rank, group * p + offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTimes:
    """What one chunk costs in the schedule, in ticks.

    Args:
        forward, backward: how long its rank is busy with one micro batch.
        forward_delay, backward_delay: how long a result travels to the next (previous) chunk while
            the rank already works on.
    """

    forward: Ticks
    backward: Ticks
    forward_delay: Ticks = 0
    backward_delay: Ticks = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOp:
    """A pass with its place in time, in ticks."""

    op: Op
    start: Ticks
    end: Ticks


def simulate(
    p: int, v: int, m: int, chunks: Sequence[ChunkTimes], releases: Sequence[Ticks]
) -> tuple[tuple[TimedOp, ...], ...]:
    """Run the schedule: each rank does its passes in order, each as soon as its input is there.

    Args:
        chunks: ``p * v`` chunks along the model.
        releases: time before which each of the ``p`` ranks cannot start.

    Returns:
        For each rank its passes with their times.
    """
    orders = [rank_order_of_work(p, v, m, rank) for rank in range(p)]
    done: dict[Op, Ticks] = {}
    timeline: list[list[TimedOp]] = [[] for _ in range(p)]
    clock = list(releases)
    remaining = sum(len(order) for order in orders)
    while remaining:
        before = remaining
        for rank in range(p):
            while len(timeline[rank]) < len(orders[rank]):
                op = orders[rank][len(timeline[rank])]
                ready = _ready_time(op, chunks, done)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                times = chunks[op.chunk]
                clock[rank] = start + (times.forward if op.is_forward else times.backward)
                done[op] = clock[rank]
                timeline[rank].append(TimedOp(op=op, start=start, end=clock[rank]))
                remaining -= 1
        assert remaining < before, "the schedule waits for itself"
    return tuple(tuple(passes) for passes in timeline)


def _ready_time(op: Op, chunks: Sequence[ChunkTimes], done: dict[Op, Ticks]) -> Ticks | None:
    """When a pass has its input, or ``None`` if the pass that makes it has not run."""
    if op.is_forward:
        if op.chunk == 0:
            return 0
        source = Op(True, op.chunk - 1, op.microbatch)
        delay = chunks[op.chunk - 1].forward_delay
    elif op.chunk == len(chunks) - 1:
        source = Op(True, op.chunk, op.microbatch)
        delay = 0
    else:
        source = Op(False, op.chunk + 1, op.microbatch)
        delay = chunks[op.chunk + 1].backward_delay
    end = done.get(source)
    return None if end is None else end + delay


@lru_cache(maxsize=4096)
def peak_live_chunks(p: int, v: int, m: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of micro batches whose activations each chunk of a rank keeps, at each peak.

    Returns:
        The distinct vectors (one entry for each of the rank's ``v`` chunks) right after a forward
        pass that no other vector exceeds in every entry.
    """
    live = [0] * v
    peaks: set[tuple[int, ...]] = set()
    for op in rank_order_of_work(p, v, m, rank):
        virtual = op.chunk // p
        live[virtual] += 1 if op.is_forward else -1
        if op.is_forward:
            peaks.add(tuple(live))
    return tuple(sorted(a for a in peaks if not any(a != b and _covers(b, a) for b in peaks)))


def _covers(big: tuple[int, ...], small: tuple[int, ...]) -> bool:
    return all(x >= y for x, y in zip(big, small, strict=True))
