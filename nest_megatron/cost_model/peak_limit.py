"""The chance that a plan runs out of memory, and the peaks with which it is at most so large."""

from __future__ import annotations

import math

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model.device_memory import (
    PeakErrors,
    allocatable_bytes,
    out_of_memory_probability,
    outside_bytes,
    peak_error,
)
from nest_megatron.cost_model.keys import DEGREES
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.site import Site
from nest_megatron.layout.layout import Layout, PartialLayout
from nest_megatron.layout.stage_layout import spread_partition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.units import Bytes

#: A plan that more likely runs out of memory than not is one that does not fit.
MOST_OOM_CHANCE = 0.5


def out_of_memory(
    model: CostModel, layout: Layout, peak_bytes: Bytes, site: Site | None = None
) -> float:
    """Chance that a plan runs out of memory, at a site where one is calibrated."""
    known = None if site is None else site.peak_error(model, layout)
    error = known or peak_error(layout.zero)
    return out_of_memory_probability(peak_bytes, allocatable(model, layout), error)


def allocatable(model: CostModel, grid: PartialLayout) -> Bytes:
    """What the tensors of a plan may take of a device."""
    outside = outside_bytes(model.spec, grid, model.cluster)
    return allocatable_bytes(model.cluster.accelerator, model.settings, outside)


class PeakLimit(Caching):
    """Predicted peaks with which plans of a job run out of memory with at most some chance.

    Args:
        max_oom_chance: ``None`` is what the device holds, however far predictions are off.
        site: whose runs say how far, where one is calibrated.
    """

    def __init__(
        self, model: CostModel, max_oom_chance: float | None = None, site: Site | None = None
    ) -> None:
        self._model, self._chance = model, max_oom_chance
        self._site = site if site is not None and site.peaks.runs else None

    @cached_by(
        lambda self, grid: (
            grid
            if self._site is not None
            else (DEGREES.of(grid.dims), grid.micro_batch_size, grid.execution, grid.zero)
        )
    )
    def of(self, grid: PartialLayout) -> Bytes:
        """The largest peak of a layout; of a site's runs, what they say of even stages."""
        if self._chance is None:
            return self._model.capacity_bytes
        learned = None
        if self._site is not None:
            stages = spread_partition(self._model.spec, grid.dims)
            learned = self._site.peak_error(self._model, grid.with_stages(stages))
        return self._within(learned or peak_error(grid.zero), allocatable(self._model, grid))

    @cached_by(lambda _, zero: zero)
    def at_most(self, zero: ZeroStage) -> Bytes:
        """No layout with such a ZeRO stage may have a larger peak."""
        model = self._model
        if self._chance is None or self._site is not None:
            return model.capacity_bytes
        most = allocatable_bytes(model.cluster.accelerator, model.settings)
        return self._within(peak_error(zero), most)

    def _within(self, error: PeakErrors, limit_bytes: Bytes) -> Bytes:
        assert self._chance is not None
        peak = limit_bytes * math.exp(-error.quantile(1.0 - self._chance))
        return min(self._model.capacity_bytes, int(peak))
