"""Bytes that weights, gradients and optimizer states take on one rank.

Megatron in 16-bit training keeps, for each parameter, 2 bytes of weight, 4 of float32 gradient
(``accumulate_allreduce_grads_in_fp32``), and 12 of optimizer state: a float32 master weight and two
Adam moments. ZeRO divides shares of that among the data-parallel ranks.
"""

from __future__ import annotations

from nest_megatron.cluster.records import Accelerator, Precision
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.parallel.zero import ZeroStage

WEIGHT_BYTES = 2
GRADIENT_BYTES = 4
#: Transformer Engine keeps an fp8 copy of each weight and its transpose between micro batches.
FP8_COPY_BYTES = 2


def static_bytes_per_parameter(zero: ZeroStage, replicas: int, settings: CostSettings) -> float:
    """Bytes that one parameter of a rank costs for as long as training runs.

    Args:
        replicas: ranks that ZeRO divides over (data times context ranks, or expert replicas).
    """
    if settings.traits.frozen_weights:
        return float(WEIGHT_BYTES)
    replicas = max(1, replicas // settings.traits.optimizer_instances)
    traits, weight = settings.traits, WEIGHT_BYTES
    gradient, optimizer = traits.gradient_bytes, traits.optimizer_bytes
    return (
        (weight / replicas if zero >= ZeroStage.WEIGHTS else weight)
        + (gradient / replicas if zero >= ZeroStage.GRADIENTS else gradient)
        + (optimizer / replicas if zero >= ZeroStage.OPTIMIZER else optimizer)
    )


def fp8_copy_bytes(settings: CostSettings) -> int:
    """Extra bytes for each parameter of a matrix product in fp8."""
    if settings.precision is not Precision.FP8 or settings.traits.fp8_weights:
        return 0
    return FP8_COPY_BYTES


def unsharded_bytes(parameters: int, zero: ZeroStage) -> int:
    """Working memory of ZeRO-3: one unit's gathered weights, the next one's, and its gradients."""
    if zero < ZeroStage.WEIGHTS:
        return 0
    return parameters * (2 * WEIGHT_BYTES + GRADIENT_BYTES)


def capacity_bytes(accelerator: Accelerator, settings: CostSettings) -> int:
    """Memory of one device that a plan may fill: all but the reserve and the margin."""
    usable = accelerator.memory_bytes * (1.0 - settings.memory_margin)
    return max(0, int(usable) - settings.memory_reserve_bytes)
