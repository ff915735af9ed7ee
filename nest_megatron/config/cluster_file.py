"""A cluster's file from what its machines say."""

from __future__ import annotations

import dataclasses
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.cluster.described import DISCOVERED, described
from nest_megatron.cluster.discovery import LocalGpus, require_same_device, require_same_product
from nest_megatron.cluster.host_outputs import divided_gpus
from nest_megatron.cluster.hosts import Host, kinds, shown_names
from nest_megatron.cluster.records import Cluster
from nest_megatron.cluster.sources import Sources, unused_outputs
from nest_megatron.cluster.topology import Topology
from nest_megatron.config.catalogue import named_cluster
from nest_megatron.config.cluster_detection import catalogued, like_gpus
from nest_megatron.config.launch import MixedGpus
from nest_megatron.errors import UserInputError
from nest_megatron.profile.network_import import cluster_yaml
from nest_megatron.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredCluster:
    """A cluster, its hosts with their groups, and where each figure is from.

    Args:
        accelerator: its name in the catalogue, where it is of the catalogue.
    """

    cluster: Cluster
    hosts: tuple[Host, ...]
    topology: Topology
    seen: tuple[str, ...]
    assumed: tuple[str, ...]
    notes: tuple[str, ...]
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
        limit = "it must be a word of letters, digits, _, - and ., at most 100"
        fix = "Write for example: nest-megatron cluster new site --out clusters/site.yaml"
        raise UserInputError("NAME", called, limit, fix)
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
    if topology is not None:
        _require_in(topology, hosts)
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
    unused = unused_outputs(sources, hosts, topology)
    return DiscoveredCluster(
        cluster=dataclasses.replace(
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
            *(*unused, *sources.unseen),
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
        limit = "neither a program nor a file names one"
        raise UserInputError("hosts", None, limit, fix="Add --hosts FILE.")
    return hosts


def _gpus(
    sources: Sources, hosts: Sequence[Host], base: Cluster | None, mixed: MixedGpus
) -> tuple[LocalGpus | None, tuple[str, ...]]:
    """The GPUs that hosts have; ``None`` where none says so and a cluster stands in."""
    without = [host for host in hosts if host.gpus is None]
    if without and (kinds(hosts) or base is None):
        told = next((each.unseen for each in without if each.unseen), sources.unseen)
        limit = "; ".join(told) or "no program said what GPUs they have"
        fix = "Give their reports (nest-megatron cluster report) with --read"
        fix += "." if kinds(hosts) else ", or name a cluster with --cluster."
        names = shown_names([host.name for host in without])
        raise UserInputError("GPUs of hosts", names, limit, fix)
    gpus, notes = like_gpus(hosts, None, mixed)
    if gpus is None and base is not None:
        _require_named(sources, hosts, base)
        notes = (*notes, f"no host says what GPUs it has: those of {base.name} are assumed")
    return gpus, notes


def _require_named(sources: Sources, hosts: Sequence[Host], base: Cluster) -> None:
    """Refuse hosts whose GPUs are counted unlike, or are listed under another name."""
    counts = {host.name: host.num_gpus for host in hosts if host.num_gpus}
    if len({*counts.values()}) > 1:
        told = ", ".join(f"{name}: {count}" for name, count in counts.items())
        limit = "a job is planned for as many GPUs on every host"
        fix = "Name those that have as many with --hosts FILE."
        raise UserInputError("GPUs of hosts", told, limit, fix)
    for name in sources.gpu_names:
        require_same_product(base, name, "--cluster")


def _require_in(topology: Topology, hosts: Sequence[Host]) -> None:
    missing = [host.name for host in hosts if topology.of(host.name) is None]
    if missing:
        limit = f"{topology.source} does not say which groups they are in"
        fix = "Give the groups of all hosts with --hosts FILE."
        raise UserInputError("hosts", shown_names(missing), limit, fix)


def _differences(sources: Sources, hosts: Sequence[Host], base: Cluster) -> Iterator[str]:
    """Where the scheduler counts other GPUs than a host's driver, or calls them otherwise."""
    for name, slices in sources.divided.items():
        yield f"{name} is left out: MIG divides its GPUs ({slices})"
    if sources.slurm is None:
        return
    for host in hosts:
        known = sources.slurm.gpu_counts.get(host.name)
        if host.gpus and known is not None and known != host.gpus.count:
            yield f"{host.name} shows {host.gpus.count} GPUs, and Slurm knows {known}"
    product = base.accelerator.name.partition("-")[0]
    kinds_of = {sources.slurm.gpu_types.get(host.name, product) for host in hosts}
    for kind in sorted(kinds_of):
        if product.lower() not in kind.lower():
            yield f"Slurm calls the GPUs {kind}, and {base.name} has {base.accelerator.name}"
