"""Files of public measurements, known by their columns, and what a row measured."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from nest_megatron.documents import read_csv
from nest_megatron.errors import UserInputError
from nest_megatron.plain import Name, frozen
from nest_megatron.units import Bytes, Seconds
from nest_megatron.validation.frameworks import release_of

#: One row as it stands in the file: column to text; an empty cell means that nobody said.
Row = Mapping[str, str]


class RefusedRowError(Exception):
    """A row that the cost model cannot be compared with; all readers of rows raise it.

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


#: Settings of the recipes behind rows, next to their file, and what stands before a column of it in
#: a row that it is joined to.
SETTINGS_FILE, SETTING = "row_settings.csv", "row_settings."

#: Columns by which a kind is known; the first kind whose columns are all there counts.
_COLUMNS = {
    RowKind.COLLECTIVES: {"collective", "n_ranks", "size_bytes"},
    RowKind.MEMORY_GOLDEN: {"mem_max_allocated_gib", "test_case"},
    RowKind.MEMORY_PEAK: {"throughput_row", "peak_mem", "model"},
    RowKind.THROUGHPUT: {"model", "gpu", "n_gpus", "tp", "pp", "iter_time_s"},
}


@frozen
class RowFile:
    """All rows of one file, in order."""

    path: Path
    kind: RowKind
    rows: tuple[Row, ...]


def read_rows(path: Path) -> RowFile:
    """Read a file of measurements, joined to the settings next to it (``row_settings.csv``).

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
    """Rows of a file with the settings that the file next to it has for them.

    A row is named by its ``throughput_row`` or its ``row_id``.

    Raises:
        UserInputError: if the file of settings cannot be read.
    """
    settings = path.with_name(SETTINGS_FILE)
    if not settings.is_file():
        return rows
    names, table = read_csv(settings, SETTINGS_FILE)
    if not {"row_id", "confidence"} <= set(names):
        raise UserInputError(
            SETTINGS_FILE,
            str(settings),
            "it has no columns row_id and confidence",
            "docs/accuracy.md lists the columns; move the file away if it is another one.",
        )
    known = {row["row_id"]: row for row in table if row["confidence"]}
    found = [known.get(row.get("throughput_row") or row.get("row_id", ""), {}) for row in rows]
    return [
        {**row, **{f"{SETTING}{name}": text for name, text in each.items()}}
        for row, each in zip(rows, found, strict=True)
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


def word(row: Row, column: str) -> str:
    """A cell as it is compared: in lower case, without blanks around it."""
    return row.get(column, "").strip().lower()


def number(row: Row, column: str) -> float | None:
    """A cell as a number, which may be written as a product; ``None`` where it is empty.

    >>> number({"seq": "4,096"}, "seq"), number({"vocab": "25256 * 8"}, "vocab"), number({}, "seq")
    (4096.0, 202048.0, None)
    """
    text = row.get(column, "").strip()
    if not text:
        return None
    try:
        plain = re.sub(r",(?=\d{3}(?!\d))", "", text)  # of thousands: a decimal comma is none
        value = math.prod(map(float, plain.split("*")))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
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
        if number_or_zero(row, column) > largest:
            raise RefusedRowError("a number is too large", f"{column} = {row[column].strip()!r}")


def whole(row: Row, column: str) -> int | None:
    """A cell as a whole number, or ``None`` where it is empty."""
    value = number(row, column)
    if value is not None and value != int(value):
        raise RefusedRowError("a number cannot be read", f"{column} = {row[column]!r}")
    return None if value is None else int(value)


def _unreadable(path: Path, limit: str) -> UserInputError:
    return UserInputError("measurements", str(path), limit, "docs/accuracy.md lists the columns.")


#: Bytes of each unit in which sources print memory.
_UNITS = {"b": 1, "mib": 2**20, "gib": 2**30, "gb": 10**9}


@frozen
class StepWork:
    """What turns a rate into a time: the sequences of a step, its operations, its GPUs.

    Args:
        model_flops: of one step, with the causal half of attention.
        attention_flops: that half.
        head_flops: the part of the product with the vocabulary, which is never recomputed.
    """

    sequences: int
    seq_length: int
    model_flops: float
    attention_flops: float
    head_flops: float
    num_gpus: int
    peak_flops_per_s: float


def measured_time(row: Row, work: StepWork) -> Seconds:
    """Seconds of a step: as printed, or from tokens per second, operations per second or MFU."""
    if seconds := number(row, "iter_time_s"):
        return seconds
    if rate := number(row, "tokens_per_s_per_gpu"):
        return work.sequences * work.seq_length / work.num_gpus / rate
    if tera := number(row, "tflops_per_gpu"):
        return _counted_flops(row, work) / work.num_gpus / (tera * 1e12)
    if share := number(row, "mfu_pct"):
        rate = share / 100 * work.peak_flops_per_s
        return _counted_flops(row, work) / work.num_gpus / rate
    raise RefusedRowError("no time measured", f"outcome {row.get('outcome', '')!r}")


def _counted_flops(row: Row, work: StepWork) -> float:
    """Operations of a step as the source counts them."""
    kind = row.get("tflops_kind", "").lower()
    if kind.startswith("8*n"):
        size = number(row, "params_b")
        if not size:
            raise RefusedRowError("no time measured", "TFLOP/s by 8*N*tokens without params_b")
        return 8 * size * 1e9 * work.sequences * work.seq_length
    flops = work.model_flops + (work.attention_flops if counts_whole_attention(row) else 0.0)
    recomputed = "hardware" in kind or "recompute" in kind
    return flops + (flops - work.head_flops) / 3 if recomputed else flops


#: Frameworks that count the whole square of attention, not its causal half, in TFLOP/s, and the
#: first release or date (year, month) that counts the half. Rows that print time and TFLOP/s agree:
#: with the whole to 0.1 % in NeMo 24.07 and Composer, with the half to 0.3 % in Megatron-Bridge and
#: Megatron-Core of 2025 and 2026.
_NEVER = (99, 1)
_WHOLE_ATTENTION = (
    ("composer", _NEVER),  # llm-foundry, scripts/train/benchmarking/README.md
    # nemo/utils/flops_formulas.py, halved by #14424 of 2025-08-09 (release 25.09)
    (r"nemo(?!.*automodel)", (25, 9)),
    ("nanotron", _NEVER),  # get_flops in nanotron/models/llama.py
    # num_floating_point_operations; arXiv:2104.04473 equation 3; Megatron-LM #831
    ("megatron|deepspeed", (25, 1)),
)


def counts_whole_attention(row: Row) -> bool:
    """Whether the TFLOP/s or MFU of a row count the whole square of attention.

    >>> counts_whole_attention({"framework": "NeMo24.03.01.framework"})
    True
    >>> counts_whole_attention({"framework": "Megatron-Bridge/MCore 26.04", "date": "2026-08-11"})
    False
    """
    framework = row.get("framework", "")
    for pattern, until in _WHOLE_ATTENTION:
        if re.search(pattern, framework, re.IGNORECASE):
            return _released(row) < until
    return False


def _released(row: Row) -> tuple[int, int]:
    """Year and month of the release that a row names, or of the row; unknown is taken as new."""
    named = release_of(row.get("framework", ""))
    dated = re.match(r"20(\d\d)(?:-(\d\d))?", row.get("date", ""))
    if named is not None or dated is None:
        return named or (99, 0)
    return int(dated[1]), int(dated[2] or 1)


def states_time(row: Row) -> bool:
    """Whether a row has a time, or a rate that makes one."""
    columns = ("iter_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct")
    return any(number(row, column) for column in columns)


#: Words of a run's authors about its timing, by what they make of it.
_DISOWNED = {
    "its timing is a sanity check": "sanity check",
    "timed under a profiler": r"nsys attached|(?:from|in) the nsys window",
    "on a device with less power than its own": "power-limited",
}


def require_measurement(row: Row) -> None:
    """Refuse a run whose timing says nothing of its device's speed, as its authors say."""
    for reason, words in _DISOWNED.items():
        if found := re.search(words, row.get("ambiguity", "")):
            raise RefusedRowError(reason, found[0])


