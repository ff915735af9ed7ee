"""GPUs of this host, as NVML would tell of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.cluster.discovery import LocalGpus, local_gpus, with_hosts_of
from nest_megatron.config import cluster_detection as rooms
from nest_megatron.config.cluster_detection import find_cluster
from nest_megatron.config.overrides import Setting
from nest_megatron.errors import UserInputError
from tests import catalogue

MIB = 2**20
#: Names and total memory in MiB as nvidia-smi prints them.
DEVICES = {
    "NVIDIA A100-SXM4-80GB": (81_920, "dgx_a100", "A100-SXM-80GB"),
    "NVIDIA A100-SXM4-40GB": (40_960, "dgx_a100", "A100-SXM-40GB"),
    "NVIDIA H100 80GB HBM3": (81_559, "dgx_h100", "H100-SXM-80GB"),
    "NVIDIA H200": (143_771, "h200", "H200-SXM-141GB"),
    "NVIDIA B200": (183_359, "b200", "B200-SXM-180GB"),
    "NVIDIA GB200": (189_471, "gb200_nvl72", "GB200-186GB"),
    "Tesla V100-SXM2-32GB": (32_768, "v100_spine_leaf", "V100-SXM2-32GB"),
}


def gpus(name: str, count: int = 8) -> LocalGpus:
    memory = DEVICES[name][0] if name in DEVICES else 81_559
    return LocalGpus(device_name=name, memory_bytes=memory * MIB, count=count)


def found(monkeypatch: pytest.MonkeyPatch, here: LocalGpus | None) -> None:
    monkeypatch.setattr(rooms, "local_gpus", lambda: here)


@pytest.mark.parametrize("name", DEVICES)
def test_each_device_is_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, gpus(name))
    _, cluster, accelerator = DEVICES[name]
    per_host, per_node = ("4", 64) if name == "NVIDIA GB200" else ("8", 8)
    place = find_cluster([], 128, {"LOCAL_WORLD_SIZE": per_host}, dry_run=False)
    assert (place.cluster.name, place.cluster.accelerator.name) == (cluster, accelerator)
    assert (place.cluster.num_gpus, place.cluster.gpus_per_node) == (128, per_node)
    assert "is assumed" in place.notes[0]


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090", "NVIDIA L40S"])
def test_other_devices_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, gpus(name))
    with pytest.raises(UserInputError, match=name):
        find_cluster([], 8, {}, dry_run=False)


def test_a_cluster_of_other_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, gpus("NVIDIA A100-SXM4-80GB"))
    named = [Setting(key="cluster", value="dgx_h100")]
    with pytest.raises(UserInputError, match=r"H100-SXM-80GB.*NVIDIA A100"):
        find_cluster(named, 8, {}, dry_run=False)
    assert find_cluster(named, 8, {}, dry_run=True).cluster.name == "dgx_h100"


def test_the_launcher_s_size_is_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, None)
    named = [Setting(key="cluster", value="dgx_h100")]
    sized = [*named, Setting(key="cluster.num_gpus", value="64")]
    assert find_cluster(named, 32, {}, dry_run=False).cluster.num_gpus == 32
    with pytest.raises(UserInputError, match="started 32 ranks"):
        find_cluster(sized, 32, {}, dry_run=False)
    assert find_cluster(sized, 1, {}, dry_run=True).cluster.num_gpus == 64


def test_another_number_of_processes_a_host_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, None)
    named = [Setting(key="cluster", value="dgx_h100")]
    place = find_cluster(named, 32, {"LOCAL_WORLD_SIZE": "4"}, dry_run=False)
    assert "starts 4 processes on each host" in place.notes[0]


def test_hosts_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, gpus("NVIDIA H100 80GB HBM3", count=4))
    place = find_cluster([], 16, {}, dry_run=False)
    assert [level.num_devices for level in place.cluster.levels] == [4, 128, None]
    cluster = catalogue.cluster("dgx_h100", 64)
    assert [level.num_devices for level in with_hosts_of(cluster, 4).levels] == [4, 128, None]


class FakeNvml(SimpleNamespace):
    """The few functions of pynvml that are used."""

    class NVMLError(Exception):
        pass

    def __init__(self, names: list[str], *, works: bool = True) -> None:
        super().__init__(names=names, works=works, open=0)

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, index: int) -> Any:
        return self.names[index].encode() if index % 2 else self.names[index]

    def nvmlDeviceGetMemoryInfo(self, index: int) -> Any:
        return SimpleNamespace(total=81_559 * MIB)


def test_nvml_is_asked_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(["NVIDIA H200"] * 4)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    here = local_gpus()
    assert here == LocalGpus(device_name="NVIDIA H200", memory_bytes=81_559 * MIB, count=4)
    assert nvml.open == 0


def test_no_driver_and_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for nvml in (FakeNvml([], works=False), FakeNvml([])):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        assert local_gpus() is None


def test_mixed_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with pytest.raises(UserInputError, match="equal GPUs"):
        local_gpus()
