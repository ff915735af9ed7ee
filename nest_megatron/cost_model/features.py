"""Features of a run by which predictions are wrong to different extents, and layouts as points.

A prediction is trusted as far as runs with the same features were predicted well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from nest_megatron.cost_model.model import CostModel
from nest_megatron.model.execution import TokenDispatcher
from nest_megatron.names import Name
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.rank_order import GroupKind, group_level
from nest_megatron.parallel.recompute import RecomputeGranularity
from nest_megatron.units import Seconds


class Feature(Name):
    """What sets a run apart from a dense model in 16 bits on Megatron, inside one node."""

    EXPERTS = "experts"
    FP8 = "fp8"
    LORA = "lora"
    LONG_CONTEXT = "long_context"
    OTHER_FRAMEWORK = "other_framework"
    LEGACY = "legacy"
    OTHER_DEVICE = "other_device"
    LARGE_SCALE = "large_scale"
    SMALL_STEP = "small_step"
    FSDP = "fsdp"
    TENSOR_NETWORK = "tensor_parallel_across_nodes"
    CONTEXT = "context_parallel"
    EXPERT = "expert_parallel"
    EXPERT_NETWORK = "expert_parallel_across_nodes"

    @property
    def words(self) -> str:
        """For people."""
        return _WORDS[self]


_WORDS = {
    Feature.EXPERTS: "experts",
    Feature.FP8: "fp8",
    Feature.LORA: "LoRA",
    Feature.LONG_CONTEXT: "long sequences",
    Feature.OTHER_FRAMEWORK: "kernels that are not Megatron's",
    Feature.LEGACY: "Megatron of 2022 and before",
    Feature.OTHER_DEVICE: "a device of no fitted runs",
    Feature.LARGE_SCALE: "1,024 GPUs and more",
    Feature.SMALL_STEP: "steps under 1 s",
    Feature.FSDP: "FSDP",
    Feature.TENSOR_NETWORK: "TP across nodes",
    Feature.CONTEXT: "CP",
    Feature.EXPERT: "EP inside nodes",
    Feature.EXPERT_NETWORK: "EP across nodes",
}
#: The same limits as those of ``validation.regimes``.
LONG_SEQUENCE, LARGE_SCALE_GPUS, SMALL_STEP_S = 32_768, 1_024, 1.0
#: The target of rows of old releases (``validation.frameworks``), and how names of targets begin
#: that run Megatron's kernels.
_LEGACY = "megatron_legacy"
_MEGATRON = ("megatron", "nemo")


def features_of(
    model: CostModel, grid: Grid, step_s: Seconds, devices: frozenset[str]
) -> frozenset[Feature]:
    """Features of a plan.

    Args:
        step_s: its predicted step.
        devices: names of accelerators that were fitted.
    """
    return frozenset(_features(model, grid, step_s, devices))


def _features(
    model: CostModel, grid: Grid, step_s: Seconds, devices: frozenset[str]
) -> Iterator[Feature]:
    dims, settings, spec = grid.dims, model.settings, model.spec
    crosses = {
        kind: group_level(dims, kind, model.cluster.group_sizes()) > 0
        for kind in (GroupKind.TP, GroupKind.EP)
    }
    spread = dims.expert_model_parallel_size > 1
    held = {
        Feature.EXPERTS: spec.is_moe,
        Feature.FP8: settings.precision.is_quantized,
        Feature.LORA: settings.traits.frozen_weights,
        Feature.LONG_CONTEXT: spec.seq_length >= LONG_SEQUENCE,
        Feature.OTHER_FRAMEWORK: not (settings.target or "megatron").startswith(_MEGATRON),
        Feature.LEGACY: settings.target == _LEGACY,
        Feature.OTHER_DEVICE: model.cluster.accelerator.name not in devices,
        Feature.LARGE_SCALE: dims.world_size >= LARGE_SCALE_GPUS,
        Feature.SMALL_STEP: step_s < SMALL_STEP_S,
        Feature.FSDP: grid.zero.is_fsdp,
        Feature.TENSOR_NETWORK: crosses[GroupKind.TP],
        Feature.CONTEXT: dims.context_parallel_size > 1,
        Feature.EXPERT: spread and not crosses[GroupKind.EP],
        Feature.EXPERT_NETWORK: spread and crosses[GroupKind.EP],
    }
    return (feature for feature, holds in held.items() if holds)


#: How much is recomputed, as a coordinate.
_RECOMPUTED = {
    RecomputeGranularity.NONE: 0.0,
    RecomputeGranularity.SELECTIVE: 1.0,
    RecomputeGranularity.FULL: 2.0,
}
_DISPATCHERS = {
    TokenDispatcher.ALLGATHER: 0.0,
    TokenDispatcher.ALLTOALL: 1.0,
    TokenDispatcher.FLEX: 2.0,
}


def coordinates(grid: Grid) -> tuple[float, ...]:
    """A layout as a point: layouts that lie near each other are mispredicted alike.

    Logarithms of degrees and micro batch to base 2, so that a step is one doubling; a step for each
    level of recomputation and sharding, and for each switch of execution.
    """
    dims, execution = grid.dims, grid.execution
    doublings = (
        dims.tensor_model_parallel_size,
        dims.pipeline_model_parallel_size,
        dims.virtual_pipeline_model_parallel_size,
        dims.context_parallel_size,
        dims.expert_model_parallel_size,
        dims.expert_tensor_parallel_size,
        grid.micro_batch_size,
    )
    return (
        *map(math.log2, doublings),
        _RECOMPUTED[grid.recompute.granularity],
        float(grid.zero.is_fsdp),
        _DISPATCHERS[execution.moe_token_dispatcher_type],
        float(execution.overlap_moe_expert_parallel_comm),
        float(execution.tp_comm_overlap),
    )


def distance(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Steps between two layouts.

    >>> distance((1.0, 3.0), (2.0, 1.0))
    3.0
    """
    return math.fsum(abs(x - y) for x, y in zip(a, b, strict=True))