def require_fixed_sequences(row: Row) -> None:
    """Refuse a step of reinforcement learning that does not say how long its answers are."""
    if word(row, "task").startswith("rl") and not number(row, "seq"):
        raise RefusedRowError("sequence length not stated", "answers of any length")


def measured_memory(row: Row) -> Bytes | None:
    """Peak bytes of one GPU, or ``None`` where the row has none."""
    value = number(row, "peak_mem")
    if not value:
        return None
    unit = row.get("peak_mem_unit", "").split("(")[0].strip().lower()
    if "nvidia-smi" in row.get("peak_mem_unit", ""):
        unit = "gib"  # nvidia-smi counts in MiB, whatever letters are written behind
    if "nanotron" in row.get("framework", "").lower():
        unit = unit.replace("gb", "gib")  # src/nanotron/logging ``create_table_log``: 1024**3
    if unit not in _UNITS:
        raise RefusedRowError("unit of memory not stated", row.get("peak_mem_unit", ""))
    return round(value * _UNITS[unit])


def ran_out_of_memory(row: Row) -> bool:
    """Whether the run ended for want of memory."""
    return word(row, "outcome") == "oom"


#: Printed time and printed rate of one row may differ by this factor: sources count the operations
#: of attention and of recomputation differently.
_TOLERATED = 2.5


def require_consistent(row: Row, work: StepWork) -> None:
    """Refuse a row that is faster than its device, or whose printed time and rate disagree."""
    took = measured_time(row, work)
    least = work.model_flops / work.num_gpus / work.peak_flops_per_s
    if took < least:
        detail = f"{took:.4g} s a step, but the device's peak needs {least:.4g} s"
        raise RefusedRowError("faster than the device's peak", detail)
    seconds, tera = number(row, "iter_time_s"), number(row, "tflops_per_gpu")
    if not seconds or not tera:
        return
    other = _counted_flops(row, work) / work.num_gpus / (tera * 1e12)
    if not 1 / _TOLERATED < other / seconds < _TOLERATED:
        detail = f"{seconds:g} s a step, but {tera:g} TFLOP/s would take {other:.4g} s"
        raise RefusedRowError("printed time and rate disagree", detail)
