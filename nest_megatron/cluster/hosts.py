"""The hosts of a job: what programs print of each, and whether they are alike."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from nest_megatron.cluster.discovery import LocalGpus, local_gpus
from nest_megatron.cluster.topology import groups_of_task, unreadable
from nest_megatron.errors import UserInputError
from nest_megatron.plain import frozen
from nest_megatron.units import Seconds

#: Where Linux shows RDMA adapters, InfiniBand's and those of RoCE.
SYSFS = Path("/sys/class/infiniband")
#: Connections of ``nvidia-smi topo -m`` that do not leave a PCIe switch for the CPU.
_NEAR = ("PIX", "PXB")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@frozen
class Adapter:
    """An active port of a network adapter.

    Args:
        rate_bits_per_s: of the link, in one direction.
        link_layer: ``InfiniBand`` or ``Ethernet``; empty where it is not said.
    """

    name: str
    rate_bits_per_s: float
    link_layer: str = ""


@frozen
class GpuMatrix:
    """How the GPUs of a host are joined.

    Args:
        nvlinks: fewest NVLinks that join two of them; 0 where a pair has none, ``None`` where that
            was not seen.
        near_adapters: adapters on a PCIe switch with a GPU, which carry the traffic of GPUs.
    """

    num_gpus: int
    nvlinks: int | None
    near_adapters: tuple[str, ...]


def parse_gpu_matrix(text: str) -> GpuMatrix:
    """``nvidia-smi topo -m``.

    Raises:
        UserInputError: for a text without the matrix.
    """
    text = _ESCAPES.sub("", text)
    lines = text.splitlines()
    header = next((line for line in lines if re.match(r"\s+GPU0\b", line)), "")
    columns = header.partition("CPU Affinity")[0].split()
    legend = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", text, re.MULTILINE))
    rows = {
        words[0]: dict(zip(columns, words[1:], strict=False))
        for words in map(str.split, lines)
        if words and re.fullmatch(r"GPU\d+", words[0])
    }
    gpus = [name for name in columns if re.fullmatch(r"GPU\d+", name)]
    if not gpus or not rows:
        raise unreadable("nvidia-smi topo -m", "it has no matrix of GPUs")
    cells = [row[gpu] for gpu in gpus for name, row in rows.items() if name != gpu and gpu in row]
    links = [int(cell[2:]) if re.fullmatch(r"NV\d+", cell) else 0 for cell in cells]
    nics = [name for name in columns if name not in gpus]
    near = [nic for nic in nics if any(row.get(nic) in _NEAR for row in rows.values())]
    # the legend of topo -mp has no NVLink
    seen = any(links) or "\nLegend:" not in text or "NV#" in text
    return GpuMatrix(
        num_gpus=len(gpus),
        nvlinks=min(links, default=0) if seen else None,
        near_adapters=tuple(legend.get(nic, nic) for nic in near),
    )


def parse_gpu_list(text: str) -> tuple[str, ...]:
    """``nvidia-smi -L``: the name of each GPU.

    Raises:
        UserInputError: if MIG divides one, or none is listed.
    """
    slices = re.findall(r"^\s+(MIG \S+)\s+Device\b", text, re.MULTILINE)
    if slices:
        raise divided_gpus("nvidia-smi -L", f"{len(slices)} slices: {', '.join(sorted({*slices}))}")
    found = re.findall(r"^GPU \d+: (.+?) \(UUID: ", text, re.MULTILINE)
    if not found:
        raise unreadable("nvidia-smi -L", "it lists no GPU (GPU 0: NAME (UUID: ...))")
    return tuple(found)


def divided_gpus(what: str, slices: str) -> UserInputError:
    """The error for GPUs that MIG divides."""
    return UserInputError(
        what,
        slices,
        "these are slices of GPUs (MIG), and a job is planned for whole GPUs",
        "Turn MIG off (nvidia-smi -mig 0), or name hosts with whole GPUs (--hosts).",
    )


def parse_nccl_topology(text: str) -> tuple[tuple[Adapter, ...], GpuMatrix | None]:
    """The file that NCCL writes to ``NCCL_TOPO_DUMP_FILE``; it gives rates in Mb/s.

    Returns:
        The adapters below a PCIe switch with a GPU, or all where none is; and the GPUs of the host,
        or nothing of a process that sees one.

    Raises:
        UserInputError: for another text, or one that defines entities.
    """
    what = "NCCL topology"
    if "<!" in text.replace("<!--", ""):
        raise unreadable(what, "it defines entities or a document type, which NCCL does not")
    try:
        system = ET.fromstring(text)
    except ET.ParseError as error:
        raise unreadable(what, f"it is no XML: {error}") from error
    if system.tag != "system":
        raise unreadable(what, f"it begins with <{system.tag}>, not <system>")
    num_gpus = sum(1 for _ in system.iter("gpu"))
    near = [pci for pci in system.iterfind("cpu/pci") if pci.find(".//gpu") is not None]
    found = {each.name: each for pci in near for each in _nets(pci)}
    matrix = GpuMatrix(num_gpus=num_gpus, nvlinks=None, near_adapters=tuple(found))
    adapters = found or {each.name: each for each in _nets(system)}
    return tuple(adapters.values()), matrix if num_gpus > 1 else None


def _nets(element: ET.Element) -> Iterator[Adapter]:
    for net in element.iter("net"):
        rate = net.get("speed", "")
        if not re.fullmatch(r"\d+", rate):
            raise unreadable("NCCL topology", f"the speed of a net is {rate!r}")
        yield Adapter(name=net.get("name", ""), rate_bits_per_s=int(rate) * 1e6)


def parse_ibstat(text: str) -> tuple[Adapter, ...]:
    """``ibstat``: its active ports; a rate is in Gb/s.

    Raises:
        UserInputError: for a text without an adapter.
    """
    found: list[Adapter] = []
    adapters = re.split(r"^CA '", text, flags=re.MULTILINE)[1:]
    if not adapters:
        raise unreadable("ibstat", "it names no adapter (CA '...')")
    for adapter in adapters:
        name = adapter.partition("'")[0]
        for port in re.split(r"^\s*Port \d+:", adapter, flags=re.MULTILINE)[1:]:
            fields = dict(re.findall(r"^\s*([\w ]+?):\s*(.+?)\s*$", port, re.MULTILINE))
            found += _port(name, *(fields.get(key, "") for key in ("State", "Rate", "Link layer")))
    return tuple(found)


def adapters_of_host(root: Path = SYSFS) -> tuple[Adapter, ...]:
    """The active RDMA ports that Linux shows; nothing where there are none."""
    found: list[Adapter] = []
    for port in sorted(root.glob("*/ports/*")):
        state, rate, layer = (_line(port / name) for name in ("state", "rate", "link_layer"))
        found += _port(port.parent.parent.name, state, rate, layer)
    return tuple(found)


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _port(name: str, state: str, rate: str, layer: str) -> Iterator[Adapter]:
    """The port, if it is active and its rate can be relied on.

    Others than InfiniBand and Ethernet (EFA) state the rate of a width, not their own.
    """
    number = re.match(r"\d+(\.\d+)?", rate)
    is_active = state.upper().endswith("ACTIVE")
    if is_active and number and layer in ("InfiniBand", "Ethernet"):
        yield Adapter(name=name, rate_bits_per_s=float(number[0]) * 1e9, link_layer=layer)


#: Longest that one program may take: a fabric of thousands of ports is read in seconds.
TIMEOUT_S = 60.0
#: How long a killed program may take to end; one that waits for a broken device never does.
_END_S = 2.0


def output_of(words: Sequence[str], *, timeout_s: Seconds = TIMEOUT_S) -> str:
    """What a program prints.

    Raises:
        UserInputError: if it is not there, ends with an error, or takes too long.
    """
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise _failed(words, f"it cannot be started: {error.strerror}") from error
    try:
        printed, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise _failed(words, f"it has not ended after {timeout_s:g} s") from error
    finally:
        if process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
    if process.returncode:
        lines = (errors.strip() or printed.strip()).splitlines()
        last = f": {lines[-1].strip()}" if lines else ""
        raise _failed(words, f"it ended with code {process.returncode}{last}")
    return printed


def _failed(words: Sequence[str], limit: str) -> UserInputError:
    return UserInputError(
        words[0],
        " ".join(words),
        limit,
        "Run it by hand, or give its saved output with --read FILE.",
    )


_Found = TypeVar("_Found")
#: ``nvidia-smi`` answers in a second; longer while a driver without persistence mode starts.
_MATRIX_S = 20.0
#: Memory of one kind of GPU differs by as much between drivers.
_SAME_MEMORY = 0.1


@frozen
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
    matrix, unseen_matrix = (None, "")
    if gpus is not None:
        matrix, unseen_matrix = _seen(
            lambda: parse_gpu_matrix(output_of(["nvidia-smi", "topo", "-m"], timeout_s=_MATRIX_S))
        )
    return Host(
        name=name or os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        gpus=gpus,
        nvlinks=None if matrix is None else matrix.nvlinks,
        adapters=() if gpus is None else gpu_adapters(adapters_of_host(), matrix, gpus.count),
        groups=groups_of_task(os.environ),
        unseen=tuple(filter(None, (unseen, unseen_matrix))),
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
    others; storage has adapters, too, and where these cannot be distinguished nothing was seen.
    """
    near = [each for each in adapters if matrix and each.name in matrix.near_adapters]
    if near:
        return tuple(near)
    kind_of = attrgetter("rate_bits_per_s", "link_layer")
    kinds = Counter(map(kind_of, adapters))
    if not kinds:
        return ()
    usual, count = kinds.most_common(1)[0]
    if num_gpus % count and count % num_gpus:
        return ()
    return tuple(each for each in adapters if kind_of(each) == usual)


