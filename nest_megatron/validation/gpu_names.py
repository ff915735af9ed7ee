"""From what a table calls a GPU to the catalogue's accelerator."""

from __future__ import annotations

import re
from functools import cache

import yaml

from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.cluster.catalogue import accelerator_from_mapping
from nest_megatron.cluster.records import Accelerator
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

    Raises:
        RefusedRowError: if the text names no known part, or leaves a choice between two.
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
    stated = re.search(r"([\d.]+)\s*GiB", gpu)
    size = float(stated[1]) * GIB if stated else 0.0
    near = [name for name in _BLACKWELL if abs(accelerator(name).memory_bytes - size) < GIB]
    if len(near) != 1:
        raise RefusedRowError("unknown GPU", f"{gpu!r} names no one part of the catalogue")
    return near[0], (f"{gpu} is {near[0]} by its memory",)


@cache
def accelerator(name: str) -> Accelerator:
    """An accelerator of the catalogue, by its file's name."""
    text = catalogue_root().joinpath("accelerator", f"{name}.yaml").read_text(encoding="utf-8")
    return accelerator_from_mapping(yaml.safe_load(text))
