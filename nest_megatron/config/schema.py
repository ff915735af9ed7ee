"""Types of the sections of ``hydra_configs/plan.yaml``; the values and their meaning are there.

No value is stated here; ``None`` is what the file leaves open. A composed section has these types
as far as mypy and OmegaConf are concerned, and is OmegaConf's own, read-only, when it runs.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from nest_megatron.plain import is_number


@dataclass(kw_only=True)
class TrainConfig:
    """The batch and the number format."""

    global_batch_size: int | None
    rampup_batch_size: tuple[int, ...] | None
    step_batch_size_schedule: str | None
    train_samples: int | None
    tokens: int | None
    micro_batch_size: int | None
    seq_length: int | None
    sequence_packing: bool | None
    sequence_lengths: str | None
    sequence_length_mean: float | None
    sequence_length_std: float | None
    image_tokens: int | None
    images: int | None
    precision: str | None
    fp8_recipe: str | None


@dataclass(kw_only=True)
class PeftConfig:
    """What is trained beside frozen weights, by the names of Megatron-Bridge's ``peft``."""

    scheme: str | None
    target_modules: tuple[str, ...] | None
    dim: int | None
    dropout: float | None
    dropout_position: str | None
    a2a_experimental: bool | None


@dataclass(kw_only=True)
class ParallelConfig:
    """What the user fixes of the layout."""

    tensor_model_parallel_size: int | None
    pipeline_model_parallel_size: int | None
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int | None
    expert_model_parallel_size: int | None
    expert_tensor_parallel_size: int | None
    data_parallel_size: int | None
    rank_order: str | None
    zero_stage: int | None
    sequence_parallel: bool | None
    recompute_granularity: str | None
    recompute_method: str | None
    recompute_num_layers: int | None
    recompute_modules: tuple[str, ...] | None
    pipeline_model_parallel_layout: str | None


@dataclass(kw_only=True)
class SearchConfig:
    """Bounds of the search."""

    max_tensor_model_parallel_size: int | None
    max_pipeline_model_parallel_size: int | None
    max_virtual_pipeline_model_parallel_size: int | None
    max_context_parallel_size: int | None
    max_expert_model_parallel_size: int | None
    max_expert_tensor_parallel_size: int | None
    max_data_parallel_size: int | None
    max_micro_batch_size: int | None
    max_seconds: float
    num_alternatives: int
    tie_percent: float
    use_all_gpus: bool
    keep: tuple[str, ...]
    packages: tuple[str, ...]
    backend: str | None


@dataclass(kw_only=True)
class CostConfig:
    """Assumptions of the cost model, and what a GPU costs."""

    expert_imbalance: float | None
    compute_slowdown: float | None
    attention_slowdown: float | None
    fp8_attention_speedup: float | None
    tp_overlap: float | None
    ep_overlap: float | None
    alltoall_slowdown: float | None
    flex_slowdown: float | None
    count_sync_launches: float | None
    dp_slowdown: float | None
    host_kernel_s: float | None
    dp_overlap: float | None
    overlap_slowdown: float | None
    optimizer_bytes_per_parameter: float | None
    straggler_delay_s: float | None
    iteration_floor_s: float | None
    gpu_hour: float | None
    gpu_watts: float | None


@dataclass(kw_only=True)
class MemoryConfig:
    """What is left free on each device."""

    max_oom_chance: float
    margin: float | None
    reserve_bytes: int | None


@dataclass(kw_only=True)
class ReliabilityConfig:
    """How often the job fails, and its checkpoints."""

    mtbf_hours: float | None
    checkpoint_s: float | None
    restart_s: float | None
    save_interval: int | None


@dataclass(kw_only=True)
class ProfileConfig:
    """Where layer times come from."""

    mode: str
    name: str | None
    max_seconds: float
    site: bool


@dataclass(kw_only=True)
class ChecksConfig:
    """Checks that can be turned off."""

    plausibility: bool


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """A job: the model and the cluster are checked by their own catalogues."""

    model: dict[str, Any] | None = None
    cluster: dict[str, Any] | None = None
    train: TrainConfig
    peft: PeftConfig
    parallel: ParallelConfig
    search: SearchConfig
    cost: CostConfig
    memory: MemoryConfig
    reliability: ReliabilityConfig
    profile: ProfileConfig
    checks: ChecksConfig
    assume_harmless: tuple[str, ...]
    flags: str | None
    target: str | None
    out: str | None


