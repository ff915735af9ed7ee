"""Where calibrations of a site are kept: one file for each kind of cluster."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from nest_megatron.cluster.records import DISCOVERED, Cluster
from nest_megatron.documents import parse_yaml
from nest_megatron.errors import UserInputError
from nest_megatron.files import expanded, read_text, user_folder, write_text
from nest_megatron.plain import from_plain, to_plain

if TYPE_CHECKING:
    from nest_megatron.cost_model.site_calibration import SiteCalibration

#: Names another folder than the user's; jobs on many hosts share one on a shared disk.
VARIABLE = "NEST_MEGATRON_SITES"
_WIDTH = 100
_HEAD = """\
# Written by nest-megatron calibrate --site.
# What runs on one kind of cluster say of predictions (docs/uncertainty.md): plans on a cluster of
# this name, accelerator and GPUs in a node use it. runs: of each plan, its step as predicted by the
# catalogue's constants and as measured, and the shares of the predicted step by mechanism. peaks:
# its highest peak of memory, or what it needed more than as it ran out, and the predicted terms.
"""


def sites_folder() -> Path:
    """The folder of calibrations; it need not exist."""
    if folder := os.environ.get(VARIABLE):
        return expanded(Path(folder), VARIABLE)
    return user_folder("config") / "sites"


def site_path(name: str, accelerator: str) -> Path:
    """The file of the calibration of a kind of cluster."""
    return sites_folder() / (re.sub(r"[^\w.-]+", "_", f"{name}-{accelerator}") + ".yaml")


def write_site(calibration: SiteCalibration, path: Path) -> None:
    """Write a calibration, whole or not at all.

    Raises:
        UserInputError: if it cannot be written there.
    """
    text = yaml.safe_dump(
        to_plain(calibration), sort_keys=False, width=_WIDTH, default_flow_style=None
    )
    write_text(path, _HEAD + text)


def read_site(path: Path) -> SiteCalibration:
    """Read a calibration.

    Raises:
        UserInputError: if it is none, or holds no run.
    """
    from nest_megatron.cost_model.site_calibration import FORMAT, SiteCalibration

    what = "site calibration"
    fields = parse_yaml(read_text(path, what), what, name=str(path))
    found = from_plain(SiteCalibration, fields, f"{path}:")
    if not found.by_date or found.format != FORMAT:
        raise UserInputError(
            what,
            str(path),
            "it holds no run" if not found.by_date else f"it has format {found.format}",
            _AGAIN,
        )
    if later := found.unknown_names:
        raise UserInputError(
            what,
            str(path),
            f"a later nest-megatron wrote it, and this one does not know {', '.join(later)}",
            _AGAIN,
        )
    return found


_AGAIN = "Write it again with nest-megatron calibrate --site, or remove it."


def find_site(cluster: Cluster) -> tuple[Path, SiteCalibration] | None:
    """The calibration for a cluster, if the folder has one.

    Raises:
        UserInputError: if its file cannot be read, or is of another kind of cluster.
    """
    path = site_path(cluster.name, cluster.accelerator.name)
    if not os.path.lexists(path):  # or its folder, a container's home, cannot be read
        return _of_same_machines(cluster)
    found = read_site(path)
    if differences := found.differences(cluster):
        raise UserInputError(
            "site calibration", str(path), f"it is of {', '.join(differences)}", _AGAIN
        )
    return path, found


def _of_same_machines(cluster: Cluster) -> tuple[Path, SiteCalibration] | None:
    """The calibration of the cluster that a discovered one was described over, or the reverse.

    Device, GPUs in a node and the figures of all links have to be the same, and known.
    """
    base = cluster.name.removesuffix(DISCOVERED)
    other = base if base != cluster.name else f"{base}{DISCOVERED}"
    path = site_path(other, cluster.accelerator.name)
    if os.path.lexists(path):
        found = read_site(path)
        own = dataclasses.replace(found, cluster=cluster.name)
        if not own.differences(cluster) and own.has_links_of(cluster):
            return path, found
    return None
