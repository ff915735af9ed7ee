"""The public tables of collectives, as samples for ``fit_collectives``."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.validation.collectives import CollectiveRow, parse_collective
from nest_megatron.validation.fit_collectives import Sample
from nest_megatron.validation.links import links
from nest_megatron.validation.refusal import RefusedRowError

#: Smallest message of a row that takes part: below, the choice of protocol rules, not the link.
LEAST_BYTES = 1_000_000
#: Weight of a row of vTrain's table, which has a thousand sizes of one machine each for two.
_VTRAIN_WEIGHT = 0.5
#: Weight of a row of SimAI's table, which names neither the collective nor the machine.
_SIMAI_WEIGHT = 0.3
_VTRAIN = {"A100": ("nvlink3", 300e9), "V100": ("nvlink2_mesh", 150e9)}


def read_samples(folder: Path) -> tuple[Sample, ...]:
    """Samples of all tables in a folder like ``shared/truth``; absent tables are skipped."""
    readers = {
        "comm_collectives.csv": _collectives,
        "comm_allreduce_lut_vtrain.csv": _vtrain,
        "comm_busbw_ratio_simai.csv": _simai,
    }
    samples: list[Sample] = []
    for name, read in readers.items():
        if (folder / name).is_file():
            with (folder / name).open(encoding="utf-8", newline="") as file:
                samples += read(csv.DictReader(file))
    return tuple(samples)


def _collectives(rows: Iterator[Mapping[str, str]]) -> Iterator[Sample]:
    for row in rows:
        try:
            parsed = parse_collective(row)
        except RefusedRowError:
            continue
        if parsed.message_bytes >= LEAST_BYTES:
            yield Sample(row=parsed, source=row["source"])


def _vtrain(rows: Iterator[Mapping[str, str]]) -> Iterator[Sample]:
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
        yield Sample(row=parsed, source="vtrain-lut", weight=_VTRAIN_WEIGHT)


def _simai(rows: Iterator[Mapping[str, str]]) -> Iterator[Sample]:
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
        yield Sample(row=parsed, source="simai-ratio", weight=_SIMAI_WEIGHT)
