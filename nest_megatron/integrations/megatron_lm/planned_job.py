"""The job of a plan file, as far as the file says it, under other layouts than the plan's."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from nest_megatron.config.compose import Settings
from nest_megatron.config.job import fields_of
from nest_megatron.config.request import site_calibration
from nest_megatron.config.space import (
    buildable_degrees,
    fixed_degrees,
    read_rank_order,
    read_recompute,
    read_zero,
)
from nest_megatron.config.train import REPLICA_DEGREES
from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.cost_model.target_defaults import DEFAULT_TARGET, target_named
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, STATED_ELSEWHERE
from nest_megatron.integrations.megatron_lm.parser import read_argv
from nest_megatron.integrations.megatron_lm.present_layout import refused
from nest_megatron.integrations.stated_job import rates_of, reliability_of
from nest_megatron.layout.dims import DEGREES, ParallelDims, RankOrder
from nest_megatron.layout.estimate import Difference
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.knobs import KnobConditions, always_on
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.facts import RELEASES
from nest_megatron.layout.stage_layout import StagePartition, parse_layout, spread_partition
from nest_megatron.model.execution import Execution
from nest_megatron.planner import Request
from nest_megatron.planner.layouts import Prices, Variant, difference, estimate_for
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.solver.space import SearchSpace

_PP, _VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
#: Longest time of all searches for layouts of one job, from when it is read.
SEARCH_S = 20.0


class PlannedJob:
    """The job of a plan file, as far as the file says it."""

    def __init__(self, plan: ParallelPlan, times: LayerTimes | None) -> None:
        self._plan, self._times = plan, times
        self._settings = restored_settings(plan.provenance.settings)
        launch = plan.launch.get(LAUNCHER)
        release = plan.provenance.framework_version
        self._version = release if release in RELEASES else self._target().megatron_core
        values: Mapping[str, Any] = {}
        if launch is not None:
            values = read_argv(launch.script, launch.argv, self._version).values
        self._values = values
        cluster = plan.cluster.resized(plan.layout.num_gpus)
        self._job = Request(
            spec=plan.model,
            cluster=cluster,
            global_batch_size=plan.layout.global_batch_size,
            settings=self._settings,
            times=times,
            batch_schedule=plan.train.batch_schedule,
            sequence_lengths=plan.train.sequence_lengths,
            not_modelled=plan.search.not_modelled,
            num_alternatives=0,
            remedies=False,
            reliability=reliability_of(plan),
            rates=rates_of(plan),
            site=None if plan.provenance.site is None else site_calibration(cluster)[0],
            space=SearchSpace(version=self._version),
            max_seconds=SEARCH_S,
            begun_s=time.monotonic(),
        )

    def _target(self) -> Target:
        return target_named(self._settings.target or DEFAULT_TARGET.name)

    def request(self, space: SearchSpace) -> Request:
        """The search for the fastest layout of a space."""
        return dataclasses.replace(self._job, space=space)

    def space(self, composed: Settings) -> SearchSpace:
        """All layouts with the sizes that were named; the sharding is the plan's otherwise."""
        schedule = self._plan.train.batch_schedule
        if composed.parallel.sequence_parallel is False:
            raise UserInputError(
                "sequence_parallel",
                False,
                "plans have it wherever tensor parallelism is on",
                "Give it to --versus.",
            )
        own, zero = self._plan.layout.sharding, read_zero(composed.parallel)
        zeros = (self._plan.layout.zero if zero is None else zero,)
        order = read_rank_order(composed.parallel)
        space = SearchSpace(
            fixed=(fixed := fixed_degrees(composed)),
            partition=self._stages(composed, fixed),
            zero_stages=zeros,
            sharding=own if zero is None else None,
            recompute=read_recompute(composed.parallel),
            execution=self._execution,
            version=self._version,
            batch_unit=schedule.batch_unit if schedule else None,
            rank_orders=tuple(RankOrder) if order is None else (order,),
        )
        degrees = buildable_degrees(self._plan.model, self._target(), space.fixed)
        return dataclasses.replace(space, fixed=degrees)

    @property
    def _execution(self) -> Execution:
        """As the plan's; what its own layout has no room for is on where it never costs time."""
        own, settings = self._plan.layout.execution, self._settings
        recipe = settings.traits.fp8_recipe.value if settings.precision.is_quantized else None
        conditions = KnobConditions(
            spec=self._plan.model,
            accelerator=self._plan.cluster.accelerator.name,
            fp8_recipe=recipe,
            can_state=fields_of(self._target()),
        )
        every = always_on(own, conditions)
        return every if allowed_execution(every, self._plan.layout) == own else own

    def variant(self, composed: Settings) -> Variant:
        """The plan's layout with what was named instead."""
        config, own = composed.parallel, self._plan.layout.without_stages()
        given = fixed_degrees(composed)
        micro = given.pop("micro_batch_size", own.micro_batch_size)
        stages = self._stages(composed, given)
        if stages is not None:
            given[_VPP] = stages.num_chunks // stages.pipeline_model_parallel_size
        dims = self._dims(given, read_rank_order(config))
        splits_sequence = config.sequence_parallel
        if splits_sequence is None:
            splits_sequence = dims.tensor_model_parallel_size > 1
        zero, recompute = read_zero(config), read_recompute(config)
        grid = dataclasses.replace(
            own,
            dims=dims,
            micro_batch_size=micro,
            sequence_parallel=splits_sequence,
            recompute=own.recompute if recompute is None else recompute,
            zero=own.zero if zero is None else zero,
        )
        if stages is None:
            stages = self._plan.layout.partition
            sizes = stages.pipeline_model_parallel_size, stages.num_chunks
            if sizes != (dims.pipeline_model_parallel_size, dims.num_chunks):
                stages = spread_partition(self._plan.model, dims)
        return self.variant_of(grid, stages, own=zero is None)

    def _stages(self, composed: Settings, given: Mapping[str, int]) -> StagePartition | None:
        """The stages that were named, for the pipeline's own size where no other is."""
        text = composed.parallel.pipeline_model_parallel_layout
        pp = given.get(_PP, self._plan.layout.dims.pipeline_model_parallel_size)
        return None if text is None else parse_layout(text, self._plan.model, pp)

    def variant_of(
        self, grid: PartialLayout, partition: StagePartition, *, own: bool = True
    ) -> Variant:
        """A grid and its stages as the job would run them.

        Args:
            own: the plan's sharding holds, as the ZeRO stage is the plan's.
        """
        grid = dataclasses.replace(grid, execution=allowed_execution(self._execution, grid))
        sharding = self._plan.layout.sharding if own else None
        return Variant(settings=self._settings, layout=grid.with_stages(partition, sharding))

    def _dims(self, given: Mapping[str, int], rank_order: RankOrder | None) -> ParallelDims:
        """The plan's degrees with those given; the GPUs that are left replicate."""
        own = self._plan.layout.dims
        kept = {name: getattr(own, name) for name in DEGREES if name != "data_parallel_size"}
        if given.get(_PP, own.pipeline_model_parallel_size) != own.pipeline_model_parallel_size:
            kept[_VPP] = 1
        degrees = {**kept, **given}
        if "data_parallel_size" not in degrees:
            gpus = self._plan.layout.num_gpus
            replica = math.prod(degrees[name] for name in REPLICA_DEGREES)
            if gpus % replica:
                raise UserInputError(
                    "tp * cp * pp",
                    replica,
                    f"it must divide the plan's {gpus} GPUs",
                    "Change one of the sizes.",
                )
            degrees["data_parallel_size"] = gpus // replica
        return ParallelDims(**degrees, rank_order=rank_order or own.rank_order)

    def refusal(self, variant: Variant) -> str:
        """The first rule of Megatron that a layout breaks, with its source; empty for none."""
        gpus, placed = variant.layout.num_gpus, self._plan.layout.num_gpus
        if gpus != placed:
            return f"tp * pp * cp * dp = {gpus}: the plan is for {placed} GPUs"
        return refused(self._job, variant, self._values, self._version, but=STATED_ELSEWHERE)

    def rule(self, composed: Settings) -> str:
        """The rule that the plan's layout with what was named breaks; empty for none."""
        try:
            return self.refusal(self.variant(composed))
        except UserInputError as error:
            return f"{error.what} = {error.value}: {error.limit}"

    def priced(self, variant: Variant) -> ParallelPlan:
        """A layout as a plan, with its prediction."""
        return estimate_for(self._job, variant.layout, settings=variant.settings)

    def difference(self, variant: Variant) -> Difference:
        """By how much a layout's step is longer than the plan's."""
        prices = Prices(self._job)
        return difference(prices.of(self.own), prices.of(variant))

    @property
    def own(self) -> Variant:
        """The plan's layout."""
        return Variant(settings=self._settings, layout=self._plan.layout)
