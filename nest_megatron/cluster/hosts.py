"""The hosts of a job: what each says of itself, and whether they are alike."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nest_megatron.cluster.discovery import LocalGpus, local_gpus
from nest_megatron.cluster.host_outputs import (
    Adapter,
    GpuMatrix,
    adapters_of_host,
    parse_gpu_matrix,
)
from nest_megatron.cluster.programs import output_of
from nest_megatron.cluster.topology import groups_of_task
from nest_megatron.errors import UserInputError

_Found = TypeVar("_Found")
#: ``nvidia-smi`` answers in a second; longer while a driver without persistence mode starts.
_MATRIX_S = 20.0
#: Memory of one kind of GPU differs by as much between drivers.
_SAME_MEMORY = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a host says of itself.

    Args:
        num_gpus, counted_by: where the driver does not say what they are, but another program how
            many, and which.
        nvlinks: fewest that join two of its GPUs; ``None`` where it was not seen.
        adapters: active ports that carry the traffic of GPUs; none where that was not seen.
        groups: switches above it, innermost first.
        unseen: why something was not seen.
    """

    name: str
    gpus: LocalGpus | None = None
    nvlinks: int | None = None
    adapters: tuple[Adapter, ...] = ()
    groups: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    num_gpus: int | None = None
    counted_by: str = ""

    @property
    def gpu_count(self) -> int | None:
        """How many GPUs it has, where any program says so."""
        return self.num_gpus if self.gpus is None else self.gpus.count

    def adapter_bytes_per_s(self, num_gpus: int) -> float | None:
        """What one GPU can send to other hosts while all do the same.

        Args:
            num_gpus: of the host, where no program says it.
        """
        if not self.adapters:
            return None
        total = sum(each.rate_bits_per_s for each in self.adapters)
        return total / 8.0 / (self.gpu_count or num_gpus)


def this_host(name: str | None = None) -> Host:
    """What can be seen on this host without starting CUDA: by NVML, ``nvidia-smi`` and Linux.

    Args:
        name: as others call it; that of Slurm, or its own, if not given.
    """
    gpus, unseen = _seen(local_gpus)
    matrix, told = (None, "")
    if gpus is not None:
        matrix, told = _seen(
            lambda: parse_gpu_matrix(output_of(["nvidia-smi", "topo", "-m"], timeout_s=_MATRIX_S))
        )
    return Host(
        name=name or os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        gpus=gpus,
        nvlinks=None if matrix is None else matrix.nvlinks,
        adapters=() if gpus is None else gpu_adapters(adapters_of_host(), matrix, gpus.count),
        groups=groups_of_task(os.environ),
        unseen=tuple(filter(None, (unseen, told))),
    )


def _seen(look: Callable[[], _Found]) -> tuple[_Found | None, str]:
    try:
        return look(), ""
    except UserInputError as error:
        return None, f"{error.what}: {error.value}: {error.limit}"


def gpu_adapters(
    adapters: Sequence[Adapter], matrix: GpuMatrix | None, num_gpus: int
) -> tuple[Adapter, ...]:
    """The adapters that carry the traffic of GPUs: those on a PCIe switch with one.

    Where none is, those of the rate and layer that most have, if each serves as many GPUs as the
    others; storage has adapters, too, and where these cannot be told apart nothing was seen.
    """
    near = [each for each in adapters if matrix and each.name in matrix.near_adapters]
    if near:
        return tuple(near)
    kinds = Counter((each.rate_bits_per_s, each.link_layer) for each in adapters)
    if not kinds:
        return ()
    usual, count = kinds.most_common(1)[0]
    if num_gpus % count and count % num_gpus:
        return ()
    return tuple(each for each in adapters if (each.rate_bits_per_s, each.link_layer) == usual)


def kinds(hosts: Sequence[Host]) -> list[tuple[LocalGpus, list[str]]]:
    """The kinds of GPUs with their hosts, by how many of these there are, most first."""
    found: list[tuple[LocalGpus, list[str]]] = []
    for host in hosts:
        if host.gpus is not None:
            names = next((names for gpus, names in found if _is_kind(gpus, host.gpus)), None)
            if names is None:
                found.append((host.gpus, [host.name]))
            else:
                names.append(host.name)
    return sorted(found, key=lambda kind: -len(kind[1]))


def _is_kind(one: LocalGpus, other: LocalGpus) -> bool:
    same_memory = abs(one.memory_bytes - other.memory_bytes) <= _SAME_MEMORY * one.memory_bytes
    return (one.device_name, one.count) == (other.device_name, other.count) and same_memory


def describe_kinds(found: Sequence[tuple[LocalGpus, Sequence[str]]]) -> str:
    """For messages: ``2 hosts have 8 x NVIDIA H100 ... (a1, a2); 1 host has ...``."""
    return "; ".join(
        f"{len(names)} {'host has' if len(names) == 1 else 'hosts have'} {gpus.describe()} "
        f"({shown_names(names)})"
        for gpus, names in found
    )


def shown_names(names: Sequence[str], most: int = 4) -> str:
    """The first names of a list.

    >>> shown_names(["a", "b", "c", "d", "e", "f"])
    'a, b, c, d and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
