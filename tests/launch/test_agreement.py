"""One plan on all ranks, over real stores: threads stand for ranks, one process for a dying one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nest_megatron.errors import NestError, UserInputError
from nest_megatron.launchers.megatron_lm import agreement
from nest_megatron.launchers.megatron_lm.agreement import (
    Board,
    NoAgreementError,
    Place,
    confirm,
    connect,
    ports,
    share,
)
from tests.app.runs import environment

pytest.importorskip("torch", reason="torch is not installed")

HERE = {"MASTER_ADDR": "localhost"}


@pytest.fixture(autouse=True)
def another_job(request: pytest.FixtureRequest) -> None:
    """Every test is a job of its own, so none meets the store of another."""
    HERE["SLURM_JOB_ID"] = request.node.name


def place(rank: int, world_size: int = 3, **changes: Any) -> Place:
    settings: dict[str, Any] = {"environment": {**HERE}, "patience_s": 20.0, **changes}
    return Place(rank=rank, world_size=world_size, **settings)


#: Boards live as long as their processes; here, as long as the tests.
BOARDS: list[Board] = []


def join(*arguments: Any, **changes: Any) -> Board:
    BOARDS.append(connect(place(*arguments, **changes)))
    return BOARDS[-1]


def on_all_ranks(act: Callable[[int], str], world_size: int = 3) -> list[str]:
    """What each rank returns, or the error that ends it."""

    def safely(rank: int) -> str:
        try:
            return act(rank)
        except NestError as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(safely, range(world_size)))


def test_rank_0_solves_and_all_have_the_answer() -> None:
    asked: list[int] = []

    def act(rank: int) -> str:
        def solve(hosts: Callable[[], Any]) -> str:
            asked.append(rank)
            assert len(hosts()) == 3
            return "the plan"

        board = join(rank)
        answer = share(board, solve)
        confirm(board, "digest")
        return answer

    assert on_all_ranks(act) == ["the plan"] * 3
    assert asked == [0]


def test_the_error_of_rank_0_ends_all_with_its_message() -> None:
    def solve(_: object) -> str:
        raise UserInputError("nest.cluster", value="x", limit="there is none", fix="Name one.")

    started = time.monotonic()
    answers = on_all_ranks(lambda rank: share(join(rank), solve))
    assert answers[0].startswith("UserInputError: nest.cluster")
    for answer in answers[1:]:
        assert answer.startswith("NoAgreementError: rank 0 could not plan: nest.cluster")
    assert time.monotonic() - started < 15


def test_a_rank_with_other_settings_ends_all() -> None:
    def act(rank: int) -> str:
        board = join(rank)
        share(board, lambda _: "plan")
        confirm(board, "odd" if rank == 2 else "even")
        return "trains"

    answers = on_all_ranks(act)
    assert all("rank 2 has settings of digest odd" in answer for answer in answers)


def test_a_rank_that_never_comes_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "FAREWELL_S", 1.0)

    def act(rank: int) -> str:
        if rank == 2:
            return "absent"
        return share(join(rank, patience_s=2.0), lambda hosts: str(hosts()))

    answers = on_all_ranks(act)
    assert "no sign of all 3 ranks after 2 s" in answers[0]
    assert "after 2 s" in answers[1]  # of rank 0's wait, or of its own


def test_rank_0_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "SILENCE_S", 1.5)
    monkeypatch.setattr(agreement, "_BEAT_S", 60.0)
    release = threading.Event()

    def act(rank: int) -> str:
        def solve(_: object) -> str:
            release.wait(10)
            return "too late"

        try:
            return share(join(rank, 2), solve)
        finally:
            if rank:
                release.set()

    assert "silent" in on_all_ranks(act, 2)[1]


DYING = """
import os, signal, sys
from nest_megatron.launchers.megatron_lm.agreement import Place, connect, share
place = Place(rank=0, world_size=2, environment={here!r})
def solve(hosts):
    hosts()
    print("solving", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
share(connect(place), solve)
"""


def test_rank_0_killed_while_solving_ends_the_others() -> None:
    here = {**HERE, "MASTER_PORT": "29733"}
    dying = subprocess.Popen([sys.executable, "-c", DYING.format(here=here)], env=environment())
    try:
        started = time.monotonic()
        with pytest.raises(NoAgreementError, match=r"has ended|silent|did not appear"):
            share(join(1, 2, environment=here), lambda _: "never asked")
        assert time.monotonic() - started < 60
    finally:
        dying.kill()
        dying.wait()


def test_two_jobs_on_one_host_find_their_own_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both want the same ports; each takes what is free and passes over the other's store."""
    monkeypatch.setattr(agreement, "ports", lambda _: (24_007, 24_104))

    def job(name: str) -> list[str]:
        here = {**HERE, "MASTER_PORT": name}
        return on_all_ranks(
            lambda rank: share(join(rank, environment=here), lambda _: f"plan {name}")
        )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(job, ["1", "2"])) == [["plan 1"] * 3, ["plan 2"] * 3]


def test_ports_are_the_same_on_all_ranks_and_never_the_master_s() -> None:
    tried = ports(place(0))
    assert tried == ports(place(2))
    assert len(set(tried)) == len(tried) >= 15
    master = {**HERE, "MASTER_PORT": str(tried[0])}
    assert tried[0] not in ports(place(0, environment=master))
    assert ports(place(0, port=4242)) == (4242,)


def test_no_free_port_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "ports", lambda _: (24_201,))
    kept = connect(place(0))
    with pytest.raises(UserInputError, match=r"nest\.port"):
        connect(place(0))
    assert kept.read("hello") == "yes"


def test_without_an_address_it_is_said() -> None:
    with pytest.raises(UserInputError, match="MASTER_ADDR"):
        connect(place(1, environment={}))
