"""Collectives against a part of the public measurements, with thresholds that fail on rot."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nest_megatron.cluster.communication import collective_time
from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.validation.machines import links
from nest_megatron.validation.rows import RefusedRowError, read_rows
from tools.calibration.catalogue import write_clusters, write_links
from tools.calibration.collectives import parse_collective, predicted_row
from tools.calibration.link_samples import read_samples
from tools.calibration.links import CollectiveSample, fit_links

DATA = Path(__file__).parent / "data" / "collectives.csv"
CONFIGS = Path(__file__).parents[2] / "hydra_configs"
ROW = {
    "gpu": "H100",
    "inter_fabric": "8x400 Gb/s NDR per node",
    "nodes": "2",
    "gpus_per_node_used": "8",
    "n_ranks": "16",
    "collective": "all_reduce",
    "size_bytes": "1073741824",
    "busbw_GBps": "400",
}


def rows() -> Iterator[dict[str, str]]:
    with DATA.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def errors() -> dict[str, list[float]]:
    """Relative errors by source."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows():
        if row["size_bytes"]:
            predicted, measured = predicted_row(row).time
            found[row["source"]].append(abs(predicted / measured - 1))
    return found


def test_public_rows_are_met() -> None:
    found = errors()
    every = [error for some in found.values() for error in some]
    assert len(every) > 60
    assert sum(every) / len(every) < 0.095
    assert max(sum(some) / len(some) for some in found.values()) < 0.30


def test_the_bus_bandwidth_gives_the_time() -> None:
    _, measured = predicted_row(ROW).time
    assert measured == pytest.approx(2**30 * 2 * 15 / 16 / 400e9)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"size_bytes": ""}, "no message size"),
        ({"busbw_GBps": ""}, "neither a time nor a bandwidth"),
        ({"n_ranks": "17"}, "ranks do not fit the nodes"),
        ({"collective": "barrier"}, "unknown collective"),
        ({"gpu": "?"}, "unknown GPU"),
        ({"inter_fabric": ""}, "network between the nodes not stated"),
        ({"nodes": ""}, "ranks or nodes not stated"),
        ({"size_bytes": "nan"}, "a number cannot be read"),
    ],
)
def test_rows_that_say_too_little_are_refused(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(RefusedRowError) as caught:
        predicted_row(ROW | changes)
    assert caught.value.reason == reason


def test_the_row_turns_the_switch_off_and_on() -> None:
    off = parse_collective(ROW | {"algo": "Ring (NVLS off)"})
    assert all(level.reduction_efficiency is None for level in off.levels)
    sharp = parse_collective(ROW | {"algo": "SHARP"})
    assert all(level.reduction_efficiency for level in sharp.levels)


@given(
    inner=st.sampled_from(["nvlink2_mesh", "nvlink3", "nvlink4", "nvlink5", "pcie", "xgmi"]),
    outer=st.sampled_from(["infiniband", "infiniband_rack", "efa", "tcpxo", "omni_path"]),
    kind=st.sampled_from([kind for kind in CollectiveKind if kind is not CollectiveKind.SEND_RECV]),
    shape=st.tuples(st.integers(1, 8), st.integers(1, 40)),
    size=st.floats(1.0, 1e11),
)
def test_more_bytes_never_take_less(
    inner: str, outer: str, kind: CollectiveKind, shape: tuple[int, int], size: float
) -> None:
    levels = (links()[inner].level("node", 8, 3e11), links()[outer].level("fabric", None, 2e10))
    time = collective_time(kind, size, shape, levels)
    assert time <= collective_time(kind, 1.01 * size, shape, levels)
    assert (time > 0) == (shape != (1, 1))


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[CollectiveSample, ...]:
    folder = tmp_path_factory.mktemp("truth")
    return read_samples(folder, read_rows(DATA).rows)


@pytest.mark.slow
def test_a_fit_finds_back_what_made_the_rows(
    tmp_path: Path, samples: tuple[CollectiveSample, ...]
) -> None:
    """Refitting the rows leaves their error where the calibration file has it, or lower."""
    pytest.importorskip("scipy")
    fit = fit_links(links(), samples, cross_validate=False)
    every = [error for some in errors().values() for error in some]
    mean = sum(map(abs, fit.errors)) / len(fit.errors)
    assert mean < sum(every) / len(every) + 0.01
    path = tmp_path / "links.yaml"
    path.write_text("\n".join(f"{name}: {{note: kept}}" for name in fit.links), encoding="utf-8")
    write_links(path, fit)
    assert path.read_text(encoding="utf-8").count('note: "kept"') == len(fit.links)


@pytest.mark.slow
def test_a_cluster_left_out_is_told_by_its_family(samples: tuple[CollectiveSample, ...]) -> None:
    """Each cluster is predicted without its rows, by what the others say of such links."""
    pytest.importorskip("scipy")
    wanted = ("gcp-a3mega-user-log", "stas00-ml-engineering", "azure-ai-benchmarking-guide")
    some = [sample for sample in samples if sample.source in wanted]
    fit = fit_links(links(), some)
    assert fit.by("cluster").keys() == {sample.cluster for sample in some if sample.is_large}
    assert all(math.isfinite(each.left_out) for each in fit.by("cluster").values())
    assert fit.overall().left_out < 0.25


def test_the_clusters_of_the_catalogue_have_the_fitted_figures(tmp_path: Path) -> None:
    for path in (CONFIGS / "cluster").glob("*.yaml"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert list(write_clusters(tmp_path, links())) == []
    slower = {
        name: dataclasses.replace(link, latency_s=0.5 * link.latency_s)
        for name, link in links().items()
    }
    written = {path.stem for path in write_clusters(tmp_path, slower)}
    assert {"dgx_a100", "dgx_h100", "h200", "b200", "gb200_nvl72"} <= written


#: Microseconds of an all-reduce of 2, 4 and 8 A100 by MiB (vTrain, comm_allreduce_lut_vtrain.csv).
A100_NODE = {
    2: {4: 61.18, 8: 86.9, 16: 131.9, 64: 404.7, 1024: 5442.8},
    4: {4: 77.32, 8: 116.8, 16: 179.6, 64: 543.8, 1024: 7259.4},
    8: {4: 95.8, 8: 134.3, 16: 232.4, 64: 579.9, 1024: 8193.0},
}


@pytest.mark.parametrize("members", A100_NODE)
def test_an_a100_node_is_met_whatever_the_size_of_the_group(members: int) -> None:
    node = (links()["nvlink3"].level("node", 8, 300e9),)
    missed = [
        collective_time(CollectiveKind.ALL_REDUCE, mebibytes * 2**20, (members,), node)
        / (1e-6 * micros)
        - 1
        for mebibytes, micros in A100_NODE[members].items()
    ]
    assert sum(map(abs, missed)) / len(missed) < 0.12
