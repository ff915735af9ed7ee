"""The recorded schedules are complete, causal, and hold what 1F1B promises."""

from __future__ import annotations

import pytest

from tests.contract.megatron_schedule import Work, recorded_order

CASES = [
    (pp, vpp, m)
    for pp in (1, 2, 3, 4, 8)
    for vpp in (1, 2, 3)
    for m in (1, 2, 4, 6, 8, 16)
    if (vpp == 1 or (pp > 1 and m % pp == 0)) and not (pp == 1 and m > 4)
]


def _in_flight(order: tuple[Work, ...]) -> int:
    kept = most = 0
    for direction, _, _ in order:
        kept += 1 if direction == "F" else -1
        most = max(most, kept)
    return most


@pytest.mark.parametrize(("pp", "vpp", "m"), CASES)
def test_every_piece_of_work_is_done_once(pp: int, vpp: int, m: int) -> None:
    for rank in range(pp):
        order = recorded_order(pp, vpp, m, rank)
        for direction in "FB":
            done = sorted((c, b) for d, c, b in order if d == direction)
            assert done == [(c, b) for c in range(vpp) for b in range(m)]
        for chunk in range(vpp):
            for batch in range(m):
                assert order.index(("F", chunk, batch)) < order.index(("B", chunk, batch))


@pytest.mark.parametrize(("pp", "vpp", "m"), CASES)
def test_the_ranks_do_not_deadlock(pp: int, vpp: int, m: int) -> None:
    """Running every rank's list in order, each step's input arrives before it is needed."""
    orders = [list(recorded_order(pp, vpp, m, rank)) for rank in range(pp)]
    last = pp * vpp - 1
    done: set[Work] = set()
    while any(orders):
        ready = []
        for rank, order in enumerate(orders):
            if not order:
                continue
            direction, chunk, batch = order[0]
            stage = chunk * pp + rank
            if direction == "F":
                needed: Work | None = ("F", stage - 1, batch) if stage else None
            else:
                needed = ("B", stage + 1, batch) if stage < last else ("F", stage, batch)
            if needed is None or needed in done:
                ready.append((rank, (direction, stage, batch)))
        assert ready, "every rank waits for another"
        for rank, work in ready:
            orders[rank].pop(0)
            done.add(work)


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 2), (4, 8), (8, 16)])
def test_plain_schedule_keeps_as_many_as_stages_follow(pp: int, m: int) -> None:
    for rank in range(pp):
        assert _in_flight(recorded_order(pp, 1, m, rank)) == min(m, pp - rank)


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (8, 2, 16)])
def test_interleaved_schedule_keeps_its_warm_up(pp: int, vpp: int, m: int) -> None:
    for rank in range(pp):
        warm_up = min(vpp * m, 2 * (pp - rank - 1) + (vpp - 1) * pp)
        most = _in_flight(recorded_order(pp, vpp, m, rank))
        assert most == min(vpp * m, warm_up + 1)


def test_impossible_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="should range"):
        recorded_order(4, 2, 2, 0)
    with pytest.raises(RuntimeError, match="remainder"):
        recorded_order(4, 2, 6, 0)