def kinds(hosts: Sequence[Host]) -> list[tuple[LocalGpus, list[str]]]:
    """The kinds of GPUs with their hosts, by how many of these there are, most first."""
    found: list[tuple[LocalGpus, list[str]]] = []
    for host in hosts:
        if host.gpus is not None:
            mine = host.gpus
            for gpus, names in found:
                differing_bytes = abs(gpus.memory_bytes - mine.memory_bytes)
                same_memory = differing_bytes <= _SAME_MEMORY * gpus.memory_bytes
                same_kind = (gpus.device_name, gpus.count) == (mine.device_name, mine.count)
                if same_kind and same_memory:
                    names.append(host.name)
                    break
            else:
                found.append((mine, [host.name]))
    return sorted(found, key=lambda kind: -len(kind[1]))


def describe_kinds(found: Sequence[tuple[LocalGpus, Sequence[str]]]) -> str:
    """For messages: ``2 hosts have 8 x NVIDIA H100 ... (a1, a2); 1 host has ...``."""
    return "; ".join(
        f"{len(names)} {'host has' if len(names) == 1 else 'hosts have'} {gpus.describe()} "
        f"({shown_names(names)})"
        for gpus, names in found
    )


def shown_names(names: Sequence[str]) -> str:
    """The first four names of a list.

    >>> shown_names(["a", "b", "c", "d", "e", "f"])
    'a, b, c, d and 2 more'
    """
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
