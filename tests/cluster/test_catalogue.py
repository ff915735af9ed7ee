"""The cluster catalogue: every file composes and loads, and a wrong description is refused."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nest_megatron.catalogue_files import catalogue_names
from nest_megatron.cluster.records import (
    Cluster,
    CollectiveKind,
    Precision,
    accelerator_from_mapping,
    cluster_from_mapping,
)
from nest_megatron.errors import UserInputError

CONFIGS = Path(__file__).parents[2] / "hydra_configs"
CLUSTERS = catalogue_names("cluster")
ACCELERATORS = catalogue_names("accelerator")

ACCELERATOR: dict[str, object] = {
    "name": "chip",
    "memory_bytes": 80 * 10**9,
    "peak_flops_per_s": {"bf16": 1e15},
    "gemm_efficiency": {"bf16": 0.8},
    "attention_efficiency": 0.5,
    "memory_bandwidth_bytes_per_s": 3e12,
    "memory_efficiency": 0.9,
    "kernel_floor_s": 0.0,
}
NODE: dict[str, object] = {
    "name": "node",
    "num_devices": 8,
    "bandwidth_bytes_per_s": 4.5e11,
    "latency_s": 2e-6,
}
FABRIC: dict[str, object] = {
    "name": "fabric",
    "num_devices": None,
    "bandwidth_bytes_per_s": 5e10,
    "latency_s": 1e-5,
    "efficiency": {"all_reduce": 0.9},
}
CLUSTER: dict[str, object] = {
    "name": "toy",
    "num_gpus": 64,
    "accelerator": ACCELERATOR,
    "levels": [NODE, FABRIC],
}


@pytest.fixture(scope="module", autouse=True)
def _hydra() -> Iterator[None]:
    with initialize_config_dir(config_dir=str(CONFIGS), version_base="1.3"):
        yield


@functools.cache
def load(name: str, *overrides: str) -> Cluster:
    """One entry of the catalogue, composed by Hydra as the application composes it."""
    config = compose(overrides=[f"+cluster={name}", *overrides])
    mapping = OmegaConf.to_container(config.cluster, resolve=True)
    assert isinstance(mapping, dict)
    return cluster_from_mapping({str(key): value for key, value in mapping.items()})


#: Accelerator, GPUs of a node, GB/s of one GPU inside and between nodes, and whether switches sum:
#: from vendors' pages, which the files name.
MACHINES = {
    "alps_gh200": ("GH200-96GB", 4, 450, 25, False),
    "aws_g7e": ("RTX-PRO-6000-96GB", 8, 63, 25, False),
    "aws_p5": ("H100-SXM-80GB", 8, 450, 50, True),
    "aws_p5en": ("H200-SXM-141GB", 8, 450, 50, True),
    "aws_p6_b200": ("B200-SXM-180GB", 8, 900, 50, True),
    "aws_p6e_gb200": ("GB200-186GB", 72, 900, 50, True),
    "azure_nd_h100_v5": ("H100-SXM-80GB", 8, 450, 50, True),
    "azure_nd_h200_v5": ("H200-SXM-141GB", 8, 450, 50, True),
    "azure_nd_mi300x_v5": ("MI300X-192GB", 8, 448, 50, False),
    "b200": ("B200-SXM-180GB", 8, 900, 50, True),
    "b300": ("B300-SXM-288GB", 8, 900, 100, True),
    "dgx_a100": ("A100-SXM-80GB", 8, 300, 25, False),
    "dgx_h100": ("H100-SXM-80GB", 8, 450, 50, True),
    "gb200_nvl36": ("GB200-186GB", 36, 900, 50, True),
    "gb200_nvl72": ("GB200-186GB", 72, 900, 50, True),
    "gb300_nvl72": ("GB300-288GB", 72, 900, 100, True),
    "gcp_a3_high": ("H100-SXM-80GB", 8, 450, 12.5 / 1.43, True),
    "gcp_a3_mega": ("H100-SXM-80GB", 8, 450, 25, True),
    "gcp_a3_ultra": ("H200-SXM-141GB", 8, 450, 50, True),
    "gcp_a4": ("B200-SXM-180GB", 8, 900, 50, True),
    "h200": ("H200-SXM-141GB", 8, 450, 50, True),
    "mi300x": ("MI300X-192GB", 8, 448, 50, False),
    "mi355x": ("MI355X-288GB", 8, 537.6, 50, False),
}
#: Stand-ins and planning devices, and the template.
OTHERS = {"custom", "h100_spine_leaf", "torus_3d", "tpuv4_fat_tree", "v100_spine_leaf"}


def test_the_catalogue_holds_the_promised_clusters() -> None:
    assert set(CLUSTERS) == {*MACHINES, *OTHERS}


@pytest.mark.parametrize("name", MACHINES)
def test_machines_are_what_their_vendors_say(name: str) -> None:
    cluster = load(name)
    inside, outside = cluster.levels[0], cluster.levels[-1]
    device, node, *rates, reduces = MACHINES[name]
    assert (cluster.accelerator.name, inside.num_devices) == (device, node)
    found = [level.bandwidth_bytes_per_s / 1e9 for level in (inside, outside)]
    assert found == pytest.approx(rates, rel=1e-9)
    assert (inside.reduction_efficiency is not None) == reduces
    text = (CONFIGS / "cluster" / f"{name}.yaml").read_text(encoding="utf-8")
    told = re.findall(r"# (?:Fitted to|Not measured|Assumed).*links\.yaml", text)
    assert len(told) == len(cluster.levels), "each level says whether its links were measured"


@pytest.mark.parametrize("name", ["alps_gh200", "mi300x"])
def test_few_gpus_of_a_full_mesh_use_few_links(name: str) -> None:
    """Without a switch a pair has one link to each other, and all GPUs of a node have all."""
    node = load(name).levels[0]
    assert node.num_devices is not None
    links = node.num_devices - 1
    assert [node.ring_share(n) for n in (2, links + 1)] == pytest.approx([1 / links, 1], abs=1e-3)
    assert node.efficiency[CollectiveKind.SEND_RECV] < 1 / links


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_composes(name: str) -> None:
    cluster = load(name)
    assert cluster.name == name
    assert cluster.description
    assert len(cluster.accelerator.source) > 20


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_level_prices_every_collective(name: str) -> None:
    for level in load(name).levels:
        assert set(level.efficiency) == set(CollectiveKind)
        assert all(0.1 < share < 1.1 for share in level.efficiency.values())


@pytest.mark.parametrize("name", CLUSTERS)
def test_bandwidth_never_grows_outwards(name: str) -> None:
    rates = [level.bandwidth_bytes_per_s for level in load(name).levels]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_accelerator_loads(name: str) -> None:
    text = (CONFIGS / "accelerator" / f"{name}.yaml").read_text(encoding="utf-8")
    device = accelerator_from_mapping(yaml.safe_load(text))
    assert device.source
    assert max(device.gemm_efficiency.values()) <= 1.0
    assert device.supports(Precision.BF16) or device.supports(Precision.FP16)


def test_the_command_line_changes_the_cluster() -> None:
    cluster = load(
        "h100_spine_leaf",
        "cluster.num_gpus=1024",
        "cluster.accelerator.memory_bytes=64000000000",
        "cluster.oversubscription=1",
    )
    assert cluster.num_gpus == 1024
    assert cluster.accelerator.memory_bytes == 64 * 10**9
    assert cluster.levels[-1].bandwidth_bytes_per_s == 50e9


def test_the_command_line_changes_the_accelerator() -> None:
    cluster = load("dgx_h100", "accelerator@cluster.accelerator=h200_sxm_141gb")
    assert cluster.accelerator.name == "H200-SXM-141GB"


def test_oversubscription_divides_the_outermost_level_alone() -> None:
    whole, half = (
        cluster_from_mapping(CLUSTER),
        cluster_from_mapping({**CLUSTER, "oversubscription": 2}),
    )
    assert half.levels[0] == whole.levels[0]
    assert half.levels[1].bandwidth_bytes_per_s == whole.levels[1].bandwidth_bytes_per_s / 2


def test_the_caller_may_size_the_cluster() -> None:
    assert cluster_from_mapping(CLUSTER).num_gpus == 64
    assert cluster_from_mapping(CLUSTER, num_gpus=128).num_gpus == 128
    with pytest.raises(UserInputError, match="Use 64 or 72"):
        cluster_from_mapping(CLUSTER, num_gpus=65)


def test_a_size_is_needed() -> None:
    unsized = {key: value for key, value in CLUSTER.items() if key != "num_gpus"}
    assert cluster_from_mapping(unsized, num_gpus=8).num_gpus == 8
    with pytest.raises(UserInputError, match=r"cluster\.num_gpus = None: the .* does not say it"):
        cluster_from_mapping(unsized)


@pytest.mark.parametrize(
    ("key", "hint"), [("num_gpu", "num_gpus"), ("level", "levels"), ("accelarator", "accelerator")]
)
def test_unknown_cluster_key_names_the_nearest(key: str, hint: str) -> None:
    with pytest.raises(UserInputError, match=f"{key}.*no such field.*Did you mean.*{hint}"):
        cluster_from_mapping({**CLUSTER, key: 1})


def test_unknown_keys_inside_are_named_with_their_place() -> None:
    with pytest.raises(
        UserInputError, match=r"cluster toy: accelerator\.memory_byte .*memory_bytes"
    ):
        cluster_from_mapping({**CLUSTER, "accelerator": {**ACCELERATOR, "memory_byte": 1}})
    with pytest.raises(UserInputError, match=r"levels\[1\]\.bandwidth .*bandwidth_bytes_per_s"):
        cluster_from_mapping({**CLUSTER, "levels": [NODE, {**FABRIC, "bandwidth": 1}]})
    with pytest.raises(UserInputError, match=r"efficiency\.allreduce.*Did you mean all_reduce"):
        cluster_from_mapping(
            {**CLUSTER, "levels": [NODE, {**FABRIC, "efficiency": {"allreduce": 1}}]}
        )
    with pytest.raises(UserInputError, match=r"peak_flops_per_s\.bf8"):
        accelerator_from_mapping({**ACCELERATOR, "peak_flops_per_s": {"bf8": 1e15}})


@pytest.mark.parametrize("key", ["name", "accelerator", "levels"])
def test_missing_cluster_key_is_named(key: str) -> None:
    with pytest.raises(UserInputError, match=f"{key}.*no default"):
        cluster_from_mapping({name: value for name, value in CLUSTER.items() if name != key})


@pytest.mark.parametrize("key", sorted(ACCELERATOR))
def test_missing_accelerator_key_is_named(key: str) -> None:
    with pytest.raises(UserInputError, match=f"{key}.*no default"):
        accelerator_from_mapping({name: v for name, v in ACCELERATOR.items() if name != key})


BAD_NUMBERS = [-1.0, math.nan, math.inf, "fast", True, None]


@pytest.mark.parametrize("value", [*BAD_NUMBERS, 0])
@pytest.mark.parametrize("key", ["memory_bytes", "memory_bandwidth_bytes_per_s"])
def test_bad_accelerator_number_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UserInputError, match=key):
        accelerator_from_mapping({**ACCELERATOR, key: value})


@pytest.mark.parametrize("value", [*BAD_NUMBERS, 0])
def test_bad_bandwidth_is_refused_by_name(value: object) -> None:
    with pytest.raises(UserInputError, match="bandwidth_bytes_per_s"):
        cluster_from_mapping(
            {**CLUSTER, "levels": [NODE, {**FABRIC, "bandwidth_bytes_per_s": value}]}
        )


@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_bad_latency_is_refused_by_name(value: object) -> None:
    with pytest.raises(UserInputError, match="latency_s"):
        cluster_from_mapping({**CLUSTER, "levels": [NODE, {**FABRIC, "latency_s": value}]})


@pytest.mark.parametrize("value", [-0.5, 0, math.nan, "0.8", 80])
def test_bad_share_is_refused(value: object) -> None:
    with pytest.raises(UserInputError, match="gemm_efficiency"):
        accelerator_from_mapping({**ACCELERATOR, "gemm_efficiency": {"bf16": value}})
    with pytest.raises(UserInputError, match="all_reduce"):
        cluster_from_mapping(
            {**CLUSTER, "levels": [NODE, {**FABRIC, "efficiency": {"all_reduce": value}}]}
        )


@pytest.mark.parametrize("value", [0.5, 0, -1, math.nan, "2"])
def test_bad_oversubscription_is_refused(value: object) -> None:
    with pytest.raises(UserInputError, match="oversubscription"):
        cluster_from_mapping({**CLUSTER, "oversubscription": value})


def test_every_number_format_needs_its_share() -> None:
    with pytest.raises(UserInputError, match=r"gemm_efficiency.*one share for each"):
        accelerator_from_mapping({**ACCELERATOR, "peak_flops_per_s": {"bf16": 1e15, "fp8": 2e15}})


@pytest.mark.parametrize(
    "levels",
    [
        *([], "node", 3, [3], [FABRIC, NODE], [NODE, NODE]),
        [NODE, {**FABRIC, "name": "node"}],
        [NODE, {**NODE, "name": "leaf"}, FABRIC],
        [NODE, {**FABRIC, "name": ""}],
    ],
)
def test_impossible_levels_are_refused(levels: object) -> None:
    with pytest.raises(UserInputError):
        cluster_from_mapping({**CLUSTER, "levels": levels})


@pytest.mark.parametrize("name", ["", " "])
def test_clusters_and_devices_have_names(name: str) -> None:
    with pytest.raises(UserInputError, match=r"name = None: it is missing"):
        cluster_from_mapping({**CLUSTER, "name": name})
    with pytest.raises(UserInputError, match=r"name = None: it is missing"):
        accelerator_from_mapping({**ACCELERATOR, "name": name})


def test_whole_floats_are_taken_as_whole_numbers() -> None:
    assert (
        accelerator_from_mapping({**ACCELERATOR, "memory_bytes": 8e10}).memory_bytes == 8 * 10**10
    )


@pytest.mark.parametrize(
    ("num_gpus", "of_each"), [(36, 72), (72, 72), (108, 36), (128, 64), (144, 72), (576, 72)]
)
def test_a_job_takes_the_same_trays_of_each_rack(num_gpus: int, of_each: int) -> None:
    cluster = load("gb200_nvl72", f"cluster.num_gpus={num_gpus}")
    assert cluster.gpus_per_node == of_each
    assert cluster.group_sizes() == (min(of_each, num_gpus), num_gpus)
    assert cluster.resized(72).gpus_per_node == 72


def test_halves_of_racks_are_domains_of_36() -> None:
    cluster = load("gb200_nvl36", "cluster.num_gpus=64")
    assert cluster.gpus_per_node == 32
    assert load("gb300_nvl72", "cluster.levels.0.num_devices=36").gpus_per_node == 36


def test_racks_that_cannot_be_filled_evenly_are_refused() -> None:
    with pytest.raises(UserInputError, match=r"72 GPUs each and a job takes .* hosts of 4") as seen:
        load("gb200_nvl72", "cluster.num_gpus=76")
    assert "Use 72 or 80." in str(seen.value)


def test_examples_of_oversubscription_cross_the_level_that_it_narrows() -> None:
    text = (CONFIGS.parent / "docs" / "sizing.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = (line for line in text.splitlines() if " cluster=" in line)
    found = [line for line in lines if "cluster.oversubscription=" in line]
    assert found
    for line in found:
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        cluster = load(words["cluster"], f"cluster.num_gpus={words['cluster.num_gpus']}")
        assert cluster.num_gpus > cluster.group_sizes()[-2]


def test_every_figure_of_an_accelerator_s_file_is_read() -> None:
    for path in sorted((CONFIGS / "accelerator").glob("*.yaml")):
        stated = yaml.safe_load(path.read_text(encoding="utf-8"))
        record = accelerator_from_mapping(stated)
        for name, value in stated.items():
            if isinstance(value, int | float):
                assert getattr(record, name) == value, (path.name, name)
