"""What a plan costs that may run out of memory: the next one is started then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from nest_megatron.units import Seconds

#: What a start that runs out of memory costs, in per cent of a run: an hour of a day. The job
#: waits, loads, fails within its first steps, is looked at, and is started with another plan.
FAILED_START_PERCENT = 4.0


def with_retries(
    steps: Sequence[Seconds], chances: Sequence[float], failed_start_percent: float
) -> list[Seconds]:
    """The mean step of each plan, where one that runs out of memory is followed by another.

    Peaks of a job's plans are predicted with one error. So a plan that runs out tells of the
    others: one with half its chance runs out then in one of two cases, one with a greater chance
    in all. After each failure the plan with the least mean step from there on is started. Where the
    plan least likely to run out has failed, it takes its step over the chance to start.

    Args:
        steps: of each plan if it starts.
        chances: of each plan to run out of memory.
        failed_start_percent: of the shortest step, for each start that fails.

    A tenth of a chance to run out costs 0.1 * (4 % + 2 %) where the next plan is 2 % slower:

    >>> [round(each, 3) for each in with_retries([1.0, 1.02], [0.1, 0.0], 4.0)]
    [1.006, 1.02]
    """
    failed_s = failed_start_percent / 100 * min(steps)
    order = sorted(range(len(steps)), key=chances.__getitem__)
    safer: list[tuple[float, Seconds, Seconds]] = []
    after: dict[float, Seconds] = {}
    for chance, plans in groupby(order, key=chances.__getitem__):
        step_s = min(steps[plan] for plan in plans)
        alone = step_s / (1 - chance) if chance < 1 else math.inf
        after[chance] = min(
            (
                less_s + less / chance * (failed_s + then_s - less_s)
                for less, less_s, then_s in safer
            ),
            default=alone,
        )
        safer.append((chance, step_s, after[chance]))
    return [
        step_s + chance * (failed_s + after[chance] - step_s)
        for step_s, chance in zip(steps, chances, strict=True)
    ]
