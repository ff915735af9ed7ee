"""From a table's words about GPUs and networks to accelerators and link technologies."""

from __future__ import annotations

import re
from functools import cache

from nest_megatron.catalogue_files import catalogue_entry
from nest_megatron.cluster.records import Accelerator, accelerator_from_mapping
from nest_megatron.plain import frozen
from nest_megatron.units import GIB
from nest_megatron.validation.rows import RefusedRowError

#: Family as printed, then the catalogue's files by form or memory; the first is the usual part.
#: Where its key is a memory, a name without one is assumed to have it.
_PARTS: dict[str, dict[str, str]] = {
    "GB300": {"": "gb300_288gb"},
    "GB200": {"": "gb200_186gb"},
    "GH200": {"": "gh200_96gb"},
    "B300": {"": "b300_sxm_288gb"},
    "B200": {"": "b200_sxm_180gb"},
    "H200": {"": "h200_sxm_141gb", "NVL": "h200_nvl_141gb"},
    "H20": {"": "h20_sxm_96gb"},
    "H800": {"": "h800_sxm_80gb"},
    "H100": {"": "h100_sxm_80gb", "96": "h100_sxm_96gb", "PCIE": "h100_pcie_80gb"},
    "A100": {"80": "a100_sxm_80gb", "40": "a100_sxm_40gb", "PCIE": "a100_pcie_80gb"},
    "A800": {"80": "a800_sxm_80gb"},
    "V100": {"32": "v100_sxm_32gb", "16": "v100_sxm_16gb"},
    "L40": {"": "l40s_48gb"},
    "MI355": {"": "mi355x_288gb"},
    "MI350": {"": "mi350x_288gb"},
    "MI325": {"": "mi325x_256gb"},
    "MI300": {"": "mi300x_192gb"},
}


def accelerator_name(gpu: str) -> tuple[str, tuple[str, ...]]:
    """Catalogue name of a GPU, and what had to be assumed.

    >>> accelerator_name("A100-40GB")
    ('a100_sxm_40gb', ())
    >>> accelerator_name("V100")
    ('v100_sxm_32gb', ('the memory of V100 is not stated; 32 GB assumed',))
    """
    if not gpu.strip():
        raise RefusedRowError("GPU not stated")
    text = re.sub(r"[^A-Z0-9]+", " ", gpu.upper())
    families = [family for family in _PARTS if re.search(rf"\b{family}(?!\d)", text)]
    if not families and "BLACKWELL" in text:
        return _blackwell(gpu)
    if len(families) != 1 or " OR " in text:
        raise RefusedRowError("unknown GPU", f"{gpu!r} names no one part of the catalogue")
    parts, rest = _PARTS[families[0]], text.partition(families[0])[2]
    named = [word for word in parts if word and re.search(rf"\b{word}(?!\d)", rest)]
    if named:
        return parts["PCIE" if "PCIE" in named else named[0]], ()
    word, usual = next(iter(parts.items()))
    assumed = f"the memory of {families[0]} is not stated; {word} GB assumed"
    return usual, ((assumed,) if word else ())


_BLACKWELL = ("b200_sxm_180gb", "gb200_186gb", "b300_sxm_288gb", "gb300_288gb")


def _blackwell(gpu: str) -> tuple[str, tuple[str, ...]]:
    """The one Blackwell whose memory a text states.

    >>> _blackwell("Blackwell ~184 GiB")[0]
    'gb200_186gb'
    """
    printed = re.search(r"([\d.]+)\s*GiB", gpu)
    size = float(printed[1]) * GIB if printed else 0.0
    near = [name for name in _BLACKWELL if abs(accelerator(name).memory_bytes - size) < GIB]
    if len(near) != 1:
        raise RefusedRowError("unknown GPU", f"{gpu!r} names no one part of the catalogue")
    return near[0], (f"{gpu} is {near[0]} by its memory",)


@cache
def accelerator(name: str) -> Accelerator:
    """An accelerator of the catalogue, by its file's name."""
    return accelerator_from_mapping(catalogue_entry("accelerator", name))


