"""When a schedule ends, and its critical path: the chain of passes that its end waits for.

From the end of the step backwards: a pass began when its rank was free or, if that was earlier,
when its input arrived. In the first case the path goes on with the rank's previous pass, in the
second, by way of the transfer, with the pass that made the input. The path has no gap. The compiled
form skips what repeats, so neither its time nor its memory grows with the micro batches.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nest_megatron.cost_model.schedule import ChunkTimes, pass_at, place_of, run, source_of
from nest_megatron.packages import is_built
from nest_megatron.units import Ticks

#: Above this, sums over a schedule could leave the compiled form's int64.
_MOST = 1 << 62
has_kernel = functools.partial(
    is_built, "nest_megatron.cost_model._schedule", "schedules are simulated pass by pass"
)


class CriticalPath(NamedTuple):
    """What lies on the critical path of a schedule: passes and transfers of each chunk.

    Of transfers of a chunk's results those count that their receiver waited for. ``ends`` is when
    the last pass of each pipeline rank ends, on the path or not.
    """

    ends: tuple[Ticks, ...]
    first_rank: int
    last_rank: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    forward_sent: tuple[int, ...]
    backward_sent: tuple[int, ...]

    def on_rank(self, chunks: Sequence[ChunkTimes], rank: int, num_stages: int) -> Ticks:
        """How long it lies on a pipeline rank's passes."""
        return sum(
            self.forward[k] * chunks[k].forward + self.backward[k] * chunks[k].backward
            for k in range(rank, len(chunks), num_stages)
        )

    def sent(self, chunks: Sequence[ChunkTimes]) -> Ticks:
        """How long it lies on transfers that overlap the work of their sender."""
        return sum(
            forward * chunk.forward_delay + backward * chunk.backward_delay
            for forward, backward, chunk in zip(
                self.forward_sent, self.backward_sent, chunks, strict=True
            )
        )


#: ``summarize`` or ``summarize_reference``.
Summarize = Callable[
    [int, int, int, Sequence[ChunkTimes], Sequence[Ticks], Sequence[Ticks]], CriticalPath
]


def summarize(
    p: int,
    v: int,
    m: int,
    chunks: Sequence[ChunkTimes],
    releases: Sequence[Ticks],
    reductions: Sequence[Ticks],
) -> CriticalPath:
    """When a schedule ends and its critical path, compiled where that is built and fits int64.

    Args:
        p, v, m: pipeline ranks, chunks on each rank, micro batches; with ``v > 1``, ``p`` is above
            1 and divides ``m``.
        releases: time before which each rank cannot start.
        reductions: time that each rank takes after its last pass. Of ranks that end at the same
            time, the path ends on the first.
    """
    names = ("forward", "backward", "forward_delay", "backward_delay")
    columns = [getattr(chunk, name) for name in names for chunk in chunks]
    most = (m + 4) * sum(columns) + sum(releases) + sum(reductions)
    if most > _MOST or not has_kernel():
        return summarize_reference(p, v, m, chunks, releases, reductions)
    from nest_megatron.cost_model import _schedule

    ends, first, last, counts = _schedule.run(
        p, v, m, array("q", columns), array("q", releases), array("q", reductions)
    )
    return _path(ends, first, last, counts)


def summarize_reference(
    p: int,
    v: int,
    m: int,
    chunks: Sequence[ChunkTimes],
    releases: Sequence[Ticks],
    reductions: Sequence[Ticks],
) -> CriticalPath:
    """``summarize`` in plain Python: runs every pass, and walks the path pass by pass."""
    ends, waited = [0] * p, [bytearray() for _ in range(p)]
    for done in run(p, v, m, chunks, releases):
        rank = done.op.chunk % p
        ends[rank] = done.end
        waited[rank].append(done.waited)
    whole = [end + reduction for end, reduction in zip(ends, reductions, strict=True)]
    last = rank = whole.index(max(whole))
    place, count = 2 * m * v - 1, len(chunks)
    counts = [0] * (4 * count)
    while place >= 0:
        op = pass_at(p, v, m, rank, place)
        way = 0 if op.is_forward else count
        counts[way + op.chunk] += 1
        source = source_of(op, count)
        if source is not None and waited[rank][place]:
            counts[2 * count + way + source.chunk] += 1
            rank, place = source.chunk % p, place_of(p, v, m, source)
        else:
            place -= 1
    return _path(tuple(ends), rank, last, counts)


def _path(ends: tuple[Ticks, ...], first: int, last: int, counts: Sequence[int]) -> CriticalPath:
    """A path from its counts [4, p * v], in the order of the fields."""
    num_chunks = len(counts) // 4
    rows = [tuple(counts[k : k + num_chunks]) for k in range(0, len(counts), num_chunks)]
    return CriticalPath(ends, first, last, *rows)
