"""Every rank's part reaches rank 0; a rank that fails, dies or falls silent ends all, at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from nest_megatron.errors import NestError, UserInputError
from nest_megatron.integrations.megatron_lm.agreement import RendezvousStore, broadcast, gather
from tests.launch.stores import give_up_soon, join, on_all_ranks
from tests.patience import LONG_S

pytest.importorskip("torch", reason="torch is not installed")

WORLD = 3
#: Raises once another rank has failed.
Check = Callable[[], None]


def gathered(
    work: Callable[[int, Check], str],
    prepare: Callable[[RendezvousStore], None] = lambda _: None,
    limit_of_rank_0_s: float = LONG_S,
) -> list[object]:
    """What each rank gathers, or the error that ends it, after the ranks have shared something.

    Args:
        prepare: called with each rank's store before the ranks work.
    """

    def act(rank: int) -> object:
        store = join(rank, WORLD)
        broadcast(store, lambda _: "orders", what="orders")
        prepare(store)
        limit_s = LONG_S if rank else limit_of_rank_0_s
        return gather(store, lambda: work(rank, store.raise_failure), what="parts", limit_s=limit_s)

    return on_all_ranks(act, WORLD)


def until_told(check: Check) -> str:
    """Work that only ends when it hears of a failure."""
    ended = time.monotonic() + LONG_S
    while time.monotonic() < ended:
        check()
        time.sleep(0.05)
    return "nobody said anything"


def test_rank_0_has_all_parts_in_order() -> None:
    assert gathered(lambda rank, _: f"part {rank}") == [("part 0", "part 1", "part 2"), (), ()]


@pytest.mark.parametrize("failing", range(WORLD))
def test_a_rank_that_fails_ends_all_with_its_reason(failing: int) -> None:
    def work(rank: int, check: Check) -> str:
        if rank != failing:
            return until_told(check)
        raise UserInputError("child", value=1, limit="it died", fix="Look at its last words.")

    answers = gathered(work)
    for rank, answer in enumerate(answers):
        if rank == failing:
            assert str(answer).startswith("UserInputError: child = 1: it died")
        else:
            assert str(answer).startswith(f"NoAgreementError: rank {failing} (")
            assert "stopped: child = 1: it died" in str(answer)


def test_those_who_are_done_hear_of_a_later_failure() -> None:
    def work(rank: int, _: Check) -> str:
        if rank != 2:
            return "done"
        time.sleep(1.0)
        raise NestError("late")

    assert ["late" in str(answer) for answer in gathered(work)] == [True] * WORLD


def test_a_rank_that_falls_silent_is_given_up() -> None:
    release = threading.Event()

    def act(rank: int) -> object:
        store = join(rank, WORLD)
        broadcast(store, lambda _: "orders", what="orders")
        if rank == 2:
            store.stop_heartbeat()
            release.wait(LONG_S)
            return None
        if rank == 0:
            give_up_soon(store, present=2, heartbeat_timeout_s=1.0)
        try:
            return gather(store, lambda: "part", what="parts", limit_s=LONG_S)
        finally:
            release.set()

    answers = on_all_ranks(act, WORLD)
    assert "no heartbeat from rank 2 (" in str(answers[0])
    assert answers[1] == answers[0]


def test_a_rank_that_takes_too_long_is_given_up() -> None:
    def prepare(store: RendezvousStore) -> None:
        if store.context.rank == 0:
            give_up_soon(store, present=2)

    def work(rank: int, check: Check) -> str:
        return until_told(check) if rank == 1 else "done"

    answers = gathered(work, prepare, limit_of_rank_0_s=0.5)
    assert all("no parts from rank 1 (" in str(answer) for answer in answers)
