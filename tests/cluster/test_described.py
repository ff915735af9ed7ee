"""A cluster from what its hosts say: what is seen, what is assumed, what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from nest_megatron.cluster.described import described, require_alike
from nest_megatron.cluster.discovery import LocalGpus
from nest_megatron.cluster.hosts import Adapter, Host, kinds, output_of, shown_names
from nest_megatron.cluster.topology import Topology
from nest_megatron.config import cluster_detection
from nest_megatron.config.cluster_detection import find_cluster, processes_per_host
from nest_megatron.config.launch import MixedGpus
from nest_megatron.config.overrides import Setting
from nest_megatron.errors import UserInputError
from tests import catalogue

H100 = LocalGpus(device_name="NVIDIA H100 80GB HBM3", memory_bytes=81_559 << 20, count=8)
H200 = LocalGpus(device_name="NVIDIA H200", memory_bytes=143_771 << 20, count=8)
A100 = LocalGpus(device_name="NVIDIA A100-SXM4-80GB", memory_bytes=81_920 << 20, count=8)


def adapters(gbits: float = 400.0) -> tuple[Adapter, ...]:
    return tuple(
        Adapter(name=f"mlx5_{i}", rate_bits_per_s=gbits * 1e9, link_layer="InfiniBand")
        for i in range(8)
    )


def host(name: str, gpus: LocalGpus | None = H100, **fields: Any) -> Host:
    return Host(name=name, gpus=gpus, **{"nvlinks": 18, "adapters": adapters(), **fields})


def racks(*sizes: int, share: float | None = None) -> tuple[list[Host], Topology]:
    names = [(f"r{k}n{i}", f"r{k}") for k, size in enumerate(sizes) for i in range(size)]
    shares = {} if share is None else {f"r{k}": share for k in range(len(sizes))}
    found = Topology(
        source="a program",
        level_names=("leaf",),
        groups={name: (rack,) for name, rack in names},
        uplink_shares=shares,
    )
    return [host(name) for name, _ in names], found


def test_rates_and_groups_that_were_seen() -> None:
    hosts, topology = racks(4, 4, share=0.5)
    found = described(catalogue.cluster("dgx_h100", 64), hosts, topology)
    assert [(x.name, x.num_devices, x.bandwidth_bytes_per_s) for x in found.cluster.levels] == [
        ("node", 8, 4.5e11),
        ("leaf", 32, 5e10),
        ("fabric", None, 2.5e10),
    ]
    assert found.cluster.num_gpus == 64
    assert "uplinks of level leaf: 0.50 of the rate of hosts: a program" in found.seen
    assert any(line.startswith("level node: 450 GB/s") for line in found.assumed)


def test_what_was_not_seen_is_named_with_its_source() -> None:
    hosts = [host("a"), host("b", adapters=())]
    found = described(catalogue.cluster("dgx_h100", 16), hosts, None)
    told = " ".join(found.assumed)
    assert "between hosts: 50 GB/s for each GPU: dgx_h100 (truth/hardware.csv" in told
    assert "the adapters of b were not seen" in told
    assert "no program said which hosts share a switch" in told
    assert found.cluster.levels == catalogue.cluster("dgx_h100", 16).levels


def test_the_slowest_host_s_adapters_count() -> None:
    hosts = [host("a"), host("b", adapters=adapters(200.0))]
    found = described(catalogue.cluster("dgx_h100", 16), hosts, None)
    assert [x.bandwidth_bytes_per_s for x in found.cluster.levels] == [4.5e11, 2.5e10, 2.5e10]
    assert any("(b)" in line for line in found.seen)


def test_the_share_above_leaves_is_assumed_where_no_uplink_was_seen() -> None:
    hosts, topology = racks(2, 2)
    found = described(catalogue.cluster("h100_spine_leaf", 32), hosts, topology)
    assert found.cluster.levels[-1].bandwidth_bytes_per_s == 1.25e10
    assert "above level leaf: 0.25 of the rate of hosts: h100_spine_leaf" in found.assumed


def test_gpus_without_nvlink_are_not_priced_with_it() -> None:
    with pytest.raises(UserInputError, match="no NVLink joins"):
        described(catalogue.cluster("dgx_h100", 8), [host("a", nvlinks=0)], None)


def test_unlike_hosts_are_refused_by_name() -> None:
    hosts = [host("a"), host("b"), host("c", H200)]
    with pytest.raises(UserInputError, match=r"2 hosts have 8 x NVIDIA H100.*\(a, b\)") as refused:
        require_alike(hosts)
    assert "1 host has 8 x NVIDIA H200 (140.4 GiB) (c)" in str(refused.value)
    assert "mixed_gpus=slower" in str(refused.value)
    four = LocalGpus(device_name=H100.device_name, memory_bytes=H100.memory_bytes, count=4)
    with pytest.raises(UserInputError, match="4 x NVIDIA H100"):
        require_alike([host("a"), host("b", four)])


def test_drivers_that_count_memory_otherwise_are_no_other_kind() -> None:
    more = LocalGpus(device_name=H100.device_name, memory_bytes=85_899_345_920, count=8)
    assert len(kinds([host("a"), host("b", more)])) == 1
    assert shown_names(["a"]) == "a"


def place(monkeypatch: pytest.MonkeyPatch, hosts: list[Host], *words: str, **fields: Any) -> Any:
    monkeypatch.setattr(cluster_detection, "local_gpus", lambda: hosts[0].gpus)
    settings = [Setting(key="cluster", value=word) for word in words]
    size = 8 * len(hosts)
    return find_cluster(
        settings, size, {"LOCAL_WORLD_SIZE": "8"}, dry_run=False, hosts=hosts, **fields
    )


def test_a_job_sees_its_adapters_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [host(f"n{i}", groups=(f"sw{i // 3}", "core")) for i in range(9)]
    found = place(monkeypatch, hosts)
    assert [x.num_devices for x in found.cluster.levels] == [8, 24, None]
    assert found.cluster.num_gpus == 72
    assert "9 hosts in 3 groups of level switch_1 (3, 3, 3)" in found.notes[0]
    assert found.notes[1].startswith("Assumed: level node: 450 GB/s")


def test_a_job_on_scattered_hosts_keeps_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [host(f"n{i}", groups=("a" if i < 6 else "b",)) for i in range(16)]
    found = place(monkeypatch, hosts)
    assert [x.num_devices for x in found.cluster.levels] == [8, 16, None]
    alone = [host(f"n{i}", groups=(f"s{i}",)) for i in range(4)]
    found = place(monkeypatch, alone)
    assert [x.num_devices for x in found.cluster.levels] == [8, None]


def test_a_figure_that_was_typed_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_detection, "local_gpus", lambda: H100)
    typed = [Setting(key="cluster.levels.1.bandwidth_bytes_per_s", value="1e10")]
    found = find_cluster(typed, 16, {}, dry_run=False, hosts=[host("a"), host("b")])
    assert found.cluster.levels[1].bandwidth_bytes_per_s == 1e10
    assert "is assumed" in found.notes[0]


def test_a_mixed_job_is_refused_or_planned_as_the_slower_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = [host("b", H200), host("a")]
    with pytest.raises(UserInputError, match="planned for equal GPUs"):
        place(monkeypatch, hosts)
    found = place(monkeypatch, hosts, mixed=MixedGpus.SLOWER)
    assert found.cluster.accelerator.name == "H100-SXM-80GB"
    assert found.notes[0].startswith("Planned as 2 hosts of H100-SXM-80GB (79.1 GiB), the slower")
    assert "is not used" in found.notes[0]


def test_a_named_cluster_is_compared_with_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [host("a"), host("b", H200)]
    with pytest.raises(UserInputError, match="H200"):
        place(monkeypatch, hosts, "dgx_h100")
    found = place(monkeypatch, hosts, "dgx_h100", mixed=MixedGpus.SLOWER)
    assert "the slower kind" in found.notes[0]
    with pytest.raises(UserInputError):
        place(monkeypatch, [host("b", H200), host("a")], "h200", mixed=MixedGpus.SLOWER)


def test_no_kind_is_the_slower_one_in_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    # the A100 has less of everything but a little more memory than the H100 of 80 GB
    with pytest.raises(UserInputError, match="no kind has the smaller figure"):
        place(monkeypatch, [host("a"), host("b", A100)], mixed=MixedGpus.SLOWER)


def test_a_host_without_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [host("a"), host("b", None, unseen=("NVML: driver mismatch",))]
    with pytest.raises(UserInputError, match=r"hosts = 'b': NVML: driver mismatch"):
        place(monkeypatch, hosts)


def test_tasks_of_a_step_say_how_many_processes_a_host_has() -> None:
    assert processes_per_host({"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}) == 8
    assert processes_per_host({"SLURM_STEP_TASKS_PER_NODE": "8(x4),4"}) is None


def test_programs_that_fail_are_named() -> None:
    assert output_of([sys.executable, "-c", "print(3)"]) == "3\n"
    for words, limit in (
        (["no-such-program-xyz"], "cannot be started"),
        ([sys.executable, "-c", "import sys; sys.exit('no rights')"], "code 1: no rights"),
    ):
        with pytest.raises(UserInputError, match=limit):
            output_of(words)


def test_a_program_that_hangs_is_ended() -> None:
    with pytest.raises(UserInputError, match="has not ended"):
        output_of([sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=0.2)