GBIT = 1e9 / 8
#: Words, the technology of links.yaml, and the rate of one adapter in bytes per second if it is
#: fixed by the name. The first that occurs counts.
_TECHNOLOGIES: tuple[tuple[str, str, float | None], ...] = (
    (r"omni-?path|\bopa\b", "omni_path", 100 * GBIT),
    (r"tcpx", "tcpxo", None),
    (r"\befa\b", "efa", None),
    (r"slingshot", "slingshot", 200 * GBIT),
    (r"\bxdr\b", "infiniband", 800 * GBIT),
    (r"\bndr\b", "infiniband", 400 * GBIT),
    (r"\bhdr\b", "infiniband", 200 * GBIT),
    (r"\bedr\b", "infiniband", 100 * GBIT),
    (r"selene", "infiniband", 200 * GBIT),
    (r"\broce", "roce", None),
    (r"infiniband|\bib\b|rdma|cx-?\d|connectx", "infiniband", None),
    (r"ethernet|\btcp\b", "ethernet", None),
)
#: A number and its unit: a capital B is bytes, all else is bits.
_RATE = r"(\d+(?:\.\d+)?)\s*-?\s*(GB/s|GBps|[Gg][Bb]it/s|Gb/s|[Gg]bps|[Gg]b/sec|G(?:bE)?\b)"
_COUNTED = re.compile(rf"(\d+)\s*[xX]\s*(?:[A-Za-z][\w-]*\s+)*?{_RATE}")
_BARE = re.compile(_RATE)
_LINKS = re.compile(
    r"(?i)\b(\d+)\s*x?\s*(?:links?\b|nics?\b|hcas?\b|omni-?path|opa\b|edr\b|hdr\b|ndr\b|xdr\b)"
)
_NODE_SIZE = re.compile(r"(\d+)-gpu node")
#: Links inside a node, and what an adapter is for where it does not carry the job's traffic.
_NOT_BETWEEN = re.compile(r"(?i)nvlink|nvswitch|xgmi|pcie|^(?!.*comput).*(?:storage|management)")


#: Adapters of a node of systems that are known by name: NVIDIA's DGX SuperPOD of A100, and IDRIS's
#: Jean Zay (truth/hardware.csv, notes of V100-SXM2-16GB).
_SYSTEMS = {"selene": 8, "superpod": 8, "jean zay": 4}


@frozen
class Adapters:
    """What the text says of the adapters between nodes.

    Args:
        technology: name in links.yaml, or ``None`` if it is not said.
        count: adapters of one node, or ``None`` if it is not said.
        per_gpu: each GPU has one.
        bytes_per_s: rate of one adapter in one direction, or ``None``.
        node_bytes_per_s: rate of all adapters of a node, where only that is said.
        reduces: the switches form sums (SHARP).
    """

    technology: str | None = None
    count: int | None = None
    per_gpu: bool = False
    bytes_per_s: float | None = None
    node_bytes_per_s: float | None = None
    reduces: bool = False


def adapters(text: str) -> Adapters:
    """Read a description of a network, as the ``network`` column of a table holds it.

    >>> adapters("NVSwitch + 4x200 Gb/s HDR per node").count
    4
    >>> adapters("NVLink + 400 Gb/s RDMA per GPU").per_gpu
    True
    >>> adapters("1600 Gbps node-node interconnect (RoCE)").node_bytes_per_s
    200000000000.0
    """
    words = text.lower()
    named = [(name, rate) for pattern, name, rate in _TECHNOLOGIES if re.search(pattern, words)]
    technology, named_rate = named[0] if named else (None, None)
    outside = _between_nodes(text.replace("×", "x"))
    bare = _BARE.search(outside)
    rate = float(bare[1]) * (1e9 if bare[2].startswith("GB") else GBIT) if bare else None
    count = _count(outside, words)
    per_gpu = re.search(r"(?i)(per|/|each) ?gpu", outside) is not None and count in (None, 1)
    of_node = re.search(r"(?i)node|aggregate|total", outside) is not None
    is_node_rate = of_node and rate is not None and count is None and not per_gpu
    return Adapters(
        technology=technology,
        count=None if per_gpu else count,
        per_gpu=per_gpu,
        bytes_per_s=None if is_node_rate else rate or named_rate,
        node_bytes_per_s=rate if is_node_rate else None,
        reduces="sharp" in words and "no sharp" not in words,
    )


def stated_node_size(text: str) -> int | None:
    """GPUs in a node, where the text says so (``per 8-GPU node``)."""
    found = _NODE_SIZE.search(text.lower())
    return int(found.group(1)) if found else None


def _count(outside: str, words: str) -> int | None:
    found = _COUNTED.search(outside) or _LINKS.search(outside) or _LINKS.search(words)
    if found:
        return int(found.group(1))
    return next((count for name, count in _SYSTEMS.items() if name in words), None)


def _between_nodes(text: str) -> str:
    """The clauses about adapters that carry the job's traffic.

    >>> _between_nodes("NVLINK + NVSWITCH | Management: 1x DPU 100Gb/s, Compute: 8x NDR 400Gb/s")
    'Compute: 8x NDR 400Gb/s'
    """
    plain = re.sub(r"\([^)]*\)", " ", text)
    clauses = re.split(r"[+;,|]|\band\b", plain)
    return " ; ".join(c.strip() for c in clauses if not _NOT_BETWEEN.search(c))
