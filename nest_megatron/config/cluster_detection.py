"""The cluster that a training process runs in: named by the user, or found on this host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nest_megatron.catalogue_files import catalogue_entry
from nest_megatron.cluster.catalogue import accelerator_from_mapping
from nest_megatron.cluster.described import described, is_slower, planned_as_slower, require_alike
from nest_megatron.cluster.discovery import (
    LocalGpus,
    is_same_device,
    local_gpus,
    require_same_device,
    with_hosts_of,
)
from nest_megatron.cluster.hosts import Host, describe_kinds, kinds, shown_names
from nest_megatron.cluster.placement import describe_groups, on_hosts
from nest_megatron.cluster.records import Cluster
from nest_megatron.cluster.topology import Topology, tasks_per_node
from nest_megatron.config.catalogue import read_cluster
from nest_megatron.config.compose import Settings, catalogue_cluster, compose
from nest_megatron.config.launch import MixedGpus
from nest_megatron.config.overrides import Setting
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
    settings: Settings
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
    hosts: Sequence[Host] = (),
    mixed: MixedGpus = MixedGpus.REFUSE,
) -> JobCluster:
    """Find the cluster of this process; ``UserInputError`` if none is known, or another is named.

    Args:
        settings: of the planning job.
        world_size: ranks that the launcher started; a dry run may name another size.
        environment: the launcher's variables.
        hosts: of the job, where they have told what they have; this one if none.
        mixed: what to do where their GPUs are unlike: ``refuse``, or plan with the figures of the
            ``slower`` kind.
    """
    if not names_cluster(settings):
        return _discovered(
            settings, world_size, environment, dry_run=dry_run, hosts=hosts, mixed=mixed
        )
    composed = compose(settings)
    cluster = _sized(composed, world_size, environment, dry_run=dry_run)
    notes = [] if dry_run else _compared(cluster, hosts, mixed)
    per_host, has = processes_per_host(environment), cluster.launch_gpus_per_host
    if per_host not in (None, has) and not dry_run:
        notes.append(
            f"The launcher starts {per_host} processes on each host, {cluster.name} has {has} "
            "GPUs on each; groups may lie on more hosts than was planned."
        )
    return JobCluster(cluster=cluster, settings=composed, notes=tuple(notes))


def _compared(cluster: Cluster, hosts: Sequence[Host], mixed: MixedGpus) -> list[str]:
    """Refuse a named cluster of other GPUs than the hosts'; a note where they are not known."""
    try:
        gpus = local_gpus()
    except UserInputError as error:
        said = f"{error.what} ({error.value}) were not compared with {cluster.name}: {error.limit}."
        return [said]
    others = [kind for kind, _ in kinds(hosts) if not is_same_device(cluster.accelerator, kind)]
    if others and mixed is MixedGpus.SLOWER and len(others) < len(kinds(hosts)):
        if all(is_slower(cluster, catalogued(kind)[1]) for kind in others):
            return [planned_as_slower(cluster, hosts)]
        require_alike(hosts)
    for kind in (*others, *filter(None, [gpus])):
        require_same_device(cluster, kind)
    return []


def _discovered(
    settings: Sequence[Setting],
    world_size: int,
    environment: Mapping[str, str],
    *,
    dry_run: bool,
    hosts: Sequence[Host],
    mixed: MixedGpus,
) -> JobCluster:
    gpus = local_gpus()
    if gpus is None:
        raise UserInputError(
            "nest.cluster",
            None,
            limit="no cluster is given, and this host shows no NVIDIA GPU",
            fix="Add for example nest.cluster=dgx_h100 (`nest-megatron clusters` lists them), or "
            "a file.",
        )
    unseen = {host.name: host.unseen for host in hosts if host.gpus is None}
    if unseen:
        limit = "; ".join(next(iter(unseen.values()))) or "they show no NVIDIA GPU"
        fix = "Repair them, or name the cluster with nest.cluster."
        raise UserInputError("hosts", shown_names(list(unseen)), limit, fix)
    gpus, notes = like_gpus(hosts, gpus, mixed)
    assert gpus is not None
    accelerator, assumed = catalogued(gpus)
    named = {"cluster": assumed.name, "cluster.accelerator": accelerator}
    borrowed = (Setting(key=key, value=value) for key, value in named.items())
    composed = compose((*borrowed, *settings))
    cluster = _sized(composed, world_size, environment, dry_run=dry_run)
    per_host = processes_per_host(environment) or gpus.count
    is_rack = cluster.gpus_per_host is not None  # its hosts are smaller than its nodes
    if per_host != cluster.launch_gpus_per_host and not is_rack:
        cluster = with_hosts_of(cluster, per_host)
    typed = any(
        each.key.startswith("cluster.levels") for each in settings
    )  # wins over what is seen
    if hosts and not dry_run and not typed and len(hosts) * gpus.count == world_size:
        cluster, told = _seen_cluster(cluster, hosts)
        return JobCluster(cluster=cluster, settings=composed, notes=(*notes, *told))
    note = (
        f"This host has {gpus.describe()}; between hosts the network of {assumed.name} is assumed."
    )
    return JobCluster(
        cluster=cluster,
        settings=composed,
        notes=(*notes, f"{note} Name yours with nest.cluster."),
    )


