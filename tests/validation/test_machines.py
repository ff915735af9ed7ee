"""Machines from a table's few words."""

from __future__ import annotations

import pytest

from nest_megatron.validation.machine_words import accelerator_name, adapters
from nest_megatron.validation.machines import machine_of
from nest_megatron.validation.rows import RefusedRowError

GBIT = 1e9 / 8
#: How MLPerf's system files describe a machine.
_SYSTEM = (
    "NVLINK Gen4 900 GB/s + NVSWITCH Gen3 | Storage+Management: 1x NVIDIA BlueField 2 DPU 100Gb/s, "
    "{} ConnectX-7 IB NDR 400Gb/s"
)


@pytest.mark.parametrize(
    ("gpu", "gpus", "per_node", "network", "technology", "rate"),
    [
        ("A100-80GB", 256, 8, "NVSwitch + 4x200 Gb/s HDR per node", "infiniband", 70 * GBIT),
        ("A100-80GB", 384, 8, "Jean Zay: 4 Omni-Path links per 8-GPU node", "omni_path", 50 * GBIT),
        ("V100-32GB", 64, 4, "Jean Zay V100: NVLink2 + Omni-Path", "omni_path", 100 * GBIT),
        ("A100-80GB", 512, 8, "Selene", "infiniband", 200 * GBIT),
        ("A100-40GB", 64, 8, "1600 Gbps node-node interconnect (RoCE)", "roce", 200 * GBIT),
        ("V100-16GB", 32, 8, "NVLink2 + 1x 100 Gb/s EDR per node", "infiniband", 8.75 * GBIT),
        ("H100-96GB-HBM2e", 64, 8, "NVLink + 400 Gb/s RDMA per GPU", "infiniband", 400 * GBIT),
        ("H100-80GB", 128, 8, "NVLink + IB 8x50 GB/s per node", "infiniband", 400 * GBIT),
        ("H100-80GB", 64, 8, "HF cluster (EFA; not stated)", "efa", 400 * GBIT),
        ("B300", 64, 8, "", "infiniband", 800 * GBIT),
        ("GB200", 256, 4, "NVL72 + IB (site not stated)", "infiniband_rack", 400 * GBIT),
        ("H100-80GB", 8192, 8, _SYSTEM.format("Compute: 8x NVIDIA"), "infiniband", 400 * GBIT),
        ("H100-80GB", 64, 8, _SYSTEM.format("Storage&Compute: 4x"), "infiniband", 140 * GBIT),
        ("GB200", 512, 4, _SYSTEM.format("Compute: 4x"), "infiniband_rack", 400 * GBIT),
    ],
)
def test_adapters_of_one_gpu(
    gpu: str, gpus: int, per_node: int, network: str, technology: str, rate: float
) -> None:
    fabric = machine_of(gpu, gpus, per_node, network).cluster.levels[-1]
    assert fabric.source.endswith(": " + technology)
    assert fabric.bandwidth_bytes_per_s == pytest.approx(rate)


@pytest.mark.parametrize(
    ("gpus", "rack"), [(4, 64), (64, 64), (256, 64), (72, 72), (144, 72), (96, 48)]
)
def test_racks_take_the_jobs_that_occur(gpus: int, rack: int) -> None:
    cluster = machine_of("GB200", gpus, 4, "NVL72 + IB").cluster
    assert (cluster.levels[0].num_devices, cluster.launch_gpus_per_host) == (rack, 4)


@pytest.mark.parametrize(("gpus", "per_node"), [(2, 8), (4, 4), (1, 1), (32, 16), (12, 8), (3, 8)])
def test_small_and_partly_filled_nodes(gpus: int, per_node: int) -> None:
    assert machine_of("H100-80GB", gpus, per_node, "").cluster.num_gpus == gpus


def test_a_group_that_a_rack_holds_is_not_divided_over_two() -> None:
    plain, grouped, wide = (
        machine_of("GB200", 96, 4, "NVL72 + IB", inside=inside).cluster for inside in (1, 32, 96)
    )
    assert [each.levels[0].num_devices for each in (plain, grouped, wide)] == [48, 32, 48]


def test_what_is_not_stated_is_told() -> None:
    texts = " ".join(machine_of("A100", 64, None, "").assumptions)
    assert all(word in texts for word in ("80 GB", "200 Gb/s", "8 adapters", "InfiniBand", "nodes"))
    assert not machine_of("A100-40GB", 8, 8, "single node").assumptions


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("H100 80GB HBM3", "h100_sxm_80gb"),
        ("A100-PCIe-80GB", "a100_pcie_80gb"),
        ("NVIDIA GB300", "gb300_288gb"),
        ("MI300X-192GB", "mi300x_192gb"),
        ("V100-SXM2-16GB", "v100_sxm_16gb"),
        ("H20", "h20_sxm_96gb"),
        ("MI350X", "mi350x_288gb"),
        ("H200", "h200_sxm_141gb"),
        ("H200-NVL-141GB", "h200_nvl_141gb"),
        ("A800-80GB", "a800_sxm_80gb"),
    ],
)
def test_names_of_gpus(gpu: str, name: str) -> None:
    assert accelerator_name(gpu) == (name, ())


def test_a_blackwell_is_known_by_its_memory() -> None:
    name, assumed = accelerator_name("Blackwell ~184 GiB (model not stated)")
    assert name == "gb200_186gb"
    assert "by its memory" in assumed[0]


def test_no_gpu_is_not_an_unknown_one() -> None:
    with pytest.raises(RefusedRowError, match="GPU not stated"):
        machine_of("", 8, 8, "")


def test_bridges_join_four_cards_of_h200_nvl() -> None:
    levels = machine_of("H200-NVL-141GB", 8, 8, "").cluster.levels
    assert [level.num_devices for level in levels] == [4, 8, None]
    assert levels[0].bandwidth_bytes_per_s > 4 * levels[1].bandwidth_bytes_per_s


@pytest.mark.parametrize(
    "gpu", ["80GB-class (not stated)", "(analysis)", "GB200 or larger", "Blackwell", "H2000"]
)
def test_an_unknown_gpu_is_refused(gpu: str) -> None:
    with pytest.raises(RefusedRowError) as caught:
        machine_of(gpu, 8, 8, "")
    assert caught.value.reason == "unknown GPU"


def test_boxes_without_a_switch() -> None:
    plain = machine_of("A100-PCIe-80GB", 8, 8, "PCIe only").cluster
    assert [level.num_devices for level in plain.levels] == [8, None]
    pairs = machine_of("A100-PCIe-80GB", 16, 8, "NVLink bridge on pairs + 1x 200 Gb/s").cluster
    assert [level.num_devices for level in pairs.levels] == [2, 8, None]


def test_bytes_and_bits_are_told_apart() -> None:
    assert adapters("8x 50 GB/s EFA v4 per node").bytes_per_s == 50e9
    assert adapters("8x 50 Gb/s per node").bytes_per_s == 50 * GBIT
