"""What a dispatcher would gain whose package is not known to be there: priced, not taken."""

from __future__ import annotations

import dataclasses

from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.model import CostModel
from nest_megatron.model.execution import FlexBackend, TokenDispatcher
from nest_megatron.parallel.execution_checks import allows_execution
from nest_megatron.parallel.execution_rules import allowed_execution
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.parallel.plan_file import sealed
from nest_megatron.parallel.rules import LaunchRequest
from nest_megatron.planner.offers import LEAST_GAIN_PERCENT
from nest_megatron.planner.request import PlanRequest
from nest_megatron.units import format_seconds


def with_package_offer(plan: ParallelPlan, request: PlanRequest) -> ParallelPlan:
    """The plan with the dispatcher that would make its own layout fastest, if one would."""
    if plan.execution.is_node_limited:
        return plan
    grid, step_s = plan.grid(), plan.predicted.iteration_time_s
    model = CostModel(request.spec, request.cluster, request.settings, request.times)
    found = []
    for backend, package in request.packages.items():
        execution = dataclasses.replace(
            grid.execution,
            moe_token_dispatcher_type=TokenDispatcher.FLEX,
            moe_flex_dispatcher_backend=backend,
        )
        other = dataclasses.replace(grid, execution=allowed_execution(execution, grid))
        if other.execution.is_node_limited and _is_accepted(other, request):
            found.append((estimate(model, other, plan.partition()), backend, package))
    fitting = [each for each in found if each[0].fits]
    if not fitting:
        return plan
    best, backend, package = min(fitting, key=lambda each: each[0].iteration_time_s)
    gain = 100.0 * (step_s / best.iteration_time_s - 1.0)
    if gain < LEAST_GAIN_PERCENT:
        return plan
    sentence = (
        f"{_words(backend, request)} would make this layout {gain:.1f} % faster "
        f"({format_seconds(best.iteration_time_s)}). It needs a package where the job runs; "
        f"search.packages=[{package}] says that it is there"
    )
    return sealed(dataclasses.replace(plan, offers=(*plan.offers, sentence)))


def _words(backend: FlexBackend, request: PlanRequest) -> str:
    """What the user sets: flags of Megatron-LM, or fields of another framework."""
    values = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
    target = request.settings.target
    if target is None or target.startswith("megatron_lm"):
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
    return " ".join(f"{name}={value}" for name, value in values.items())


def _is_accepted(grid: Grid, request: PlanRequest) -> bool:
    asked = LaunchRequest(
        spec=request.spec,
        dims=grid.dims,
        micro_batch_size=grid.micro_batch_size,
        global_batch_size=grid.global_batch_size,
        recompute=grid.recompute,
        zero=grid.zero,
        precision=request.settings.precision,
        sequence_parallel=grid.sequence_parallel,
        version=request.space.version,
        execution=grid.execution,
    )
    return allows_execution(asked)
