"""Where hosts and their groups are learnt from: Slurm, Kubernetes, this host, saved outputs."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from nest_megatron.cluster.discovery import LocalGpus
from nest_megatron.cluster.hosts import (
    Adapter,
    GpuMatrix,
    Host,
    gpu_adapters,
    output_of,
    parse_gpu_list,
    parse_gpu_matrix,
    parse_ibstat,
    parse_nccl_topology,
)
from nest_megatron.cluster.topology import (
    LEVELS,
    Topology,
    hosts_of,
    level_names,
    parse_host_file,
    parse_ibnetdiscover,
    parse_slurm_topology,
)
from nest_megatron.documents import parse_json
from nest_megatron.errors import UserInputError
from nest_megatron.files import read_text
from nest_megatron.plain import from_plain, frozen

#: Every host answers within this; ``srun`` may first wait for a step that ends.
_REPORTS_S = 180.0
#: A slice of a GPU, as MIG and Slurm's GRES call it: 1g.10gb, a100_3g.20gb.
_MIG = re.compile(r"\d+g\.\d+gb")
#: States in which Slurm's nodes run no job (``*``: it does not respond). One that is powered down
#: is started when a job needs it.
_UNUSABLE = r"(?<!_)DOWN|DRAIN|ERROR|FAIL|FUTURE|MAINT|NOT_RESPONDING|UNKNOWN|\*"
#: Labels of nodes that say where a node is, innermost first; the first family that all have counts.
_FAMILIES = (
    tuple(f"network.topology.nvidia.com/{level}" for level in LEVELS),
    tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (3, 2, 1)),
    ("cloud.google.com/gce-topology-subblock", "cloud.google.com/gce-topology-block"),
    ("topology.kubernetes.io/zone",),
)


@frozen
class Output:
    """What one saved output says: its file's name, the program, and what of it is known."""

    file: str
    program: str
    contents: Sources


@frozen
class Sources:
    """What was learnt.

    Args:
        hosts: those that were seen; none where only groups were.
        topology: which hosts share switches.
        adapters, matrix: of one host, taken for those that tell nothing of their own.
        gpu_names: of the GPUs of one host, by ``nvidia-smi -L``.
        slurm_gpus, slurm_gpu_types: whole GPUs of nodes, by Slurm, and what it calls them, where
            it names them.
        divided: slices of hosts whose GPUs MIG divides.
        unseen: what could not be read, and why.
        outputs: the files that were read, in their order.
    """

    hosts: tuple[Host, ...] = ()
    topology: Topology | None = None
    adapters: tuple[Adapter, ...] = ()
    matrix: GpuMatrix | None = None
    gpu_names: tuple[str, ...] = ()
    slurm_gpus: Mapping[str, int] = dataclasses.field(default_factory=dict)
    slurm_gpu_types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    divided: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()

    def joined(self, later: Sources) -> Sources:
        """Both, where the later one wins, but an own report over a scheduler's word of a host."""
        hosts = {host.name: host for host in self.hosts}
        for host in later.hosts:
            old = hosts.get(host.name)
            if old is None or old.gpus is None or host.nvlinks is not None:
                hosts[host.name] = host
        found: dict[str, Any] = {"hosts": tuple(hosts.values())}
        for name in ("topology", "adapters", "matrix", "gpu_names"):
            found[name] = getattr(later, name) or getattr(self, name)
        for name in ("slurm_gpus", "slurm_gpu_types", "divided"):
            found[name] = {**getattr(self, name), **getattr(later, name)}
        for name in ("unseen", "outputs"):
            found[name] = getattr(self, name) + getattr(later, name)
        return Sources(**found)

    def known_hosts(self, names: Sequence[str], num_gpus: int | None) -> tuple[Host, ...]:
        """The named hosts, or those that were seen, or those of Slurm, or else of the groups.

        Args:
            num_gpus: of a host of which no program says it.
        """
        seen = {host.name: host for host in self.hosts}
        groups = () if self.topology is None else tuple(self.topology.groups)
        with_gpus = tuple(name for name, count in self.slurm_gpus.items() if count)
        listed = names or tuple(seen) or with_gpus or groups
        return tuple(
            self._completed(seen.get(name, Host(name=name)), self.slurm_gpus.get(name), num_gpus)
            for name in listed
        )

    def _completed(self, host: Host, of_slurm: int | None, assumed: int | None) -> Host:
        """A host, and what is taken for it from the outputs of one host."""
        matrix = self.matrix
        by = next((o.program for o in self.outputs if o.contents.matrix is matrix), "")
        counted = (
            ("scontrol show node", of_slurm),
            (by, None if matrix is None else matrix.num_gpus),
            ("nvidia-smi -L", len(self.gpu_names)),
        )
        program, count = next(((name, known) for name, known in counted if known), ("", None))
        count = host.gpu_count or count
        if matrix is not None and matrix.num_gpus != count:
            matrix = None
        adapters, nvlinks = host.adapters, host.nvlinks
        if not adapters and (count or assumed):
            adapters = gpu_adapters(self.adapters, matrix, count or assumed or 1)
        if nvlinks is None and matrix is not None:
            nvlinks = matrix.nvlinks
        known = replace(host, adapters=adapters, nvlinks=nvlinks)
        if host.gpu_count or not count:
            return known
        return replace(known, num_gpus=count, counted_by=program)


