"""Which layouts a way of carrying out layers goes with.

Source: ``TransformerConfig.__post_init__`` (0.16.1 :1852-1912; 0.20 :3002-3076).
"""

from __future__ import annotations

import dataclasses

from nest_megatron.model.execution import Execution
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.recompute import RecomputeGranularity


def of_every_layout(execution: Execution) -> Execution:
    """What of it Megatron takes whatever the layout."""
    if not execution.overlap_moe_expert_parallel_comm:
        return execution
    return dataclasses.replace(
        execution, overlap_moe_expert_parallel_comm=False, delay_wgrad_compute=False
    )


def allowed_execution(execution: Execution, grid: Grid) -> Execution:
    """What of it Megatron takes on a layout.

    The exchange of tokens runs beside another micro batch's work where there is one: several expert
    ranks, virtual stages in a pipeline, and no whole layer that is computed again.
    """
    dims = grid.dims
    plain = dims.pipeline_model_parallel_size > 1 and dims.virtual_pipeline_model_parallel_size == 1
    full = grid.recompute.granularity is RecomputeGranularity.FULL
    if dims.expert_model_parallel_size > 1 and not plain and not full:
        return execution
    return of_every_layout(execution)
