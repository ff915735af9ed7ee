"""The end of a schedule and its critical path: compiled and plain agree, and it has no gap."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron.cost_model import critical_path
from nest_megatron.cost_model.critical_path import CriticalPath, summarize, summarize_reference
from nest_megatron.cost_model.schedule import ChunkTimes, Op, simulate, source_of

#: Pipeline ranks, chunks on each, micro batches.
Shape = tuple[int, int, int]
shapes = st.one_of(
    st.tuples(st.integers(1, 7), st.just(1), st.integers(1, 40)),
    st.tuples(st.integers(2, 6), st.integers(2, 4), st.integers(1, 20)).map(
        lambda shape: (shape[0], shape[1], shape[0] * shape[2])
    ),
)
#: The largest time of a pass, and how a transfer beside the work compares with it.
scales = st.sampled_from([3, 10, 1000, 10**12])
transfers = st.sampled_from([0, 0.3, 1, 5])


def job(
    shape: Shape, scale: int, transfer: float, seed: int
) -> tuple[list[ChunkTimes], list[int], list[int]]:
    """Chunks, gathers, reductions: all random, or nearly equal chunks, whose ranks drift apart."""
    rng, (p, v, _) = random.Random(seed), shape
    usual, uneven = [rng.randint(0, scale) for _ in range(2)], rng.choice([0.0, 0.2, 1.0])

    def passes(way: int) -> int:
        if rng.random() < uneven:
            return rng.randint(0, scale)
        return usual[way] + (rng.randint(0, 2) if rng.random() < 0.3 else 0)

    chunks = [
        ChunkTimes(
            forward=passes(0),
            backward=passes(1),
            forward_delay=rng.randint(0, round(transfer * scale)),
            backward_delay=rng.randint(0, round(transfer * scale)),
        )
        for _ in range(p * v)
    ]
    gathers, reductions = ([rng.randint(0, 5 * scale) for _ in range(p)] for _ in range(2))
    return chunks, gathers, reductions


def length(
    path: CriticalPath,
    chunks: Sequence[ChunkTimes],
    gathers: Sequence[int],
    reductions: Sequence[int],
) -> int:
    passes = sum(path.on_rank(chunks, rank, len(gathers)) for rank in range(len(gathers)))
    return gathers[path.first_rank] + passes + path.sent(chunks) + reductions[path.last_rank]


@settings(max_examples=300, deadline=None)
@given(shape=shapes, scale=scales, transfer=transfers, seed=st.integers(0, 10**6))
def test_compiled_and_plain_agree(shape: Shape, scale: int, transfer: float, seed: int) -> None:
    pytest.importorskip("nest_megatron.cost_model._schedule", reason="the kernel is not built")
    chunks, gathers, reductions = job(shape, scale, transfer, seed)
    found = summarize(*shape, chunks, gathers, reductions)
    assert found == summarize_reference(*shape, chunks, gathers, reductions)
    finish = max(end + reduction for end, reduction in zip(found.ends, reductions, strict=True))
    assert length(found, chunks, gathers, reductions) == finish


@pytest.mark.parametrize("shape", [(5, 1, 700), (4, 3, 480), (3, 2, 600)], ids=str)
@pytest.mark.parametrize("transfer", [0, 5])
def test_long_schedules_agree(shape: Shape, transfer: float) -> None:
    """Long enough for ranks that drift apart, and for rounds of several periods."""
    for seed in range(4):
        chunks, gathers, reductions = job(shape, 1000, transfer, seed)
        found = summarize(*shape, chunks, gathers, reductions)
        assert found == summarize_reference(*shape, chunks, gathers, reductions), seed


@settings(deadline=None)
@given(shape=shapes, transfer=transfers, seed=st.integers(0, 10**6))
def test_plain_path_is_a_chain_of_the_timeline(shape: Shape, transfer: float, seed: int) -> None:
    """Read off all passes with their times, without what ``summarize_reference`` kept of them."""
    chunks, gathers, reductions = job(shape, 1000, transfer, seed)
    found = summarize_reference(*shape, chunks, gathers, reductions)
    timeline = simulate(*shape, chunks, gathers)
    assert found.ends == tuple(passes[-1].end for passes in timeline)
    start = {timed.op: timed.start for passes in timeline for timed in passes}
    end = {timed.op: timed.end for passes in timeline for timed in passes}
    before = {b.op: a.op for passes in timeline for a, b in pairwise(passes)}
    op: Op | None = timeline[found.last_rank][-1].op
    seen = [0] * (2 * len(chunks))
    first = -1
    while op is not None:
        seen[op.chunk + (0 if op.is_forward else len(chunks))] += 1
        first, free = op.chunk % shape[0], before.get(op)
        free_at = end[free] if free else gathers[first]
        op = free if start[op] == free_at else source_of(op, len(chunks))
    assert tuple(seen) == found.forward + found.backward
    assert first == found.first_rank


@pytest.mark.parametrize(("p", "m"), [(1, 7), (4, 1), (4, 4), (4, 32)])
def test_equal_chunks_stay_on_the_last_rank(p: int, m: int) -> None:
    """Filled by one forward pass of each rank before it, drained by one backward pass of each."""
    chunks = [ChunkTimes(forward=10, backward=20)] * p
    path = summarize(p, 1, m, chunks, [0] * p, [0] * p)
    assert [path.on_rank(chunks, rank, p) for rank in range(p)] == [30] * (p - 1) + [30 * m]


def test_neither_memory_nor_length_grows_with_micro_batches() -> None:
    """8,192 micro batches in 32 stages of 4 chunks: two million passes."""
    pytest.importorskip("nest_megatron.cost_model._schedule", reason="the kernel is not built")
    peaks = []
    for m in (512, 8192, 2**20):
        chunks, gathers, reductions = job((32, 4, m), 10**6, 0.3, seed=1)
        tracemalloc.start()
        found = summarize(32, 4, m, chunks, gathers, reductions)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        finish = max(end + reduction for end, reduction in zip(found.ends, reductions, strict=True))
        assert length(found, chunks, gathers, reductions) == finish
    assert max(peaks) < 4 * 2**20


def test_plain_form_keeps_a_byte_of_a_pass() -> None:
    chunks, gathers, reductions = job((8, 1, 4000), 1000, 0, seed=1)
    tracemalloc.start()
    summarize_reference(8, 1, 4000, chunks, gathers, reductions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * (2 * 8 * 4000)


def test_without_the_kernel_the_plain_form_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, gathers, reductions = job((4, 2, 8), 1000, 0.3, seed=1)
    expected = summarize(4, 2, 8, chunks, gathers, reductions)
    monkeypatch.setattr(critical_path, "has_kernel", lambda: False)
    assert summarize(4, 2, 8, chunks, gathers, reductions) == expected


def test_what_leaves_int64_is_left_to_the_plain_form() -> None:
    chunks = [ChunkTimes(forward=2**60, backward=2**61)] * 2
    found = summarize(2, 1, 3, chunks, [0, 0], [0, 0])
    assert max(found.ends) == 4 * (2**60 + 2**61)
