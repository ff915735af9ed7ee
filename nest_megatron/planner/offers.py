"""What another data-parallel sharding than the job's own would give: priced, never taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nest_megatron.errors import UserInputError
from nest_megatron.parallel.plan import ParallelPlan, zero_stage
from nest_megatron.parallel.plan_file import sealed
from nest_megatron.parallel.zero import DataParallelSharding
from nest_megatron.planner.request import PlanRequest
from nest_megatron.units import format_seconds

#: Smaller gains are below what the cost model can tell apart (docs/accuracy.md).
LEAST_GAIN_PERCENT = 1.0


def with_offer(
    best: ParallelPlan, request: PlanRequest, find: Callable[[PlanRequest], object]
) -> ParallelPlan:
    """A plan that says what the job would gain under another sharding, where it would.

    Args:
        request: the question that ``best`` answers.
        find: answers a request with a plan, or with something else where nothing fits.
    """
    offer = request.offer
    if offer is None:
        return best
    asked = dataclasses.replace(
        request,
        space=offer.space,
        offer=None,
        num_alternatives=0,
        num_compared=1,  # what is told is which fastest plan is faster
    )
    try:
        other = find(asked)
    except UserInputError:  # its degrees have no legal layout under another sharding
        return best
    if not isinstance(other, ParallelPlan):
        return best
    step_s, other_s = best.shortest_step_s, other.shortest_step_s
    gain = 100.0 * (step_s / other_s - 1.0)
    if gain < LEAST_GAIN_PERCENT:
        return best
    sharding = zero_stage(other.parallel).sharding
    kind = offer.ckpt_format.get(sharding)
    sentence = (
        f"{_named(other, offer.own)} would be {gain:.1f} % faster ({format_seconds(other_s)})"
        f"{f'; it needs --ckpt-format {kind}' if kind else ''}. To have it: {offer.free[sharding]}"
    )
    return sealed(dataclasses.replace(best, offers=(*best.offers, sentence)))


def _named(plan: ParallelPlan, own: DataParallelSharding) -> str:
    fsdp = plan.parallel.use_megatron_fsdp
    how = "through Megatron-FSDP" if fsdp else "without Megatron-FSDP"
    if own is DataParallelSharding.TORCH_FSDP2:
        how = f"{how} instead of PyTorch FSDP2" if fsdp else "without PyTorch FSDP2"
    return f"ZeRO-{int(zero_stage(plan.parallel))} {how}"
