"""Memory that a plan leaves free, and what more would cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from nest_megatron.cost_model.memory import capacity_bytes
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.parallel.objective import Objective
from nest_megatron.parallel.plan import Headroom, ParallelPlan
from nest_megatron.parallel.plan_file import sealed
from nest_megatron.planner.request import PlanRequest
from nest_megatron.solver.relatives import Relative
from nest_megatron.units import Seconds, to_seconds

#: Free memory beyond what a plan leaves whose price is told.
_MORE = 0.1
#: Largest margin (``CostSettings``).
MOST_HEADROOM = 0.9


def roomier(request: PlanRequest) -> PlanRequest | None:
    """The request for plans that leave more free than they must; ``None`` if none is wanted.

    The nominally fastest plan is that of the whole space, up to the limit of the device.
    """
    share = request.headroom
    if share is None or request.objective is Objective.NOMINAL:
        return None
    return leaving(request, share) if share > request.settings.memory_margin else None


def leaving(request: PlanRequest, share: float) -> PlanRequest:
    """A request whose plans leave a share of each device free."""
    return dataclasses.replace(request, settings=_leaving(request.settings, share))


def _leaving(settings: CostSettings, share: float) -> CostSettings:
    return dataclasses.replace(settings, memory_margin=share)


def told_headroom(
    plan: ParallelPlan,
    request: PlanRequest,
    model: CostModel,
    compared: Iterable[Relative],
    find: Callable[[PlanRequest], ParallelPlan | None],
) -> ParallelPlan:
    """The plan with what it leaves free, and what more would cost.

    Args:
        compared: the plan was chosen among them: the fastest that leaves more free bounds the price
            from above.
        find: the best plan of a request: the fastest that leaves ``priced_headroom`` free.
    """
    if request.headroom is None or request.objective is Objective.NOMINAL:
        return plan
    priced, step_s = request.priced_headroom, plan.predicted.iteration_time_s
    taken = plan.predicted.peak_memory_bytes + request.settings.memory_reserve_bytes
    left = 1.0 - taken / plan.cluster.accelerator.memory_bytes
    more = round(left + _MORE, 2) if left >= request.headroom else request.headroom
    more = more if priced is None else priced
    if priced is None:
        other_s = _fastest_leaving(more, model, compared)
    else:
        fastest = dataclasses.replace(request, objective=Objective.NOMINAL, num_alternatives=0)
        other = find(leaving(dataclasses.replace(fastest, shortlist=False), priced))
        other_s = None if other is None else other.predicted.iteration_time_s
    found = Headroom(
        wanted=request.headroom,
        left=left,
        more=more,
        more_costs_percent=(None if other_s is None else 100.0 * max(0.0, other_s / step_s - 1.0)),
        is_searched=priced is not None,
    )
    return sealed(dataclasses.replace(plan, headroom=found))


def _fastest_leaving(share: float, model: CostModel, found: Iterable[Relative]) -> Seconds | None:
    """The step of the fastest plan that leaves a share free; ``None`` if none does."""
    if share > MOST_HEADROOM:
        return None
    limit = capacity_bytes(model.cluster.accelerator, _leaving(model.settings, share))
    steps = [each.plan.iteration for each in found if each.peak_bytes <= limit]
    return to_seconds(min(steps)) if steps else None