def slurm_job(environment: Mapping[str, str]) -> Sources:
    """The hosts of this allocation, each read by a task of a step on it.

    Raises:
        UserInputError: outside of an allocation, or if the step fails.
    """
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        raise UserInputError(
            "--slurm",
            None,
            "this process is in no allocation of Slurm",
            "Run it in a job (salloc, sbatch), or give saved outputs with --read.",
        )
    count = str(len(hosts_of(nodes)))
    report = [sys.executable, "-m", "nest_megatron", "cluster", "report"]
    step = ["srun", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    found = reports(output_of([*step, *report], timeout_s=_REPORTS_S))
    for program, *more in (("scontrol show topology",), ("scontrol show node", nodes), (_FABRIC,)):
        try:
            found = found.joined(_PROGRAMS[program][1](output_of([*program.split(), *more])))
        except UserInputError as error:
            said = f"{error.what}: {error.limit}"
            found = replace(found, unseen=(*found.unseen, said))
    return found


def kubernetes_nodes() -> Sources:
    """The nodes with GPUs of the Kubernetes cluster that ``kubectl`` talks to.

    Raises:
        UserInputError: if it cannot be reached, or no node says what GPUs it has.
    """
    return parse_kubernetes_nodes(output_of(["kubectl", "get", "nodes", "-o", "json"]))


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
            raise UserInputError(
                "report of a host",
                line,
                f"it is no line of nest-megatron cluster report ({error})",
                "Print reports alone into the file.",
            ) from error
        hosts.append(from_plain(Host, fields, "report of a host:"))
    return Sources(hosts=tuple(hosts))


def parse_slurm_nodes(text: str) -> Sources:
    """``scontrol show node``: what GPUs each node has."""
    counts, types = dict[str, int](), dict[str, str]()
    divided, left_out = dict[str, str](), dict[str, str]()
    for node in re.split(r"(?=\bNodeName=)", text):
        name = re.match(r"NodeName=(\S+)", node)
        gres = re.search(r"\bGres=(\S+)", node)
        if not name or not gres:
            continue
        found = re.findall(r"\bgpu:(?:([^:,(]+):)?(\d{1,9})(?!\w)", gres[1])
        slices = [f"{count} x {kind}" for kind, count in found if _MIG.search(kind)]
        if slices:
            divided[name[1]] = ", ".join(slices)
            continue
        state = re.search(rf"\bState=(\S*(?:{_UNUSABLE})\S*)", node)
        if state or len({kind for kind, _ in found}) > 1:
            unlike = " and ".join(f"{count} x {kind or 'GPU'}" for kind, count in found)
            why = state[1] if state else f"unlike GPUs, {unlike}"
            left_out[name[1]] = f"scontrol show node: {name[1]} is left out: {why}"
            continue
        counts[name[1]] = sum(int(count) for _, count in found)
        if named := [kind for kind, _ in found if kind]:
            types[name[1]] = ", ".join(named)
    return Sources(
        slurm_gpus=counts,
        slurm_gpu_types=types,
        divided=divided,
        unseen=tuple(left_out.values()),
    )


def parse_kubernetes_nodes(text: str) -> Sources:
    """``kubectl get nodes -o json``: nodes that NVIDIA's GPU feature discovery has labelled.

    Raises:
        UserInputError: for another text, or where no node has the labels.
    """
    what = "kubectl get nodes -o json"
    try:
        nodes = {str(n["metadata"]["name"]): n for n in parse_json(text, what)["items"]}
        labels = {name: dict(n["metadata"].get("labels", {})) for name, n in nodes.items()}
        with_gpus = [name for name, node in nodes.items() if _has_gpus(node)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserInputError(
            what, None, f"it is no list of nodes ({error})", "Save its output again."
        ) from error
    divided = {name: slices for name, each in labels.items() if (slices := _slices(each))}
    gpus = {
        name: found
        for name, each in labels.items()
        if name not in divided and (found := _labelled_gpus(each))
    }
    if not gpus and not divided:
        raise UserInputError(
            what,
            None,
            "no node has the labels nvidia.com/gpu.product and .count",
            "Install NVIDIA's GPU feature discovery, or give reports of the hosts (--read).",
        )
    topology = None
    for family in _FAMILIES:
        known = [key for key in family if gpus and all(key in labels[name] for name in gpus)]
        if known:
            groups = {name: tuple(labels[name][key] for key in known) for name in gpus}
            names = tuple(key.rpartition("/")[2].rpartition("-")[2] for key in known)
            names = level_names(len(known)) if family is _FAMILIES[1] else names
            source = f"{what}: {', '.join(known)}"
            topology = Topology(source=source, level_names=names, groups=groups)
            break
    return Sources(
        hosts=tuple(Host(name=name, gpus=found) for name, found in gpus.items()),
        topology=topology,
        divided=divided,
        unseen=tuple(
            f"kubectl get nodes: {name} has GPUs, but no labels of GPU feature discovery: left out"
            for name in with_gpus
            if name not in gpus and name not in divided
        ),
    )


def _has_gpus(node: Mapping[str, Any]) -> bool:
    """Whether the device plugin offers GPUs of a node."""
    offered = node.get("status", {}).get("allocatable", {}).get("nvidia.com/gpu", "0")
    return str(offered).isdigit() and int(offered) > 0


def _slices(labels: Mapping[str, Any]) -> str:
    """The MIG slices of a node; empty where its GPUs are whole.

    With MIG's strategy ``single`` slices stand in for GPUs; with ``mixed`` each kind is counted.
    """
    product = str(labels.get("nvidia.com/gpu.product", ""))
    if "-MIG-" in product:
        return f"{labels.get('nvidia.com/gpu.count', '?')} x {product}"
    counted = ((re.fullmatch(r"nvidia\.com/(mig-.+)\.count", key), n) for key, n in labels.items())
    return ", ".join(f"{count} x {kind[1]}" for kind, count in counted if kind)


def _labelled_gpus(labels: Mapping[str, Any]) -> LocalGpus | None:
    product, count, memory = (
        str(labels.get(f"nvidia.com/gpu.{name}", "")) for name in ("product", "count", "memory")
    )
    if not product or not count.isdigit() or not memory.isdigit():
        return None
    name = product.removesuffix("-SHARED").replace("-", " ")
    return LocalGpus(device_name=name, memory_bytes=int(memory) << 20, count=int(count))


def _nccl(text: str) -> Sources:
    adapters, matrix = parse_nccl_topology(text)
    return Sources(adapters=adapters, matrix=matrix)


_FABRIC: Final = "ibnetdiscover"
#: By program how its output begins, or what it alone holds, and what reads it.
_PROGRAMS: Mapping[str, tuple[str, Callable[[str], Sources]]] = {
    "nest-megatron cluster report": (r'\s*\{"name"', reports),
    "kubectl get nodes -o json": (r"\s*\{", parse_kubernetes_nodes),
    "NCCL_TOPO_DUMP_FILE": (r"\s*<system\b|\s*<\?xml", _nccl),
    "scontrol show topology": (
        r"(?s).*^(SwitchName|BlockName)=",
        lambda text: Sources(topology=parse_slurm_topology(text)),
    ),
    "scontrol show node": (r"(?s).*^NodeName=", parse_slurm_nodes),
    _FABRIC: (
        r'(?s).*^Switch\s+\d+\s+"S-',
        lambda text: Sources(topology=parse_ibnetdiscover(text)),
    ),
    "ibstat": (r"(?s).*^CA '", lambda text: Sources(adapters=parse_ibstat(text))),
    "nvidia-smi topo -m": (
        r"(?s).*^\S*\s+(\x1b\[\S*)?GPU0\b",
        lambda text: Sources(matrix=parse_gpu_matrix(text)),
    ),
    "nvidia-smi -L": (
        r"(?s).*^GPU \d+: .*UUID",
        lambda text: Sources(gpu_names=parse_gpu_list(text)),
    ),
}


def saved_output(path: Path) -> Sources:
    """What a program printed into a file, which program is seen from its form.

    Raises:
        UserInputError: for the output of another program, or one that cannot be read.
    """
    text = read_text(path, "--read")
    for program, (form, parse) in _PROGRAMS.items():
        if re.match(form, text, re.MULTILINE):
            found = parse(text)
            output = Output(file=path.name, program=program, contents=found)
            return replace(found, outputs=(output,))
    raise UserInputError(
        "--read",
        str(path),
        f"it is none of: {', '.join(_PROGRAMS)}",
        "Save the output of one of these programs, whole.",
    )


def read_hosts(path: Path) -> Topology:
    """A file with a host and its groups in each line.

    Raises:
        UserInputError: naming the file.
    """
    try:
        return parse_host_file(read_text(path, "--hosts"))
    except UserInputError as error:
        if error.value is not None:
            raise
        raise UserInputError("--hosts", str(path), error.limit, error.fix) from error


def unused_outputs(
    sources: Sources, hosts: Sequence[Host], topology: Topology | None
) -> Iterator[str]:
    """What of the files that were read is not used, with the reason.

    Args:
        hosts: those of the cluster, with what was taken for them.
        topology: the groups that are used.
    """
    for output in sources.outputs:
        for part, reason in _unused(output.contents, sources, hosts, topology):
            yield f"{output.file} ({output.program}): its {part} are not used: {reason}"


def _unused(
    found: Sources, sources: Sources, hosts: Sequence[Host], topology: Topology | None
) -> Iterator[tuple[str, str]]:
    names = {host.name for host in hosts}
    own = {host.name: host for host in sources.hosts}
    named = {host.name for host in found.hosts}.union(found.slurm_gpus)
    if named and not named & names:
        yield "hosts", "none of them is among those of the job"
    elif found.hosts and not any(host in sources.hosts for host in found.hosts):
        yield "hosts", "another file tells more of them"
    other = None if found.topology is topology else topology
    unlike_gpus = _unlike_count(len(found.gpu_names), hosts)
    of_hosts = _BY_HOSTS if all(host.gpus for host in hosts) else unlike_gpus
    for part, read, used, why in (
        ("groups", found.topology, sources.topology, other and f"{other.source} says them"),
        ("GPUs", found.gpu_names, sources.gpu_names, of_hosts),
        ("adapters", found.adapters, sources.adapters, _unused_adapters(hosts, own)),
        ("links", found.matrix, sources.matrix, _unused_matrix(found.matrix, hosts, own)),
    ):
        if read and read is not used:
            yield part, "a file after it tells them too"
        elif read and why:
            yield part, why


_BY_HOSTS = "every host tells its own"


def _unused_adapters(hosts: Sequence[Host], own: Mapping[str, Host]) -> str:
    without = [host for host in hosts if host.name not in own or not own[host.name].adapters]
    if not without:
        return _BY_HOSTS
    if any(host.adapters for host in without):
        return ""
    return (
        "those of GPUs cannot be distinguished from those of storage; add nvidia-smi topo -m of "
        "the same host"
    )


def _unused_matrix(matrix: GpuMatrix | None, hosts: Sequence[Host], own: Mapping[str, Host]) -> str:
    without = [
        host
        for host in hosts
        if host.name not in own or own[host.name].nvlinks is None or not own[host.name].adapters
    ]
    if not without:
        return _BY_HOSTS
    return "" if matrix is None else _unlike_count(matrix.num_gpus, without)


def _unlike_count(num_gpus: int, hosts: Sequence[Host]) -> str:
    counts = {host.gpu_count for host in hosts}
    if num_gpus in counts:
        return ""
    shown = " or ".join(sorted(str(count) for count in counts))
    return f"it is of a host with {num_gpus} GPUs, and the hosts have {shown}"
