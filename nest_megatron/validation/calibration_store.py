"""Files of ``hydra_configs/calibration``, which ``nest-megatron calibrate`` writes.

Among them link technologies: what each reaches of its rate, as fitted to public measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from nest_megatron.catalogue_files import catalogue_entry
from nest_megatron.cluster.records import CollectiveKind, NetworkLevel
from nest_megatron.files import write_text

_WRITTEN = "# Written by `nest-megatron calibrate` (nest_megatron/validation); do not edit.\n"


def write_record(folder: Path, name: str, head: str, record: Mapping[str, object]) -> Path:
    """Write a file of a catalogue's ``calibration/``, under comments that say what its keys are."""
    path = folder / f"{name}.yaml"
    text = yaml.safe_dump(record, sort_keys=False, width=100, default_flow_style=None)
    write_text(path, f"{_WRITTEN}{head}{text}")
    return path


_SOURCE = "calibration/links.yaml: "


@dataclass(frozen=True, slots=True, kw_only=True)
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
PARAMETERS = tuple(
    f.name for f in dataclasses.fields(LinkTechnology) if f.name not in ("name", "source")
)


@cache
def links() -> Mapping[str, LinkTechnology]:
    """All technologies of ``hydra_configs/calibration/links.yaml``, by name."""
    entries = catalogue_entry("calibration", "links")
    return {name: _link(name, entry) for name, entry in entries.items()}


def link_of_level(level: NetworkLevel) -> str:
    """Technology of a level that ``LinkTechnology.level`` made."""
    return level.source.removeprefix(_SOURCE)


def _link(name: str, entry: Mapping[str, Any]) -> LinkTechnology:
    figures = {key: entry[key] for key in PARAMETERS if key in entry}
    figures["efficiency"] = {
        CollectiveKind(kind): share for kind, share in figures["efficiency"].items()
    }
    figures["ring_shares"] = tuple(figures.get("ring_shares", ()))
    return LinkTechnology(name=name, **figures)
