"""Which layouts a way of carrying out layers goes with.

Source: ``TransformerConfig.__post_init__`` (0.16.1 :1144, :1232, :1852-1912; 0.20 :3002-3076),
``MoEFlexTokenDispatcher``.
"""

from __future__ import annotations

import dataclasses

from nest_megatron.model.execution import PLAIN, Execution, GraphImpl
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.recompute import Recompute, RecomputeGranularity, RecomputeModule


def of_every_layout(execution: Execution) -> Execution:
    """What of it Megatron takes whatever the layout."""
    if not execution.overlap_moe_expert_parallel_comm:
        return execution
    return dataclasses.replace(
        execution, overlap_moe_expert_parallel_comm=False, delay_wgrad_compute=False
    )


def allowed_execution(execution: Execution, grid: Grid) -> Execution:
    """What of it Megatron takes on a layout; what does nothing there is left out.

    The all-to-all of tokens runs beside another micro batch's work where there is one: several
    expert ranks, virtual stages in a pipeline, and no experts that are recomputed.
    """
    dims, again = grid.dims, grid.recompute
    if not _exchanges_beside(grid):
        execution = of_every_layout(execution)
    execution = _with_scope(execution, again)
    idle = {
        _TENSOR: dims.tensor_model_parallel_size == 1,
        _CONTEXT: dims.context_parallel_size == 1,
        _DISPATCHER: dims.expert_ranks == 1 and execution.is_node_limited,
        _SHARED: RecomputeModule.SHARED_EXPERTS in again.modules
        or execution.overlap_moe_expert_parallel_comm,
        _LAYERS: dims.pipeline_model_parallel_size > 1
        or again.granularity is not RecomputeGranularity.NONE,
        _MODULES: again.granularity is RecomputeGranularity.FULL,
        _GRAPHS: again.granularity is RecomputeGranularity.FULL
        and execution.cuda_graph_impl is GraphImpl.TRANSFORMER_ENGINE,
    }
    fields = [name for names, is_idle in idle.items() if is_idle for name in names]
    plain = {name: getattr(PLAIN, name) for name in fields}
    return dataclasses.replace(execution, **plain) if plain else execution


_TENSOR = ("tp_comm_overlap",)
_CONTEXT = ("cp_comm_type", "hierarchical_context_parallel_sizes")
_DISPATCHER = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")
_SHARED = ("moe_shared_expert_overlap",)
_LAYERS = ("cpu_offloading_num_layers",)
_MODULES = ("offload_modules",)
_GRAPHS = ("cuda_graph_impl", "cuda_graph_scope")
#: Modules of experts outside their all-to-all, and those that a schedule calls by itself.
_ROUTER = frozenset({"moe_router", "moe_preprocess"})
_FEED_FORWARD = frozenset({"mlp"})


def _with_scope(execution: Execution, again: Recompute) -> Execution:
    """The modules that Megatron captures, less those that it refuses to.

    The router is not captured where the module ``moe`` is recomputed (0.16.1 tc:1790), and no
    feed-forward half where the all-to-all of tokens runs beside another micro batch (tc:1898).
    """
    if execution.cuda_graph_impl is not GraphImpl.TRANSFORMER_ENGINE:
        return execution
    left_out = _ROUTER if RecomputeModule.MOE in again.modules else frozenset()
    if execution.overlap_moe_expert_parallel_comm:
        left_out |= _FEED_FORWARD
    scope = tuple(name for name in execution.cuda_graph_scope if name not in left_out)
    if scope == execution.cuda_graph_scope:
        return execution
    impl = execution.cuda_graph_impl if scope else PLAIN.cuda_graph_impl
    return dataclasses.replace(execution, cuda_graph_impl=impl, cuda_graph_scope=scope)


def _exchanges_beside(grid: Grid) -> bool:
    dims, again = grid.dims, grid.recompute
    plain = dims.pipeline_model_parallel_size > 1 and dims.virtual_pipeline_model_parallel_size == 1
    full = again.granularity is RecomputeGranularity.FULL
    experts = RecomputeModule.MOE in again.modules
    return dims.expert_model_parallel_size > 1 and not (plain or full or experts)
