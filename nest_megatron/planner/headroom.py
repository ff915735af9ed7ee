"""Memory that a plan leaves free, and what more would cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from nest_megatron.cost_model.memory import capacity_bytes
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.layout.estimate import Estimate
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.objective import Objective
from nest_megatron.layout.plan import Headroom
from nest_megatron.planner.choice import Peaks
from nest_megatron.planner.request import Request
from nest_megatron.planner.uncertain import comfortable_bytes
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.units import Bytes, Seconds, to_seconds

#: Free memory beyond what a plan leaves whose price is told.
_MORE = 0.1
#: Largest margin (``CostSettings``).
MOST_HEADROOM = 0.9


class PredictedLayout(NamedTuple):
    """A layout that was found for a request, and what is expected of it.

    Args:
        shortest_step_s: its own predicted step, or that of a runner-up.
    """

    layout: Layout
    predicted: Estimate
    shortest_step_s: Seconds


def with_larger_margin(request: Request, comfortable: Bytes) -> CostSettings | None:
    """Settings whose plans leave more free than they must; ``None`` if none is wanted.

    The nominally fastest plan is that of the whole space, up to the limit of the device.

    Args:
        comfortable: the predicted peak with which the fastest plan would hardly run out of memory;
            where runs of a site say so, as much is left free.
    """
    share = request.headroom
    if share is None or request.objective is Objective.NOMINAL:
        return None
    if request.site is not None and request.site.peaks.runs:
        share = max(share, _free(request, request.settings, comfortable))
    return _with_margin(request.settings, share) if share > request.settings.memory_margin else None


def settings_to_start(request: Request, model: CostModel, plan: SolvedLayout) -> CostSettings:
    """Settings whose plans the objective allows, as far as their peaks err as this one's."""
    most = comfortable_bytes(model, plan, request.site, request.most_out_of_memory)
    return with_least_free(request, request.settings, most)


def with_least_free(request: Request, settings: CostSettings, peak_bytes: Bytes) -> CostSettings:
    """Settings whose plans need no more memory than a peak."""
    free = _free(request, settings, peak_bytes)
    return _with_margin(settings, max(settings.memory_margin, free))


def _free(request: Request, settings: CostSettings, peak_bytes: Bytes) -> float:
    """The share of a device that a plan with such a peak leaves free, the reserve apart."""
    taken = peak_bytes + settings.memory_reserve_bytes
    return min(MOST_HEADROOM, 1.0 - taken / request.cluster.accelerator.memory_bytes)


def _with_margin(settings: CostSettings, share: float) -> CostSettings:
    """Settings whose plans leave a share of each device free."""
    return dataclasses.replace(settings, memory_margin=share)


def headroom_of(
    predicted: Estimate,
    request: Request,
    model: CostModel,
    peaks: Peaks,
    find: Callable[[Request], PredictedLayout | None],
) -> Headroom | None:
    """What a plan leaves free, and what more would cost; ``None`` where nothing is wanted.

    Args:
        predicted: what is expected of the plan.
        peaks: the plan was chosen among them: the fastest that leaves more free bounds the price
            from above.
        find: the best layout of a request: the fastest that leaves ``priced_headroom`` free.
    """
    if request.headroom is None or request.objective is Objective.NOMINAL:
        return None
    priced, step_s = request.priced_headroom, predicted.iteration_time_s
    taken = predicted.peak_memory_bytes + request.settings.memory_reserve_bytes
    left = 1.0 - taken / model.cluster.accelerator.memory_bytes
    more = round(left + _MORE, 2) if left >= request.headroom else request.headroom
    other_s = None
    if priced is not None:
        fastest = dataclasses.replace(
            request,
            settings=_with_margin(request.settings, priced),
            objective=Objective.NOMINAL,
            num_alternatives=0,
            shortlist=False,
        )
        other = find(fastest)
        other_s = None if other is None else other.predicted.iteration_time_s
    elif more <= MOST_HEADROOM:
        limit = capacity_bytes(model.cluster.accelerator, _with_margin(model.settings, more))
        steps = [solved.iteration for solved, peak in peaks.items() if peak <= limit]
        other_s = to_seconds(min(steps)) if steps else None
    return Headroom(
        wanted=request.headroom,
        left=left,
        more=more if priced is None else priced,
        more_costs_percent=None if other_s is None else 100.0 * max(0.0, other_s / step_s - 1.0),
        is_searched=priced is not None,
    )
