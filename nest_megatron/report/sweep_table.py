"""The table of a sweep: one row a job, for the terminal, as CSV and as Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.units import Bytes, format_gib, format_seconds

#: Certificates of searches that ended by themselves.
_PROVEN = ("optimal", "chosen")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One job of a sweep.

    Args:
        settings: what varies, as typed, by key.
        status: ``ok``, ``does not fit``, ``bad input`` or ``ended early`` (without a plan).
        told: what is wrong with the input, or known of a search that ended early; of missing bytes,
            ``at most`` where time ended their analysis.
    """

    number: int
    settings: Mapping[str, str]
    status: str
    plan: ParallelPlan | None = None
    missing_bytes: Bytes | None = None
    told: str = ""

    def shown(self) -> dict[str, str]:
        """The row's cells for the terminal."""
        job = "\n".join(f"{_short(key)}={value}" for key, value in self.settings.items())
        cells = {"#": str(self.number), "Job": job, "Iteration": "-"}
        if self.plan is not None:
            return cells | _cells(self.plan)
        if self.missing_bytes is None:
            return cells | {"Iteration": self.status, "Layout": self.told}
        missing = f"{self.told} {format_gib(self.missing_bytes)}".lstrip()
        return cells | {"Layout": f"{self.status}: {missing} missing"}

    def fields(self) -> dict[str, Any]:
        """The row's cells for a program: SI units, and empty where there is no plan."""
        row: dict[str, Any] = {"number": self.number, **_numbers(self.settings)}
        row |= {"status": self.status, "told": self.told, "missing_bytes": self.missing_bytes}
        return row | (dict.fromkeys(_FIELDS) if self.plan is None else _fields(self.plan))


def to_csv(rows: Sequence[SweepRow]) -> str:
    """The rows as CSV with a head; what there is none of is empty."""
    stream = io.StringIO()
    table = [row.fields() for row in rows]
    writer = csv.DictWriter(stream, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return stream.getvalue()


def to_parquet(rows: Sequence[SweepRow]) -> bytes:
    """The rows as a Parquet file.

    A setting that is a number in some rows and text in others is text in all.

    Raises:
        ImportError: without pyarrow (the ``sweep`` extra).
    """
    import pyarrow
    from pyarrow import parquet

    table = [row.fields() for row in rows]
    columns = {name: _one_type([row[name] for row in table]) for name in table[0]}
    kinds = {name: getattr(pyarrow, kind)() for name, kind in _OFTEN_EMPTY.items()}
    arrays = {name: pyarrow.array(c, type=kinds.get(name)) for name, c in columns.items()}
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays), stream)
    return stream.getvalue()


def number_of(text: str) -> float | None:
    """A setting's value as a number, if it is one."""
    try:
        return float(text)
    except ValueError:
        return None


def _numbers(settings: Mapping[str, str]) -> dict[str, Any]:
    return {key: _number_or_text(value) for key, value in settings.items()}


def _number_or_text(value: str) -> Any:
    number = number_of(value)
    if number is None:
        return value
    return int(number) if number.is_integer() and "." not in value else number


def _one_type(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    return [None if v is None else str(v) for v in values] if len(kinds) > 1 else values


def _short(key: str) -> str:
    return key.rpartition(".")[2]


def _cells(plan: ParallelPlan) -> dict[str, str]:
    chosen, predicted = plan.parallel, plan.predicted
    virtual = chosen.virtual_pipeline_model_parallel_size
    stages = f"PP {chosen.pipeline_model_parallel_size}{f'x{virtual}' if virtual else ''}"
    degrees = [f"TP {chosen.tensor_model_parallel_size}", stages]
    degrees += [f"CP {chosen.context_parallel_size}", f"DP {chosen.data_parallel_size}"]
    if plan.model.is_moe:
        degrees.append(f"EP {chosen.expert_model_parallel_size}")
    return {
        "Iteration": format_seconds(predicted.iteration_time_s),
        "MFU": f"{100 * predicted.mfu:.1f} %",
        "Memory": format_gib(predicted.peak_memory_bytes),
        "Layout": " ".join(degrees),
        "Proof": plan.search.certificate if plan.search.certificate in _PROVEN else "gap",
    }


def _fields(plan: ParallelPlan) -> dict[str, Any]:
    chosen, predicted, search = plan.parallel, plan.predicted, plan.search
    values = {
        "model_name": plan.model.name,
        "cluster_name": plan.cluster.name,
        "num_gpus": plan.placement.num_gpus,
        "global_batch_size": plan.train.global_batch_size,
        "seq_length": plan.train.seq_length,
        "iteration_time_s": predicted.iteration_time_s,
        "tokens_per_s_per_gpu": predicted.tokens_per_s_per_gpu,
        "model_tflops_per_gpu": predicted.model_tflops_per_gpu,
        "mfu": predicted.mfu,
        "peak_memory_bytes": predicted.peak_memory_bytes,
        "capacity_bytes": predicted.capacity_bytes,
        "micro_batch_size": plan.train.micro_batch_size,
        "rank_order": plan.placement.rank_order.value,
        "recompute": plan.grid().recompute.label(),
        "zero_stage": int(plan.grid().zero),
        "certificate": search.certificate,
        "gap_percent": search.gap_percent,
        "search_seconds": search.seconds,
    }
    known = plan.uncertainty
    values |= {name: None if known is None else getattr(known, name) for name in _KNOWN}
    values |= {name: getattr(chosen, name) for name in _CHOSEN}
    values |= {f"{name}_s": predicted.terms.get(name, 0.0) for name in _TERMS}
    return {name: values[name] for name in _FIELDS}


_KNOWN = ("low_s", "high_s", "out_of_memory")
_CHOSEN = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_layout",
)
_TERMS = (
    "compute",
    "recompute",
    "tp_communication",
    "cp_communication",
    "ep_communication",
    "pp_communication",
    "dp_communication",
    "pipeline_bubble",
    "optimizer",
    "embedding_sync",
    "stragglers",
    "host",
)
#: Columns that may hold nothing in every row, and their types.
_OFTEN_EMPTY = {
    "missing_bytes": "int64",
    "virtual_pipeline_model_parallel_size": "int64",
    "pipeline_model_parallel_layout": "string",
}
#: Columns of a plan, in their order.
_FIELDS = (
    "model_name",
    "cluster_name",
    "num_gpus",
    "global_batch_size",
    "seq_length",
    "iteration_time_s",
    "tokens_per_s_per_gpu",
    "model_tflops_per_gpu",
    "mfu",
    "peak_memory_bytes",
    "capacity_bytes",
    *_KNOWN,
    *_CHOSEN,
    "micro_batch_size",
    "rank_order",
    "recompute",
    "zero_stage",
    *(f"{name}_s" for name in _TERMS),
    "certificate",
    "gap_percent",
    "search_seconds",
)
