"""The stage problem: one launchable grid with its unit costs, waiting for a stage partition.

Times are ticks, memory is bytes; both are whole numbers, so every sum and comparison is exact. The
iteration time of a partition is::

    constant + max over ranks (end of its last pass + reduction) + max over ranks (optimizer step)

where a rank starts after its exposed parameter *gather* (of updated weights, what its first forward
passes cannot hide), and its exposed gradient *reduction* is what its last backward passes cannot
hide. Each is the larger of two sums over the rank's units: what can never be hidden (``unhidden``),
and what remains of all of it when the overlap is used up (``hideable``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from nest_megatron.cost_model.critical_path import CriticalPath, Summarize, summarize
from nest_megatron.cost_model.schedule import ChunkTimes, TimedOp, peak_live_chunks, simulate
from nest_megatron.plain import frozen
from nest_megatron.units import Bytes, Ticks


class UnitCost(NamedTuple):
    """What a unit of the layer sequence, or a chunk, costs its rank; passes of one micro batch.

    The ``block_`` fields hold for a layer among the first ``block_num_layers`` of its chunk, which
    full ``block`` recomputation recomputes.
    """

    forward: Ticks
    backward: Ticks
    block_backward: Ticks
    gather_unhidden: Ticks
    gather_hideable: Ticks
    reduce_unhidden: Ticks
    reduce_hideable: Ticks
    optimizer: Ticks
    static_bytes: Bytes
    saved_bytes: Bytes
    block_saved_bytes: Bytes
    working_bytes: Bytes
    block_working_bytes: Bytes


class PipelineProblem(NamedTuple):
    """One grid with everything but the stage partition.

    Args:
        num_stages, num_virtual, num_microbatches: ``p``, ``v``, ``m``.
        unit_kinds: for each unit, in order, its index into ``costs``.
        num_layers: transformer layers; they are the units ``1 .. num_layers``.
        block_num_layers: layers at the head of each chunk that are recomputed (0: none).
        send_forward: time to send an activation from each of the ``p * v`` chunks to the next one.
        send_backward: time to send a gradient from each chunk to the previous one.
        overlap_p2p: transfers overlap the work of the sending rank; else they take its time.
        constant: time of a step outside the schedule.
    """

    num_stages: int
    num_virtual: int
    num_microbatches: int
    unit_kinds: bytes
    costs: tuple[UnitCost, ...]
    num_layers: int
    block_num_layers: int
    send_forward: tuple[Ticks, ...]
    send_backward: tuple[Ticks, ...]
    overlap_p2p: bool
    capacity_bytes: Bytes
    constant: Ticks

    @property
    def num_units(self) -> int:
        """Units of the layer sequence, embedding and head included."""
        return len(self.unit_kinds)

    @property
    def num_chunks(self) -> int:
        """Virtual stages in the whole pipeline."""
        return self.num_stages * self.num_virtual


class RankMemory(NamedTuple):
    """Memory of one rank at its peak: weights and states, kept activations, work in progress."""

    static: Bytes
    activation: Bytes
    working: Bytes

    @property
    def total(self) -> Bytes:
        """All three."""
        return self.static + self.activation + self.working


@frozen
class Evaluation:
    """What a partition costs; tuples hold a value for each chunk or rank, times are ticks.

    ``busy`` is that of each rank's passes; ``finish`` is when the last rank is through, its
    reduction included.
    """

    iteration: Ticks
    chunks: tuple[ChunkTimes, ...]
    busy: tuple[Ticks, ...]
    finish: Ticks
    path: CriticalPath
    gathers: tuple[Ticks, ...]
    reductions: tuple[Ticks, ...]
    optimizers: tuple[Ticks, ...]
    memory: tuple[RankMemory, ...]
    fits: bool

    @property
    def critical_rank(self) -> int:
        """The rank that is busy longest, and so waits least, its gather and reduction included.

        Of several the one that the critical path lies on longest, then the first.
        """
        p = len(self.busy)
        return max(
            range(p),
            key=lambda rank: (
                self.gathers[rank] + self.busy[rank] + self.reductions[rank],
                self.path.on_rank(self.chunks, rank, p),
                -rank,
            ),
        )

    def first_start(self, rank: int) -> Ticks:
        """When the first pass of a rank starts: once the first micro batch has come so far."""
        start = self.gathers[0]
        for before, gather in zip(self.chunks, self.gathers[1 : rank + 1], strict=False):
            start = max(gather, start + before.forward + before.forward_delay)
        return start


def chunk_cost(problem: PipelineProblem, first: int, end: int) -> UnitCost:
    """Units ``first .. end`` as one, whose ``block_`` fields equal its own.

    The first layers follow their ``block_`` fields if the problem has such a block.
    """
    layers = [unit for unit in range(first, end) if 1 <= unit <= problem.num_layers]
    in_block = frozenset(layers[: problem.block_num_layers])
    costs = []
    for unit in range(first, end):
        cost = problem.costs[problem.unit_kinds[unit]]
        if unit in in_block:
            cost = cost._replace(
                backward=cost.block_backward,
                saved_bytes=cost.block_saved_bytes,
                working_bytes=cost.block_working_bytes,
            )
        costs.append(cost)
    total = UnitCost(*map(sum, zip(*costs, strict=True)))
    working = max(cost.working_bytes for cost in costs)
    return total._replace(
        block_backward=total.backward,
        block_saved_bytes=total.saved_bytes,
        working_bytes=working,
        block_working_bytes=working,
    )


def chunks_of(problem: PipelineProblem, boundaries: Sequence[int]) -> list[UnitCost]:
    """The chunks of a partition; those of the same units at the same place in it are one."""
    found = {}
    keys = []
    for first, end in pairwise(boundaries):
        behind = max(0, end - 1 - problem.num_layers)
        keys.append((problem.unit_kinds[first:end], first == 0, behind))
        if keys[-1] not in found:
            found[keys[-1]] = chunk_cost(problem, first, end)
    return [found[key] for key in keys]


def evaluate(
    problem: PipelineProblem, boundaries: tuple[int, ...], run: Summarize = summarize
) -> Evaluation:
    """Iteration time and memory of one stage partition, by simulating its schedule.

    Args:
        boundaries: ``p * v + 1`` unit indices rising strictly from 0 to the number of units.
        run: what simulates; each returns the same.
    """
    p, v, m = problem.num_stages, problem.num_virtual, problem.num_microbatches
    chunks = chunks_of(problem, boundaries)
    times = tuple(chunk_times(problem, k, chunk) for k, chunk in enumerate(chunks))
    ranks = [chunks[rank::p] for rank in range(p)]
    gathers = tuple(_larger(r, "gather_unhidden", "gather_hideable") for r in ranks)
    reductions = tuple(_larger(r, "reduce_unhidden", "reduce_hideable") for r in ranks)
    optimizers = tuple(sum(c.optimizer for c in r) for r in ranks)
    path = run(p, v, m, times, gathers, reductions)
    finish = max(end + reduction for end, reduction in zip(path.ends, reductions, strict=True))
    memory = [rank_memory(problem, rank, held) for rank, held in enumerate(ranks)]
    return Evaluation(
        iteration=problem.constant + finish + max(optimizers),
        chunks=times,
        busy=tuple(m * sum(c.forward + c.backward for c in times[r::p]) for r in range(p)),
        finish=finish,
        path=path,
        gathers=gathers,
        reductions=reductions,
        optimizers=optimizers,
        memory=tuple(memory),
        fits=max(rank.total for rank in memory) <= problem.capacity_bytes,
    )


def timeline(problem: PipelineProblem, evaluation: Evaluation) -> tuple[tuple[TimedOp, ...], ...]:
    """All passes of every rank in the schedule of a partition, as it was evaluated."""
    p, v, m = problem.num_stages, problem.num_virtual, problem.num_microbatches
    return simulate(p, v, m, evaluation.chunks, evaluation.gathers)


def _larger(chunks: Sequence[UnitCost], least: str, rest: str) -> Ticks:
    return max(0, *(sum(int(getattr(c, name)) for c in chunks) for name in (least, rest)))


def chunk_times(problem: PipelineProblem, index: int, chunk: UnitCost) -> ChunkTimes:
    """A chunk's place in the schedule: its transfers take its rank's time, or overlap it."""
    sent = problem.send_forward[index], problem.send_backward[index]
    busy, overlapped = ((0, 0), sent) if problem.overlap_p2p else (sent, (0, 0))
    return ChunkTimes(
        forward=chunk.forward + busy[0],
        backward=chunk.backward + busy[1],
        forward_delay=overlapped[0],
        backward_delay=overlapped[1],
    )


def rank_memory(problem: PipelineProblem, rank: int, chunks: Sequence[UnitCost]) -> RankMemory:
    """Peak memory of one pipeline rank that holds some chunks."""
    p, v, m = problem.num_stages, problem.num_virtual, problem.num_microbatches
    activation = max(
        sum(count * chunk.saved_bytes for count, chunk in zip(live, chunks, strict=True))
        for live in peak_live_chunks(p, v, m, rank)
    )
    return RankMemory(
        static=sum(c.static_bytes for c in chunks),
        activation=activation,
        working=max(c.working_bytes for c in chunks),
    )


def memory_of_ranks(problem: PipelineProblem, boundaries: Sequence[int]) -> list[RankMemory]:
    """Peak memory of every pipeline rank of a partition."""
    chunks, p = chunks_of(problem, boundaries), problem.num_stages
    return [rank_memory(problem, rank, chunks[rank::p]) for rank in range(p)]


def fits_in_memory(problem: PipelineProblem, boundaries: Sequence[int]) -> bool:
    """Whether every rank of a partition stays within the capacity."""
    ranks = memory_of_ranks(problem, boundaries)
    return all(rank.total <= problem.capacity_bytes for rank in ranks)
