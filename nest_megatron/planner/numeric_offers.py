"""What a plan would gain by choices that change numbers: priced, never taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.formats import beside_buffers, format_of, uneven_sides
from nest_megatron.cost_model.model import CostModel
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.parallel.plan_file import sealed
from nest_megatron.planner.offers import LEAST_GAIN_PERCENT
from nest_megatron.planner.request import NumericOffer, PlanRequest
from nest_megatron.units import Bytes, Seconds, format_gib, format_seconds

#: Sentences beside a plan.
_MOST = 5


#: Freed memory that is worth a sentence where a choice is no faster.
_LEAST_FREED_PERCENT = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """A plan's own layout under another choice.

    Args:
        fits: within the GPUs' memory, as far as the plan may fill it.
        faster_percent: over the plan.
        freed_percent: of a GPU's memory at the highest peak in the plan.
    """

    offer: NumericOffer
    fits: bool
    iteration_time_s: Seconds
    faster_percent: float
    freed_bytes: Bytes
    freed_percent: float

    @property
    def is_worth_it(self) -> bool:
        """Whether the cost model can tell it from the plan."""
        freed = self.freed_percent >= _LEAST_FREED_PERCENT and self.faster_percent > -1.0
        return self.fits and (self.faster_percent >= LEAST_GAIN_PERCENT or freed)

    def sentence(self) -> str:
        """What it would do, and what it changes."""
        gains = []
        if self.faster_percent >= LEAST_GAIN_PERCENT:
            faster = f"make this layout {self.faster_percent:.1f} % faster"
            gains.append(f"{faster} ({format_seconds(self.iteration_time_s)})")
        if self.freed_percent >= LEAST_GAIN_PERCENT:
            gains.append(f"free {format_gib(self.freed_bytes)} of peak memory per GPU")
        gain = " and ".join(gains)
        return f"{self.offer.words} would {gain}. It changes numbers: {self.offer.knob.changes}"


def with_numeric_offers(plan: ParallelPlan, request: PlanRequest) -> ParallelPlan:
    """The plan with those choices that would gain something, the best first.

    Each is one evaluation of the cost model: the layout stays, so another one may gain more. Of
    choices of one family (formats of GEMMs) the best is said.
    """
    worth = [priced for priced in _all(plan, request) if priced.is_worth_it]
    worth.sort(key=lambda priced: (priced.iteration_time_s, -priced.freed_bytes))
    best = {priced.offer.knob.family: priced for priced in reversed(worth)}
    said = tuple(priced.sentence() for priced in worth if best[priced.offer.knob.family] is priced)
    if not said:
        return plan
    return sealed(dataclasses.replace(plan, offers=(*plan.offers, *said[:_MOST])))


def _all(plan: ParallelPlan, request: PlanRequest) -> Iterator[_Priced]:
    partition, before = plan.partition(), plan.predicted
    for offer in request.numeric_offers:
        grid = _accepted(plan, offer, request)
        if grid is None:
            continue
        model = CostModel(request.spec, request.cluster, offer.settings, request.times)
        found = estimate(model, grid, partition)
        freed = before.peak_memory_bytes - max(s.peak_memory_bytes for s in found.stages)
        yield _Priced(
            offer=offer,
            fits=found.fits,
            iteration_time_s=found.iteration_time_s,
            faster_percent=100.0 * (before.iteration_time_s / found.iteration_time_s - 1.0),
            freed_bytes=freed,
            freed_percent=100.0 * freed / before.peak_memory_bytes,
        )


def _accepted(plan: ParallelPlan, offer: NumericOffer, request: PlanRequest) -> Grid | None:
    """The plan's grid as it would run with the choice; ``None`` where Megatron refuses it.

    Layers that were timed in one number format say nothing of another.
    """
    knob, traits, grid = offer.knob, offer.settings.traits, plan.grid()
    if grid.zero.is_fsdp and knob.precision is None:
        return None  # whose widths are flags of their own
    if knob.of_sharded_optimizer and not plan.parallel.use_distributed_optimizer:
        return None
    if knob.of_experts and plan.execution.is_node_limited:
        return None  # its kernels drop nothing
    if knob.precision is None:
        return grid
    number_format = format_of(offer.settings.precision, traits.fp8_recipe)
    if request.times is not None or number_format is None:
        return None
    if uneven_sides(request.spec, grid.dims, number_format):
        return None
    if not beside_buffers(traits.fp8_recipe):
        execution = dataclasses.replace(grid.execution, tp_comm_overlap=False)
        grid = dataclasses.replace(grid, execution=execution)
    return grid
