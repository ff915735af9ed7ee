"""Types of the sections of ``hydra_configs/plan.yaml``; the values and their meaning are there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

#: How OmegaConf spells "the file gives it"; written out so that this module imports nothing slow.
_IN_FILE: Any = "???"


@dataclass(kw_only=True)
class TrainConfig:
    """The batch and the number format."""

    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    seq_length: int | None = None
    precision: str | None = None


@dataclass(kw_only=True)
class ParallelConfig:
    """What the user fixes of the layout."""

    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    expert_model_parallel_size: int | None = None
    expert_tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    rank_order: str | None = None
    zero_stage: int | None = None
    sequence_parallel: bool | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None
    pipeline_model_parallel_layout: str | None = None


@dataclass(kw_only=True)
class SearchConfig:
    """Bounds of the search."""

    max_tensor_model_parallel_size: int | None = None
    max_pipeline_model_parallel_size: int | None = None
    max_virtual_pipeline_model_parallel_size: int | None = None
    max_context_parallel_size: int | None = None
    max_expert_model_parallel_size: int | None = None
    max_expert_tensor_parallel_size: int | None = None
    max_data_parallel_size: int | None = None
    max_micro_batch_size: int | None = None
    max_seconds: float = _IN_FILE
    num_alternatives: int = _IN_FILE
    use_all_gpus: bool = _IN_FILE
    backend: str | None = None


@dataclass(kw_only=True)
class CostConfig:
    """Assumptions of the cost model."""

    expert_imbalance: float | None = None
    dp_overlap: float | None = None
    overlap_slowdown: float | None = None
    optimizer_bytes_per_parameter: float | None = None
    iteration_floor_s: float | None = None


@dataclass(kw_only=True)
class MemoryConfig:
    """What is left free on each device."""

    margin: float | None = None
    reserve_bytes: int | None = None


@dataclass(kw_only=True)
class PlanConfig:
    """A job: the model and the cluster are checked by their own catalogues."""

    model: dict[str, Any] | None = None
    cluster: dict[str, Any] | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    out: str | None = None


SECTIONS: dict[str, type] = {
    "train": TrainConfig,
    "parallel": ParallelConfig,
    "search": SearchConfig,
    "cost": CostConfig,
    "memory": MemoryConfig,
}


def section_keys() -> tuple[str, ...]:
    """Every key outside the model and the cluster (``train.precision``, ..., ``out``)."""
    inside = (
        f"{name}.{f.name}" for name, kind in SECTIONS.items() for f in dataclasses.fields(kind)
    )
    return (*inside, "out")
