"""A layout by Megatron's names, where its ranks lie, and what is expected of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nest_megatron.model.execution import Execution
from nest_megatron.parallel.batch_schedule import TrainChoice
from nest_megatron.parallel.dims import RankOrder
from nest_megatron.parallel.objective import Uncertainty
from nest_megatron.parallel.price import Price
from nest_megatron.parallel.recompute import RecomputeGranularity, RecomputeMethod, RecomputeModule
from nest_megatron.plain import added
from nest_megatron.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelChoice:
    """What is written into the job, by Megatron's names; ``None`` is a flag left out."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    data_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    sequence_parallel: bool
    pipeline_model_parallel_layout: str | None
    recompute_granularity: RecomputeGranularity | None
    recompute_method: RecomputeMethod | None
    recompute_num_layers: int | None
    recompute_modules: tuple[RecomputeModule, ...]
    use_distributed_optimizer: bool
    use_megatron_fsdp: bool
    data_parallel_sharding_strategy: str | None
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    use_torch_fsdp2: bool = added(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where ranks lie.

    Args:
        stage_ranks: first and last global rank of each pipeline rank (of its first replica, where
            the rank order spreads a pipeline rank over the cluster).
        group_levels: outermost network level that each kind of group crosses.
        rank_permutation: global rank that each launched rank takes; ``None`` leaves them as the
            launcher gives them out, as long as it keeps each host's together.
    """

    rank_order: RankOrder
    use_tp_pp_dp_mapping: bool
    num_gpus: int
    gpus_per_node: int
    stage_ranks: tuple[tuple[int, ...], ...]
    group_levels: Mapping[str, str]
    rank_permutation: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStage:
    """One pipeline rank: what it holds, its time for one micro batch, its memory by term."""

    layers: tuple[str, ...]
    forward_s: Seconds
    backward_s: Seconds
    busy_share: float
    parameters: int
    memory_bytes: Mapping[str, Bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model expects.

    ``terms`` add up to ``iteration_time_s``: work and waiting of ``critical_rank``, the pipeline
    rank that is busy longest.
    """

    iteration_time_s: Seconds
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float
    terms: Mapping[str, Seconds]
    critical_rank: int
    peak_memory_bytes: Bytes
    capacity_bytes: Bytes
    fits: bool
    binding_constraint: str
    stages: tuple[PredictedStage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLayout:
    """What of a plan was priced, without its job and its search.

    Args:
        not_modelled: flags of the job whose effect on memory is not known.
    """

    train: TrainChoice
    parallel: ParallelChoice
    placement: Placement
    execution: Execution
    predicted: Prediction
    uncertainty: Uncertainty | None
    price: Price | None
    not_modelled: tuple[str, ...]
