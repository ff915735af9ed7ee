"""The GPUs of this host, seen without starting CUDA on them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nest_megatron.cluster.records import Accelerator, Cluster
from nest_megatron.errors import UserInputError
from nest_megatron.plain import frozen
from nest_megatron.units import format_gib

#: Drivers and frameworks disagree by a few per cent on what one device holds.
_MEMORY_TOLERANCE = 0.1


@frozen
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


@contextlib.contextmanager
def open_nvml() -> Iterator[Any]:
    """NVIDIA's management library, while it is open; ``pynvml.NVMLError`` without a driver."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def local_gpus() -> LocalGpus | None:
    """The GPUs of this host, or ``None`` where there is no NVIDIA driver.

    NVML is read, not CUDA: a CUDA context would fix settings that Megatron's arguments decide.

    Raises:
        UserInputError: if the host mixes kinds of GPU, divides one, or cannot tell them.
    """
    import pynvml

    no_driver = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    try:
        with open_nvml() as nvml:
            found = [_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        if error.value in no_driver:
            return None
        raise _bad_gpus(
            str(error), "the driver does not tell what they are (nvidia-smi says more)", "Repair it"
        ) from error
    if not found:
        return None
    names, memory, is_divided = zip(*found, strict=True)
    if any(is_divided):
        raise _bad_gpus(
            sorted(set(names)),
            "a job is planned for whole GPUs, and MIG divides them",
            "Turn MIG off (nvidia-smi -mig 0)",
        )
    if len(set(names)) > 1:
        raise _bad_gpus(sorted(set(names)), "a job is planned for equal GPUs", "Run on equal ones")
    return LocalGpus(device_name=names[0], memory_bytes=min(memory), count=len(names))


def known_gpus() -> LocalGpus | None:
    """The GPUs of this host as far as a plan can be compared with them."""
    with contextlib.suppress(UserInputError):
        return local_gpus()
    return None


def _device(nvml: Any, index: int) -> tuple[str, int, bool]:
    """Name, memory in bytes, and whether MIG divides the device."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(handle)
    try:
        is_divided = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:  # kinds of GPU that have no MIG
        is_divided = False
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return name.decode() if isinstance(name, bytes) else name, memory, is_divided


def _bad_gpus(value: object, limit: str, fix: str) -> UserInputError:
    fix = f"{fix}, or name the cluster with nest.cluster."
    return UserInputError("GPUs of this host", value, limit, fix)


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

    An NVL is a card for PCIe, too, with links between two or four.
    """
    if not is_same_product(accelerator, gpus.device_name):
        return False
    difference = abs(gpus.memory_bytes - accelerator.memory_bytes)
    return difference <= _MEMORY_TOLERANCE * accelerator.memory_bytes


def is_same_product(accelerator: Accelerator, device_name: str) -> bool:
    """Whether the driver's name of a device is that of a catalogued accelerator, of any memory."""
    words = re.split(r"[^A-Za-z0-9]+", device_name.upper())
    product, *form = accelerator.name.upper().split("-")
    return product in words and {"PCIE", "NVL"}.intersection(words) <= set(form)


def require_same_product(cluster: Cluster, device_name: str, what: str) -> None:
    """Refuse a cluster description of other GPUs than those that a program names.

    Args:
        what: the setting that names the cluster.

    Raises:
        UserInputError: naming both.
    """
    if not is_same_product(cluster.accelerator, device_name):
        raise UserInputError(
            what,
            cluster.name,
            f"its GPUs are {cluster.accelerator.name}, and the file names {device_name}",
            "Name the cluster that the file is of (`nest-megatron clusters` lists them).",
        )


def require_same_device(cluster: Cluster, gpus: LocalGpus, what: str = "nest.cluster") -> None:
    """Refuse a cluster description that is of other GPUs than a host's.

    Args:
        what: the setting that names the cluster.

    Raises:
        UserInputError: naming both.
    """
    if is_same_device(cluster.accelerator, gpus):
        return
    memory = format_gib(cluster.accelerator.memory_bytes)
    raise UserInputError(
        what,
        cluster.name,
        f"it describes {cluster.accelerator.name} ({memory}), but a host has {gpus.describe()}",
        "Name a cluster with these GPUs (`nest-megatron clusters` lists them), or a file.",
    )


def with_hosts_of(cluster: Cluster, gpus_per_host: int) -> Cluster:
    """A catalogued cluster with another number of GPUs in each node, and as many nodes a level."""
    inner = cluster.levels[0].num_devices or cluster.num_gpus
    levels = tuple(
        replace(level, num_devices=level.num_devices // inner * gpus_per_host)
        if level.num_devices is not None
        else level
        for level in cluster.levels
    )
    return replace(cluster, levels=levels, gpus_per_host=None)
