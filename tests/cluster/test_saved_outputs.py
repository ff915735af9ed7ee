"""Saved outputs of several programs together: each is used, or named with the reason."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path

import pytest

from nest_megatron.cluster.sources import Sources, read_hosts, saved_output
from nest_megatron.config.cluster_detection import DiscoveredCluster, discovered
from nest_megatron.config.launch import MixedGpus
from nest_megatron.errors import UserInputError
from nest_megatron.plain import to_plain
from tests.cluster.test_described import host
from tests.cluster.test_outputs import CAPTURED

TOPO, PORTS, NODES = (
    CAPTURED / name for name in ("topo_4nic.txt", "ibstat_6.txt", "scontrol_node.txt")
)
LABELS = CAPTURED / "nodes_kubernetes.json"


def of(*paths: Path, hosts: Path | None = None, base: str | None = "dgx_h100") -> DiscoveredCluster:
    sources = reduce(Sources.joined, map(saved_output, paths), Sources())
    listed = None if hosts is None else read_hosts(hosts)
    return discovered(sources, listed=listed, base=base, mixed=MixedGpus.REFUSE)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.txt"
    path.write_text("n1 r1\nn2 r1\n")
    return path


def notes_of(found: DiscoveredCluster) -> list[str]:
    return [note for note in found.notes if "not used" in note]


def test_adapters_of_one_host_are_those_of_listed_hosts(two: Path) -> None:
    found = of(TOPO, PORTS, hosts=two)
    assert found.cluster.levels[1].bandwidth_bytes_per_s == 25e9
    assert "8 GPUs on each of n1, n2: nvidia-smi topo -m" in found.seen
    assert any("4 adapters of 400 Gb/s InfiniBand" in line for line in found.seen)
    assert "adapters of hosts that do not tell theirs: those of one host (4)" in found.assumed
    assert notes_of(found) == []


def test_ports_without_the_matrix_are_named(two: Path) -> None:
    found = of(PORTS, hosts=two)
    assert found.cluster.levels[1].bandwidth_bytes_per_s == 50e9
    assert notes_of(found) == [
        "ibstat_6.txt (ibstat): its adapters are not used: those of GPUs cannot be distinguished "
        "from those of storage; add nvidia-smi topo -m of the same host"
    ]


def test_as_many_ports_as_gpus_need_no_matrix(two: Path, tmp_path: Path) -> None:
    four = tmp_path / "four.txt"
    four.write_text("CA '".join(PORTS.read_text().split("CA '")[:5]))
    found = of(four, hosts=two)
    assert found.cluster.levels[1].bandwidth_bytes_per_s == 25e9
    assert not any("GPUs on each" in line for line in found.seen)


def test_nodes_of_slurm_are_hosts() -> None:
    found = of(NODES)
    assert [each.name for each in found.hosts] == ["n1", "n2"]
    assert found.cluster.num_gpus == 16
    assert "8 GPUs on each of n1, n2: scontrol show node" in found.seen
    assert not any("Slurm calls" in note for note in found.notes)
    other = of(NODES, base="dgx_a100")
    assert "Slurm calls the GPUs h100, and dgx_a100 has A100-SXM-80GB" in other.notes
    with pytest.raises(UserInputError, match=r"n1, n2.*no program said what GPUs they have"):
        of(NODES, base=None)


def test_why_no_node_of_slurm_is_a_host(tmp_path: Path) -> None:
    path = tmp_path / "nodes.txt"
    path.write_text("".join(f"NodeName=n{n} Gres=gpu:8\n   State=DOWN*\n" for n in range(9)))
    with pytest.raises(UserInputError, match=r"can be used \(.*n0 is left out: DOWN\*.*5 more\)"):
        of(path)


def test_nodes_of_slurm_add_no_hosts_to_reports(tmp_path: Path) -> None:
    path = tmp_path / "reports.jsonl"
    path.write_text(json.dumps(to_plain(host("n1"))) + "\n")
    for order in ((path, NODES), (NODES, path)):
        assert [each.name for each in of(*order).hosts] == ["n1"]


def test_nodes_of_two_files_are_joined(tmp_path: Path) -> None:
    first, second = NODES.read_text().split("NodeName=n2")
    paths = tmp_path / "n1.txt", tmp_path / "n2.txt"
    for path, text in zip(paths, (first, f"NodeName=n2{second}"), strict=True):
        path.write_text(text)
    assert [each.name for each in of(*paths).hosts] == ["n1", "n2"]


def test_nodes_without_labels_are_named(tmp_path: Path) -> None:
    path = labelled(tmp_path, n1={})
    listed = json.loads(path.read_text())
    listed["items"] += [
        {"metadata": {"name": name}, "status": {"allocatable": {"nvidia.com/gpu": count}}}
        for name, count in (("n2", "8"), ("cpu", "0"))
    ]
    path.write_text(json.dumps(listed))
    found = of(path)
    assert [each.name for each in found.hosts] == ["n1"]
    assert [note for note in found.notes if "left out" in note] == [
        "kubectl get nodes: n2 has GPUs, but no labels of GPU feature discovery: left out"
    ]


def test_what_nccl_sees_of_a_whole_host_is_taken(two: Path, tmp_path: Path) -> None:
    gpus = "".join(
        f'<pci busid="{n}"><pci busid="{n}:1"><gpu dev="{n}"/></pci>'
        f'<pci busid="{n}:2"><nic><net name="mlx5_{n}" speed="200000"/></nic></pci></pci>'
        for n in range(8)
    )
    other = '<pci busid="9"><nic><net name="eth" speed="400000"/></nic></pci>'
    path = tmp_path / "nccl.xml"
    path.write_text(f'<system version="1"><cpu numaid="0">{gpus}{other}</cpu></system>')
    found = of(path, hosts=two)
    assert found.cluster.levels[1].bandwidth_bytes_per_s == 25e9
    assert "8 GPUs on each of n1, n2: NCCL_TOPO_DUMP_FILE" in found.seen
    assert notes_of(found) == []


def test_unlike_counts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "nodes.txt"
    path.write_text("NodeName=n1 Gres=gpu:8\nNodeName=n2 Gres=gpu:4\nNodeName=login Gres=(null)\n")
    with pytest.raises(UserInputError, match="n1: 8, n2: 4"):
        of(path)


def test_a_matrix_of_other_hosts_is_named(two: Path, tmp_path: Path) -> None:
    matrix = tmp_path / "topo.txt"
    matrix.write_text(
        "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tNV4\tPIX\nGPU1\tNV4\t X \tSYS\nNIC0\tPIX\tSYS\t X\n"
    )
    found = of(NODES, matrix, hosts=two)
    assert notes_of(found) == [
        "topo.txt (nvidia-smi topo -m): its links are not used: it is of a host with 2 GPUs, and "
        "the hosts have 8"
    ]


def test_what_is_told_better_or_later_is_named(two: Path, tmp_path: Path) -> None:
    reports = tmp_path / "reports.jsonl"
    reports.write_text("".join(f"{json.dumps(to_plain(host(n)))}\n" for n in ("n1", "n2")))
    found = of(TOPO, PORTS, CAPTURED / "topology_tree.txt", LABELS, reports, hosts=two)
    assert notes_of(found) == [
        "topo_4nic.txt (nvidia-smi topo -m): its links are not used: every host tells its own",
        "ibstat_6.txt (ibstat): its adapters are not used: every host tells its own",
        "topology_tree.txt (scontrol show topology): its groups are not used: a file after it "
        "tells them too",
        "nodes_kubernetes.json (kubectl get nodes -o json): its hosts are not used: none of them "
        "is among those of the job",
        "nodes_kubernetes.json (kubectl get nodes -o json): its groups are not used: host file "
        "says them",
    ]


def test_a_list_of_gpus_of_another_kind_is_refused(two: Path, tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("".join(f"GPU {n}: NVIDIA A100-SXM4-80GB (UUID: GPU-{n})\n" for n in range(4)))
    with pytest.raises(UserInputError, match=r"H100-SXM-80GB.*NVIDIA A100-SXM4-80GB"):
        of(path, hosts=two)
    assert of(path, hosts=two, base="dgx_a100").cluster.num_gpus == 8


@pytest.mark.parametrize(
    ("count", "unused"),
    [
        (8, []),
        (4, ["its GPUs are not used: it is of a host with 4 GPUs, and the hosts have 8"]),
    ],
)
def test_what_the_list_of_gpus_says_is_told(count: int, unused: list[str], tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    lines = [f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n})\n" for n in range(count)]
    path.write_text("".join(lines))
    told = f"nvidia-smi -L lists {count} x NVIDIA H100 80GB HBM3"
    found = of(NODES, path)
    assert f"{told}: those of dgx_h100 are assumed" in found.notes
    assert notes_of(found) == [f"list.txt (nvidia-smi -L): {each}" for each in unused]
    with pytest.raises(UserInputError, match=rf"{told}, and no program said how much memory"):
        of(NODES, path, base=None)
    path.with_name("later.txt").write_text("".join(lines[:1] * 8))
    later = of(NODES, path, path.with_name("later.txt"))
    assert notes_of(later) == [
        "list.txt (nvidia-smi -L): its GPUs are not used: a file after it tells them too"
    ]


def labelled(folder: Path, **labels: dict[str, str]) -> Path:
    plain = {"gpu.product": "NVIDIA-H100-80GB-HBM3", "gpu.count": "8", "gpu.memory": "81559"}
    items = [
        {
            "metadata": {
                "name": name,
                "labels": {f"nvidia.com/{k}": v for k, v in {**plain, **more}.items()},
            }
        }
        for name, more in labels.items()
    ]
    path = folder / "nodes.json"
    path.write_text(json.dumps({"items": items}))
    return path


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "gpu.count": "56"},
            r"56 x NVIDIA-H100-80GB-HBM3-MIG-1g\.10gb",
        ),
        ({"mig-3g.40gb.count": "16"}, r"16 x mig-3g\.40gb"),
    ],
)
def test_slices_of_kubernetes_are_told(more: dict[str, str], told: str, tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=f"n1: {told}.*MIG.*nvidia-smi -mig 0"):
        of(labelled(tmp_path, n1=more))
    found = of(labelled(tmp_path, n1=more, n2={}))
    assert [each.name for each in found.hosts] == ["n2"]
    assert any(note.startswith("n1 is left out: MIG divides its GPUs") for note in found.notes)


def test_unknown_gpus_are_refused_with_both_names_of_the_option(tmp_path: Path) -> None:
    labels = labelled(tmp_path, n1={"gpu.product": "NVIDIA-L40S", "gpu.memory": "46068"})
    told = r"8 x NVIDIA L40S \(45\.0 GiB\).*nest\.cluster, or with --cluster"
    with pytest.raises(UserInputError, match=told):
        of(labels, base=None)


def test_slices_of_slurm_are_told(tmp_path: Path, two: Path) -> None:
    path = tmp_path / "nodes.txt"
    path.write_text("NodeName=n1 Gres=gpu:1g.10gb:56\nNodeName=n2 Gres=gpu:8\n")
    with pytest.raises(UserInputError, match=r"n1: 56 x 1g\.10gb"):
        of(path, hosts=two)
    assert [each.name for each in of(path).hosts] == ["n2"]
