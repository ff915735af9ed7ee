"""The cluster that a process runs in, named or found on this host, and files that describe one."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nest_megatron.catalogue_files import catalogue_entry, catalogue_root
from nest_megatron.cluster.described import (
    Described,
    described,
    is_slower,
    planned_as_slower,
    require_alike,
)
from nest_megatron.cluster.discovery import (
    LocalGpus,
    is_same_device,
    local_gpus,
    require_same_device,
    require_same_product,
    with_hosts_of,
)
from nest_megatron.cluster.hosts import Host, describe_kinds, divided_gpus, kinds, shown_names
from nest_megatron.cluster.placement import describe_groups, on_hosts
from nest_megatron.cluster.records import DISCOVERED, Cluster, accelerator_from_mapping
from nest_megatron.cluster.sources import Sources, unused_outputs
from nest_megatron.cluster.topology import Topology, tasks_per_node
from nest_megatron.config.catalogue import named_cluster, read_cluster
from nest_megatron.config.compose import Settings, catalogue_cluster, compose
from nest_megatron.config.launch import MixedGpus
from nest_megatron.config.overrides import Setting
from nest_megatron.errors import UserInputError
from nest_megatron.plain import frozen
from nest_megatron.profile.network_import import cluster_yaml
from nest_megatron.version import __version__

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


@frozen
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
    gpus, assumed = None, None
    notes: tuple[str, ...] = ()
    if names_cluster(settings):
        composed = compose(settings)
    else:
        gpus, notes = _gpus_of_job(hosts, mixed)
        accelerator, assumed = catalogued(gpus)
        named = {"cluster": assumed.name, "cluster.accelerator": accelerator}
        borrowed = (Setting(key=key, value=value) for key, value in named.items())
        composed = compose((*borrowed, *settings))
    cluster = _sized(composed, world_size, environment, dry_run=dry_run)
    per_host = processes_per_host(environment)
    if gpus is None or assumed is None:
        said = [] if dry_run else _compared(cluster, hosts, mixed)
        has = cluster.launch_gpus_per_host
        if per_host not in (None, has) and not dry_run:
            said.append(
                f"The launcher starts {per_host} processes on each host, {cluster.name} has {has} "
                "GPUs on each; groups may lie on more hosts than was planned."
            )
        return JobCluster(cluster=cluster, settings=composed, notes=tuple(said))
    per_host = per_host or gpus.count
    is_rack = cluster.gpus_per_host is not None  # its hosts are smaller than its nodes
    if per_host != cluster.launch_gpus_per_host and not is_rack:
        cluster = with_hosts_of(cluster, per_host)
    # what is typed of levels wins over what is seen
    typed = any(each.key.startswith("cluster.levels") for each in settings)
    if hosts and not dry_run and not typed and len(hosts) * gpus.count == world_size:
        cluster, told = _seen_cluster(cluster, hosts)
    else:
        told = (
            f"This host has {gpus.describe()}; between hosts the network of {assumed.name} is "
            "assumed. Name yours with nest.cluster.",
        )
    return JobCluster(cluster=cluster, settings=composed, notes=(*notes, *told))


def node_notes(cluster: Cluster, num_ranks: int | None, num_nodes: int | None) -> tuple[str, ...]:
    """A note where a job's nodes are not those of its cluster; ``None`` for what is not known."""
    node = cluster.host_size
    if not num_ranks or not num_nodes or node is None:
        return ()
    each = num_ranks // num_nodes
    if each == node or (each < node and num_nodes == 1):
        return ()
    return (
        f"The job has {each} ranks on each of {num_nodes} nodes; those of {cluster.name} have "
        f"{node} GPUs, and the plan takes whole nodes.",
    )


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


def _gpus_of_job(hosts: Sequence[Host], mixed: MixedGpus) -> tuple[LocalGpus, tuple[str, ...]]:
    """The GPUs that a job on these hosts is planned for where no cluster is named; and notes."""
    gpus = local_gpus()
    if gpus is None:
        raise UserInputError(
            "nest.cluster",
            None,
            "no cluster is given, and this host shows no NVIDIA GPU",
            "Add for example nest.cluster=dgx_h100 (`nest-megatron clusters` lists them), or "
            "a file.",
        )
    unseen = {host.name: host.unseen for host in hosts if host.gpus is None}
    if unseen:
        raise UserInputError(
            "hosts",
            shown_names(list(unseen)),
            "; ".join(next(iter(unseen.values()))) or "they show no NVIDIA GPU",
            "Repair them, or name the cluster with nest.cluster.",
        )
    found, notes = like_gpus(hosts, gpus, mixed)
    return found or gpus, notes


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
    raise UserInputError(
        "mixed GPUs",
        describe_kinds(found),
        "no kind has the smaller figure of memory, speed and links in everything",
        "Describe a cluster with the smaller figures in a file, and name it.",
    )


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
            return name, replace(catalogue_cluster(cluster), accelerator=accelerator)
    raise UserInputError(
        "GPUs of hosts",
        gpus.describe(),
        "the catalogue has no cluster of them",
        "Describe theirs in a file (`nest-megatron cluster new` writes one), and name it with "
        "nest.cluster, or with --cluster of a command.",
    )


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
        seen = (*seen, f"{describe_groups(tuple(groups.values()), names)}: {source}")
    assumed = "; ".join((*found.assumed, *found.notes))
    fix = "Name yours with nest.cluster (nest-megatron cluster discover writes one)."
    return placed, (f"Seen: {'; '.join(seen)}.", f"Assumed: {assumed}. {fix}")


