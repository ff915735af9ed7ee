"""One plan on all ranks, over real stores: threads stand for ranks, one process for a dying one."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.launch import read_launch, read_words
from nest_megatron.errors import NestError, UserInputError, exit_code_of
from nest_megatron.integrations.megatron_lm import agreement
from nest_megatron.integrations.megatron_lm.agreement import (
    RendezvousStore,
    broadcast,
    require_equal,
)
from nest_megatron.integrations.megatron_lm.ranks import LaunchedJob
from nest_megatron.integrations.megatron_lm.rendezvous import NoAgreementError
from nest_megatron.integrations.recorder import Recorder
from tests.cli.runs import environment
from tests.launch.stores import (
    HERE,
    STORES,
    context,
    free_ports,
    give_up_soon,
    join,
    on_all_ranks,
    shorten,
)
from tests.patience import LONG_S, wait_until

torch = pytest.importorskip("torch", reason="torch is not installed")


def test_rank_0_solves_and_all_have_the_answer() -> None:
    asked: list[int] = []

    def act(rank: int) -> str:
        def solve(hosts: Callable[[], Any]) -> str:
            asked.append(rank)
            assert len(hosts()) == 3
            return "the plan"

        store = join(rank)
        answer = broadcast(store, solve)
        require_equal(store, {"--lr": "0.1"})
        return answer

    assert on_all_ranks(act) == ["the plan"] * 3
    assert asked == [0]


def test_all_ranks_end_with_the_exit_code_of_rank_0() -> None:
    """A search that time ended is bad input on no rank."""

    class EndedError(NestError):
        exit_code = 3

    def solve(hosts: Callable[[], Any]) -> str:
        raise EndedError("time is over")

    def act(rank: int) -> str:
        try:
            return broadcast(join(rank), solve)
        except NestError as error:
            return f"{error.exit_code} {error}"

    first, *others = on_all_ranks(act)
    assert first == "3 time is over"
    assert all(text.startswith("3 ") and "time is over" in text for text in others)


@pytest.mark.parametrize(
    ("error", "code"),
    [(ZeroDivisionError("x"), 70), (OSError("full"), 2), (SystemExit(5), 5), (SystemExit("no"), 1)],
)
def test_all_ranks_end_as_the_one_with_a_fault(error: BaseException, code: int) -> None:
    def solve(hosts: Callable[[], Any]) -> str:
        raise error

    def act(rank: int) -> str:
        try:
            return broadcast(join(rank), solve)
        except (ArithmeticError, NestError, OSError, SystemExit) as found:
            return str(exit_code_of(found))

    assert on_all_ranks(act) == [str(code)] * 3


def test_the_error_of_rank_0_ends_all_with_its_message() -> None:
    def solve(_: object) -> str:
        raise UserInputError("nest.cluster", value="x", limit="there is none", fix="Name one.")

    answers = on_all_ranks(lambda rank: broadcast(join(rank), solve))
    assert answers[0].startswith("UserInputError: nest.cluster")
    for answer in answers[1:]:
        assert answer.startswith("NoAgreementError: rank 0 (")
        assert "stopped: nest.cluster = 'x': there is none" in answer


def test_a_rank_with_other_settings_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_OTHERS_S", LONG_S)

    def act(rank: int) -> str:
        store = join(rank)
        broadcast(store, lambda _: "plan")
        lr = "0.01" if rank == 2 else "0.1"
        require_equal(store, {"--lr": lr, "--seed": "1", **({"--new": "x"} if rank == 1 else {})})
        return "trains"

    answers = on_all_ranks(act)
    here = socket.gethostname()
    for answer in answers:
        assert f"--lr: 0.1 on ranks 0-1 ({here}); 0.01 on rank 2 ({here})" in answer
        assert f"--new: not set on ranks 0, 2 ({here}); x on rank 1 ({here})" in answer
        assert "--seed" not in answer


def test_a_rank_that_never_comes_is_named() -> None:
    def act(rank: int) -> str:
        if rank == 2:
            return "absent"
        store = join(rank)
        if rank == 0:
            give_up_soon(store, present=2, rendezvous_timeout_s=0.5)
        require_equal(store, {"--lr": "0.1"})
        return "trains"

    for answer in on_all_ranks(act)[:2]:
        assert "1 of 3 ranks have not arrived: rank 2. " in answer
        assert f"Arrived: ranks 0-1 ({socket.gethostname()})." in answer
        assert "without +nest" in answer


def test_rank_0_that_falls_silent_is_given_up() -> None:
    release = threading.Event()

    def act(rank: int) -> str:
        def solve(_: object) -> str:
            release.wait(LONG_S)
            return "too late"

        store = join(rank, 2)
        if rank == 0:
            store.stop_heartbeat()
        else:
            shorten(store, heartbeat_timeout_s=1.0)
        try:
            return broadcast(store, solve)
        finally:
            if rank:
                release.set()

    assert "no heartbeat from rank 0 (" in on_all_ranks(act, 2)[1]


def test_a_rank_that_falls_silent_after_it_came_is_given_up() -> None:
    def act(rank: int) -> str:
        store = join(rank)
        require_equal(store, {"--lr": "0.1"}, what="command")
        if rank == 1:
            store.stop_heartbeat()
            return "stopped"
        if rank == 0:
            give_up_soon(store, present=2, heartbeat_timeout_s=1.0)
        require_equal(store, {"--lr": "0.1"}, what="arguments")
        return "trains"

    answers = on_all_ranks(act)
    assert answers[1] == "stopped"
    for answer in (answers[0], answers[2]):
        assert "no heartbeat from rank 1 (" in answer


DYING = """
import os, signal, sys
from nest_megatron.integrations.megatron_lm.agreement import RendezvousStore, broadcast
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
context = RankContext(rank=0, world_size=2, environment={here!r})
def solve(hosts):
    hosts()
    print("solving", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
broadcast(RendezvousStore(context), solve)
"""


def test_rank_0_killed_while_solving_ends_the_others() -> None:
    here = {**HERE, "MASTER_PORT": str(free_ports(1)[0])}
    dying = subprocess.Popen([sys.executable, "-c", DYING.format(here=here)], env=environment())
    try:
        with pytest.raises(NoAgreementError, match=r"has ended|no heartbeat|did not appear"):
            broadcast(join(1, 2, environment=here), lambda _: "never asked")
    finally:
        dying.kill()
        dying.wait()


STOPPED = """
import time
from nest_megatron.integrations.megatron_lm.agreement import RendezvousStore
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
store = RendezvousStore(RankContext(rank=0, world_size=2, environment={here!r}))
print("hosts", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("joined", [True, False])
def test_a_host_of_the_store_that_is_stopped_is_given_up(joined: bool) -> None:
    """Requests to it block in C without end; the deadline is the caller's own."""
    here = {**HERE, "MASTER_PORT": str(free_ports(1)[0])}
    code = STOPPED.format(here=here)
    stopped = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "hosts\n"
        store = join(1, 2, environment=here) if joined else None
        stopped.send_signal(signal.SIGSTOP)
        os.waitpid(stopped.pid, os.WUNTRACED)
        if store is None:
            with pytest.raises(NoAgreementError, match=r"did not appear .* rank 0 is stopped"):
                join(1, 2, environment=here, rendezvous_timeout_s=8.0)
        else:
            shorten(store, heartbeat_timeout_s=1.0)
            store._limit_s = 1.0
            with pytest.raises(NoAgreementError, match="has not answered for 1 s"):
                require_equal(store, {"--lr": "1"})
    finally:
        stopped.kill()
        stopped.communicate()


def test_a_rank_that_waits_calls_the_store_once_for_each_entry() -> None:
    """Thousands of ranks wait while rank 0 plans, and the store serves them all."""
    calls: list[str] = []

    def counted(store: RendezvousStore) -> RendezvousStore:
        original = store._answer

        def answer(*arguments: Any) -> Any:
            calls.append("call")
            return original(*arguments)

        store._answer = answer  # type: ignore[method-assign]
        return store

    def act(rank: int) -> str:
        def solve(_: object) -> str:
            wait_until(lambda: store._entry > 2)
            return "the plan"

        store = join(rank, 2)
        if rank == 0:
            shorten(store, heartbeat_timeout_s=0.4)  # it sends them more often
            return broadcast(store, solve)
        store.stop_heartbeat()  # it would send none, but for the time before it waits
        answer = broadcast(counted(store), lambda _: "never asked")
        assert len(calls) == store._entry
        assert store._entry > 2, "rank 0 sent heartbeats meanwhile"
        return answer

    assert on_all_ranks(act, 2) == ["the plan"] * 2


def test_rank_0_may_come_later_than_a_heartbeat() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    agent = torch.distributed.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    here = {**HERE, "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
    waited, number = threading.Event(), itertools.count()

    def act(rank: int) -> str:
        if rank == 0:
            waited.wait(LONG_S)
        store = join(rank, 2, environment=here)
        wait_for = store.wait_for

        def waiting(key: str, limit_s: float) -> str | None:
            if next(number) < 2:  # the time of a heartbeat is over, and rank 0 is not there
                return wait_for(key, 0.2)
            waited.set()
            return wait_for(key, limit_s)

        store.wait_for = waiting  # type: ignore[method-assign]
        return broadcast(store, lambda _: "the plan")

    assert on_all_ranks(act, 2) == ["the plan"] * 2
    del agent


def test_two_jobs_on_one_host_find_their_own_rank_0() -> None:
    """Each has a key of its own, even in one store."""

    def job(name: str) -> list[str]:
        here = {**HERE, "SLURM_STEP_ID": name}
        return on_all_ranks(
            lambda rank: broadcast(join(rank, environment=here), lambda _: f"plan {name}")
        )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(job, ["1", "2"])) == [["plan 1"] * 3, ["plan 2"] * 3]


MEETING = """
import sys
import torch
from nest_megatron.integrations.megatron_lm.agreement import RendezvousStore, broadcast
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
rank = int(sys.argv[1])
context = RankContext(rank=rank, world_size=2, environment={here!r})
store = RendezvousStore(context)
assert broadcast(store, lambda _: "the plan") == "the plan"
torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
total = torch.ones(1)
torch.distributed.all_reduce(total)
assert total == 2
torch.distributed.destroy_process_group()  # its threads abort a process that ends without
"""


def test_torch_finds_the_store_at_the_same_port_later() -> None:
    here = {**HERE, "MASTER_PORT": str(free_ports(1)[0])}
    code = MEETING.format(here=here)
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, rank], env={**environment(), **here})
        for rank in "10"
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]


