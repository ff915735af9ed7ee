"""Layouts that somebody chose for a job: each priced as the planner prices its own."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import NormalDist

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.estimate import Estimate, estimate
from nest_megatron.cost_model.goodput import Reliability
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.site import Site, expected
from nest_megatron.cost_model.uncertainty import (
    Predictive,
    difference_deviation,
    probability_faster,
)
from nest_megatron.errors import UserInputError
from nest_megatron.model.sequence_lengths import SequenceLengths
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.batch_schedule import BatchSchedule
from nest_megatron.parallel.before_after import Difference
from nest_megatron.parallel.degree_rules import require_legal
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.partition import StagePartition
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.parallel.price import Rates
from nest_megatron.parallel.rules import DEFAULT_VERSION, LaunchRequest
from nest_megatron.parallel.zero import DataParallelSharding
from nest_megatron.planner.assemble import assemble, nothing_searched, with_goodput
from nest_megatron.planner.request import PlanRequest
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.solver.ranking import SolvedGrid
from nest_megatron.units import Bytes, Seconds

#: Share of outcomes that the interval of a difference holds, as that of a step.
_LEVEL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What runs: degrees, batch split and execution, the stages, and what the job's flags say.

    Args:
        sharding: what divides states among replicas; ``None`` leaves it to the ZeRO stage.
    """

    settings: CostSettings
    grid: Grid
    partition: StagePartition
    sharding: DataParallelSharding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A layout with its prediction, and how far that can be off."""

    layout: Layout
    found: Estimate
    known: Predictive

    @property
    def step_s(self) -> Seconds:
        """The predicted step."""
        return self.found.iteration_time_s

    @property
    def peak_memory_bytes(self) -> Bytes:
        """Of the pipeline rank with the highest peak."""
        return max(stage.peak_memory_bytes for stage in self.found.stages)


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


class Prices:
    """Prices of a job's layouts."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._models: dict[CostSettings, CostModel] = {}

    def of(self, layout: Layout) -> Priced:
        """The prediction of a layout, whether Megatron launches it or not."""
        model = self._models.get(layout.settings)
        if model is None:
            model = self._models[layout.settings] = self._request.cost_model(layout.settings)
        grid, partition = layout.grid, layout.partition
        found = estimate(model, grid, partition)
        known = expected(self._request.site, model, grid, partition, found.iteration_time_s)
        return Priced(layout=layout, found=found, known=known)


def estimate_plan(
    spec: TransformerSpec,
    cluster: Cluster,
    settings: CostSettings,
    grid: Grid,
    partition: StagePartition,
    times: LayerTimes | None = None,
    reliability: Reliability | None = None,
    *,
    schedule: BatchSchedule | None = None,
    lengths: SequenceLengths | None = None,
    site: Site | None = None,
    sharding: DataParallelSharding | None = None,
    not_modelled: tuple[str, ...] = (),
    rates: Rates | None = None,
    version: str = DEFAULT_VERSION,
) -> ParallelPlan:
    """A plan for a layout that the user chose, with its prediction; nothing is searched.

    Args:
        times: measured times of the model's layers.
        reliability: how often the job fails.
        schedule: how the batch grows, by which the layout is checked and priced at each size.
        lengths: of the data's sequences, which the traits of ``settings`` price.
        site: the site's calibration.
        sharding: what divides states among replicas; ``None`` leaves it to the ZeRO stage.
        not_modelled: flags of the job whose effect on memory is not known.
        rates: what a GPU costs, and the length of the run.
        version: the Megatron-LM release whose rules hold.

    Raises:
        UserInputError: if Megatron would refuse the layout, or it is not of the cluster's size.
    """
    if grid.dims.world_size > cluster.num_gpus:
        raise UserInputError(
            "tp * pp * cp * dp",
            value=grid.dims.world_size,
            limit=f"the cluster has {cluster.num_gpus} GPUs",
            fix="Lower a degree or raise cluster.num_gpus.",
        )
    check_launchable(spec, settings, grid, partition, schedule, version=version)
    model = CostModel(spec, cluster, settings, times)
    solved = SolvedGrid(grid=grid, boundaries=partition.boundaries, iteration=0)
    record = dataclasses.replace(nothing_searched(), not_modelled=not_modelled)
    found = assemble(
        model, solved, record, sharding=sharding, schedule=schedule, lengths=lengths, site=site
    )
    return with_goodput(found, reliability, rates)


def estimate_for(
    request: PlanRequest,
    grid: Grid,
    partition: StagePartition,
    *,
    settings: CostSettings | None = None,
    sharding: DataParallelSharding | None = None,
) -> ParallelPlan:
    """As ``estimate_plan``, for the job of a request; ``settings`` in the place of its own."""
    return estimate_plan(
        request.spec,
        request.cluster,
        settings or request.settings,
        grid,
        partition,
        request.times,
        request.reliability,
        schedule=request.batch_schedule,
        lengths=request.sequence_lengths,
        site=request.site,
        sharding=sharding,
        not_modelled=request.not_modelled,
        rates=request.rates,
        version=request.space.version,
    )


def keep_layout(plan: ParallelPlan, request: PlanRequest) -> ParallelPlan:
    """Price a plan's layout for another request: all degrees stay, but that of data parallelism.

    With another number of GPUs as many replicas train as they hold.

    Raises:
        UserInputError: if the GPUs or the batch do not divide, or Megatron refuses the layout.
    """
    grid, num_gpus = plan.grid(), request.cluster.num_gpus
    dims, resized = grid.dims, num_gpus != plan.cluster.num_gpus
    one_replica = dims.world_size // dims.data_parallel_size
    if resized and num_gpus % one_replica:
        limit = f"a replica of the layout takes {one_replica}"
        fix = "Use a multiple of it."
        raise UserInputError("cluster.num_gpus", value=num_gpus, limit=limit, fix=fix)
    replicas = num_gpus // one_replica if resized else dims.data_parallel_size
    dims = dataclasses.replace(dims, data_parallel_size=replicas)
    grid = dataclasses.replace(grid, dims=dims, global_batch_size=request.global_batch_size)
    return estimate_for(request, grid, plan.partition())


def check_launchable(
    spec: TransformerSpec,
    settings: CostSettings,
    grid: Grid,
    partition: StagePartition,
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
        grid,
        partition=partition,
        sharding=grid.zero.sharding,
        batch_schedule=schedule,
        version=version,
        **settings.of_launch(),
    )
    require_legal(asked)
