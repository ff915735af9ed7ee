"""What two ranks and several turns of ``cpu_end_to_end.py`` amount to."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.cpu_job import NUM_RANKS, Figures
from benchmarks.cpu_ranks import Ran
from nest_megatron.profile.records import Timing


def slower_figures(found: Sequence[Figures]) -> Figures:
    """The slower rank's, which the other waits for."""
    return Figures(
        flops_per_s=min(each.flops_per_s for each in found),
        copy_bytes_per_s=min(each.copy_bytes_per_s for each in found),
        call_s=max(each.call_s for each in found),
        hidden_share=min(each.hidden_share for each in found),
    )


def slower_timings(ranks: Sequence[Sequence[Timing]]) -> tuple[Timing, ...]:
    """Each block as the slower rank ran it, times in each direction apart."""
    times = ("forward_s", "backward_s", "recompute_s", "optimizer_s", "spread")
    return tuple(
        dataclasses.replace(
            each[0], **{name: max(getattr(timing, name) for timing in each) for name in times}
        )
        for each in zip(*ranks, strict=True)
    )


def quicker_timings(turns: Sequence[Sequence[Timing]]) -> tuple[Timing, ...]:
    """Each block in its quicker turn."""
    return tuple(
        min(each, key=lambda timing: timing.forward_s + timing.backward_s)
        for each in zip(*turns, strict=True)
    )


def others_share(ranks: Sequence[Ran]) -> float:
    """Share of two cores that other processes took: above some per cent, do not rely on a time."""
    others = max(ran.busy_s for ran in ranks) - sum(ran.own_s for ran in ranks)
    return max(0.0, others) / (NUM_RANKS * sum(ranks[0].seconds))


def step_seconds(ranks: Sequence[Ran]) -> float:
    """Median of the steps, each as the slower rank had it."""
    return statistics.median(
        max(each) for each in zip(*(ran.seconds for ran in ranks), strict=True)
    )
