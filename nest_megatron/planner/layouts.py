"""Layouts that somebody chose for a job: each priced as the planner prices its own."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.site import expected
from nest_megatron.cost_model.uncertainty import (
    Predictive,
    difference_deviation,
    probability_faster,
)
from nest_megatron.errors import UserInputError
from nest_megatron.layout.batch_schedule import BatchSchedule
from nest_megatron.layout.estimate import Difference, Estimate
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook import require_legal
from nest_megatron.layout.rulebook.facts import DEFAULT_VERSION, LaunchRequest
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner.assemble import (
    assemble,
    nothing_searched,
    predicted_batches,
)
from nest_megatron.planner.request import Request
from nest_megatron.units import Bytes, Seconds

#: Share of outcomes that the interval of a difference holds, as that of a step.
_LEVEL = 0.9


class PredictedLayout(NamedTuple):
    """A layout that was found for a request, and what is expected of it."""

    layout: Layout
    predicted: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What runs: a layout, and the cost model's assumptions as its job's flags make them."""

    settings: CostSettings
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A layout with its prediction, and how far that can be off."""

    found: Estimate
    known: Predictive

    @property
    def step_s(self) -> Seconds:
        """The predicted step."""
        return self.found.iteration_time_s

    @property
    def peak_memory_bytes(self) -> Bytes:
        """Of the pipeline rank with the highest peak."""
        return self.found.peak_memory_bytes


def difference(other: Priced, found: Priced) -> Difference:
    """How a priced layout differs from another one."""
    ratio = found.known.median_s / other.known.median_s
    spread = NormalDist().inv_cdf((1.0 + _LEVEL) / 2.0) * difference_deviation(
        found.known, other.known
    )
    return Difference(
        seconds=found.step_s - other.step_s,
        percent=100.0 * (ratio - 1.0),
        low_percent=100.0 * (ratio * math.exp(-spread) - 1.0),
        high_percent=100.0 * (ratio * math.exp(spread) - 1.0),
        chance_faster=probability_faster(found.known, other.known),
    )


class Prices(Caching):
    """Prices of a job's layouts."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def of(self, variant: Variant) -> Priced:
        """The prediction of a variant, whether Megatron launches it or not."""
        model = self._model(variant.settings)
        found = estimate(model, variant.layout)
        known = expected(self._request.site, model, variant.layout, found.iteration_time_s)
        return Priced(found=found, known=known)

    @cached_by(lambda _, settings: settings)
    def _model(self, settings: CostSettings) -> CostModel:
        return self._request.cost_model(settings)


def estimate_for(
    request: Request, layout: Layout, *, settings: CostSettings | None = None
) -> ParallelPlan:
    """A plan for a layout that the user chose, with its prediction; nothing is searched.

    Args:
        settings: in the place of the request's own.

    Raises:
        UserInputError: if Megatron would refuse the layout, or it is not of the cluster's size.
    """
    if layout.num_gpus > request.cluster.num_gpus:
        raise UserInputError(
            "tp * pp * cp * dp",
            layout.num_gpus,
            limit=f"the cluster has {request.cluster.num_gpus} GPUs",
            fix="Lower a degree or raise cluster.num_gpus.",
        )
    model, schedule = request.cost_model(settings), request.batch_schedule
    check_launchable(
        *(request.spec, model.settings, layout, schedule), version=request.space.version
    )
    return assemble(
        dataclasses.replace(request, defaults=(), given=()),  # which are of a search
        *(model, layout, estimate(model, layout)),
        dataclasses.replace(nothing_searched(), not_modelled=request.not_modelled),
        batches=tuple(predicted_batches(model, layout, schedule)),
        alternatives=(),
    )


def keep_layout(plan: ParallelPlan, request: Request) -> ParallelPlan:
    """Price a plan's layout for another request: all degrees stay, but that of data parallelism.

    With another number of GPUs as many replicas train as they hold.

    Raises:
        UserInputError: if the GPUs or the batch do not divide, or Megatron refuses the layout.
    """
    layout, num_gpus = plan.layout, request.cluster.num_gpus
    dims, resized = layout.dims, num_gpus != plan.cluster.num_gpus
    one_replica = dims.world_size // dims.data_parallel_size
    if resized and num_gpus % one_replica:
        limit = f"a replica of the layout takes {one_replica}"
        fix = "Use a multiple of it."
        raise UserInputError("cluster.num_gpus", num_gpus, limit, fix)
    replicas = num_gpus // one_replica if resized else dims.data_parallel_size
    dims = dataclasses.replace(dims, data_parallel_size=replicas)
    stages = dataclasses.replace(
        layout, dims=dims, global_batch_size=request.global_batch_size
    ).with_stages(layout.partition)
    return estimate_for(request, stages)


def check_launchable(
    spec: TransformerSpec,
    settings: CostSettings,
    layout: Layout,
    schedule: BatchSchedule | None = None,
    *,
    version: str = DEFAULT_VERSION,
) -> None:
    """Refuse a layout that breaks one of Megatron's rules on degrees.

    Raises:
        UserInputError: for the first rule broken.
    """
    asked = LaunchRequest.of(
        spec,
        layout,
        partition=layout.partition,
        sharding=layout.zero.sharding,
        batch_schedule=schedule,
        version=version,
        **settings.of_launch(),
    )
    require_legal(asked)
