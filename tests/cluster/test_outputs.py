"""Outputs of programs, as others published them (captured/README.md has the sources)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_megatron.cluster import hosts, sources, topology
from nest_megatron.cluster.hosts import Adapter, GpuMatrix, gpu_adapters
from nest_megatron.cluster.topology import host_file, hosts_of, parse_host_file, tasks_per_node
from nest_megatron.errors import UserInputError

CAPTURED = Path(__file__).with_name("captured")


def captured(name: str) -> str:
    return (CAPTURED / name).read_text(encoding="utf-8")


def test_gpus_and_the_adapters_beside_them() -> None:
    found = hosts.parse_gpu_matrix(captured("topo_h100.txt"))
    assert (found.num_gpus, found.nvlinks) == (8, 18)
    # NIC3 is on the switch of no GPU; the rows of the last two GPUs are not in the capture
    assert found.near_adapters == tuple(f"mlx5_{i}" for i in (0, 1, 2, 4, 5, 6))


def test_gpus_without_nvlink() -> None:
    found = hosts.parse_gpu_matrix(captured("topo_4090.txt"))
    assert found == GpuMatrix(num_gpus=8, nvlinks=0, near_adapters=())


@pytest.mark.parametrize("name", ["mlx5_bond_0", "ibp12s0", "bnxt_re0", "hfi1_0", "NIC0"])
def test_adapters_have_any_name(name: str) -> None:
    text = (
        f"\tGPU0\tGPU1\t{name}\tmlx5_1\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tNV4\tSYS\tPIX\t0-31\t0\nGPU1\tNV4\t X \tSYS\tPXB\t0-31\t0\n"
    )
    assert hosts.parse_gpu_matrix(text).near_adapters == ("mlx5_1",)
    text = text.replace("SYS\tPIX", "PIX\tSYS").replace("PXB", "SYS")
    assert hosts.parse_gpu_matrix(text).near_adapters == (name,)


def test_escapes_of_a_terminal_are_no_part_of_the_matrix() -> None:
    text = (
        "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV12\t0-23\nGPU1\tNV12\t X \t0-23\n"
    )
    assert hosts.parse_gpu_matrix(text).nvlinks == 12


def test_a_matrix_of_pcie_alone_says_nothing_of_nvlink() -> None:
    """``nvidia-smi topo -mp``, whose legend has no NVLink."""
    of_pcie = f"{captured('topo_4090.txt')}\nLegend:\n\n  X    = Self\n"
    assert hosts.parse_gpu_matrix(of_pcie).nvlinks is None
    with_nvlink = f"{of_pcie}  NV#  = Connection traversing a bonded set of # NVLinks\n"
    assert hosts.parse_gpu_matrix(with_nvlink).nvlinks == 0


def test_nccl_s_topology() -> None:
    found, matrix = hosts.parse_nccl_topology(captured("nccl_h200.xml"))
    assert found == (Adapter(name="mlx5_0", rate_bits_per_s=4e11),)
    assert matrix is None, "of a process that sees one GPU"


def test_an_adapter_on_no_switch_with_a_gpu_is_left_out() -> None:
    found, _ = hosts.parse_nccl_topology(captured("nccl_a100_storage.xml"))
    assert [each.name for each in found] == ["mlx5_0"]


@pytest.mark.parametrize(
    "text",
    [
        '<!DOCTYPE x [<!ENTITY a "aaaa">]><system>&a;</system>',
        "<system",
        "<plan/>",
        '<system><cpu><pci><nic><net name="x" speed="fast"/></nic></pci></cpu></system>',
    ],
)
def test_other_xml_is_refused(text: str) -> None:
    with pytest.raises(UserInputError, match="NCCL topology"):
        hosts.parse_nccl_topology(text)


def test_ibstat_tells_active_ports() -> None:
    text = captured("ibstat.txt")
    port = Adapter(name="mlx4_0", rate_bits_per_s=4e10, link_layer="InfiniBand")
    assert hosts.parse_ibstat(text) == (port,)
    assert hosts.parse_ibstat(text.replace("State: Active", "State: Down")) == ()


def test_linux_tells_the_same(tmp_path: Path) -> None:
    for name, state, rate, layer in (
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),
        ("mlx5_1", "1: DOWN", "400 Gb/sec (4X NDR)", "InfiniBand"),
        ("efa_0", "4: ACTIVE", "100 Gb/sec (4X EDR)", "Unspecified"),
    ):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        for file, text in (("state", state), ("rate", rate), ("link_layer", layer)):
            (port / file).write_text(f"{text}\n")
    found = hosts.adapters_of_host(tmp_path)
    assert found == (Adapter(name="mlx5_0", rate_bits_per_s=4e11, link_layer="InfiniBand"),)
    assert hosts.adapters_of_host(tmp_path / "none") == ()


def adapters(count: int, gbits: float, first: int = 0) -> list[Adapter]:
    return [
        Adapter(name=f"mlx5_{i}", rate_bits_per_s=gbits * 1e9, link_layer="InfiniBand")
        for i in range(first, first + count)
    ]


def test_adapters_of_storage_are_told_apart_or_nothing_is_said() -> None:
    ten = adapters(10, 400)
    near = GpuMatrix(num_gpus=8, nvlinks=18, near_adapters=tuple(f"mlx5_{i}" for i in range(8)))
    assert gpu_adapters(ten, near, 8) == tuple(ten[:8])
    assert gpu_adapters(ten, None, 8) == ()
    assert gpu_adapters([*ten[:8], *adapters(2, 200, first=8)], None, 8) == tuple(ten[:8])


def test_hosts_of_a_fabric_with_rails() -> None:
    found = topology.parse_ibnetdiscover(captured("ibnetdiscover_superpod.txt"))
    assert found.of("a06-p1-dgx-02-c01") == found.of("a06-p1-dgx-02-c03.site")
    assert found.of("a06-p1-dgx-02-c01") != found.of("a08-p1-dgx-04-c01")
    assert len(found.groups) == 5
    assert found.notes == ("ports of hosts that tell no host's name, in no group: 1",)
    # 6 ports of hosts and 4 uplinks, and 2 of each, all of 400 Gb/s
    assert sorted(found.uplink_shares.values()) == [pytest.approx(4 / 6), 1.0]


def test_a_slow_link_is_named() -> None:
    text = captured("ibnetdiscover_superpod.txt").replace("lid 236 4xNDR", "lid 236 4xDDR", 1)
    notes = topology.parse_ibnetdiscover(text).notes
    assert notes[0] == "1 of the uplinks run at 20 Gb/s, the others at 400"


def test_switches_of_slurm() -> None:
    found = topology.parse_slurm_topology(captured("topology_tree.txt"))
    assert found.level_names == ("leaf",)
    assert (found.of("node3"), found.of("node11")) == (("rack1",), ("rack2",))
    assert found.usual_sizes() == (10,)


def test_switches_above_switches() -> None:
    text = (
        "SwitchName=le1 Level=0 LinkSpeed=1 Nodes=bm[01-02]\n"
        "SwitchName=le2 Level=0 LinkSpeed=1 Nodes=bm[03-04]\n"
        "SwitchName=sp1 Level=1 LinkSpeed=1 Nodes=bm[01-04] Switches=le[1-2]\n"
    )
    found = topology.parse_slurm_topology(text)
    assert (found.level_names, found.of("bm03")) == (("leaf", "spine"), ("le2", "sp1"))


def test_blocks_of_slurm() -> None:
    text = (
        "BlockName=block01 BlockIndex=0 Nodes=node[0001-0018] BlockSize=18\n"
        "BlockName=block02 BlockIndex=1 Nodes=node[0019-0036] BlockSize=18\n"
        "AggregatedBlock=block[01-02] BlockIndex=2 Nodes=node[0001-0036] BlockSize=36\n"
    )
    found = topology.parse_slurm_topology(text)
    assert found.of("node0019") == ("block02",)
    assert found.usual_sizes() == (18,)


@pytest.mark.parametrize("text", ["", "slurm_load_topo error: Unknown", "SwitchName=s1 Level=0"])
def test_no_switch_is_said(text: str) -> None:
    with pytest.raises(UserInputError, match="no switch and no block"):
        topology.parse_slurm_topology(text)


def test_gpus_that_slurm_knows_of() -> None:
    text = (
        "NodeName=node-a1 Arch=x86_64 Gres=gpu:a100:4 NodeAddr=node-a1\n"
        "NodeName=cg14 Arch=x86_64\n   Gres=gpu:nvidia_h100_80gb_hbm3:8(S:0-1)\n"
        "NodeName=binfservas07 Gres=(null)\nNodeName=n2 Gres=gpu:8\n"
    )
    found = sources.parse_slurm_nodes(text)
    assert found.slurm_gpus == {"node-a1": 4, "cg14": 8, "binfservas07": 0, "n2": 8}
    assert found.slurm_gpu_types == {"node-a1": "a100", "cg14": "nvidia_h100_80gb_hbm3"}
    assert not found.divided


def test_nodes_that_no_job_can_have_are_left_out() -> None:
    text = (
        "NodeName=n1 Gres=gpu:h100:8\n   State=IDLE ThreadsPerCore=1\n"
        "NodeName=n2 Gres=gpu:h100:8\n   State=DOWN*+DRAIN\n"
        "NodeName=n3 Gres=gpu:h100:4,gpu:a100:4\n   State=MIXED\n"
    )
    found = sources.parse_slurm_nodes(text)
    assert found.slurm_gpus == {"n1": 8}
    assert found.unseen == (
        "scontrol show node: n2 is left out: DOWN*+DRAIN",
        "scontrol show node: n3 is left out: unlike GPUs, 4 x h100 and 4 x a100",
    )


@pytest.mark.parametrize(
    ("state", "is_host"),
    [
        ("IDLE+CLOUD+POWERED_DOWN", True),
        ("IDLE+CLOUD+POWERING_DOWN", True),
        ("MIXED+PLANNED", True),
        ("FUTURE", False),
        ("UNKNOWN*", False),
        ("IDLE*", False),
        ("IDLE+NOT_RESPONDING", False),
        ("IDLE+MAINT+RESERVED", False),
        ("DOWN+CLOUD+POWERED_DOWN", False),
        ("IDLE+DRAIN", False),
    ],
)
def test_states_of_slurm_s_nodes(state: str, is_host: bool) -> None:
    found = sources.parse_slurm_nodes(f"NodeName=n1 Gres=gpu:h100:8\n   State={state} Weight=1\n")
    assert ("n1" in found.slurm_gpus) is is_host
    told = f"scontrol show node: n1 is left out: {state}"
    assert found.unseen == (() if is_host else (told,))


def test_slices_of_slurm_are_no_gpus() -> None:
    text = "NodeName=n1 Gres=gpu:a100_1g.5gb:7,gpu:a100_3g.20gb:2(S:0)\nNodeName=n2 Gres=gpu:8\n"
    found = sources.parse_slurm_nodes(text)
    assert found.slurm_gpus == {"n2": 8}
    assert found.divided == {"n1": "7 x a100_1g.5gb, 2 x a100_3g.20gb"}


def test_the_list_of_gpus_names_slices() -> None:
    whole = "".join(f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n}f-1)\n" for n in range(2))
    assert hosts.parse_gpu_list(whole) == ("NVIDIA H100 80GB HBM3",) * 2
    sliced = f"{whole}  MIG 1g.10gb     Device  0: (UUID: MIG-1)\n  MIG 3g.40gb     Device  1: (UU"
    with pytest.raises(UserInputError, match=r"2 slices: MIG 1g\.10gb, MIG 3g\.40gb.*whole GPUs"):
        hosts.parse_gpu_list(sliced)
    with pytest.raises(UserInputError, match="it lists no GPU"):
        hosts.parse_gpu_list("No devices found.\n")


def test_labels_of_kubernetes() -> None:
    found = sources.parse_kubernetes_nodes(captured("nodes_kubernetes.json"))
    gpus = {host.name: host.gpus for host in found.hosts}
    assert set(gpus) == {"Node201", "Node304"}
    assert gpus["Node201"] is not None
    assert gpus["Node201"].describe() == "8 x NVIDIA H100 80GB HBM3 (79.6 GiB)"
    assert found.topology is not None
    assert found.topology.level_names == ("leaf", "spine")
    assert found.topology.of("Node304") == ("xf946c4acef2d5939", "S1")


def test_nodes_without_labels_are_said() -> None:
    items = [{"metadata": {"name": "a", "labels": {}}}]
    with pytest.raises(UserInputError, match="no node has the labels"):
        sources.parse_kubernetes_nodes(json.dumps({"items": items}))


def test_a_file_of_hosts() -> None:
    assert [*parse_host_file("n[1-2] rackA\nn3 rackB").groups] == ["n1", "n2", "n3"]
    found = parse_host_file("# host rack row\nn1 r1 a\nn2 r2 a   # new\n\nn3 r1 a\n")
    assert found.groups == {"n1": ("r1", "a"), "n2": ("r2", "a"), "n3": ("r1", "a")}
    assert parse_host_file(host_file(found, ["n3", "n1"])).groups == {
        "n3": ("r1", "a"),
        "n1": ("r1", "a"),
    }


@pytest.mark.parametrize("text", ["", "# none\n", "a r1\na r2\n", "a r1\nb\n"])
def test_a_wrong_file_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(UserInputError, match="host file"):
        parse_host_file(text)


@pytest.mark.parametrize("text", ["a1 slots=8\na2 slots=8\n", "a1 r1\na2 max_slots=4 r1\n"])
def test_a_host_file_of_mpi_is_refused(text: str) -> None:
    with pytest.raises(UserInputError, match=r"slots=\d is no host and no group.*HOST GROUP"):
        parse_host_file(text)


def test_tasks_of_nodes() -> None:
    assert tasks_per_node("8(x2),4") == (8, 8, 4)
    assert tasks_per_node("many") == ()
    assert hosts_of("") == []


@given(st.text(alphabet='SwitchName=Level Nodes[]0123-,()"#\n\tGPUNVX<>{}:', max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (
        hosts.parse_gpu_matrix,
        hosts.parse_nccl_topology,
        hosts.parse_ibstat,
        topology.parse_slurm_topology,
        sources.parse_slurm_nodes,
        topology.parse_ibnetdiscover,
        sources.parse_kubernetes_nodes,
        topology.parse_host_file,
        sources.reports,
    ):
        try:
            parse(text)
        except UserInputError:
            continue


@pytest.mark.parametrize("name", [p.name for p in CAPTURED.iterdir() if p.suffix != ".md"])
def test_each_output_is_recognized(name: str) -> None:
    found = sources.saved_output(CAPTURED / name)
    assert found != sources.Sources() or name == "topo_4090.txt"


def test_another_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("total 0\n")
    with pytest.raises(UserInputError, match="it is none of"):
        sources.saved_output(tmp_path / "x")
