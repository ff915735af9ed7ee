"""What a stage keeps, by one of two rules: the paper's, or this project's own cost model.

The paper's (its section 3.3, as its artifact computes it): ``2 W + O + A + (s - 1) S`` with weights
and gradients of 2 bytes a parameter, Adam's states of 12 bytes or none for SGD, the activations
``A`` of one micro batch, and for every further one in flight ``S``: all of ``A``, or where the
stage is recomputed its input alone. All of the device may be used.

Ours: what Megatron holds (``cost_model/memory.py``), each layer keeping its own input where it is
recomputed, with the working memory of the largest layer, in what the reserve and margin leave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nest_megatron.cost_model.layer_cost import UnitTimes, run_unit
from nest_megatron.cost_model.memory import (
    WEIGHT_BYTES,
    static_bytes,
    unsharded_bytes,
)
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.spec import LayerKind
from nest_megatron.names import Name
from nest_megatron.parallel.recompute import FULL_RECOMPUTE, NO_RECOMPUTE
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.research.nest_dp.records import CheckpointPolicy
from nest_megatron.units import Bytes, Seconds


class MemoryRule(Name):
    """Whose account of memory holds."""

    PAPER = "paper"
    OURS = "ours"


class Optimizer(Name):
    """Optimizers that the paper's rule knows; ours is Adam."""

    SGD = "sgd"
    ADAM = "adam"


def bytes_per_parameter(
    rule: MemoryRule, optimizer: Optimizer, zero: ZeroStage, degree: int, settings: CostSettings
) -> float:
    """Weights, gradients and states of one parameter on one device.

    Args:
        degree: devices that ZeRO divides over.

    >>> bytes_per_parameter(MemoryRule.PAPER, Optimizer.SGD, ZeroStage.WEIGHTS, 8, CostSettings())
    0.5
    """
    if rule is MemoryRule.OURS:
        return static_bytes(zero, degree, settings, in_layer=False).total
    states = 12.0 if optimizer is Optimizer.ADAM else 0.0
    weights = WEIGHT_BYTES / (degree if zero >= ZeroStage.WEIGHTS else 1)
    gradients = WEIGHT_BYTES / (degree if zero >= ZeroStage.GRADIENTS else 1)
    return weights + gradients + states / (degree if zero >= ZeroStage.OPTIMIZER else 1)


def gradient_bytes(rule: MemoryRule, settings: CostSettings) -> int:
    """Width of the gradients that replicas sum."""
    return WEIGHT_BYTES if rule is MemoryRule.PAPER else settings.traits.gradient_bytes


def reserved_bytes(
    rule: MemoryRule, zero: ZeroStage, most_parameters: int, settings: CostSettings
) -> Bytes:
    """What ZeRO-3 gathers of the largest layer beside a stage; the paper's rule has no such term.

    Args:
        most_parameters: of one layer on one rank.
    """
    return 0 if rule is MemoryRule.PAPER else unsharded_bytes(most_parameters, zero, settings)


def checkpoint_policy(
    rule: MemoryRule,
    units: Sequence[tuple[LayerKind, UnitTimes]],
    entry_bytes: Sequence[float],
    *,
    recompute: bool,
    latent_attention: bool,
) -> CheckpointPolicy:
    """What is kept of each layer.

    Args:
        units: the layers, their times and saved activations without recomputation.
        entry_bytes: what crosses into each downset.
    """
    n, nothing = len(units), (0,) * len(entry_bytes)
    if rule is MemoryRule.PAPER:
        saved = tuple(math.ceil(times.input_bytes + _saved(times)) for _, times in units)
        return CheckpointPolicy(
            recompute=recompute,
            first_bytes=saved,
            further_bytes=(0,) * n if recompute else saved,
            entry_bytes=tuple(map(math.ceil, entry_bytes)) if recompute else nothing,
            peak_bytes=(0,) * n,
        )
    setting = FULL_RECOMPUTE if recompute else NO_RECOMPUTE
    runs = [run_unit(t, kind, setting, latent_attention=latent_attention) for kind, t in units]
    kept = tuple(math.ceil(run.saved_bytes) for run in runs)
    return CheckpointPolicy(
        recompute=recompute,
        first_bytes=kept,
        further_bytes=kept,
        entry_bytes=nothing,
        peak_bytes=tuple(math.ceil(run.working_bytes) for run in runs),
    )


def recompute_time(rule: MemoryRule, kind: LayerKind, times: UnitTimes) -> Seconds:
    """A layer's forward pass where it is recomputed: by the paper's rule all of a stage is."""
    if rule is MemoryRule.OURS and kind in (LayerKind.EMBEDDING, LayerKind.HEAD):
        return 0.0
    return times.whole_forward.total


def _saved(times: UnitTimes) -> float:
    return sum(times.saved_bytes.values())
