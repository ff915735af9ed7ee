"""The event simulator: invariants of any schedule, known closed forms, memory of micro batches."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_megatron.cost_model.schedule import (
    ChunkTimes,
    Op,
    num_warmup,
    pass_at,
    peak_live_chunks,
    place_of,
    simulate,
)

shapes = st.one_of(
    st.tuples(st.integers(1, 6), st.just(1), st.integers(1, 12)),
    st.tuples(st.integers(2, 5), st.integers(2, 4), st.integers(1, 4)).map(
        lambda shape: (shape[0], shape[1], shape[0] * shape[2])
    ),
)


def rank_order_of_work(p: int, v: int, m: int, rank: int) -> list[Op]:
    """All passes of one pipeline rank."""
    return [pass_at(p, v, m, rank, place) for place in range(2 * m * v)]


def random_chunks(count: int, seed: int) -> list[ChunkTimes]:
    rng = random.Random(seed)
    return [
        ChunkTimes(
            forward=rng.randint(1, 9),
            backward=rng.randint(1, 18),
            forward_delay=rng.randint(0, 3),
            backward_delay=rng.randint(0, 3),
        )
        for _ in range(count)
    ]


@given(shape=shapes, rank=st.integers(0, 5))
def test_every_rank_does_every_pass_once(shape: tuple[int, int, int], rank: int) -> None:
    p, v, m = shape
    order = rank_order_of_work(p, v, m, rank % p)
    expected = {
        Op(forward, virtual * p + rank % p, batch)
        for forward in (True, False)
        for virtual in range(v)
        for batch in range(m)
    }
    assert len(order) == len(expected) == 2 * v * m
    assert set(order) == expected


@given(shape=shapes, seed=st.integers(0, 1000))
def test_no_pass_starts_before_its_input(shape: tuple[int, int, int], seed: int) -> None:
    p, v, m = shape
    chunks = random_chunks(p * v, seed)
    timeline = simulate(p, v, m, chunks, [0] * p)
    end = {timed.op: timed.end for rank in timeline for timed in rank}
    for rank in timeline:
        for earlier, later in pairwise(rank):
            assert later.start >= earlier.end
        for timed in rank:
            op = timed.op
            if op.is_forward and op.chunk:
                source = Op(True, op.chunk - 1, op.microbatch)
                assert timed.start >= end[source] + chunks[op.chunk - 1].forward_delay
            elif not op.is_forward and op.chunk < p * v - 1:
                source = Op(False, op.chunk + 1, op.microbatch)
                assert timed.start >= end[source] + chunks[op.chunk + 1].backward_delay
            elif not op.is_forward:
                assert timed.start >= end[Op(True, op.chunk, op.microbatch)]


@pytest.mark.parametrize(("p", "v", "m"), [(1, 1, 7), (4, 1, 4), (4, 1, 32), (8, 2, 16), (4, 5, 8)])
def test_equal_chunks_take_the_textbook_time(p: int, v: int, m: int) -> None:
    """``(m + (p - 1) / v)`` times one rank's work (Narayanan et al. 2021, section 2.2)."""
    forward, backward = 10, 20
    timeline = simulate(
        p, v, m, [ChunkTimes(forward=forward, backward=backward)] * (p * v), [0] * p
    )
    assert max(rank[-1].end for rank in timeline) == (m * v + p - 1) * (forward + backward)


def test_the_textbook_sum_is_wrong_for_a_slow_first_stage() -> None:
    """``sum t_i + (m - 1) max t_i`` overestimates: the first stage's warm-up hides its excess."""
    chunks = [ChunkTimes(forward=120, backward=240)] + [ChunkTimes(forward=100, backward=200)] * 7
    timeline = simulate(8, 1, 8, chunks, [0] * 8)
    simulated = max(rank[-1].end for rank in timeline)
    textbook = sum(c.forward + c.backward for c in chunks) + 7 * 360
    assert 1.08 < textbook / simulated < 1.10


@given(shape=shapes, seed=st.integers(0, 100), chunk=st.integers(0, 100))
def test_more_work_never_ends_sooner(shape: tuple[int, int, int], seed: int, chunk: int) -> None:
    p, v, m = shape
    chunks = random_chunks(p * v, seed)
    slower = list(chunks)
    index = chunk % (p * v)
    slower[index] = ChunkTimes(forward=chunks[index].forward + 5, backward=chunks[index].backward)
    slower[index] = ChunkTimes(
        forward=slower[index].forward,
        backward=slower[index].backward,
        forward_delay=chunks[index].forward_delay,
        backward_delay=chunks[index].backward_delay,
    )
    before = max(rank[-1].end for rank in simulate(p, v, m, chunks, [0] * p))
    assert max(rank[-1].end for rank in simulate(p, v, m, slower, [0] * p)) >= before


@given(p=st.integers(1, 8), m=st.integers(1, 20))
def test_plain_schedule_keeps_one_micro_batch_more_each_stage_up(p: int, m: int) -> None:
    for rank in range(p):
        assert peak_live_chunks(p, 1, m, rank) == ((min(m, p - rank),),)


@given(shape=shapes, seed=st.integers(0, 1000))
def test_the_peak_is_that_of_all_passes(shape: tuple[int, int, int], seed: int) -> None:
    """Whatever the chunks keep, the few vectors hold the peak of the whole order of work."""
    p, v, m = shape
    rng = random.Random(seed)
    for rank in range(p):
        kept = [rng.randint(0, 9) for _ in range(v)]
        peak = held = 0
        for op in rank_order_of_work(p, v, m, rank):
            held += kept[op.chunk // p] if op.is_forward else -kept[op.chunk // p]
            peak = max(peak, held)
        vectors = peak_live_chunks(p, v, m, rank)
        assert peak == max(sum(a * b for a, b in zip(live, kept, strict=True)) for live in vectors)
        if m > 2 * p:
            assert vectors == peak_live_chunks(p, v, m + p, rank)


@given(shape=shapes, rank=st.integers(0, 5))
def test_places_and_passes_are_inverse(shape: tuple[int, int, int], rank: int) -> None:
    p, v, m = shape
    for place, op in enumerate(rank_order_of_work(p, v, m, rank % p)):
        assert place_of(p, v, m, op) == place


def test_interleaved_schedule_keeps_its_warm_up() -> None:
    for rank in range(4):
        total = max(sum(live) for live in peak_live_chunks(4, 3, 16, rank))
        assert total == num_warmup(4, 3, 16, rank) + 1
