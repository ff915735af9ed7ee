"""Calls that the ranks of a large job make to the store where they meet.

Run from the project's root: ``python benchmarks/rendezvous.py``.

A simulation: rank 0 and one other rank run the code of a job, each against a store in memory that
counts calls, in a job of 64, 1,024 and 16,384 ranks. The ranks between are counted as the other
one; what they would have written is in the store. Times are real, so a phase is watched for 15
seconds, after two in which everything starts.

Phases: rank 0 plans and all others wait for it; rank 0 waits for a rank that is late, as do the
others; every rank works (it measures layers), and looks now and then whether another has failed.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from nest_megatron.errors import NestError
from nest_megatron.integrations.megatron_lm.agreement import (
    RendezvousStore,
    broadcast,
    gather,
    propagating_errors,
)
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext

SIZES = (64, 1_024, 16_384)
START_S, WATCHED_S = 2.0, 15.0


class Memory:
    """Values of all ranks, with the rules of ``torch.distributed.TCPStore``."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()


class Client:
    """One rank's connection, which counts its calls."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.calls = 0
        self.timeout_s = 300.0

    def set_timeout(self, timeout: timedelta) -> None:
        """Local, as in torch."""
        self.timeout_s = timeout.total_seconds()

    def set(self, key: str, value: str) -> None:
        self._change(lambda values: values.update({key: value.encode()}))

    def append(self, key: str, value: str) -> None:
        self._change(lambda values: values.update({key: values.get(key, b"") + value.encode()}))

    def add(self, key: str, step: int) -> int:
        self._change(lambda values: values.update({key: b"%d" % (int(values.get(key, 0)) + step)}))
        return int(self.memory.values[key])

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        def change(values: dict[str, bytes]) -> None:
            if values.get(key, b"").decode() == expected:
                values[key] = value.encode()

        self._change(change)
        return self.memory.values[key]

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return all(key in self.memory.values for key in keys)

    def get(self, key: str) -> bytes:
        self.calls += 1
        with self.memory.changed:
            self.memory.changed.wait_for(lambda: key in self.memory.values, self.timeout_s)
        return self.memory.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls += 1
        return [self.memory.values[key] for key in keys]

    def _change(self, change: Callable[[dict[str, bytes]], Any]) -> None:
        self.calls += 1
        with self.memory.changed:
            change(self.memory.values)
            self.memory.changed.notify_all()


class Simulated(RendezvousStore):
    """A rank of the simulation."""

    def __init__(self, context: RankContext, client: Client) -> None:
        self._client = client
        super().__init__(context)

    def _connect(self) -> Client:
        return self._client


class EndedError(NestError):
    """The phase was watched for long enough."""


def ranks(world_size: int) -> tuple[list[RendezvousStore], list[Client]]:
    """Rank 0 and the last rank of a job whose other ranks have arrived."""
    memory = Memory()
    for rank in range(1, world_size - 1):
        Client(memory).set(f"heartbeat/{rank}", "0")
        Client(memory).append("roll", json.dumps([rank, "host"]) + "\n")
        Client(memory).add("roll/count", 1)
    clients = [Client(memory), Client(memory)]
    stores: list[RendezvousStore] = []
    for rank, client in zip((0, world_size - 1), clients, strict=True):
        context = RankContext(rank=rank, world_size=world_size, environment={})
        stores.append(Simulated(context, client))
    return stores, clients


def plans(store: RendezvousStore, ended: threading.Event) -> None:
    """Rank 0 plans, and the others wait."""

    def solve(_: object) -> str:
        ended.wait()
        raise EndedError("planned")

    broadcast(store, solve)


def waits(store: RendezvousStore, ended: threading.Event) -> None:
    """Rank 0 waits for all, and some rank is late; this one is not."""
    world_size, others = store.context.world_size, range(1, store.context.world_size - 2)
    if store.context.rank == 0:
        for rank in others:
            store.call("append", "parts", json.dumps([rank, ""]) + "\n")
        store.count("parts/count", len(others))
        assert len(others) == world_size - 3

    def look() -> bool:
        if ended.is_set():
            raise EndedError("waited")
        return False

    with propagating_errors(store):
        store.leave("parts", "")
        if store.context.rank:
            store.receive("the others")
        store.collect("parts", enough=look)


def works(store: RendezvousStore, ended: threading.Event) -> None:
    """Every rank works, and looks for failures as one that waits for a child process does."""

    def work() -> str:
        while not ended.wait(store.interval_s):
            store.raise_failure()
        raise EndedError("worked")

    gather(store, work, what="timings", limit_s=300.0)


def calls_per_s(phase: Callable[[RendezvousStore, threading.Event], None], size: int) -> float:
    """Of all ranks of a job in one of its phases."""
    stores, clients = ranks(size)
    ended = threading.Event()

    def act(store: RendezvousStore) -> None:
        try:
            phase(store, ended)
        except NestError as error:
            if not any(word in str(error) for word in ("planned", "waited", "worked")):
                raise

    with ThreadPoolExecutor(len(stores)) as pool:
        running = [pool.submit(act, store) for store in stores]
        time.sleep(START_S)
        before = [client.calls for client in clients]
        time.sleep(WATCHED_S)
        first, other = (client.calls - calls for client, calls in zip(clients, before, strict=True))
        ended.set()
    for done in running:
        done.result()
    for store in stores:
        store.stop_heartbeat()
    return (first + (size - 1) * other) / WATCHED_S


def main() -> None:
    """All phases of all sizes, at the same time: they wait nearly all of it."""
    phases = {"rank 0 plans": plans, "a rank is late": waits, "all ranks work": works}
    runs = list(itertools.product(phases, SIZES))
    with ThreadPoolExecutor(len(runs)) as pool:
        found = pool.map(lambda run: calls_per_s(phases[run[0]], run[1]), runs)
        rates = dict(zip(runs, found, strict=True))
    print("store calls/s    " + "".join(f"{size:>10,} ranks" for size in SIZES))
    for name in phases:
        print(f"{name:17}" + "".join(f"{rates[name, size]:>16,.0f}" for size in SIZES))


if __name__ == "__main__":
    main()
