"""The processes that profile together: who they are, what they tell each other, their network."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from nest_megatron.errors import NestError, ProfileError
from nest_megatron.megatron_core.stage import Where
from nest_megatron.profile.network import NetworkProfile

#: Longest wait for the other ranks, which may still be timing their last block.
_PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that torchrun started; alone without it."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def ranks() -> Ranks:
    """Who this process is, by torchrun's variables."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = (
        int(os.environ.get(name, default)) for name, default in zip(names, "0101", strict=True)
    )
    return Ranks(*found)


def meet(where: Where, message: Any, *, to_measure: bool = True) -> tuple[list[Any], list[str]]:
    """Join the real process group; every rank's message, and the host of each.

    Args:
        to_measure: the network comes next: the group is of the backend that is measured.

    Raises:
        ProfileError: if the ranks do not come together.
    """
    import torch.distributed as dist

    backend = "nccl" if where is Where.GPU and to_measure else "gloo"
    with _naming_failures(backend):
        dist.init_process_group(backend, timeout=_PATIENCE)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (message, socket.gethostname()))
    return [words for words, _ in found], [host for _, host in found]


def measure_network(hosts: list[str], max_seconds: float) -> NetworkProfile | None:
    """Time collectives between the ranks; the profile is on rank 0 alone.

    Raises:
        ProfileError: if a collective fails, and with it all that follow.
    """
    import torch.distributed as dist

    from nest_megatron.profile.collectives import measure

    with _naming_failures(dist.get_backend()):
        return measure(dist.group.WORLD, hosts, max_seconds)


@contextlib.contextmanager
def _naming_failures(backend: str) -> Iterator[None]:
    try:
        yield
    except NestError:
        raise
    except (RuntimeError, ValueError) as error:  # as torch.distributed has them
        limit = f"it failed: {next(iter(str(error).splitlines()), type(error).__name__)}"
        fix = "What was timed is stored. NCCL_DEBUG=INFO says more; --no-collectives times layers."
        raise ProfileError("process group", backend, limit, fix) from error


def leave() -> None:
    """Leave the process group."""
    import torch.distributed as dist

    dist.destroy_process_group()
