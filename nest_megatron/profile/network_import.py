"""A described cluster with the network that was measured on it, and the file that holds it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nest_megatron.catalogue_files import catalogue_entry, catalogue_names
from nest_megatron.cluster.discovery import is_same_product, require_same_product
from nest_megatron.cluster.records import Cluster, CollectiveKind, NetworkLevel
from nest_megatron.errors import ProfileError, UserInputError
from nest_megatron.files import now, read_text
from nest_megatron.plain import to_plain
from nest_megatron.profile import network
from nest_megatron.profile.nccl_tests import read_logs
from nest_megatron.profile.network import (
    CollectiveSample,
    LevelFit,
    NetworkBackend,
    NetworkProfile,
)
from nest_megatron.profile.network_fit import fit_hosts, fit_levels
from nest_megatron.version import __version__

_HEAD = """\
# Written by nest-megatron {version}: the network of cluster={name} as measured, each level with its
# source. Plan on it with nest-megatron plan cluster=./{file}.
"""


class FittedNetwork(NamedTuple):
    """Measurements with their fit, and the described cluster with its levels as measured."""

    profile: NetworkProfile
    notes: tuple[str, ...]
    cluster: Cluster | None


def read_measurements(paths: Sequence[Path], kind: CollectiveKind | None) -> NetworkProfile:
    """One profile of all files: logs of nccl-tests, or a profile that was measured.

    Raises:
        UserInputError: for a file that is neither, or a profile together with other files.
    """
    names = {read_text(path, "measurements"): str(path) for path in paths}  # each counts once
    if any(map(network.is_profile, names)):
        if len(names) > 1:
            raise UserInputError(
                "measurements",
                [*names.values()],
                "a network profile is imported alone",
                "Import it by itself, or the logs of nccl-tests.",
            )
        return network.load(*names.popitem())
    reading = read_logs(zip(names.values(), names, strict=True), kind)
    return NetworkProfile(
        name=paths[0].stem,
        created=now(),
        source=f"nccl-tests: {', '.join(Path(name).name for name in names.values())}",
        backend=NetworkBackend.IMPORTED,
        versions={"nest-megatron": __version__, **reading.versions},
        samples=reading.samples,
        notes=reading.notes,
        devices=reading.devices,
    )


def fit_network(profile: NetworkProfile, described: Cluster | None) -> FittedNetwork:
    """Fit the levels of a described cluster, or of the hosts that were measured.

    Each level's ``source`` says what was measured; levels and kinds of collectives that were not
    keep the description's figures.

    Raises:
        ProfileError: if the samples do not fit the cluster's hosts, or are too few.
        UserInputError: for a cluster with a GPU of the catalogue that is not the one measured.
    """
    others = tuple[str, ...]()
    if described is None:
        fitted, cluster = fit_hosts(profile.samples), None
    else:
        others = _other_devices(profile, described)
        fitted = fit_levels(placed(profile.samples, described), described.levels)
        fits = {fit.name: fit for fit in fitted.fits}
        levels = tuple(
            dataclasses.replace(new, source=_source(profile, new, old, fits.get(new.name)))
            for new, old in zip(fitted.levels, described.levels, strict=True)
        )
        cluster = dataclasses.replace(described, levels=levels)
    return FittedNetwork(
        profile=dataclasses.replace(profile, fits=fitted.fits, fit_notes=fitted.notes),
        notes=(*profile.notes, *fitted.notes, *others),
        cluster=cluster,
    )


def _other_devices(profile: NetworkProfile, cluster: Cluster) -> tuple[str, ...]:
    """Notes on devices that were measured and are not those of a cluster.

    Raises:
        UserInputError: if the cluster's GPU is one of the catalogue.
    """
    others = [name for name in profile.devices if not is_same_product(cluster.accelerator, name)]
    if not others:
        return ()
    names = catalogue_names("accelerator")
    known = {catalogue_entry("accelerator", name)["name"] for name in names}
    notes = []
    for name in others:
        if cluster.accelerator.name in known:
            require_same_product(cluster, name, "--cluster")
        notes.append(
            f"{name} was measured, and the accelerator of {cluster.name} is called "
            f"{cluster.accelerator.name}: nothing says that they are the same."
        )
    return tuple(notes)


def cluster_text(cluster: Cluster, name: str, out: Path) -> str:
    """A cluster's file: the accelerator by reference where it can be, and the measured levels."""
    description = f"{cluster.description or cluster.name}, network measured"
    measured = dataclasses.replace(cluster, description=description)
    head = _HEAD.format(version=__version__, name=name, file=out.name)
    entry = catalogue_entry("cluster", name) if name in catalogue_names("cluster") else {}
    return head + cluster_yaml(measured, entry.get("defaults", ()))


def cluster_yaml(cluster: Cluster, defaults: Sequence[Any] = ()) -> str:
    """A cluster's fields as YAML.

    Args:
        defaults: names the accelerator as Hydra does; its figures are written out where it is
            empty.
    """
    fields = to_plain(cluster)
    fields["levels"] = [_without_empty(level) for level in fields["levels"]]
    if defaults:
        del fields["accelerator"]
        fields = {"defaults": list(defaults), **fields}
    body = yaml.safe_dump(_without_empty(fields), sort_keys=False, width=100, allow_unicode=True)
    return str(body)


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that say something; the outermost level's ``num_devices`` is null on purpose."""
    return {
        key: _rounded(value)
        for key, value in fields.items()
        if value not in (None, [], "") or key == "num_devices"
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def placed(samples: Sequence[CollectiveSample], cluster: Cluster) -> tuple[CollectiveSample, ...]:
    """Samples with a fan-out at each of a cluster's levels, their hosts taken as neighbours."""
    return tuple(dataclasses.replace(s, shape=_fan_outs(s.shape, cluster)) for s in samples)


def _fan_outs(shape: tuple[int, ...], cluster: Cluster) -> tuple[int, ...]:
    """Fan-outs of a group on neighbouring hosts, innermost first.

    Where the hosts do not fill groups of a level evenly (10 hosts over leaves of 4) the level gets
    the most that divides them, 2 here: no rank is put nearer than it is.
    """
    inside, hosts = shape
    per_host = min(cluster.gpus_per_host or cluster.gpus_per_node, cluster.gpus_per_node)
    if inside > per_host:
        raise ProfileError(
            "samples",
            f"{inside} ranks on one host",
            f"hosts of {cluster.name} have {per_host} GPUs",
            "Name the cluster that was measured.",
        )
    found: list[int] = []
    for level in cluster.levels:
        most = hosts
        if level.num_devices is not None:
            most = max(1, level.num_devices // per_host // math.prod(found))
        together = next(d for d in range(min(hosts, most), 0, -1) if hosts % d == 0)
        found.append(together)
        hosts //= together
    found[0] *= inside
    return tuple(found)


def _source(
    profile: NetworkProfile, new: NetworkLevel, old: NetworkLevel, fit: LevelFit | None
) -> str:
    """What a level's figures rest on: measurements, the description, or both."""
    words = f"not measured ({profile.name})"
    if fit is not None:
        words = (
            f"measured: {profile.source}, {profile.created[:10]}, {fit.num_samples} samples of "
            f"{fit.smallest_bytes} to {fit.largest_bytes} bytes, residual "
            f"{100 * fit.residual:.0f} %"
        )
        kept = ", ".join(kind for kind in new.efficiency if kind not in fit.measured_kinds)
        words += f"; as described: {kept}" if kept else ""
    return f"{words}; described: {old.source}" if old.source else words
