"""Files of public measurements, told apart by their columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.documents import read_csv
from nest_megatron.errors import UserInputError
from nest_megatron.names import Name

#: One row as it stands in the file: column to text; an empty cell means that nobody said.
Row = Mapping[str, str]


class RefusedRowError(Exception):
    """A row that the cost model cannot be held against; all readers of rows raise it.

    Args:
        reason: a short phrase without values, so that refusals can be counted by it.
        detail: what the row says, with its values; empty where the reason says all.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class RowKind(Name):
    """What a file of measurements holds."""

    THROUGHPUT = "throughput"
    MEMORY_PEAK = "memory_peak"
    MEMORY_GOLDEN = "memory_megatron_golden"
    COLLECTIVES = "comm_collectives"


#: Settings of the recipes behind rows, beside their file, and what stands before a column of it in
#: a row that it is joined to.
SETTINGS_FILE, SETTING = "row_settings.csv", "row_settings."

#: Columns by which a kind is known; the first kind whose columns are all there counts.
_COLUMNS = {
    RowKind.COLLECTIVES: {"collective", "n_ranks", "size_bytes"},
    RowKind.MEMORY_GOLDEN: {"mem_max_allocated_gib", "test_case"},
    RowKind.MEMORY_PEAK: {"throughput_row", "peak_mem", "model"},
    RowKind.THROUGHPUT: {"model", "gpu", "n_gpus", "tp", "pp", "iter_time_s"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """All rows of one file, in order."""

    path: Path
    kind: RowKind
    rows: tuple[Row, ...]


def read_rows(path: Path) -> RowFile:
    """Read a file of measurements, joined to the settings beside it (``row_settings.csv``).

    Raises:
        UserInputError: if it is missing, empty, no table, or of no known kind.
    """
    names, rows = read_csv(path, "measurements")
    columns = set(names)
    if not rows:
        raise _unreadable(path, "it has no rows")
    for kind, needed in _COLUMNS.items():
        if needed <= columns:
            return RowFile(path=path, kind=kind, rows=tuple(_joined(path, rows)))
    wanted = "; ".join(f"{kind}: {', '.join(sorted(needed))}" for kind, needed in _COLUMNS.items())
    raise _unreadable(path, f"its columns are of no known kind ({wanted})")


def _joined(path: Path, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows of a file with the settings that the file beside it has for them.

    A row is named by its ``throughput_row`` or its ``row_id``.

    Raises:
        UserInputError: if the file of settings cannot be read.
    """
    beside = path.with_name(SETTINGS_FILE)
    if not beside.is_file():
        return rows
    names, table = read_csv(beside, SETTINGS_FILE)
    if not {"row_id", "confidence"} <= set(names):
        raise UserInputError(
            SETTINGS_FILE,
            value=str(beside),
            limit="it has no columns row_id and confidence",
            fix="docs/accuracy.md lists the columns; move the file away if it is another one.",
        )
    known = {row["row_id"]: row for row in table if row["confidence"]}
    settings = [known.get(row.get("throughput_row") or row.get("row_id", ""), {}) for row in rows]
    return [
        {**row, **{f"{SETTING}{name}": text for name, text in found.items()}}
        for row, found in zip(rows, settings, strict=True)
    ]


#: No run has come near these; a misprint beyond them would be priced for ever.
_LARGEST = {
    **dict.fromkeys(("pp", "vp", "mtp_layers"), 1e3),
    **dict.fromkeys(("gpus_per_node", "layers", "tp", "cp", "ep", "etp"), 1e4),
    **dict.fromkeys(("heads", "experts", "ga"), 1e5),
    **dict.fromkeys(("n_gpus", "n_ranks", "nodes", "hidden", "gbs", "mbs"), 1e6),
    "ffn": 1e7,
    **dict.fromkeys(("vocab", "seq"), 1e8),
}


def number(row: Row, column: str) -> float | None:
    """A cell as a number, or ``None`` where it is empty."""
    text = row.get(column, "").strip()
    if not text:
        return None
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise RefusedRowError("a number cannot be read", f"{column} = {text!r}")
    return value


def number_or_zero(row: Row, column: str) -> float:
    """A cell as a number; 0 where it is empty or cannot be read."""
    try:
        return number(row, column) or 0.0
    except RefusedRowError:
        return 0.0


def refuse_misprints(row: Row) -> None:
    """Refuse a row with a figure beyond anything that has been run."""
    for column, largest in _LARGEST.items():
        text = row.get(column, "").strip()
        try:
            too_large = float(text.replace(",", "")) > largest if text else False
        except ValueError:
            continue
        if too_large:
            raise RefusedRowError("a number is too large", f"{column} = {text!r}")


def whole(row: Row, column: str) -> int | None:
    """A cell as a whole number, or ``None`` where it is empty."""
    value = number(row, column)
    if value is not None and value != int(value):
        raise RefusedRowError("a number cannot be read", f"{column} = {row[column]!r}")
    return None if value is None else int(value)


def _unreadable(path: Path, limit: str) -> UserInputError:
    return UserInputError(
        "measurements", value=str(path), limit=limit, fix="docs/accuracy.md lists the columns."
    )
