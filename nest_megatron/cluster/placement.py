"""Ranks over hosts: neighbours in the network are neighbours in the order of ranks.

A cluster numbers its GPUs so that GPU ``r`` lies in group ``r // size`` of a level. Hosts that a
scheduler gave lie as they lie; a level then keeps the groups of hosts that are whole in every
group of the network, and no rank is taken to be nearer to another than it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from nest_megatron.cluster.records import Cluster
from nest_megatron.errors import UserInputError
from nest_megatron.plain import Name
from nest_megatron.units import counted

#: Of each host, the names of its groups, innermost first.
Groups = Sequence[tuple[str, ...]]


def network_order(groups: Groups) -> list[int]:
    """Hosts in an order in which each group's are together, by who of a group comes first.

    >>> network_order([("a", "x"), ("c", "y"), ("b", "x"), ("a", "x")])
    [0, 3, 2, 1]
    """
    first: dict[tuple[str, ...], int] = {}
    for i, names in enumerate(groups):
        for level in range(len(names) + 1):
            first.setdefault(names[level:], i)
    keys = [[first[names[k:]] for k in range(len(names), -1, -1)] for names in groups]
    return sorted(range(len(groups)), key=lambda i: (keys[i], i))


def whole_groups(groups: Groups) -> tuple[int, ...]:
    """Hosts of the largest pieces that every group of a level is made of, innermost first.

    >>> whole_groups([("a",)] * 6 + [("b",)] * 10), whole_groups([("a",)] * 3)
    ((2,), (3,))
    """
    levels = range(len(groups[0])) if groups else ()
    return tuple(math.gcd(*Counter(names[k:] for names in groups).values()) for k in levels)


def inner_groups(cluster: Cluster, groups: Groups) -> Groups:
    """Groups without those that are a cluster's outermost level, which all hosts share."""
    between = len(cluster.levels[1:-1])
    shared = len({names[between:] for names in groups}) == 1
    return [names[:between] for names in groups] if shared else groups


def on_hosts(cluster: Cluster, groups: Groups) -> Cluster:
    """A cluster as a job sees it that runs on these hosts, ordered by ``network_order``.

    Args:
        cluster: with a level for each of ``inner_groups`` between its node and its outermost one.

    Raises:
        UserInputError: if the groups are not the cluster's levels.
    """
    node = cluster.levels[0].num_devices
    if node is None:
        raise UserInputError(
            f"cluster {cluster.name}",
            None,
            "it has no level of nodes",
            "Describe the node and the network between nodes.",
        )
    if cluster.gpus_per_host is not None and cluster.gpus_per_host < node:
        raise UserInputError(
            "hosts",
            len(groups),
            f"several hosts of {cluster.name} form a {cluster.levels[0].name}",
            "Placement is by whole nodes; have the scheduler give whole ones (Slurm: --segment).",
        )
    between, groups = cluster.levels[1:-1], inner_groups(cluster, groups)
    if any(len(names) != len(between) for names in groups):
        listed = ", ".join(level.name for level in between) or "no level"
        raise UserInputError(
            "groups of hosts",
            len(groups[0]),
            f"{cluster.name} has {listed} between node and outermost level",
            "Give each host so many groups, innermost first, or a cluster with these levels.",
        )
    kept, inner = [cluster.levels[0]], 1
    for level, hosts in zip(between, whole_groups(groups), strict=True):
        if hosts == len(groups):  # all are in one group: nothing lies outside of it
            kept.append(replace(level, num_devices=None))
            break
        if hosts > inner:
            kept.append(replace(level, num_devices=hosts * node))
            inner = hosts
    else:
        kept.append(cluster.levels[-1])
    return replace(cluster, num_gpus=len(groups) * node, levels=tuple(kept))


def describe_groups(groups: Groups, level_names: Sequence[str]) -> str:
    """How hosts are spread, for messages.

    >>> describe_groups([("a",)] * 6 + [("b",)] * 10, ["leaf"])
    '16 hosts in 2 groups of level leaf (10, 6)'
    """
    listed = []
    for k, name in enumerate(level_names):
        sizes = sorted(Counter(names[k:] for names in groups).values(), reverse=True)
        more = ", ..." if len(sizes) > 8 else ""
        shown = ", ".join(map(str, sizes[:8])) + more
        listed.append(f"{counted(len(sizes), 'group')} of level {name} ({shown})")
    return f"{len(groups)} hosts in {' and '.join(listed) or 'one network'}"


class Launcher(Name):
    """What starts the ranks."""

    SRUN = "srun"
    MPIRUN = "mpirun"
    TORCHRUN = "torchrun"


def launch_file(launcher: Launcher, hosts: Sequence[str], per_host: int) -> str:
    r"""The file that a launcher gives out ranks by.

    Args:
        hosts: in the order of ranks.

    >>> launch_file(Launcher.SRUN, ["b", "a"], 2), launch_file(Launcher.TORCHRUN, ["b", "a"], 2)
    ('b\nb\na\na\n', 'b\na\n')
    """
    lines = 1 if launcher is Launcher.TORCHRUN else per_host
    return "".join(f"{host}\n" * lines for host in hosts)


def torchrun_words(num_hosts: int, per_host: int) -> list[str]:
    """The size of a job as torchrun takes it, on each host."""
    return ["torchrun", "--nproc-per-node", str(per_host), "--nnodes", str(num_hosts)]


def launch_file_words(launcher: Launcher, path: str, hosts: Sequence[str], per_host: int) -> str:
    """How a launcher reads its file."""
    ranks = len(hosts) * per_host
    if launcher is Launcher.SRUN:
        return f"SLURM_HOSTFILE={path} srun --distribution=arbitrary --ntasks={ranks} ..."
    if launcher is Launcher.MPIRUN:
        return f"mpirun --hostfile {path} --map-by seq -np {ranks} ...   # Open MPI: a rank a line"
    rank = f'$(($(grep -nx "$(hostname)" {path} | cut -d: -f1) - 1))'
    size = " ".join(torchrun_words(len(hosts), per_host))
    return f"{size} --node-rank={rank} --master-addr={hosts[0]} ...   # on each host"