@dataclass(kw_only=True)
class WatchConfig:
    """Which steps of a job are compared with the prediction, and where that is written.

    Args:
        steps: from the first; 0 is never, and keeps no record of the run. ``nest.watch=N`` is
            short for it.
        prometheus: file for node_exporter's textfile collector.
    """

    steps: int = 20
    prometheus: str | None = None


@dataclass(kw_only=True)
class LaunchConfig:
    """What ``+nest=auto`` does with a job, besides planning it; written ``nest.KEY``.

    Args:
        free: the user's own flags that the search may change, or ``all``.
        dry_run: print what would be launched, and stop before a GPU is touched.
        stop_before_training: plan on the machines of the job, measure if asked to, then stop.
        alternative: launch this runner-up instead of the best plan; 0 is the best.
        plan: the pinned plan of ``+nest=pinned``, or a pinned table of plans.
        on_mismatch: what happens where the machines or the software are not the pinned plan's:
            ``refuse`` ends the job, ``nearest`` keeps the degrees and the stages of the plan,
            ``replan`` searches as ``+nest=auto`` does; if not given what a policy says, else
            ``refuse``.
        ranks: how global ranks are given out: ``by_host`` keeps each host's together, ``launched``
            leaves them, a list names the new rank of each launched one.
        mixed_gpus: what happens where hosts have unlike GPUs: ``refuse`` ends the job, ``slower``
            plans with the slower kind's figures for all.
        watch: what is measured of the first steps.
        port: for handing the plan to the other ranks where torchrun does not; ``MASTER_PORT`` if
            not given.
        may_differ: arguments that may differ by rank, besides those that always may; of a nested
            configuration last names of fields, or dotted names.
        rendezvous_timeout_s: longest wait for other ranks beside the time for planning and
            measuring; Megatron's own ``--distributed-timeout-minutes`` if not given.
        heartbeat_timeout_s: longest time without a heartbeat of a rank, or of the store.
    """

    free: list[str] = field(default_factory=list)
    dry_run: bool = False
    stop_before_training: bool = False
    alternative: int = 0
    plan: str | None = None
    on_mismatch: str | None = None
    ranks: Any = "by_host"
    mixed_gpus: str = "refuse"
    watch: WatchConfig = field(default_factory=WatchConfig)
    port: int | None = None
    may_differ: list[str] = field(default_factory=list)
    rendezvous_timeout_s: float | None = None
    heartbeat_timeout_s: float = 20.0


#: Sections of ``PlanConfig`` by name.
SECTIONS: dict[str, Any] = {
    name: kind
    for name, kind in typing.get_type_hints(PlanConfig).items()
    if dataclasses.is_dataclass(kind)
}


def stated_values(section: Any) -> dict[str, Any]:
    """The values of a composed section that are there, lists as they are typed."""
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(section, resolve=True)
    return {name: value for name, value in values.items() if value is not None}


Section = TypeVar("Section")


def with_values(section: Section, **values: object) -> Section:
    """A composed section with other values."""
    from omegaconf import OmegaConf

    return cast(Section, OmegaConf.merge(cast(Any, section), values))


def section_keys() -> tuple[str, ...]:
    """Every key outside the model and the cluster (``train.precision``, ..., ``out``)."""
    inside = (
        f"{name}.{f.name}" for name, kind in SECTIONS.items() for f in dataclasses.fields(kind)
    )
    return (*inside, "assume_harmless", "flags", "target", "out")


def is_numeric(key: str) -> bool:
    """Whether a setting of a section, or of ``LaunchConfig``, is a number."""
    section, _, name = key.rpartition(".")
    kind = {"": LaunchConfig, "watch": WatchConfig, **SECTIONS}.get(section)
    fields = () if kind is None else dataclasses.fields(kind)
    return any(each.name == name and is_number(each) for each in fields)


def launch_keys() -> tuple[str, ...]:
    """Every key of ``LaunchConfig``, those inside ``watch`` by their dotted names."""
    whole = (f.name for f in dataclasses.fields(LaunchConfig))
    return (*whole, *(f"watch.{f.name}" for f in dataclasses.fields(WatchConfig)))
