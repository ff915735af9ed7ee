"""Features of a run by which predictions are wrong to different extents, and layouts as points.

A prediction is trusted as far as measured runs with the same features were predicted well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.model import CostModel
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.rank_order import GroupKind, group_level
from nest_megatron.layout.recompute import RecomputeGranularity
from nest_megatron.model.execution import TokenDispatcher
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.plain import Name, frozen
from nest_megatron.units import Seconds


class Feature(Name):
    """What sets a run apart from a dense model in 16 bits on Megatron, inside one node."""

    words: str

    def __new__(cls, name: str, words: str = "") -> Feature:
        member = str.__new__(cls, name)
        member._value_, member.words = name, words
        return member

    EXPERTS = "experts", "experts"
    FP8 = "fp8", "fp8"
    LORA = "lora", "LoRA"
    SCAN = "scan", "state-space layers"
    IMAGES = "images", "an encoder of images"
    LONG_CONTEXT = "long_context", "long sequences"
    OTHER_FRAMEWORK = "other_framework", "kernels that are not Megatron's"
    LEGACY = "legacy", "Megatron of 2022 and before"
    OTHER_DEVICE = "other_device", "a device of no fitted runs"
    LARGE_SCALE = "large_scale", "1,024 GPUs and more"
    SMALL_STEP = "small_step", "steps under 1 s"
    FSDP = "fsdp", "FSDP"
    TENSOR_NETWORK = "tensor_parallel_across_nodes", "TP across nodes"
    CONTEXT = "context_parallel", "CP"
    EXPERT = "expert_parallel", "EP inside nodes"
    EXPERT_NETWORK = "expert_parallel_across_nodes", "EP across nodes"


#: Blocks whose tokens meet in a scan, which is priced without a measurement of its kernels.
SCANNED = frozenset({LayerBlock.MAMBA, LayerBlock.GATED_DELTA_NET})
#: The same limits as those of ``validation.outcome``.
LONG_SEQUENCE, LARGE_SCALE_GPUS, SMALL_STEP_S = 32_768, 1_024, 1.0
#: The target of rows of old releases (``validation.frameworks``), and how names of targets begin
#: that run Megatron's kernels.
_LEGACY, _MEGATRON = "megatron_legacy", ("megatron", "nemo")


def features_of(
    model: CostModel, grid: PartialLayout, step_s: Seconds, devices: frozenset[str]
) -> frozenset[Feature]:
    """Features of a plan with a predicted step, where runs on some devices were fitted."""
    dims, settings, spec = grid.dims, model.settings, model.spec
    tp_crosses, ep_crosses = (
        group_level(dims, kind, model.cluster.group_sizes()) > 0
        for kind in (GroupKind.TP, GroupKind.EP)
    )
    spread = dims.expert_model_parallel_size > 1
    holds = {
        Feature.EXPERTS: spec.is_moe,
        Feature.FP8: settings.precision.is_quantized,
        Feature.LORA: spec.adapters is not None,
        Feature.SCAN: not SCANNED.isdisjoint(spec.blocks),
        Feature.IMAGES: spec.vision is not None,
        Feature.LONG_CONTEXT: spec.seq_length >= LONG_SEQUENCE,
        Feature.OTHER_FRAMEWORK: not (settings.target or "megatron").startswith(_MEGATRON),
        Feature.LEGACY: settings.target == _LEGACY,
        Feature.OTHER_DEVICE: model.cluster.accelerator.name not in devices,
        Feature.LARGE_SCALE: dims.world_size >= LARGE_SCALE_GPUS,
        Feature.SMALL_STEP: step_s < SMALL_STEP_S,
        Feature.FSDP: grid.zero.is_fsdp,
        Feature.TENSOR_NETWORK: tp_crosses,
        Feature.CONTEXT: dims.context_parallel_size > 1,
        Feature.EXPERT: spread and not ep_crosses,
        Feature.EXPERT_NETWORK: spread and ep_crosses,
    }
    return frozenset(feature for feature, held in holds.items() if held)


#: Places along the axes of recomputation and of dispatchers, one step apart.
_RECOMPUTED = (
    RecomputeGranularity.NONE,
    RecomputeGranularity.SELECTIVE,
    RecomputeGranularity.FULL,
)
_DISPATCHERS = (TokenDispatcher.ALLGATHER, TokenDispatcher.ALLTOALL, TokenDispatcher.FLEX)


def coordinates(grid: PartialLayout) -> tuple[float, ...]:
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
        float(_RECOMPUTED.index(grid.recompute.granularity)),
        float(grid.zero.is_fsdp),
        float(_DISPATCHERS.index(execution.moe_token_dispatcher_type)),
        float(execution.overlap_moe_expert_parallel_comm),
        float(execution.tp_comm_overlap),
    )


def distance(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Steps between two layouts.

    >>> distance((1.0, 3.0), (2.0, 1.0))
    3.0
    """
    return math.fsum(abs(x - y) for x, y in zip(a, b, strict=True))


