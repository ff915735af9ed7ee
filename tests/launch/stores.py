"""Ranks as threads of this process, which meet in real stores.

A busy machine keeps a thread from the cores for seconds. So what a test waits for has long limits,
and a limit that is to pass is shortened on a rank that waits for nothing else any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nest_megatron.errors import NestError
from nest_megatron.integrations.megatron_lm.agreement import RendezvousStore
from nest_megatron.integrations.megatron_lm.rendezvous import RankContext
from tests.patience import LONG_S, wait_until


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that nobody listens on, below those from which Linux connects."""
    found: list[int] = []
    for port in range(20_000 + os.getpid() % 4_000, 32_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            found.append(port)
        if len(found) == count:
            break
    return tuple(found)


#: What says where rank 0 is, and which job this is (``tests/launch/conftest.py``).
HERE = {
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": str(free_ports(1)[0]),
    "SLURM_JOB_ID": str(os.getpid()),
}
#: Stores live as long as their processes; here, as long as the tests.
STORES: list[RendezvousStore] = []


def context(rank: int, world_size: int = 3, **changes: Any) -> RankContext:
    settings: dict[str, Any] = {
        "environment": {**HERE},
        "rendezvous_timeout_s": LONG_S,
        "heartbeat_timeout_s": LONG_S / 10,
        **changes,
    }
    return RankContext(rank=rank, world_size=world_size, **settings)


def join(*arguments: Any, **changes: Any) -> RendezvousStore:
    STORES.append(RendezvousStore(context(*arguments, **changes)))
    return STORES[-1]


def shorten(store: RendezvousStore, **limits: float) -> None:
    """Give a rank that has joined other limits; its requests to the store keep the long one."""
    store.context = dataclasses.replace(store.context, **limits)


def on_all_ranks(act: Callable[[int], Any], world_size: int = 3) -> list[Any]:
    """What each rank returns, or the error that ends it."""

    def safely(rank: int) -> Any:
        try:
            return act(rank)
        except NestError as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(safely, range(world_size)))


def give_up_soon(store: RendezvousStore, present: int, **limits: float) -> None:
    """Have rank 0 wait only so long for the parts that are missing once others have brought theirs.

    Args:
        present: how many ranks bring their part, rank 0 included.
        limits: that count from then on.
    """
    collect = store.collect

    def collected(what: str, *arguments: Any, **options: Any) -> dict[int, str]:
        wait_until(lambda: store.num_parts(what) >= present)
        shorten(store, **limits)
        return collect(what, *arguments, **options)

    store.collect = collected  # type: ignore[method-assign]
