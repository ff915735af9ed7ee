"""What each runner-up loses, term by term."""

from __future__ import annotations

from collections.abc import Mapping

from nest_megatron.cost_model.settings import restored_settings
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
    spec, pp = plan.model, other.pipeline_model_parallel_size
    layout = other.pipeline_model_parallel_layout
    try:
        settings = restored_settings(plan.provenance.settings)
        partition = uniform_partition(spec, 1) if layout is None else parse_layout(layout, spec, pp)
        priced = estimate_plan(spec, plan.cluster, settings, _grid(plan, other), partition, times)
    except UserInputError:
        return None
    found = priced.predicted
    if abs(found.iteration_time_s - other.iteration_time_s) > 1e-6 * other.iteration_time_s:
        return None
    return {name: s - plan.predicted.terms.get(name, 0.0) for name, s in found.terms.items()}


def _grid(plan: ParallelPlan, other: Alternative) -> Grid:
    return Grid(
        dims=ParallelDims.of(other, other.rank_order),
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
    if label == NO_RECOMPUTE.label():
        return NO_RECOMPUTE
    words = label.split()
    if words[0] == RecomputeGranularity.FULL:
        method, layers = RecomputeMethod(words[1]), int(words[2])
        return Recompute(granularity=RecomputeGranularity.FULL, method=method, num_layers=layers)
    modules = tuple(RecomputeModule(name) for name in label.split("+"))
    return Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=modules)
