"""GPUs of this host, as NVML would tell of them."""

from __future__ import annotations

import functools
from typing import Any

import pynvml
import pytest

from nest_megatron.cluster.discovery import LocalGpus, known_gpus, local_gpus, with_hosts_of
from nest_megatron.config import cluster_detection as rooms
from nest_megatron.config.cluster_detection import find_cluster
from nest_megatron.config.overrides import Setting
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm import measure
from nest_megatron.model.execution import Implementation
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
    memory = DEVICES.get(name.removesuffix(" NVL"), (81_559,))[0]
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


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090"]
)
def test_other_devices_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, gpus(name))
    with pytest.raises(UserInputError, match=name):
        find_cluster([], 8, {}, dry_run=False)


def test_a_cluster_of_other_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, gpus("NVIDIA A100-SXM4-80GB"))
    named = [Setting(key="cluster", value="dgx_h100")]
    with pytest.raises(UserInputError, match=r"H100-SXM-80GB.*NVIDIA A100"):
        find_cluster(named, 8, {}, dry_run=False)
    launched = {"WORLD_SIZE": "8"}
    assert find_cluster(named, 8, launched, dry_run=True).cluster.name == "dgx_h100"


def test_the_launcher_s_size_is_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, None)
    named = [Setting(key="cluster", value="dgx_h100")]
    sized = [*named, Setting(key="cluster.num_gpus", value="64")]
    assert find_cluster(named, 32, {}, dry_run=False).cluster.num_gpus == 32
    with pytest.raises(UserInputError, match="started 32 ranks"):
        find_cluster(sized, 32, {}, dry_run=False)
    assert find_cluster(sized, 1, {}, dry_run=True).cluster.num_gpus == 64
    with pytest.raises(UserInputError, match="does not say how many GPUs the job runs on"):
        find_cluster(named, 1, {}, dry_run=True)


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


class Nvml:
    """The few functions of NVML that are used, in place of the driver's; the rest is pynvml's.

    Args:
        devices: name, total memory in MiB, and whether MIG is on (``None``: the kind has none).
        fails: what a function answers with, by its name.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *devices: tuple[str | bytes, int, bool | None],
        fails: dict[str, int] | None = None,
    ) -> None:
        self.devices, self.fails, self.open = devices, fails or {}, 0
        for name in (
            *("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"),
            *("nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMigMode"),
        ):
            monkeypatch.setattr(pynvml, name, functools.partial(self.call, name))

    def call(self, name: str, *args: Any) -> Any:
        if name in self.fails:
            raise pynvml.NVMLError(self.fails[name])
        return getattr(self, name)(*args)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, index: int) -> str | bytes:
        return self.devices[index][0]

    def nvmlDeviceGetMemoryInfo(self, index: int) -> Any:
        memory = pynvml.c_nvmlMemory_t()
        memory.total = self.devices[index][1] * MIB
        return memory

    def nvmlDeviceGetMigMode(self, index: int) -> list[int]:
        is_on = self.devices[index][2]
        if is_on is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(is_on), int(is_on)]


H200 = ("NVIDIA H200", 143_771, False)
NAMED = [Setting(key="cluster", value="h200")]


@pytest.mark.parametrize("name", ["NVIDIA H200", b"NVIDIA H200"], ids=["text", "bytes"])
def test_nvml_is_asked_and_closed(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(monkeypatch, *[(name, 143_771, False)] * 4)
    here = local_gpus()
    assert here == LocalGpus(device_name="NVIDIA H200", memory_bytes=143_771 * MIB, count=4)
    assert nvml.open == 0


def test_a_gpu_without_mig_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    Nvml(monkeypatch, ("Tesla V100-SXM2-32GB", 32_768, None))
    here = local_gpus()
    assert here is not None
    assert here.count == 1


@pytest.mark.parametrize(
    "error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
)
def test_no_driver_and_no_device(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Nvml(monkeypatch, fails={"nvmlInit": error})
    assert local_gpus() is None
    Nvml(monkeypatch)
    assert local_gpus() is None


#: What a host answers that has GPUs which no job can be planned for, and the words for it.
_BAD = {
    "mixed": ((H200, ("NVIDIA H100 80GB HBM3", 81_559, False)), {}, "equal GPUs"),
    "divided": (((*H200[:2], True),) * 2, {}, "MIG"),
    "one lost": (
        (H200,) * 8,
        {"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_GPU_IS_LOST},
        "GPU is lost",
    ),
    "not permitted": ((), {"nvmlInit": pynvml.NVML_ERROR_NO_PERMISSION}, "Permissions"),
    "another driver": (
        (),
        {"nvmlInit": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH},
        "version mismatch",
    ),
    "no memory of its own": (
        (("NVIDIA GB10", 0, None),),
        {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED},
        "Not Supported",
    ),
}


@pytest.mark.parametrize("name", _BAD)
def test_gpus_that_cannot_be_told_are_no_host_without_gpus(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, fails, words = _BAD[name]
    nvml = Nvml(monkeypatch, *devices, fails=fails)
    with pytest.raises(UserInputError, match=words):
        find_cluster([], 8, {}, dry_run=False)
    assert known_gpus() is None
    assert nvml.open == 0


@pytest.mark.parametrize("name", _BAD)
def test_the_fix_helps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that is named is taken, and what could not be compared is said."""
    devices, fails, words = _BAD[name]
    Nvml(monkeypatch, *devices, fails=fails)
    place = find_cluster(NAMED, 8, {}, dry_run=False)
    assert place.cluster.name == "h200"
    assert words in place.notes[0]
    assert "not compared" in place.notes[0]


@pytest.mark.parametrize("name", _BAD)
def test_nothing_is_measured_on_the_processor_in_their_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, fails, words = _BAD[name]
    Nvml(monkeypatch, *devices, fails=fails)
    with pytest.raises(UserInputError, match=f"measure.*{words}"):
        measure.machine_here(Implementation.LOCAL)
