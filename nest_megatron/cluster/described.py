"""A cluster of what was seen, over the description that stands in for what was not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nest_megatron.cluster.discovery import with_hosts_of
from nest_megatron.cluster.hosts import Host, describe_kinds, kinds, shown_names
from nest_megatron.cluster.records import Cluster, NetworkLevel
from nest_megatron.cluster.topology import Topology
from nest_megatron.errors import UserInputError
from nest_megatron.plain import frozen
from nest_megatron.units import format_gib


@frozen
class Described:
    """A cluster, what of it was seen and by what, and what was assumed from where."""

    cluster: Cluster
    seen: tuple[str, ...]
    assumed: tuple[str, ...]
    notes: tuple[str, ...] = ()


def described(base: Cluster, hosts: Sequence[Host], topology: Topology | None) -> Described:
    """Describe the cluster that hosts are of, with full groups of the usual size.

    Args:
        base: of the same accelerator; its figures stand where nothing was seen.
        hosts: at least one, alike where they have been seen.
        topology: which of them share switches.

    Raises:
        UserInputError: if NVLink does not join the GPUs of a host and the base says that it does.
    """
    per_host = next((host.gpu_count for host in hosts if host.gpu_count), None)
    is_rack = base.gpus_per_host is not None
    cluster, assumed, notes = base, list[str](), list[str]()
    if per_host is not None and not is_rack:
        cluster = with_hosts_of(base, per_host)
    seen = list(_seen_of_hosts(hosts))
    node = cluster.levels[0]
    _require_links(hosts, node)
    assumed.append(
        f"level {node.name}: {_rate(node.bandwidth_bytes_per_s)} for each GPU: {base.name}"
        f"{_source(node)}"
    )
    inner = _first_network_level(cluster, hosts, seen, assumed)
    if topology is not None and is_rack:
        notes.append(f"groups of {topology.source} were not used: hosts of {base.name} form racks")
        topology = None
    levels = _levels_above(cluster, inner, hosts, topology, seen, assumed)
    if topology is not None:
        notes += topology.notes
    assumed.append(f"latencies, and shares of rates that collectives reach: {base.name}")
    size = len(hosts) * (per_host or base.launch_gpus_per_host)
    cluster = replace(cluster, levels=(node, *levels), num_gpus=size)
    return Described(cluster=cluster, seen=tuple(seen), assumed=tuple(assumed), notes=tuple(notes))


def _seen_of_hosts(hosts: Sequence[Host]) -> Iterator[str]:
    found = kinds(hosts)
    if found:
        yield f"{describe_kinds(found)}: NVML, or labels of nodes"
    counted: dict[tuple[int, str], list[str]] = {}
    for host in hosts:
        if host.num_gpus:
            counted.setdefault((host.num_gpus, host.counted_by), []).append(host.name)
    for (number, program), names in counted.items():
        yield f"{number} GPUs on each of {shown_names(names)}: {program}"
    links = sorted({host.nvlinks for host in hosts if host.nvlinks})
    if links:
        joined = " or ".join(map(str, links))
        yield f"{joined} NVLinks join each two GPUs of a host: nvidia-smi topo -m"


def _require_links(hosts: Sequence[Host], node: NetworkLevel) -> None:
    """Refuse hosts without NVLink between all GPUs under a description that has it."""
    without = [h.name for h in hosts if h.nvlinks == 0 and (h.gpu_count or 0) > 1]
    if without and not node.ring_shares:
        raise UserInputError(
            "hosts",
            shown_names(without),
            f"nvidia-smi topo -m shows GPUs that no NVLink joins, and "
            f"{_rate(node.bandwidth_bytes_per_s)} would be assumed between them",
            "Describe the hosts in a file (`nest-megatron cluster new`), name it with --cluster.",
        )


def _first_network_level(
    cluster: Cluster, hosts: Sequence[Host], seen: list[str], assumed: list[str]
) -> NetworkLevel:
    """The level between hosts, at the rate of the slowest host's adapters where all are seen."""
    if len(cluster.levels) < 2:
        raise UserInputError(
            f"cluster {cluster.name}",
            None,
            "it has no level between hosts",
            "Name a cluster with a network.",
        )
    level = cluster.levels[1]
    assumed_gpus = cluster.launch_gpus_per_host
    rates = {h.name: rate for h in hosts if (rate := h.adapter_bytes_per_s(assumed_gpus))}
    if len(rates) < len(hosts):
        without = shown_names([host.name for host in hosts if host.name not in rates])
        assumed.append(
            f"between hosts: {_rate(level.bandwidth_bytes_per_s)} for each GPU: {cluster.name}"
            f"{_source(level)}; the adapters of {without} were not seen, or cannot be distinguished"
        )
        return level
    slowest = min(rates, key=lambda name: rates[name])
    rate, adapters = rates[slowest], next(h.adapters for h in hosts if h.name == slowest)
    kinds_of = sorted({(a.rate_bits_per_s / 1e9, a.link_layer) for a in adapters})
    words = ", ".join(f"{gbits:g} Gb/s {layer}".strip() for gbits, layer in kinds_of)
    source = f"{len(adapters)} adapters of {words}"
    seen.append(f"between hosts: {_rate(rate)} for each GPU: {source} ({slowest})")
    if max(rates.values()) > rate:
        others = sum(each > rate for each in rates.values())
        seen.append(f"{others} hosts have faster adapters, which the slowest host holds back")
    return replace(
        level, bandwidth_bytes_per_s=rate, source=f"seen: {source}; described: {level.source}"
    )


