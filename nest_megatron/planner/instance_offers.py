"""What several instances of the distributed optimizer would gain: priced, not taken.

They bring the gathering of weights nearer, at the price of as many copies of the optimizer states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from nest_megatron.cost_model.estimate import Estimate, estimate
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.target_defaults import MEGATRON_LM
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.parallel.plan_file import sealed
from nest_megatron.planner.offers import LEAST_GAIN_PERCENT
from nest_megatron.planner.request import PlanRequest
from nest_megatron.units import format_seconds

_FLAG = "--num-distributed-optimizer-instances"
#: More groups of replicas than this are not tried: states are then divided among few.
_MOST = 16


def with_instance_offer(plan: ParallelPlan, request: PlanRequest) -> ParallelPlan:
    """The plan with the number of instances that would make its own layout fastest, if one would.

    It is not searched: it is a setting of the whole job, whose every value would make another
    search.
    """
    names = [target.name for target in MEGATRON_LM]
    own = request.settings.traits.optimizer_instances
    if request.settings.target not in names or own > 1 or plan.grid().zero.is_fsdp:
        return plan
    if not plan.parallel.use_distributed_optimizer:
        return plan
    fitting = [each for each in _priced(plan, request) if each[1].fits]
    if not fitting:
        return plan
    number, best = min(fitting, key=lambda each: each[1].iteration_time_s)
    gain = 100.0 * (plan.predicted.iteration_time_s / best.iteration_time_s - 1.0)
    if gain < LEAST_GAIN_PERCENT:
        return plan
    sentence = (
        f"{_FLAG} {number} would make this layout {gain:.1f} % faster "
        f"({format_seconds(best.iteration_time_s)}). It keeps {number} copies of the optimizer "
        "states"
    )
    return sealed(dataclasses.replace(plan, offers=(*plan.offers, sentence)))


def _priced(plan: ParallelPlan, request: PlanRequest) -> Iterator[tuple[int, Estimate]]:
    settings, grid = request.settings, plan.grid()
    for number in _numbers(grid.dims, is_moe=request.spec.is_moe):
        traits = dataclasses.replace(settings.traits, optimizer_instances=number)
        other = dataclasses.replace(settings, traits=traits)
        model = CostModel(request.spec, request.cluster, other, request.times)
        yield number, estimate(model, grid, plan.partition())


def _numbers(dims: ParallelDims, *, is_moe: bool) -> Iterator[int]:
    """Instances that divide the replicas, those of experts as well (0.16.1 parallel_state:833)."""
    replicas = dims.data_parallel_size * dims.context_parallel_size
    if is_moe:
        replicas = math.gcd(replicas, dims.expert_data_parallel_size)
    return (n for n in range(2, min(_MOST, replicas // 2) + 1) if replicas % n == 0)
