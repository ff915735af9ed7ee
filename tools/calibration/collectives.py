"""Predicted and measured time of one row of collective benchmarks (nccl-tests and the like)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from nest_megatron.cluster.communication import collective_time
from nest_megatron.cluster.records import CollectiveKind, NetworkLevel
from nest_megatron.validation.machine_words import accelerator_name
from nest_megatron.validation.machines import RACK_GPUS, largest_part, network_levels
from nest_megatron.validation.outcome import RowOutcome
from nest_megatron.validation.rows import RefusedRowError, Row, number, whole

#: Names of collectives in the tables, without punctuation.
_KINDS = {kind.value.replace("_", ""): kind for kind in CollectiveKind}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """A row that can be predicted: the call, its group's place, and the measured time."""

    kind: CollectiveKind
    message_bytes: float
    shape: tuple[int, ...]
    levels: tuple[NetworkLevel, ...]
    measured_s: float


def predicted_row(row: Row, _: object = None) -> RowOutcome:
    """One row of ``comm_collectives.csv`` with its predicted time."""
    parsed = parse_collective(row)
    seconds = row_time(parsed, parsed.levels)
    if not seconds:
        raise RefusedRowError("a group of one", f"shape {parsed.shape}")
    return RowOutcome(row=row, predicted_s=seconds, measured_s=parsed.measured_s)


def row_time(row: CollectiveRow, levels: tuple[NetworkLevel, ...]) -> float:
    """Predicted seconds of a row on given levels."""
    return collective_time(row.kind, row.message_bytes, row.shape, levels)


def parse_collective(row: Row) -> CollectiveRow:
    """Read a row of collective benchmarks."""
    name = row.get("collective", "")
    kind = _KINDS.get("".join(c for c in name.lower() if c.isalpha()))
    if kind is None:
        raise RefusedRowError("unknown collective", repr(name))
    size = number(row, "size_bytes")
    if size is None:
        raise RefusedRowError("no message size", f"row {row.get('row_id', '')}")
    columns = ("n_ranks", "nodes", "gpus_per_node_used")
    ranks, nodes, used = (_count(row, column) for column in columns)
    if ranks < 2 or nodes * used < ranks or ranks % nodes:
        detail = f"{ranks} ranks on {nodes} nodes of {used}"
        raise RefusedRowError("ranks do not fit the nodes", detail)
    levels, shape = _levels_and_shape(row, ranks, nodes)
    return CollectiveRow(
        kind=kind,
        message_bytes=size,
        shape=shape,
        levels=levels,
        measured_s=_measured_s(row, kind, size, ranks),
    )


def _levels_and_shape(
    row: Row, ranks: int, nodes: int
) -> tuple[tuple[NetworkLevel, ...], tuple[int, ...]]:
    name, _ = accelerator_name(row.get("gpu", ""))
    words = f"{row.get('intra_fabric', '')} ; {row.get('inter_fabric', '')}"
    if nodes > 1 and not row.get("inter_fabric") and not _is_rack(row):
        raise RefusedRowError("network between the nodes not stated", row.get("system", ""))
    network = words if "pcie" in words.lower() else row.get("inter_fabric", "")
    levels, _ = network_levels(name, _machine_node(row), network, sharing=ranks // nodes)
    algorithm = row.get("algo", "").lower()
    # Tables call the sums of an NVL72 rack's own switches SHARP too; those its level has anyway.
    if "sharp" in algorithm and levels[-1].tree_efficiency and not _is_rack(row):
        outer = dataclasses.replace(levels[-1], reduction_efficiency=levels[-1].tree_efficiency)
        levels = (*levels[:-1], outer)
    if "nvls off" in algorithm:
        levels = tuple(dataclasses.replace(lv, reduction_efficiency=None) for lv in levels)
    inside = largest_part(ranks, RACK_GPUS) if _is_rack(row) else ranks // nodes
    return levels, _shape(levels, inside, ranks // inside)


def _shape(levels: tuple[NetworkLevel, ...], inside: int, outside: int) -> tuple[int, ...]:
    shape: list[int] = []
    for level in levels[:-2]:
        shape.append(math.gcd(inside, level.num_devices or 1))
        inside //= shape[-1]
    return (*shape, inside, outside)


def _is_rack(row: Row) -> bool:
    return row.get("gpu", "").upper().startswith(("GB200", "GB300"))


def _machine_node(row: Row) -> int | None:
    """GPUs of the whole node, where not those that its generation usually has."""
    used = _count(row, "gpus_per_node_used")
    if row.get("gpu", "").upper().startswith("V100"):
        return 4 if used <= 4 else 8
    return None


def _measured_s(row: Row, kind: CollectiveKind, size: float, ranks: int) -> float:
    if micros := number(row, "time_us"):
        return micros * 1e-6
    if algorithm := number(row, "algbw_GBps"):
        return size / (algorithm * 1e9)
    if bus := number(row, "busbw_GBps"):
        return size * _bus_factor(kind, ranks) / (bus * 1e9)
    raise RefusedRowError("neither a time nor a bandwidth", f"row {row.get('row_id', '')}")


def _bus_factor(kind: CollectiveKind, ranks: int) -> float:
    """Bus over algorithm bandwidth, as nccl-tests defines it."""
    if kind is CollectiveKind.SEND_RECV:
        return 1.0
    return (2 if kind is CollectiveKind.ALL_REDUCE else 1) * (ranks - 1) / ranks


def _count(row: Row, column: str) -> int:
    value = whole(row, column)
    if not value:
        raise RefusedRowError("ranks or nodes not stated", f"{column}: {row.get(column)!r}")
    return value