def _levels_above(
    cluster: Cluster,
    inner: NetworkLevel,
    hosts: Sequence[Host],
    topology: Topology | None,
    seen: list[str],
    assumed: list[str],
) -> list[NetworkLevel]:
    """The network's levels: groups that were seen, or those of the description at seen rates."""
    old = cluster.levels[1].bandwidth_bytes_per_s
    share = cluster.levels[-1].bandwidth_bytes_per_s / old
    if topology is None or not topology.level_names:
        scale = inner.bandwidth_bytes_per_s / old
        above = [
            replace(x, bandwidth_bytes_per_s=x.bandwidth_bytes_per_s * scale)
            for x in cluster.levels[2:]
        ]
        if above:
            sizes = ", ".join(
                f"{x.name} of {x.num_devices} GPUs" for x in cluster.levels[1:] if x.num_devices
            )
            assumed.append(
                f"groups of hosts: {sizes}, {_share(share)} above: {cluster.name}; no program said "
                "which hosts share a switch"
            )
        return [inner, *above]
    usual = tuple(zip(topology.level_names, topology.usual_sizes(), strict=True))
    listed = ", ".join(f"{name} of {size} hosts" for name, size in usual)
    seen.append(f"groups of hosts, by their usual size: {listed}: {topology.source}")
    first = topology.level_names[0]
    shares = [
        topology.uplink_shares.get(names[0]) for host in hosts if (names := topology.of(host.name))
    ]
    known = [each for each in shares if each is not None]
    if known and len(known) == len(shares):
        share, above_first = min(known), f"seen: uplinks of level {first}: {_share(min(known))}"
        seen.append(f"uplinks of level {first}: {_share(share)}: {topology.source}")
    else:
        above_first = f"assumed: {_share(share)}: {cluster.name}"
        assumed.append(f"above level {first}: {_share(share)}: {cluster.name}")
    node = cluster.levels[0].num_devices or 1
    rate, source = inner.bandwidth_bytes_per_s, inner.source
    outer = replace(inner, bandwidth_bytes_per_s=rate * share, source=f"{source}; {above_first}")
    kept, hosts_inside = list[NetworkLevel](), 1
    for name, size in usual:  # those of more than one group of the level inside, which are whole
        whole = size - size % hosts_inside
        if whole > hosts_inside:
            level = inner if name == first else outer
            kept.append(replace(level, name=name, num_devices=whole * node))
            hosts_inside = whole
    return [*kept, replace(outer, name="fabric", num_devices=None)]


def _share(share: float) -> str:
    return "non-blocking" if share >= 1.0 else f"{share:.2f} of the rate of hosts"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:g} GB/s"


def _source(level: NetworkLevel) -> str:
    return f" ({level.source})" if level.source else ""


def require_alike(hosts: Sequence[Host]) -> None:
    """Refuse hosts that differ in kind, memory or number of GPUs.

    Raises:
        UserInputError: with what was seen on which hosts.
    """
    found = kinds(hosts)
    if len(found) > 1:
        raise UserInputError(
            "GPUs of the job",
            describe_kinds(found),
            "a job is planned for equal GPUs, as many on every host",
            "Have the scheduler give one kind (Slurm: --constraint), or where all have as many, "
            "plan with the slower kind's figures for all: nest.mixed_gpus=slower in a job, "
            "--mixed-gpus slower for cluster discover.",
        )


def is_slower(one: Cluster, other: Cluster) -> bool:
    """Whether no figure of a cluster's device and of the links in its nodes is the larger one."""
    a, b = one.accelerator, other.accelerator
    return (
        a.memory_bytes <= b.memory_bytes
        and a.memory_bandwidth_bytes_per_s <= b.memory_bandwidth_bytes_per_s
        and all(b.peak_flops_per_s.get(p, 0.0) >= flops for p, flops in a.peak_flops_per_s.items())
        and one.levels[0].bandwidth_bytes_per_s <= other.levels[0].bandwidth_bytes_per_s
    )


def planned_as_slower(slower: Cluster, hosts: Sequence[Host]) -> str:
    """The price of planning unlike hosts as equal ones."""
    memory = format_gib(slower.accelerator.memory_bytes)
    return (
        f"Planned as {len(hosts)} hosts of {slower.accelerator.name} ({memory}), the slower kind: "
        f"{describe_kinds(kinds(hosts))}. What others have more of memory and speed is not used."
    )