#: Runs from which a prediction may be called certain, and under which it is not; per cent off.
_MANY, _FEW = 20, 5
_NEAR_PCT, _FAR_PCT = 10.0, 20.0
#: Features in which a run has to equal a plan to be like it; others it may have beside.
_KINDS = frozenset(
    {
        Feature.EXPERTS,
        Feature.FP8,
        Feature.LORA,
        Feature.SCAN,
        Feature.IMAGES,
        Feature.FSDP,
        Feature.SMALL_STEP,
        Feature.OTHER_FRAMEWORK,
        Feature.LEGACY,
        Feature.OTHER_DEVICE,
    }
)


class Level(Name):
    """How far a prediction can be trusted."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


#: Classes of devices by how their names begin.
_DEVICES = {
    "Volta": re.compile("V100"),
    "Ampere": re.compile("A[18]00"),
    "Hopper": re.compile("GH200|H[128]00"),
    "Blackwell": re.compile("G?B[23]00"),
}


def device_class(accelerator: str) -> str:
    """The architecture of a device by its name; "" for one of no measured runs.

    >>> device_class("GB200-NVL72-186GB"), device_class("MI300X")
    ('Blackwell', '')
    """
    return next((name for name, start in _DEVICES.items() if start.match(accelerator)), "")


def number_format(precision: Precision) -> str:
    """The format by which runs are told apart: bf16 and fp16 run alike."""
    return str(Precision.BF16 if precision is Precision.FP16 else precision)


@frozen
class Runs:
    """Measured runs with the same features, and the mean absolute error of their predictions.

    Args:
        precision: their ``number_format``.
        device: their ``device_class``.
    """

    features: frozenset[Feature]
    precision: str
    device: str
    runs: int
    error_pct: float

    @classmethod
    def from_plain(cls, cell: Mapping[str, Any]) -> Runs:
        """From an entry of ``calibration/uncertainty.yaml``."""
        features = frozenset(map(Feature, cell["features"]))
        return cls(**{**cell, "features": features})


def runs_like(
    evidence: tuple[Runs, ...],
    features: frozenset[Feature],
    precision: Precision,
    accelerator: str,
) -> Runs:
    """The runs that have all features of a plan, of its format and devices alone, as one row."""
    form, device = number_format(precision), device_class(accelerator)
    like = [
        each
        for each in evidence
        if (each.precision, each.device) == (form, device)
        and features <= each.features
        and features & _KINDS == each.features & _KINDS
    ]
    runs = sum(each.runs for each in like)
    error = math.fsum(each.runs * each.error_pct for each in like) / runs if runs else 0.0
    return Runs(features=features, precision=form, device=device, runs=runs, error_pct=error)


def confidence(like: Runs) -> Level:
    """How far a prediction can be trusted, by the runs that are like it."""
    if like.runs < _FEW or like.error_pct > _FAR_PCT:
        return Level.LOW
    return Level.HIGH if like.runs >= _MANY and like.error_pct <= _NEAR_PCT else Level.MEDIUM


def kind_words(features: frozenset[Feature], precision: Precision, accelerator: str) -> str:
    """What a plan has in common with the runs that are like it."""
    model = "experts" if Feature.EXPERTS in features else "dense"
    others = [each.words for each in Feature if each in features - {Feature.EXPERTS, Feature.FP8}]
    on = f" on {device}" if (device := device_class(accelerator)) else ""
    return ", ".join([f"{model} {precision}{on}", *others])