def _sized(
    composed: Settings, world_size: int, environment: Mapping[str, str], *, dry_run: bool
) -> Cluster:
    """The composed cluster, as large as the job; a dry run on one process is of any size."""
    given = "cluster.num_gpus" in composed.given
    if dry_run and (given or "WORLD_SIZE" not in environment):
        if not (given or composed.describes_cluster):  # the size of the catalogue's is an example
            raise UserInputError(
                "nest.cluster.num_gpus",
                None,
                "a dry run on one process does not say how many GPUs the job runs on",
                "Say nest.cluster.num_gpus=16.",
            )
        return read_cluster(composed)
    cluster = read_cluster(composed, world_size)
    said = read_cluster(composed).num_gpus if given else world_size
    if said != world_size:
        raise UserInputError(
            "nest.cluster.num_gpus",
            said,
            f"the launcher started {world_size} ranks",
            "Leave it out: the number of ranks is the size (or add nest.dry_run=true).",
        )
    return cluster


def processes_per_host(environment: Mapping[str, str]) -> int | None:
    """Processes that the launcher starts on each host, where it says so."""
    said = number_said(environment, "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
    tasks = set(tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "")))
    return tasks.pop() if said is None and len(tasks) == 1 else said


def number_said(environment: Mapping[str, str], *names: str) -> int | None:
    """The number in the first of these variables that holds one."""
    for name in names:
        if (text := environment.get(name, "")).isdigit():
            return int(text)
    return None


@frozen
class DiscoveredCluster(Described):
    """A cluster, its hosts with their groups, and where each figure is from.

    Args:
        accelerator: its name in the catalogue, where it is of the catalogue.
    """

    hosts: tuple[Host, ...]
    topology: Topology
    accelerator: str | None

    def text(self, out: Path) -> str:
        """The file that ``plan cluster=FILE`` reads."""
        lines = [
            f"Written by nest-megatron {__version__} cluster discover. Plan on it with "
            f"nest-megatron plan cluster=./{out.name}.",
            *(f"seen: {line}" for line in self.seen),
            *(f"assumed: {line}" for line in self.assumed),
            *(f"note: {line}" for line in self.notes),
        ]
        head = "\n".join(
            textwrap.fill(x, 110, initial_indent="# ", subsequent_indent="#   ") for x in lines
        )
        reference = f"/accelerator@accelerator: {self.accelerator}"
        defaults = [dict([reference.split(": ")]), "_self_"] if self.accelerator else []
        return f"{head}\n{cluster_yaml(self.cluster, defaults)}"


