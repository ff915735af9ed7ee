"""The cluster that a training process runs in: named by the user, or found on this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nest_megatron.cluster.discovery import (
    LocalGpus,
    is_same_device,
    local_gpus,
    require_same_device,
    with_hosts_of,
)
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.compose import Composed, compose
from nest_megatron.config.overrides import Setting
from nest_megatron.config.request import read_cluster
from nest_megatron.errors import UserInputError

#: Cluster of the catalogue whose network is assumed around discovered GPUs, by accelerator.
_ASSUMED_CLUSTERS = {
    "a100_sxm_80gb": "dgx_a100",
    "a100_sxm_40gb": "dgx_a100",
    "h100_sxm_80gb": "dgx_h100",
    "h200_sxm_141gb": "h200",
    "b200_sxm_180gb": "b200",
    "b300_sxm_288gb": "b300",
    "gb200_186gb": "gb200_nvl72",
    "gb300_288gb": "gb300_nvl72",
    "v100_sxm_32gb": "v100_spine_leaf",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCluster:
    """The cluster that a job runs on, the settings of its planning, and what was assumed."""

    cluster: Cluster
    composed: Composed
    notes: tuple[str, ...]


def names_cluster(settings: Sequence[Setting]) -> bool:
    """Whether the user names a cluster."""
    return any(setting.key == "cluster" for setting in settings)


def find_cluster(
    settings: Sequence[Setting],
    world_size: int,
    environment: Mapping[str, str],
    *,
    dry_run: bool,
) -> JobCluster:
    """Find the cluster of this process; ``UserInputError`` if none is known, or another is named.

    Args:
        settings: of the planning job.
        world_size: ranks that the launcher started; a dry run may name another size.
        environment: the launcher's variables.
    """
    if not names_cluster(settings):
        return _discovered(settings, world_size, environment, dry_run=dry_run)
    composed = compose(settings)
    cluster = _sized(composed, world_size, environment, dry_run=dry_run)
    notes = [] if dry_run else _compared(cluster)
    per_host, hosts = processes_per_host(environment), cluster.launch_gpus_per_host
    if per_host not in (None, hosts) and not dry_run:
        notes.append(
            f"The launcher starts {per_host} processes on each host, {cluster.name} has {hosts} "
            "GPUs on each; groups may lie on more hosts than was planned."
        )
    return JobCluster(cluster=cluster, composed=composed, notes=tuple(notes))


def _compared(cluster: Cluster) -> list[str]:
    """Refuse a named cluster of other GPUs than this host's; a note where they are not known."""
    try:
        gpus = local_gpus()
    except UserInputError as error:
        said = f"{error.what} ({error.value}) were not compared with {cluster.name}: {error.limit}."
        return [said]
    if gpus is not None:
        require_same_device(cluster, gpus)
    return []


def _discovered(
    settings: Sequence[Setting], world_size: int, environment: Mapping[str, str], *, dry_run: bool
) -> JobCluster:
    gpus = local_gpus()
    if gpus is None:
        raise UserInputError(
            "nest.cluster",
            value=None,
            limit="no cluster is given, and this host shows no NVIDIA GPU",
            fix="Add for example nest.cluster=dgx_h100 (`nest-megatron clusters` lists them), or "
            "a file.",
        )
    assumed, name = _assumed(gpus)
    composed = compose((*assumed, *settings))
    cluster = _sized(composed, world_size, environment, dry_run=dry_run)
    per_host = processes_per_host(environment) or gpus.count
    is_rack = cluster.gpus_per_host is not None  # its hosts are smaller than its nodes
    if per_host != cluster.launch_gpus_per_host and not is_rack:
        cluster = with_hosts_of(cluster, per_host)
    note = f"This host has {gpus.describe()}; between hosts the network of {name} is assumed."
    return JobCluster(
        cluster=cluster, composed=composed, notes=(f"{note} Name yours with nest.cluster.",)
    )


def _assumed(gpus: LocalGpus) -> tuple[tuple[Setting, ...], str]:
    """Settings for the GPUs of this host, and the cluster whose network they borrow."""
    for accelerator, cluster in _ASSUMED_CLUSTERS.items():
        if accelerator.partition("_")[0].upper() not in gpus.device_name.upper():
            continue  # composing takes a tenth of a second
        chosen = (
            Setting(key="cluster", value=cluster),
            Setting(key="cluster.accelerator", value=accelerator),
        )
        if is_same_device(read_cluster(compose(chosen).config).accelerator, gpus):
            return chosen, cluster
    limit = f"no cluster is given, and {gpus.describe()} is not in the catalogue"
    fix = "Describe it in a file (nest.cluster=custom is a template) and name that file."
    raise UserInputError("nest.cluster", value=None, limit=limit, fix=fix)


def _sized(
    composed: Composed, world_size: int, environment: Mapping[str, str], *, dry_run: bool
) -> Cluster:
    """The composed cluster, as large as the job; a dry run on one process is of any size."""
    given = "cluster.num_gpus" in composed.given
    if dry_run and (given or "WORLD_SIZE" not in environment):
        return read_cluster(composed.config)
    cluster = read_cluster(composed.config, world_size)
    said = read_cluster(composed.config).num_gpus if given else world_size
    if said != world_size:
        limit = f"the launcher started {world_size} ranks"
        fix = "Leave it out: the number of ranks is the size (or add nest.dry_run=true)."
        raise UserInputError("nest.cluster.num_gpus", value=said, limit=limit, fix=fix)
    return cluster


def processes_per_host(environment: Mapping[str, str]) -> int | None:
    """Processes that the launcher starts on each host, where it says so."""
    return number_said(environment, "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")


def number_said(environment: Mapping[str, str], *names: str) -> int | None:
    """The number in the first of these variables that holds one."""
    said = (environment.get(name, "") for name in names)
    return next((int(text) for text in said if text.isdigit()), None)
