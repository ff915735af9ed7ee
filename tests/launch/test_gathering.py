"""Every rank's part reaches rank 0; a rank that fails, dies or falls silent ends all, at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nest_megatron.errors import NestError, UserInputError
from nest_megatron.integrations.megatron_lm.agreement import Check, broadcast, gather
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
from nest_megatron.integrations.megatron_lm.rendezvous_store import RendezvousStore, connect

pytest.importorskip("torch", reason="torch is not installed")

HERE = {"MASTER_ADDR": "localhost"}
WORLD = 3
#: Stores live as long as their processes; here, as long as the tests.
STORES: list[RendezvousStore] = []


@pytest.fixture(autouse=True)
def another_job(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test is a job of its own, so none meets the store of another or of another checkout."""
    HERE["SLURM_JOB_ID"] = f"{request.node.name} of {os.getpid()}"
    yield
    for store in STORES:
        store.stop_heartbeat()


def join(rank: int, heartbeat_timeout_s: float = 20.0) -> RendezvousStore:
    context = RankContext(
        rank=rank,
        world_size=WORLD,
        environment={**HERE},
        rendezvous_timeout_s=20.0,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )
    STORES.append(connect(context))
    return STORES[-1]


def on_all_ranks(work: Callable[[int, Check], str], limit_s: float = 20.0) -> list[object]:
    """What each rank gathers, or the error that ends it, after the ranks have shared something."""

    def act(rank: int) -> object:
        store = join(rank)
        try:
            broadcast(store, lambda _: "orders", what="orders")
            return gather(store, lambda check: work(rank, check), what="parts", limit_s=limit_s)
        except NestError as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(act, range(WORLD)))


def until_told(check: Check) -> str:
    """Work that only ends when it hears of a failure."""
    ended = time.monotonic() + 300
    while time.monotonic() < ended:
        check()
        time.sleep(0.05)
    return "nobody said anything"


def test_rank_0_has_all_parts_in_order() -> None:
    assert on_all_ranks(lambda rank, _: f"part {rank}") == [("part 0", "part 1", "part 2"), (), ()]


@pytest.mark.parametrize("failing", range(WORLD))
def test_a_rank_that_fails_ends_all_with_its_reason(failing: int) -> None:
    def work(rank: int, check: Check) -> str:
        if rank != failing:
            return until_told(check)
        raise UserInputError("child", value=1, limit="it died", fix="Look at its last words.")

    answers = on_all_ranks(work)
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

    assert ["late" in str(answer) for answer in on_all_ranks(work)] == [True] * WORLD


def test_a_rank_that_falls_silent_is_given_up() -> None:
    release = threading.Event()

    def act(rank: int) -> object:
        store = join(rank, heartbeat_timeout_s=3.0)
        broadcast(store, lambda _: "orders", what="orders")
        if rank == 2:
            store.stop_heartbeat()
            release.wait(15)
            return None
        try:
            return gather(store, lambda _: "part", what="parts", limit_s=15.0)
        except NestError as error:
            return str(error)
        finally:
            release.set()

    with ThreadPoolExecutor(WORLD) as pool:
        answers = list(pool.map(act, range(WORLD)))
    assert "no heartbeat from rank 2 (" in str(answers[0])
    assert answers[1] == answers[0]


def test_a_rank_that_takes_too_long_is_given_up() -> None:
    def work(rank: int, check: Check) -> str:
        return until_told(check) if rank == 1 else "done"

    answers = on_all_ranks(work, limit_s=1.0)
    assert all("no parts from rank 1 (" in str(answer) for answer in answers)