def test_an_agent_that_joined_late_counts_fewer_restarts() -> None:
    """Only where one store serves several attempts does the count tell them apart."""
    keys = {
        (own, count): context(0, environment={**HERE, **agents_store(own, count)}).key
        for own in ("False", "True")
        for count in ("0", "1")
    }
    assert keys["False", "0"] == keys["False", "1"]
    assert keys["True", "0"] != keys["True", "1"]


def agents_store(is_there: str, restarts: str) -> dict[str, str]:
    names = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
    return dict(zip(names, (is_there, restarts), strict=True))


@pytest.mark.parametrize("name", ["MASTER_PORT", "nest.port"])
def test_no_free_port_is_said(name: str) -> None:
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        port = other.getsockname()[1]
        words: dict[str, Any] = {"environment": {**HERE, "MASTER_PORT": str(port)}}
        if name == "nest.port":
            words = {"port": port}
        with pytest.raises(UserInputError, match=rf"^{name} = {port}: it is not free on rank 0"):
            RendezvousStore(context(0, **words))


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_without_an_address_it_is_said(name: str) -> None:
    there = {key: text for key, text in HERE.items() if key != name}
    with pytest.raises(UserInputError, match=name):
        RendezvousStore(context(1, environment=there))


def test_rank_0_may_search_longer_than_ranks_wait_for_each_other() -> None:
    def solve(hosts: Callable[[], Any]) -> str:
        hosts()
        time.sleep(1.0)
        return "the plan"

    def act(rank: int) -> str:
        store = join(rank, planning_s=LONG_S)
        if rank:
            shorten(store, rendezvous_timeout_s=0.2)
        return broadcast(store, solve)

    assert on_all_ranks(act) == ["the plan"] * 3


