"""What a row measured, in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from nest_megatron.units import Bytes, Seconds
from nest_megatron.validation.refusal import RefusedRowError
from nest_megatron.validation.rows import Row, number

#: Bytes of each unit in which sources print memory.
_UNITS = {"b": 1, "mib": 2**20, "gib": 2**30, "gb": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What turns a rate into a time: the sequences of a step, its operations, its GPUs."""

    sequences: int
    seq_length: int
    model_flops: float
    num_gpus: int
    peak_flops_per_s: float


def measured_time(row: Row, work: Work) -> Seconds:
    """Seconds of a step: as printed, or from tokens per second, operations per second or MFU.

    Raises:
        RefusedRowError: if the row has none of them.
    """
    tokens = work.sequences * work.seq_length / work.num_gpus
    seconds = number(row, "iter_time_s")
    if seconds:
        return seconds
    rate = number(row, "tokens_per_s_per_gpu")
    if rate:
        return tokens / rate
    tera = number(row, "tflops_per_gpu")
    if tera:
        return _counted_flops(row, work) / work.num_gpus / (tera * 1e12)
    share = number(row, "mfu_pct")
    if share:
        return work.model_flops / work.num_gpus / (share / 100 * work.peak_flops_per_s)
    raise RefusedRowError("no time measured", f"outcome {row.get('outcome', '')!r}")


def _counted_flops(row: Row, work: Work) -> float:
    """Operations of a step as the source counts them."""
    kind = row.get("tflops_kind", "").lower()
    if kind.startswith("8*n"):
        size = number(row, "params_b")
        if not size:
            raise RefusedRowError("no time measured", "TFLOP/s by 8*N*tokens without params_b")
        return 8 * size * 1e9 * work.sequences * work.seq_length
    if "hardware" in kind or "recompute" in kind:
        return work.model_flops * 4 / 3
    return work.model_flops


def measured_memory(row: Row) -> Bytes | None:
    """Peak bytes of one GPU, or ``None`` where the row has none.

    Raises:
        RefusedRowError: for a unit that is not known.
    """
    value = number(row, "peak_mem")
    if not value:
        return None
    unit = row.get("peak_mem_unit", "").split("(")[0].strip().lower()
    if "nvidia-smi" in row.get("peak_mem_unit", ""):
        unit = "gib"  # nvidia-smi counts in MiB, whatever letters are written behind
    if unit not in _UNITS:
        raise RefusedRowError("unit of memory not stated", row.get("peak_mem_unit", ""))
    return round(value * _UNITS[unit])


def ran_out_of_memory(row: Row) -> bool:
    """Whether the run ended for want of memory."""
    return row.get("outcome", "").strip().lower() == "oom"


#: Printed time and printed rate of one row may differ by this factor: sources count the operations
#: of attention and of recomputation in several ways.
_TOLERATED = 2.5


def require_consistent(row: Row, work: Work) -> None:
    """Refuse a row whose printed time and printed rate speak of different jobs.

    Raises:
        RefusedRowError: if the two times differ by more than any way of counting explains.
    """
    seconds, tera = number(row, "iter_time_s"), number(row, "tflops_per_gpu")
    if not seconds or not tera:
        return
    other = _counted_flops(row, work) / work.num_gpus / (tera * 1e12)
    if not 1 / _TOLERATED < other / seconds < _TOLERATED:
        detail = f"{seconds:g} s a step, but {tera:g} TFLOP/s would take {other:.4g} s"
        raise RefusedRowError("printed time and rate disagree", detail)
