"""The public tables of collectives, as samples for ``links.fit_links``."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.validation.machines import links
from nest_megatron.validation.rows import RefusedRowError
from tools.calibration.collectives import CollectiveRow, parse_collective
from tools.calibration.links import CollectiveSample

#: Smallest message that takes part: below, clocks and rounded printouts rule.
_LEAST_BYTES = 1000
#: Weight of a row that a framework's own profiler timed: its calls wait for the host as well.
_PROFILER_WEIGHT = 0.3
#: Weight of a row of vTrain's table, which has a thousand sizes of one machine each for two.
_VTRAIN_WEIGHT = 0.5
#: Weight of a row of SimAI's table, which names neither the collective nor the machine.
_SIMAI_WEIGHT = 0.3
#: Weight of a row of SimuMax's fits, and sizes at which their latencies do not matter.
_SIMUMAX_WEIGHT, _SIMUMAX_BYTES = 0.5, (2**28, 2**30, 2**32)
_VTRAIN = {"A100": ("nvlink3", 300e9), "V100": ("nvlink2_mesh", 150e9)}
#: By the start of its system's name: technology, and rate of one GPU.
_SIMUMAX = {"b200": ("nvlink5", 900e9), "a100_pcie": ("pcie", 31e9)}


def read_samples(
    folder: Path, collectives: Iterable[Mapping[str, str]]
) -> tuple[CollectiveSample, ...]:
    """Samples of rows of collectives, and of the other tables that lie in their folder.

    Args:
        folder: one like ``shared/truth``; absent tables are skipped.
    """
    readers = {
        "comm_allreduce_lut_vtrain.csv": _vtrain,
        "comm_busbw_ratio_simai.csv": _simai,
        "comm_fitted_models.csv": _simumax,
    }
    samples = [*_collectives(collectives)]
    for name, read in readers.items():
        if (folder / name).is_file():
            with (folder / name).open(encoding="utf-8", newline="") as file:
                samples += read(csv.DictReader(file))
    return tuple(samples)


def _collectives(rows: Iterable[Mapping[str, str]]) -> Iterator[CollectiveSample]:
    for row in rows:
        try:
            parsed = parse_collective(row)
        except RefusedRowError:
            continue
        if parsed.message_bytes >= _LEAST_BYTES:
            source = row.get("source", "")
            weight = _PROFILER_WEIGHT if "profiler" in row.get("software", "").lower() else 1.0
            cluster = f"{source} {row.get('gpu', '')}"
            yield CollectiveSample(row=parsed, source=source, cluster=cluster, weight=weight)


def _vtrain(rows: Iterator[Mapping[str, str]]) -> Iterator[CollectiveSample]:
    """Powers of two of a table that goes up in steps of 1 MiB."""
    for row in rows:
        mebibytes = int(row["size_bytes"]) >> 20
        if mebibytes & (mebibytes - 1):
            continue
        name, rate = _VTRAIN[row["gpu"]]
        parsed = CollectiveRow(
            kind=CollectiveKind.ALL_REDUCE,
            message_bytes=float(row["size_bytes"]),
            shape=(int(row["n_gpus"]),),
            levels=(links()[name].level("node", 8, rate),),
            measured_s=float(row["time_us_outofplace"]) * 1e-6,
        )
        cluster = f"vtrain-lut {row['gpu']}"
        yield CollectiveSample(
            row=parsed, source="vtrain-lut", cluster=cluster, weight=_VTRAIN_WEIGHT
        )


def _simai(rows: Iterator[Mapping[str, str]]) -> Iterator[CollectiveSample]:
    """Rings over the adapters of whole nodes, read as gathers on H100 nodes with 8 x 400 Gb/s."""
    levels = (
        links()["nvlink4"].level("node", 8, 450e9),
        links()["infiniband"].level("fabric", None, 50e9),
    )
    for row in rows:
        nodes, _, rest = row["scale"].partition("Node-")
        if row["table"] != "NIC path collectives" or not rest:
            continue
        size, shape = float(row["size_bytes"]), (8, int(nodes))
        sent = size * (1 - 1 / (8 * int(nodes)))
        parsed = CollectiveRow(
            kind=CollectiveKind.ALL_GATHER,
            message_bytes=size,
            shape=shape,
            levels=levels,
            measured_s=sent / (float(row["ratio_of_peak_busbw"]) * 8 * 50e9),
        )
        source = "simai-ratio"
        yield CollectiveSample(row=parsed, source=source, cluster=source, weight=_SIMAI_WEIGHT)


def _simumax(rows: Iterator[Mapping[str, str]]) -> Iterator[CollectiveSample]:
    """What SimuMax's lines through its measurements say of large messages inside a node."""
    kinds = {"all2all": CollectiveKind.ALL_TO_ALL} | {kind.value: kind for kind in CollectiveKind}
    seen = set()
    for row in rows:
        system, op, network = row["system"], row["op"], row["network"]
        name = next((start for start in _SIMUMAX if system.startswith(start)), None)
        members = int(network.rpartition("_")[2][:-1]) if network.endswith("x") else 8
        if name is None or op not in kinds or not row["measured"].startswith("yes"):
            continue
        if (name, op, members) in seen:  # the B200 has each line twice
            continue
        seen.add((name, op, members))
        link, rate = _SIMUMAX[name]
        share = float(row["volume_scale"]) * (1 - 1 / members)
        reached = float(row["link_GBps"]) * 1e9 * float(row["op_efficiency"])
        for size in _SIMUMAX_BYTES:
            parsed = CollectiveRow(
                kind=kinds[op],
                message_bytes=float(size),
                shape=(members,),
                levels=(links()[link].level("node", 8, rate),),
                measured_s=share * size / reached,
            )
            yield CollectiveSample(
                row=parsed,
                source="simumax-system-config",
                cluster=f"simumax {name}",
                weight=_SIMUMAX_WEIGHT,
            )