_TEMPLATE_HEAD = """\
# Written by nest-megatron {version} cluster new: a complete cluster as it stands, two levels, H100.
# Change what is marked CHANGE, then look at it and plan on it with
#   nest-megatron clusters {path}
#   nest-megatron plan model=llama3_8b cluster={path}
"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def cluster_template(name: str | None, out: Path) -> str:
    """A file of a cluster to fill in, with a comment for each field.

    Args:
        name: what reports call it; the file's name without its ending if not given.
        out: the file that it is for.

    Raises:
        UserInputError: for a name that is no word.
    """
    called = out.stem if name is None else name
    if not _NAME.fullmatch(called):
        raise UserInputError(
            "NAME",
            called,
            "it must be a word of letters, digits, _, - and ., at most 100",
            "Write for example: nest-megatron cluster new site --out clusters/site.yaml",
        )
    template = catalogue_root().joinpath("cluster", "custom.yaml").read_text(encoding="utf-8")
    body = template[template.index("defaults:") :]
    for field, word in (("name", called), ("description", f"{called}: describe it here")):
        body = re.sub(rf"(?m)^{field}: +\S.*?(?=  +#|$)", f'{field}: "{word}"', body, count=1)
    shown = shlex.quote(re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", str(out)))
    shown = shown if "/" in shown else f"./{shown}"
    return _TEMPLATE_HEAD.format(version=__version__, path=shown) + body


def discovered(
    sources: Sources, *, listed: Topology | None, base: str | None, mixed: MixedGpus
) -> DiscoveredCluster:
    """Describe the cluster that was seen.

    Args:
        listed: the hosts, and with columns of groups their groups, as the user gives them.
        base: the cluster that stands in for what was not seen; found by the GPUs if not given.

    Raises:
        UserInputError: if no host is known, or none says what GPUs it has and no base is given, or
            hosts are unlike.
    """
    topology = listed if listed is not None and listed.level_names else sources.topology
    accelerator, stand_in = None, None
    if base is not None:
        stand_in = named_cluster(base)
    hosts = _hosts(sources, listed, stand_in)
    gpus, notes = _gpus(sources, hosts, stand_in, mixed)
    if gpus is not None and stand_in is not None:
        require_same_device(stand_in, gpus, "--cluster")
    elif gpus is not None:
        accelerator, stand_in = catalogued(gpus)
    assert stand_in is not None
    missing = [host.name for host in hosts if topology and topology.of(host.name) is None]
    if topology is not None and missing:
        raise UserInputError(
            "hosts",
            shown_names(missing),
            f"{topology.source} does not say which groups they are in",
            "Give the groups of all hosts with --hosts FILE.",
        )
    found = described(stand_in, hosts, topology)
    names = [level.name for level in found.cluster.levels]
    known = topology or Topology(source="", level_names=(), groups={h.name: () for h in hosts})
    own = {host.name for host in sources.hosts if host.adapters}
    shared = next((host.adapters for host in hosts if host.name not in own), ())
    taken = (
        [f"adapters of hosts that do not tell theirs: those of one host ({len(shared)})"]
        if shared
        else []
    )
    return DiscoveredCluster(
        cluster=replace(
            found.cluster,
            name=f"{stand_in.name}{DISCOVERED}",
            description=" ".join(
                (f"{len(hosts)} hosts, by nest-megatron cluster discover.", *notes)
            ),
        ),
        hosts=hosts,
        topology=known.only(names),
        seen=found.seen,
        assumed=(*found.assumed, *taken),
        notes=(
            *(*notes, *found.notes, *_differences(sources, hosts, stand_in)),
            *(*unused_outputs(sources, hosts, topology), *sources.unseen),
        ),
        accelerator=accelerator,
    )


def _hosts(sources: Sources, listed: Topology | None, base: Cluster | None) -> tuple[Host, ...]:
    assumed = None if base is None else base.launch_gpus_per_host
    hosts = sources.known_hosts(() if listed is None else tuple(listed.groups), assumed)
    divided = {
        name: slices
        for name, slices in sources.divided.items()
        if not hosts or any(host.name == name and host.gpus is None for host in hosts)
    }
    if divided:
        told = "; ".join(f"{name}: {slices}" for name, slices in divided.items())
        raise divided_gpus("GPUs of hosts", told)
    if not hosts:
        limit = "neither a program nor a file names one that can be used"
        limit += f" ({shown_names(sources.unseen)})" if sources.unseen else ""
        raise UserInputError("hosts", None, limit, "Add --hosts FILE.")
    return hosts


def _gpus(
    sources: Sources, hosts: Sequence[Host], base: Cluster | None, mixed: MixedGpus
) -> tuple[LocalGpus | None, tuple[str, ...]]:
    """The GPUs that hosts have; ``None`` where none says so and a cluster stands in."""
    without = [host for host in hosts if host.gpus is None]
    listed = Counter(sources.gpu_names).items()
    named = " and ".join(f"{count} x {name}" for name, count in listed)
    if without and (kinds(hosts) or base is None):
        told = next((each.unseen for each in without if each.unseen), sources.unseen)
        limit = "no program said what GPUs they have"
        if named:
            limit = f"nvidia-smi -L lists {named}, and no program said how much memory they have"
        limit += f" ({'; '.join(told)})" if told else ""
        fix = "Give their reports (nest-megatron cluster report) with --read"
        fix += "." if kinds(hosts) else ", or name a cluster with --cluster."
        raise UserInputError(
            "GPUs of hosts", shown_names([host.name for host in without]), limit, fix
        )
    gpus, notes = like_gpus(hosts, None, mixed)
    if gpus is None and base is not None:
        counts = {host.name: host.num_gpus for host in hosts if host.num_gpus}
        if len({*counts.values()}) > 1:
            raise UserInputError(
                "GPUs of hosts",
                ", ".join(f"{name}: {count}" for name, count in counts.items()),
                "a job is planned for as many GPUs on every host",
                "Name those that have as many with --hosts FILE.",
            )
        for name in sources.gpu_names:  # as programs list them
            require_same_product(base, name, "--cluster")
        said = f"nvidia-smi -L lists {named}" if named else "no host says what GPUs it has"
        notes = (*notes, f"{said}: those of {base.name} are assumed")
    return gpus, notes


def _differences(sources: Sources, hosts: Sequence[Host], base: Cluster) -> Iterator[str]:
    """Where the scheduler counts other GPUs than a host's driver, or calls them otherwise."""
    for name, slices in sources.divided.items():
        yield f"{name} is left out: MIG divides its GPUs ({slices})"
    for host in hosts:
        known = sources.slurm_gpus.get(host.name)
        if host.gpus and known is not None and known != host.gpus.count:
            yield f"{host.name} shows {host.gpus.count} GPUs, and Slurm knows {known}"
    product = base.accelerator.name.partition("-")[0]
    kinds_of = {sources.slurm_gpu_types.get(host.name, product) for host in hosts}
    for kind in sorted(kinds_of):
        if product.lower() not in kind.lower():
            yield f"Slurm calls the GPUs {kind}, and {base.name} has {base.accelerator.name}"
