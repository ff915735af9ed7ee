"""Files of ``hydra_configs/calibration``, which ``nest-megatron calibrate`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.documents import LOADER
from nest_megatron.files import write_text

_WRITTEN = "# Written by `nest-megatron calibrate` (nest_megatron/validation); do not edit.\n"


def read_record(name: str) -> dict[str, Any]:
    """A file of the installed catalogue, by its name without ``.yaml``."""
    path = catalogue_root().joinpath("calibration", f"{name}.yaml")
    return cast("dict[str, Any]", yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER) or {})


def write_record(folder: Path, name: str, head: str, record: Mapping[str, object]) -> Path:
    """Write a file of a catalogue's ``calibration/``, under comments that say what its keys are."""
    path = folder / f"{name}.yaml"
    text = yaml.safe_dump(record, sort_keys=False, width=100, default_flow_style=None)
    write_text(path, f"{_WRITTEN}{head}{text}")
    return path
