"""``plan --hosts``: a plan for hosts as they lie, and what hosts side by side would give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.api import Plan
from nest_megatron.cluster.placement import (
    Launcher,
    describe_groups,
    launch_file,
    launch_file_words,
    network_order,
    on_hosts,
    whole_groups,
)
from nest_megatron.cluster.records import Cluster
from nest_megatron.cluster.sources import read_hosts
from nest_megatron.config.catalogue import read_cluster
from nest_megatron.config.compose import Settings
from nest_megatron.errors import UserInputError
from nest_megatron.files import write_text
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.plain import to_plain
from nest_megatron.report.failure import WITHOUT_PLAN
from nest_megatron.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Hosts in the order of ranks, and the configuration of a job on them.

    Args:
        packed: the same job on hosts that fill the cluster's groups; ``None`` where these do.
        note: how the hosts lie.
    """

    hosts: tuple[str, ...]
    per_host: int
    composed: Settings
    packed: Settings | None
    note: str

    def compared(self, found: ParallelPlan, plan: Callable[[Settings], ParallelPlan]) -> str:
        """What a packed allocation would give beside this one.

        Args:
            found: the plan for the hosts.
            plan: makes the plan of another configuration.
        """
        if self.packed is None:
            return "Hosts side by side would give the same: these fill their groups."
        own = found.predicted.iteration_time_s
        try:
            best = plan(self.packed).predicted.iteration_time_s
        except WITHOUT_PLAN:
            return "For hosts side by side no plan was found; what they would give is not known."
        side_by_side = f"{format_seconds(best)} on hosts side by side in full groups"
        longer = f"{100.0 * (own / best - 1.0):+.1f} % for where these lie".replace("-0.0", "+0.0")
        return f"Predicted step {format_seconds(own)}; {side_by_side} ({longer})."

    def write(self, path: Path, launcher: Launcher) -> str:
        """Write the launcher's file, and say how it is read."""
        write_text(path, launch_file(launcher, self.hosts, self.per_host))
        return launch_file_words(launcher, str(path), self.hosts, self.per_host)


def placed(composed: Settings, path: Path) -> Placement:
    """A job on the hosts of a file, at the size that they are.

    Raises:
        UserInputError: if the file cannot be read, or does not go with the cluster.
    """
    topology, cluster = read_hosts(path), read_cluster(composed)
    hosts = tuple(topology.groups)
    groups = tuple(topology.groups.values())
    given = on_hosts(cluster, groups)
    if "cluster.num_gpus" in composed.given and cluster.num_gpus != given.num_gpus:
        limit = f"{path} names {len(hosts)} hosts with {given.num_gpus} GPUs"
        fix = "Leave it out: the hosts are the size of the job."
        raise UserInputError("cluster.num_gpus", cluster.num_gpus, limit, fix)
    names = [level.name for level in cluster.levels[1:-1]]
    note = f"{describe_groups(groups, names)}."
    pieces = ", ".join(
        f"{size} of level {name}" for name, size in zip(names, whole_groups(groups), strict=True)
    )
    if pieces and given.levels[-1] == cluster.levels[-1]:
        note += f" Priced as groups of {pieces}: no two ranks are nearer than that."
    packed = cluster.resized(given.num_gpus)
    return Placement(
        hosts=tuple(hosts[i] for i in network_order(groups)),
        per_host=given.launch_gpus_per_host,
        composed=_with_cluster(composed, given),
        packed=None if _crossed(given) == _crossed(packed) else _with_cluster(composed, packed),
        note=note,
    )


def with_notes(found: Plan, *notes: str) -> Plan:
    """A plan that says more of itself, in its file, too."""
    record = found.record
    launch = {
        name: dataclasses.replace(each, notes=(*each.notes, *notes))
        for name, each in record.launch.items()
    }
    record = dataclasses.replace(record, launch=launch)
    return dataclasses.replace(found, record=record, notes=(*found.notes, *notes))


def _crossed(cluster: Cluster) -> list[tuple[str, int]]:
    """The levels that a job of the cluster's size has, with their groups."""
    sizes = cluster.group_sizes()
    count = next(i for i, size in enumerate(sizes, 1) if size >= cluster.num_gpus)
    return [(level.name, size) for level, size in zip(cluster.levels[:count], sizes, strict=False)]


def _with_cluster(composed: Settings, cluster: Cluster) -> Settings:
    given = {**composed.given, "cluster.num_gpus": None}
    return dataclasses.replace(composed, cluster=to_plain(cluster), given=given)
