"""What training costs: tokens for a dollar, and dollars, energy and time of a whole run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nest_megatron.errors import UserInputError
from nest_megatron.layout.batch_schedule import PredictedBatch
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the user pays, and how long the run is; what is ``None`` is not known.

    Args:
        gpu_hour: dollars for an hour of one GPU, with its share of host and network.
        gpu_watts: power that one GPU takes while it trains, with the same share.
        tokens: of the whole run.
    """

    gpu_hour: float | None = None
    gpu_watts: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        examples = {"cost.gpu_hour": 2.5, "cost.gpu_watts": "1.2kW", "train.tokens": "15T"}
        for key, example in examples.items():
            value = getattr(self, key.partition(".")[2])
            if value is not None and not 0 < value < math.inf:
                raise UserInputError(
                    key, value, "it must be above 0 and finite", f"For example {key}={example}."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a plan costs; what is ``None`` is not known.

    Args:
        gpu_hour: dollars.
        tokens_per_dollar: at the plan's batch.
        tokens: of the whole run.
        run_s: of the whole run; failures, and checkpoints, where the plan knows its goodput.
        run_dollars: for the time of all GPUs that the plan uses.
        run_mwh: that these take.
    """

    gpu_hour: float | None
    gpu_watts: float | None
    tokens_per_dollar: float | None
    tokens: int | None
    run_s: Seconds | None
    run_dollars: float | None
    run_mwh: float | None


def price(
    rates: Rates,
    *,
    layout: PartialLayout,
    seq_length: int,
    step_s: Seconds,
    kept: float = 1.0,
    batches: Sequence[PredictedBatch] = (),
) -> Price:
    """What a layout costs that takes so long for a step.

    Args:
        kept: share of the time that goes into steps that are kept.
        batches: the run's parts, where its batch grows: they say how long it is.
    """
    step_tokens = layout.global_batch_size * seq_length
    tokens = rates.tokens
    working_s = None if tokens is None else -(-tokens // step_tokens) * step_s
    if batches:
        parts = [(batch.steps, batch) for batch in batches if batch.steps is not None]
        if len(parts) < len(batches):
            tokens = working_s = None
        else:
            tokens = sum(steps * each.global_batch_size * seq_length for steps, each in parts)
            working_s = sum(steps * each.iteration_time_s for steps, each in parts)
    run_s = None if working_s is None or not kept else working_s / kept
    hours = None if run_s is None else layout.num_gpus * run_s / 3600
    per_dollar = None
    if rates.gpu_hour is not None:
        per_dollar = kept * 3600 * step_tokens / (step_s * layout.num_gpus * rates.gpu_hour)
    return Price(
        gpu_hour=rates.gpu_hour,
        gpu_watts=rates.gpu_watts,
        tokens_per_dollar=per_dollar,
        tokens=tokens,
        run_s=run_s,
        run_dollars=_times(hours, rates.gpu_hour),
        run_mwh=_times(hours, rates.gpu_watts, 1e-6),
    )


def _times(*factors: float | None) -> float | None:
    known = [factor for factor in factors if factor is not None]
    return math.prod(known) if len(known) == len(factors) else None
