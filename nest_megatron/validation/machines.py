"""The machine that a row of measurements was taken on, from the few words that the row has for it.

Whatever the row leaves open is assumed by GPU generation, and each assumption is handed back as a
short text. What link technologies reach of their rate is fitted (``calibration/links.yaml``).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from nest_megatron.catalogue_files import catalogue_entry
from nest_megatron.cluster.records import Cluster, CollectiveKind, NetworkLevel
from nest_megatron.plain import Source, from_plain, frozen
from nest_megatron.validation.machine_words import (
    GBIT,
    Adapters,
    accelerator,
    accelerator_name,
    adapters,
    stated_node_size,
)
from nest_megatron.validation.rows import RefusedRowError

_SOURCE = "calibration/links.yaml: "


@frozen
class LinkTechnology:
    """One technology: the fields of ``NetworkLevel`` that do not depend on the machine."""

    name: str
    latency_s: float
    startup_s: float
    ramp: float
    efficiency: Mapping[CollectiveKind, float]
    reduction_efficiency: float | None = None
    tree_efficiency: float | None = None
    chain_share: float = 1.0
    max_rails: int | None = None
    ring_shares: tuple[float, ...] = ()
    source: str = ""

    def level(self, name: str, num_devices: int | None, bandwidth: float) -> NetworkLevel:
        """A network level of this technology; bandwidth of one device in one direction."""
        figures = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        figures |= {"name": name, "source": _SOURCE + self.name}
        return NetworkLevel(num_devices=num_devices, bandwidth_bytes_per_s=bandwidth, **figures)


#: Keys of an entry of links.yaml that are fields of ``LinkTechnology``; the others tell of the fit.
LINK_FIELDS = tuple(
    f.name for f in dataclasses.fields(LinkTechnology) if f.name not in ("name", "source")
)


@functools.cache
def links() -> Mapping[str, LinkTechnology]:
    """All technologies of ``hydra_configs/calibration/links.yaml``, by name."""
    more = Source(is_foreign=True)  # entries tell of the fit, too
    return {
        name: from_plain(LinkTechnology, {"name": name, **entry}, source=more)
        for name, entry in catalogue_entry("calibration", "links").items()
    }


def link_of_level(level: NetworkLevel) -> str:
    """Technology of a level that ``LinkTechnology.level`` made."""
    return level.source.removeprefix(_SOURCE)


#: GPUs in the NVLink domain of an NVL72 rack.
RACK_GPUS = 72


@frozen
class MachineMatch:
    """A cluster, and what had to be assumed of it."""

    cluster: Cluster
    assumptions: tuple[str, ...] = ()


class Generation(NamedTuple):
    """What a machine of one GPU generation usually has.

    Args:
        link: technology inside a node (links.yaml), and what one GPU sends in one direction.
        domain: GPUs that this technology joins.
        nics: adapters of one node, and the rate of each in Gb/s.

    Source: truth/hardware.csv, columns intra_gbps_per_dir, gpus_per_nvlink_domain, typical_nic.
    """

    link: str
    bytes_per_s: float
    domain: int
    nics: int
    nic_gbit_per_s: float

    @property
    def is_rack(self) -> bool:
        """Whether the GPUs of many hosts share one NVLink domain."""
        return self.link == "nvlink5_rack"

    @property
    def host(self) -> int:
        """GPUs that one operating system sees."""
        return 4 if self.is_rack else self.domain


#: By the first word of the catalogue's file name; PCIe parts apart. An NVL72 rack has 72 GPUs, of
#: which jobs take 64 (hydra_configs/cluster/gb200_nvl72.yaml).
_GENERATIONS = {
    "v100": Generation("nvlink2", 150e9, 8, 4, 100),
    "a100": Generation("nvlink3", 300e9, 8, 8, 200),
    "h100": Generation("nvlink4", 450e9, 8, 8, 400),
    "a800": Generation("nvlink3", 200e9, 8, 8, 200),
    "h20": Generation("nvlink4", 450e9, 8, 8, 400),
    "h800": Generation("nvlink4", 200e9, 8, 8, 400),
    "h200": Generation("nvlink4", 450e9, 8, 8, 400),
    "gh200": Generation("nvlink4", 450e9, 1, 1, 400),
    "b200": Generation("nvlink5", 900e9, 8, 8, 400),
    "b300": Generation("nvlink5", 900e9, 8, 8, 800),
    "gb200": Generation("nvlink5_rack", 900e9, 64, 64, 400),
    "gb300": Generation("nvlink5_rack", 900e9, 64, 64, 800),
    "l40s": Generation("pcie", 31e9, 8, 1, 200),
    "mi300x": Generation("xgmi", 448e9, 8, 8, 400),  # 7 links of 64 GB/s, AMD's data sheet
    "mi325x": Generation("xgmi", 448e9, 8, 8, 400),
    "mi350x": Generation("xgmi", 537.6e9, 8, 8, 400),  # as MI355X
    "mi355x": Generation("xgmi", 537.6e9, 8, 8, 400),  # 7 links of 76.8 GB/s
    "a100_pcie": Generation("pcie", 31e9, 8, 2, 200),
    "h100_pcie": Generation("pcie", 63e9, 8, 2, 400),
    "h200_nvl": Generation("pcie", 63e9, 8, 2, 400),
}
#: What adapters carry that several GPUs share, of their rate: the rings through them leave by one
#: GPU's PCIe path. From vTrain's runs on nodes of 8 A100 with 4 HDR adapters, tensor groups of 16.
SHARED_ADAPTER = 0.7
#: Technologies whose shares in links.yaml were measured on shared adapters.
_MEASURED_SHARED = frozenset({"omni_path"})
#: NVLink bridges: their technology, what one carries, and how many GPUs it joins.
_BRIDGES = {
    "a100_pcie": ("nvlink3", 300e9, 2),
    "h100_pcie": ("nvlink4", 300e9, 2),
    "h200_nvl": ("nvlink4", 450e9, 4),
}


@functools.cache
def machine_of(
    gpu: str,
    num_gpus: int,
    gpus_per_node: int | None,
    network: str,
    *,
    flash_attention: bool = True,
    inside: int = 1,
) -> MachineMatch:
    """The machine of a row, one object for all rows that ran on it.

    Args:
        gpu: as the table has it (``A100-80GB``).
        num_gpus: devices of the job.
        gpus_per_node: as the table has it; an NVL72 rack has 4 (its trays).
        network: free text (``NVSwitch + 4x200 Gb/s HDR per node``).
        flash_attention: the framework runs fused attention where the GPU has it.
        inside: GPUs of a group that a job would place in one node, if it takes no whole ones.

    Raises:
        RefusedRowError: for an unknown GPU, or a job that takes no whole nodes.
    """
    name, assumptions = accelerator_name(gpu)
    levels, assumed = network_levels(name, gpus_per_node, network)
    size = levels[0].num_devices or num_gpus
    generation, device = _usual(name), accelerator(name)
    if num_gpus > size and num_gpus % size:
        # nodes that all hold the same part of a job which takes no whole nodes, groups undivided
        most = RACK_GPUS if generation.is_rack else size
        fitting = largest_part(num_gpus, most)
        if inside <= most and num_gpus % inside == 0:
            fitting = inside * largest_part(num_gpus // inside, most // inside)
        if fitting == 1 or len(levels) > 2:
            raise RefusedRowError("a job of no whole nodes", f"{num_gpus} GPUs on nodes of {most}")
        levels = (replace(levels[0], num_devices=fitting), *levels[1:])
        assumed = (*assumed, f"{fitting} of a node's {most} GPUs used")
    node = levels[0].num_devices or num_gpus
    fused = flash_attention and device.flash_attention
    cluster = Cluster(
        name=f"{name} x {num_gpus}",
        num_gpus=num_gpus,
        accelerator=replace(device, flash_attention=fused),
        levels=levels,
        gpus_per_host=min(gpus_per_node or generation.host, node),
        description=network,
    )
    if num_gpus <= node:
        assumed = tuple(text for text in assumed if not text.startswith("between nodes"))
    return MachineMatch(cluster=cluster, assumptions=(*assumptions, *assumed))


def network_levels(
    accelerator_file: str, gpus_per_node: int | None, network: str, *, sharing: int | None = None
) -> tuple[tuple[NetworkLevel, ...], tuple[str, ...]]:
    """Levels from the node outwards, and what had to be assumed.

    Args:
        accelerator_file: name of the catalogue's file.
        sharing: GPUs of a node that use its adapters, where that is not all of them.
    """
    usual = _usual(accelerator_file)
    node = usual.domain if usual.is_rack else gpus_per_node or usual.domain
    texts: tuple[str, ...] = ()
    if usual.is_rack:
        texts = (f"{node} GPUs of a rack form one node",)
    elif gpus_per_node is None:
        texts = (f"nodes of {node} GPUs",)
    inner = _inside(accelerator_file, usual, node, network)
    full_node = stated_node_size(network) or node
    said = adapters(network)
    if usual.is_rack and said.count and gpus_per_node:  # those of one host
        said = replace(said, count=said.count * (node // gpus_per_node))
    outer, outer_texts = _between(usual, full_node, min(sharing or node, full_node), said)
    return (*inner, outer), (*texts, *outer_texts)


def _usual(accelerator_file: str) -> Generation:
    first, _, rest = accelerator_file.partition("_")
    return _GENERATIONS.get(f"{first}_{rest.partition('_')[0]}") or _GENERATIONS[first]


def _inside(
    accelerator_file: str, usual: Generation, node: int, network: str
) -> tuple[NetworkLevel, ...]:
    words = network.lower()
    if usual.link == "nvlink2":
        # Four GPUs are fully joined, eight form the hybrid cube mesh of DGX-1, DGX-2 has a switch.
        name = "nvlink2_mesh" if 4 < node <= 8 else "nvlink2"
        return (links()[name].level("node", node, usual.bytes_per_s),)
    if re.search(r"\bpcie\b", words) and not re.search(r"nvlink|nvswitch", words):
        rate = 31e9 if "a100" in accelerator_file else 63e9
        return (links()["pcie"].level("node", node, min(rate, usual.bytes_per_s)),)
    inner = links()[usual.link].level("node", node, usual.bytes_per_s)
    bridge = _BRIDGES.get("_".join(accelerator_file.split("_")[:2]))
    if bridge is None or node == 1:
        return (inner,)
    technology, rate, joined = bridge
    joined = min(joined, node)
    # Pairs are bought apart; a card of four is sold with its bridge.
    if node % joined == 0 and (joined > 2 or re.search(r"nvlink|bridge|pair", words)):
        group = links()[technology].level("pair" if joined == 2 else "bridge", joined, rate)
        group = replace(group, reduction_efficiency=None)
        return (group, inner) if node > joined else (group,)
    return (inner,)


def _between(
    usual: Generation, full_node: int, sharing: int, said: Adapters
) -> tuple[NetworkLevel, tuple[str, ...]]:
    technology = said.technology or "infiniband"
    if usual.is_rack and technology == "infiniband":
        technology = "infiniband_rack"
    rate, texts, shared = _rate_of_one(usual, full_node, sharing, said)
    if shared and technology not in _MEASURED_SHARED:
        rate *= SHARED_ADAPTER
        texts = (*texts, f"between nodes: shared adapters carry {SHARED_ADAPTER:g} of their rate")
    level = links()[technology].level("fabric", None, rate)
    if said.technology is None:
        texts = (*texts, "between nodes: InfiniBand assumed")
    if said.reduces:
        efficiency = links()[technology].tree_efficiency
        level = replace(level, reduction_efficiency=efficiency)
    return level, texts


def _rate_of_one(
    usual: Generation, full_node: int, sharing: int, said: Adapters
) -> tuple[float, tuple[str, ...], bool]:
    """What one GPU can send out while ``sharing`` of its node do, and if they share adapters."""
    texts: tuple[str, ...] = ()
    rate = said.bytes_per_s
    if said.per_gpu and rate is not None:
        return rate, texts, False
    if said.node_bytes_per_s is not None:
        return said.node_bytes_per_s / full_node, texts, False
    if rate is None:
        rate = usual.nic_gbit_per_s * GBIT
        texts = (f"between nodes: adapters of {usual.nic_gbit_per_s:g} Gb/s assumed",)
    count = said.count
    if count is None:
        count = max(1, usual.nics * full_node // usual.domain)
        texts = (*texts, f"between nodes: {count} adapters per node assumed")
    return rate * min(1.0, count / sharing), texts, count < sharing


def largest_part(number: int, most: int) -> int:
    """The largest divisor that is not above ``most``.

    >>> largest_part(128, 72), largest_part(144, 72)
    (64, 72)
    """
    return max(part for part in range(1, most + 1) if number % part == 0)
