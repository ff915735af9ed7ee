"""Where hosts and their groups are learnt from: Slurm, Kubernetes, this host, saved outputs."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.cluster.host_outputs import (
    Adapter,
    GpuMatrix,
    parse_gpu_matrix,
    parse_ibstat,
    parse_nccl_topology,
)
from nest_megatron.cluster.hosts import Host, gpu_adapters, this_host
from nest_megatron.cluster.programs import output_of
from nest_megatron.cluster.topology import (
    Topology,
    hosts_of,
    parse_host_file,
    parse_ibnetdiscover,
    parse_kubernetes_nodes,
    parse_slurm_nodes,
    parse_slurm_topology,
)
from nest_megatron.documents import parse_json
from nest_megatron.errors import UserInputError
from nest_megatron.files import read_text
from nest_megatron.plain import from_plain

#: Every host answers within this; ``srun`` may first wait for a step that ends.
_REPORTS_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What was learnt.

    Args:
        hosts: those that were seen; none where only groups were.
        topology: which hosts share switches.
        adapters, matrix: of one host, taken for those that tell nothing of their own.
        gpu_counts: GPUs that the scheduler knows of, by host.
        unseen: what could not be asked, and why.
    """

    hosts: tuple[Host, ...] = ()
    topology: Topology | None = None
    adapters: tuple[Adapter, ...] = ()
    matrix: GpuMatrix | None = None
    gpu_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unseen: tuple[str, ...] = ()

    def joined(self, later: Sources) -> Sources:
        """Both, where the later one wins, but an own report over a scheduler's word of a host."""
        hosts = {host.name: host for host in self.hosts}
        for host in later.hosts:
            old = hosts.get(host.name)
            keep = old is not None and old.gpus is not None and host.nvlinks is None
            hosts[host.name] = old if keep and old is not None else host
        return Sources(
            hosts=tuple(hosts.values()),
            topology=later.topology or self.topology,
            adapters=later.adapters or self.adapters,
            matrix=later.matrix or self.matrix,
            gpu_counts={**self.gpu_counts, **later.gpu_counts},
            unseen=(*self.unseen, *later.unseen),
        )

    def known_hosts(self, names: Sequence[str]) -> tuple[Host, ...]:
        """The named hosts, or those that were seen, or else all of the groups."""
        seen = {host.name: host for host in self.hosts}
        groups = () if self.topology is None else tuple(self.topology.groups)
        listed = names or tuple(seen) or groups
        return tuple(self._completed(seen.get(name, Host(name=name))) for name in listed)

    def _completed(self, host: Host) -> Host:
        if host.gpus is None or host.adapters:
            return host
        adapters = gpu_adapters(self.adapters, self.matrix, host.gpus.count)
        return dataclasses.replace(host, adapters=adapters)


def slurm_job(environment: Mapping[str, str]) -> Sources:
    """The hosts of this allocation, each asked by a task of a step on it.

    Raises:
        UserInputError: outside of an allocation, or if the step fails.
    """
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        limit = "this process is in no allocation of Slurm"
        fix = "Run it in a job (salloc, sbatch), or give saved outputs with --read."
        raise UserInputError("--slurm", value=None, limit=limit, fix=fix)
    count = str(len(hosts_of(nodes)))
    report = [sys.executable, "-m", "nest_megatron", "cluster", "report"]
    step = ["srun", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    found = reports(output_of([*step, *report], timeout_s=_REPORTS_S))
    for program, parse in (
        (["scontrol", "show", "topology"], _topology),
        (["scontrol", "show", "node", nodes], _gpu_counts),
        (["ibnetdiscover"], _fabric),
    ):
        try:
            found = found.joined(parse(output_of(program)))
        except UserInputError as error:
            said = f"{error.what}: {error.limit}"
            found = dataclasses.replace(found, unseen=(*found.unseen, said))
    return found


def kubernetes_nodes() -> Sources:
    """The nodes with GPUs of the Kubernetes cluster that ``kubectl`` talks to.

    Raises:
        UserInputError: if it cannot be asked, or no node says what GPUs it has.
    """
    return _nodes(output_of(["kubectl", "get", "nodes", "-o", "json"]))


def local_host() -> Sources:
    """This host."""
    return Sources(hosts=(this_host(),))


def reports(text: str) -> Sources:
    """Lines that ``nest-megatron cluster report`` printed on each host.

    Raises:
        UserInputError: for a line that is none.
    """
    hosts = []
    for line in filter(str.strip, text.splitlines()):
        try:
            fields = parse_json(line, "report of a host")
        except (ValueError, RecursionError) as error:
            limit = f"it is no line of nest-megatron cluster report ({error})"
            fix = "Print reports alone into the file."
            raise UserInputError("report of a host", value=line, limit=limit, fix=fix) from error
        hosts.append(from_plain(Host, fields, "report of a host:"))
    return Sources(hosts=tuple(hosts))


def _topology(text: str) -> Sources:
    return Sources(topology=parse_slurm_topology(text))


def _fabric(text: str) -> Sources:
    return Sources(topology=parse_ibnetdiscover(text))


def _gpu_counts(text: str) -> Sources:
    return Sources(gpu_counts=parse_slurm_nodes(text))


def _nodes(text: str) -> Sources:
    found = parse_kubernetes_nodes(text)
    hosts = tuple(Host(name=name, gpus=gpus) for name, gpus in found.gpus.items())
    return Sources(hosts=hosts, topology=found.topology)


def _matrix(text: str) -> Sources:
    return Sources(matrix=parse_gpu_matrix(text))


def _ports(text: str) -> Sources:
    return Sources(adapters=parse_ibstat(text))


def _nccl(text: str) -> Sources:
    return Sources(adapters=parse_nccl_topology(text).adapters)


#: How the outputs of programs begin, or what only they hold.
_RECOGNIZED = (
    (r'\s*\{"name"', reports),
    (r"\s*\{", _nodes),
    (r"\s*<system\b|\s*<\?xml", _nccl),
    (r"(?s).*^(SwitchName|BlockName)=", _topology),
    (r"(?s).*^NodeName=", _gpu_counts),
    (r'(?s).*^Switch\s+\d+\s+"S-', _fabric),
    (r"(?s).*^CA '", _ports),
    (r"(?s).*^\S*\s+(\x1b\[\S*)?GPU0\b", _matrix),
)


def saved_output(path: Path) -> Sources:
    """What a program printed into a file, which program is seen from its form.

    Raises:
        UserInputError: for the output of another program, or one that cannot be read.
    """
    text = read_text(path, "--read")
    for form, parse in _RECOGNIZED:
        if re.match(form, text, re.MULTILINE):
            return parse(text)
    limit = (
        "it is none of: nest-megatron cluster report, kubectl get nodes -o json, scontrol show "
        "topology, scontrol show node, ibnetdiscover, ibstat, nvidia-smi topo -m, and the file of "
        "NCCL_TOPO_DUMP_FILE"
    )
    fix = "Save the output of one of these programs, whole."
    raise UserInputError("--read", value=str(path), limit=limit, fix=fix)


def read_hosts(path: Path, what: str = "--hosts") -> Topology:
    """A file with a host and its groups in each line.

    Raises:
        UserInputError: naming the file.
    """
    try:
        return parse_host_file(read_text(path, what))
    except UserInputError as error:
        if error.value is not None:
            raise
        raise UserInputError(what, value=str(path), limit=error.limit, fix=error.fix) from error
