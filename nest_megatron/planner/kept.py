"""The layout of a plan on a job that has changed: what it costs to keep it."""

from __future__ import annotations

import dataclasses

from nest_megatron.errors import UserInputError
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner.layouts import estimate_for
from nest_megatron.planner.request import PlanRequest


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
