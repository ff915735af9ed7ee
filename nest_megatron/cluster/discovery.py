"""The GPUs of this host, seen without starting CUDA on them."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import dataclass

from nest_megatron.cluster.records import Accelerator, Cluster
from nest_megatron.errors import UserInputError
from nest_megatron.units import format_gib

#: Drivers and frameworks disagree by a few per cent on what one device holds.
_MEMORY_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGpus:
    """What the driver says of this host: equal devices, their name and memory in bytes."""

    device_name: str
    memory_bytes: int
    count: int

    def describe(self) -> str:
        """For messages.

        >>> LocalGpus(device_name="NVIDIA H200", memory_bytes=150 << 30, count=8).describe()
        '8 x NVIDIA H200 (150.0 GiB)'
        """
        return f"{self.count} x {self.device_name} ({format_gib(self.memory_bytes)})"


def local_gpus() -> LocalGpus | None:
    """The GPUs of this host, or ``None`` where there is no NVIDIA driver.

    NVML is asked, not CUDA: a CUDA context would fix settings that Megatron's arguments decide.

    Raises:
        UserInputError: if the host mixes kinds of GPU.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        given = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        names = [name.decode() if isinstance(name, bytes) else name for name in given]
        memory = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    if not names:
        return None
    if len(set(names)) > 1:
        limit, fix = "a job is planned for equal GPUs", "Name the cluster with nest.cluster."
        raise UserInputError("GPUs of this host", value=sorted(set(names)), limit=limit, fix=fix)
    return LocalGpus(device_name=names[0], memory_bytes=min(memory), count=len(names))


def is_same_device(accelerator: Accelerator, gpus: LocalGpus) -> bool:
    """Whether the driver's name and memory are those of a catalogued accelerator.

    >>> from types import SimpleNamespace
    >>> h100 = SimpleNamespace(name="H100-SXM-80GB", memory_bytes=84932558848)
    >>> is_same_device(h100, LocalGpus(device_name="NVIDIA H100 80GB HBM3",
    ...                                memory_bytes=85520809984, count=8))
    True
    >>> is_same_device(h100, LocalGpus(device_name="NVIDIA H100 PCIe",
    ...                                memory_bytes=85520809984, count=8))
    False
    """
    words = re.split(r"[^A-Za-z0-9]+", gpus.device_name.upper())
    product, *form = accelerator.name.upper().split("-")
    if product not in words or ("PCIE" in words and "PCIE" not in form):
        return False
    difference = abs(gpus.memory_bytes - accelerator.memory_bytes)
    return difference <= _MEMORY_TOLERANCE * accelerator.memory_bytes


def require_same_device(cluster: Cluster, gpus: LocalGpus) -> None:
    """Refuse a cluster description that is of other GPUs than this host's.

    Raises:
        UserInputError: naming both.
    """
    if is_same_device(cluster.accelerator, gpus):
        return
    memory = format_gib(cluster.accelerator.memory_bytes)
    raise UserInputError(
        "nest.cluster",
        value=cluster.name,
        limit=f"it describes {cluster.accelerator.name} ({memory}), but this host has "
        f"{gpus.describe()}",
        fix="Name a cluster with these GPUs (`nest-megatron clusters` lists them), or a file.",
    )


def with_hosts_of(cluster: Cluster, gpus_per_host: int) -> Cluster:
    """A catalogued cluster with another number of GPUs in each node, and as many nodes a level."""
    inner = cluster.levels[0].num_devices or cluster.num_gpus
    levels = tuple(
        dataclasses.replace(level, num_devices=level.num_devices // inner * gpus_per_host)
        if level.num_devices is not None
        else level
        for level in cluster.levels
    )
    return dataclasses.replace(cluster, levels=levels, gpus_per_host=None)
