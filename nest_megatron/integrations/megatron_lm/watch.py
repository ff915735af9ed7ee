"""What the first iterations took, beside what was predicted."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.units import Bytes, Seconds, format_gib, format_range, format_seconds

Result = TypeVar("Result")

#: Share of the watched iterations that come first and are left out: caches fill, kernels are tuned.
_WARM_UP = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The prediction to compare with: a step, and the memory of this rank.

    Args:
        range_s: between which steps 9 of 10 runs lie, where the plan says it.
    """

    iteration_time_s: Seconds
    memory_bytes: Bytes
    range_s: tuple[Seconds, Seconds] | None = None


def expected(plan: ParallelPlan) -> Expected:
    """What a plan predicts for global rank 0, which is on the first pipeline rank."""
    known = plan.uncertainty
    return Expected(
        iteration_time_s=plan.predicted.iteration_time_s,
        memory_bytes=sum(plan.predicted.stages[0].memory_bytes.values()),
        range_s=None if known is None else (known.low_s, known.high_s),
    )


def watched(
    train_step: Callable[..., Result], iterations: int, prediction: Expected
) -> Callable[..., Result]:
    """Megatron's ``train_step``, which says once how long a step takes and what it needs.

    Only the moments at which steps begin are noted, so nothing waits for the device; an
    evaluation or a checkpoint between two steps does not move the median.
    """
    begun: list[float] = []

    @functools.wraps(train_step)
    def step(*args: Any, **kwargs: Any) -> Result:
        if len(begun) <= iterations:
            begun.append(time.perf_counter())
            if len(begun) == iterations + 1:
                print(f"nest: {comparison(begun, prediction, peak_memory_bytes())}", flush=True)
        return train_step(*args, **kwargs)

    return step


def comparison(begun: list[float], prediction: Expected, memory_bytes: Bytes | None) -> str:
    """One line on measured and predicted figures, from when each step began, in seconds.

    >>> prediction = Expected(iteration_time_s=1.0, memory_bytes=50 << 30, range_s=(0.9, 1.1))
    >>> comparison([0.0, 3.0, 4.25, 5.5, 6.75], prediction, 60 << 30)
    ... # doctest: +NORMALIZE_WHITESPACE
    'measured over iterations 2 to 4: 1.250 s a step (predicted 1.000 s, +25.0 %, outside 0.90 to
    1.10 s, where 9 of 10 runs lie), peak memory of rank 0 60.0 GiB (predicted 50.0 GiB, +20.0 %)'
    """
    skipped = int(_WARM_UP * (len(begun) - 1))
    times = [after - before for before, after in itertools.pairwise(begun)][skipped:]
    step, where = statistics.median(times), ""
    if prediction.range_s is not None:
        low, high = prediction.range_s
        inside = "inside" if low <= step <= high else "outside"
        where = f", {inside} {format_range(low, high)}, where 9 of 10 runs lie"
    predicted, wanted = prediction.iteration_time_s, prediction.memory_bytes
    line = (
        f"measured over iterations {skipped + 1} to {len(begun) - 1}: {format_seconds(step)} a "
        f"step (predicted {format_seconds(predicted)}, {_more(step, predicted)}{where})"
    )
    if memory_bytes is None:
        return line
    return (
        f"{line}, peak memory of rank 0 {format_gib(memory_bytes)} "
        f"(predicted {format_gib(wanted)}, {_more(memory_bytes, wanted)})"
    )


def _more(measured: float, predicted: float) -> str:
    return f"{100 * (measured - predicted) / predicted:+.1f} %"


def peak_memory_bytes() -> Bytes | None:
    """The peak of this process on its device, also outside the allocator; ``None`` without one."""
    import torch

    try:
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        return int(torch.cuda.max_memory_reserved() + max(0, outside))
    except (RuntimeError, ValueError, AssertionError, AttributeError):
        return None
