"""What each runner-up loses, term by term."""

from __future__ import annotations

from collections.abc import Mapping

from nest_megatron.errors import UserInputError
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.layout import parse_layout, uniform_partition
from nest_megatron.parallel.plan import Alternative, ParallelPlan
from nest_megatron.parallel.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.planner import estimate_plan
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.schedule_view import settings_of


def term_differences(
    plan: ParallelPlan, times: LayerTimes | None = None
) -> tuple[Mapping[str, float] | None, ...]:
    """For each runner-up, seconds that each term takes more than in the plan.

    Args:
        times: the measured layer times that the plan was made with.

    Returns:
        One mapping a runner-up; ``None`` where this version prices it otherwise than the plan says.
    """
    return tuple(_differences(plan, other, times) for other in plan.alternatives)


def _differences(
    plan: ParallelPlan, other: Alternative, times: LayerTimes | None
) -> Mapping[str, float] | None:
    try:
        priced = _priced(plan, other, times)
    except UserInputError:
        return None
    told, found = other.iteration_time_s, priced.predicted.iteration_time_s
    if abs(found - told) > 1e-6 * told:
        return None
    terms = plan.predicted.terms
    return {name: s - terms.get(name, 0.0) for name, s in priced.predicted.terms.items()}


def _priced(plan: ParallelPlan, other: Alternative, times: LayerTimes | None) -> ParallelPlan:
    spec, pp = plan.model, other.pipeline_model_parallel_size
    layout = other.pipeline_model_parallel_layout
    partition = uniform_partition(spec, 1) if layout is None else parse_layout(layout, spec, pp)
    grid, settings = _grid(plan, other), settings_of(plan)
    return estimate_plan(spec, plan.cluster, settings, grid, partition, times)


def _grid(plan: ParallelPlan, other: Alternative) -> Grid:
    return Grid(
        dims=ParallelDims(
            tensor_model_parallel_size=other.tensor_model_parallel_size,
            pipeline_model_parallel_size=other.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=other.virtual_pipeline_model_parallel_size or 1,
            context_parallel_size=other.context_parallel_size,
            data_parallel_size=other.data_parallel_size,
            expert_model_parallel_size=other.expert_model_parallel_size,
            expert_tensor_parallel_size=other.expert_tensor_parallel_size,
            rank_order=other.rank_order,
        ),
        global_batch_size=plan.train.global_batch_size,
        micro_batch_size=other.micro_batch_size,
        sequence_parallel=other.tensor_model_parallel_size > 1,
        recompute=recompute_of(other.recompute),
        zero=ZeroStage(other.zero_stage),
        execution=other.execution,
    )


def recompute_of(label: str) -> Recompute:
    """The setting behind a label of ``Recompute.label``.

    >>> recompute_of(Recompute().label()) == Recompute()
    True
    """
    words = label.split()
    if words[0] == RecomputeGranularity.FULL:
        return Recompute(
            granularity=RecomputeGranularity.FULL,
            method=RecomputeMethod(words[1]),
            num_layers=int(words[2]),
        )
    if label == NO_RECOMPUTE.label():
        return NO_RECOMPUTE
    return Recompute(
        granularity=RecomputeGranularity.SELECTIVE,
        modules=tuple(RecomputeModule(name) for name in label.split("+")),
    )