def like_gpus(
    hosts: Sequence[Host], gpus: LocalGpus | None, mixed: MixedGpus
) -> tuple[LocalGpus | None, tuple[str, ...]]:
    """The GPUs that a job on these hosts is planned for, and what that gives up.

    Args:
        gpus: where no host says anything.

    Raises:
        UserInputError: if they are unlike, and are not to be planned as the slower kind or cannot.
    """
    found = kinds(hosts)
    if len(found) < 2:
        return (found[0][0] if found else gpus), ()
    if mixed is not MixedGpus.SLOWER or len({kind.count for kind, _ in found}) > 1:
        require_alike(hosts)
    clusters = [(catalogued(kind)[1], kind) for kind, _ in found]
    for cluster, kind in clusters:
        if all(is_slower(cluster, other) for other, _ in clusters):
            return kind, (planned_as_slower(cluster, hosts),)
    limit = "no kind has the smaller figure of memory, speed and links in everything"
    fix = "Describe a cluster with the smaller figures in a file, and name it."
    raise UserInputError("mixed GPUs", describe_kinds(found), limit, fix)


def catalogued(gpus: LocalGpus) -> tuple[str, Cluster]:
    """The accelerator that GPUs are, by its name, in the cluster whose network is assumed.

    Raises:
        UserInputError: if the catalogue has none.
    """
    for name, cluster in _ASSUMED_CLUSTERS.items():
        if name.partition("_")[0].upper() not in gpus.device_name.upper():
            continue  # reading takes time
        accelerator = accelerator_from_mapping(catalogue_entry("accelerator", name))
        if is_same_device(accelerator, gpus):
            return name, dataclasses.replace(catalogue_cluster(cluster), accelerator=accelerator)
    limit = f"no cluster is given, and {gpus.describe()} is not in the catalogue"
    fix = "Describe it in a file (`nest-megatron cluster new` writes one) and name that file."
    raise UserInputError("nest.cluster", None, limit, fix)


def _seen_cluster(cluster: Cluster, hosts: Sequence[Host]) -> tuple[Cluster, tuple[str, ...]]:
    """A cluster at the rates and with the groups of switches that the job's hosts tell of."""
    depth = min(len(host.groups) for host in hosts)
    names = tuple(f"switch_{level + 1}" for level in range(depth))
    groups = {host.name: host.groups[:depth] for host in hosts}
    source = "SLURM_TOPOLOGY_ADDR"
    topology = Topology(source=source, level_names=names, groups=groups)
    found = described(cluster, hosts, topology if depth else None)
    seen, placed = found.seen, found.cluster
    if depth and cluster.gpus_per_host is None:
        topology = topology.only([level.name for level in found.cluster.levels])
        placed = on_hosts(found.cluster, tuple(topology.groups.values()))
        spread = describe_groups(tuple(groups.values()), names)
        seen = (*seen, f"{spread}: {source}")
    assumed = "; ".join((*found.assumed, *found.notes))
    fix = "Name yours with nest.cluster (nest-megatron cluster discover writes one)."
    return placed, (f"Seen: {'; '.join(seen)}.", f"Assumed: {assumed}. {fix}")


def _sized(
    composed: Settings, world_size: int, environment: Mapping[str, str], *, dry_run: bool
) -> Cluster:
    """The composed cluster, as large as the job; a dry run on one process is of any size."""
    given = "cluster.num_gpus" in composed.given
    if dry_run and (given or "WORLD_SIZE" not in environment):
        return read_cluster(composed)
    cluster = read_cluster(composed, world_size)
    said = read_cluster(composed).num_gpus if given else world_size
    if said != world_size:
        limit = f"the launcher started {world_size} ranks"
        fix = "Leave it out: the number of ranks is the size (or add nest.dry_run=true)."
        raise UserInputError("nest.cluster.num_gpus", said, limit, fix)
    return cluster


def processes_per_host(environment: Mapping[str, str]) -> int | None:
    """Processes that the launcher starts on each host, where it says so."""
    said = number_said(environment, "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
    tasks = set(tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "")))
    return tasks.pop() if said is None and len(tasks) == 1 else said


def number_said(environment: Mapping[str, str], *names: str) -> int | None:
    """The number in the first of these variables that holds one."""
    said = (environment.get(name, "") for name in names)
    return next((int(text) for text in said if text.isdigit()), None)