def test_a_rank_is_alive_between_its_plan_and_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Bridge's script has work of its own there, such as data that rank 0 prepares."""
    command = read_words(["+nest=auto"])
    monkeypatch.setattr(Recorder, "begin", lambda self, *_, **__: broadcast(self._store, str))

    def act(rank: int) -> bool:
        args = Namespace(rank=rank, world_size=2)
        job = LaunchedJob(words=command, launch=read_launch(command), script="", argv=(), args=args)
        job.store, job.decision = join(rank, 2), Mock()
        with job.ending_together():
            broadcast(job.store, str)
        if rank == 0:
            shorten(job.store, heartbeat_timeout_s=0.4)  # it sends them more often
            entry = job.store._entry
            wait_until(lambda: job.store._entry > entry + 1)
        with job.ending_together():
            job.begin_record()
        return job.store._stopped.is_set()

    assert on_all_ranks(act, 2) == [True, True]


@pytest.mark.parametrize(
    ("words", "planning_s"),
    [
        ((), 60.0),
        (("nest.search.max_seconds=5", "nest.search.max_seconds=6e2"), 600.0),
        (("nest.search.max_seconds=soon",), 60.0),
    ],
)
def test_the_command_says_how_long_rank_0_may_plan(
    words: tuple[str, ...], planning_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **HERE})
    command = read_words(["+nest=auto", "nest.rendezvous_timeout_s=30", *words])
    args = Namespace(rank=0, world_size=2)
    job = LaunchedJob(words=command, launch=read_launch(command), script="", argv=(), args=args)
    job.join(600.0)
    assert job.store is not None
    STORES.append(job.store)
    found = job.store.context
    assert (found.rendezvous_timeout_s, found.planning_s) == (30.0, planning_s)
    assert compose(()).search.max_seconds == 60.0
