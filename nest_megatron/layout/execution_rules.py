"""Which layouts an execution of layers goes with.

Source: ``TransformerConfig.__post_init__`` (0.16.1 :1144, :1232, :1852-1912; 0.20 :3002-3076),
``MoEFlexTokenDispatcher``.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import Any

from nest_megatron.layout.knobs import KNOBS
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import Recompute, RecomputeGranularity, RecomputeModule
from nest_megatron.layout.rulebook.facts import release_number
from nest_megatron.model.execution import PLAIN, Execution, GraphImpl
from nest_megatron.plain import replace, to_plain

#: Field of ``Execution`` -> Megatron's arguments that state it, of both releases.
_ARGUMENTS = {knob.name: [knob.name] for knob in KNOBS} | {
    "moe_flex_dispatcher_backend": ["moe_flex_dispatcher_backend", "moe_enable_deepep"],
    "cuda_graph_impl": ["cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"],
    "cuda_graph_scope": ["cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules"],
    "offload_modules": ["fine_grained_activation_offloading", "offload_modules"],
}
#: Argument -> field of ``Execution``.
EXECUTION_FIELDS = {name: field for field, names in _ARGUMENTS.items() for name in names}
#: Choice -> Megatron's arguments that state it.
EXECUTION_ARGUMENTS: dict[str, tuple[str, ...]] = {
    choice: tuple(name for knob in knobs for name in _ARGUMENTS[knob.name])
    for choice, knobs in groupby(KNOBS, key=attrgetter("choice"))
}
#: Fields of ``Execution`` that a command states where the model has experts.
WITH_EXPERTS = (
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "moe_shared_expert_overlap",
    "moe_permute_fusion",
    "moe_router_fusion",
    "use_transformer_engine_op_fuser",
)
#: Arguments of earlier releases that newer ones replace.
_OLDER = ("moe_enable_deepep", "enable_cuda_graph", "external_cuda_graph")


def execution_arguments(execution: Execution, version: str) -> dict[str, Any]:
    """Megatron's arguments of both releases, and their values for an execution of layers.

    Before 0.18 a graph of the whole step is a scope of its own graphs (0.16.1 args:1432).
    """
    impl, scope = execution.cuda_graph_impl, to_plain(execution.cuda_graph_scope)
    if impl is GraphImpl.FULL_ITERATION and release_number(version) < (0, 18):
        impl, scope = GraphImpl.LOCAL, [impl.value]
    levels = list(execution.hierarchical_context_parallel_sizes)
    return {
        **{name: to_plain(getattr(execution, name)) for name in WITH_EXPERTS},
        "tp_comm_overlap": execution.tp_comm_overlap,
        "cp_comm_type": execution.cp_comm_type.value,
        "hierarchical_context_parallel_sizes": levels or None,
        "cuda_graph_impl": impl.value,
        "cuda_graph_scope": scope,
        "cuda_graph_modules": scope,
        "cpu_offloading_num_layers": execution.cpu_offloading_num_layers,
        "fine_grained_activation_offloading": bool(execution.offload_modules),
        "offload_modules": to_plain(execution.offload_modules) or None,
        **dict.fromkeys(_OLDER, False),
    }


def execution_environment(execution: Execution) -> dict[str, str | None]:
    """Variables that Megatron needs with those flags.

    Transformer Engine from 2.10 on would move weights with the activations (0.16.1 args:1225); a
    release before it does not read the variable. NCCL may not register the buffers of graphs where
    the allocator grows its segments (args:1247).
    """
    found: dict[str, str | None] = {}
    if execution.offload_modules:
        found["NVTE_CPU_OFFLOAD_V1"] = "1"
    if execution.cuda_graph_impl is GraphImpl.TRANSFORMER_ENGINE:
        found["NCCL_GRAPH_REGISTER"] = "0"
    return found


#: Modules of experts outside their all-to-all.
_ROUTER = frozenset({"moe_router", "moe_preprocess"})


def of_every_layout(execution: Execution) -> Execution:
    """What of it Megatron takes whatever the layout."""
    return _without(execution, "overlap_moe_expert_parallel_comm", "delay_wgrad_compute")


def _without(execution: Execution, *names: str) -> Execution:
    changed = {name for name in names if getattr(execution, name) != getattr(PLAIN, name)}
    if not changed:
        return execution
    return replace(execution, **{name: getattr(PLAIN, name) for name in changed})


def what_allows_execution(grid: PartialLayout) -> tuple[object, ...]:
    """All that ``allowed_execution`` reads of a layout."""
    dims = grid.dims
    return (
        grid.recompute,
        grid.sequence_parallel,
        dims.pipeline_model_parallel_size > 1,
        dims.virtual_pipeline_model_parallel_size == 1,
        dims.context_parallel_size == 1,
        dims.expert_model_parallel_size == 1,
        dims.expert_ranks == 1,
    )


def allowed_execution(
    execution: Execution, grid: PartialLayout, *, own_graphs: bool = False
) -> Execution:
    """What of it Megatron takes on a layout; what does nothing there is left out.

    The all-to-all of tokens overlaps another micro batch's work where there is one: several
    expert ranks, virtual stages in a pipeline, and no experts that are recomputed.

    Args:
        own_graphs: the CUDA graphs are the job's own, and stay as they are.
    """
    dims, recompute = grid.dims, grid.recompute
    pipelined = dims.pipeline_model_parallel_size > 1
    full = recompute.granularity is RecomputeGranularity.FULL
    experts_recomputed = full or RecomputeModule.MOE in recompute.modules
    plain_schedule = pipelined and dims.virtual_pipeline_model_parallel_size == 1
    if dims.expert_model_parallel_size == 1 or plain_schedule or experts_recomputed:
        execution = of_every_layout(execution)
    if not own_graphs:
        execution = _with_scope(execution, recompute)
    one_context, one_rank = dims.context_parallel_size == 1, dims.expert_ranks == 1
    without_graphs = full and not own_graphs
    without_graphs &= execution.cuda_graph_impl is GraphImpl.TRANSFORMER_ENGINE
    idle = {
        "tp_comm_overlap": not grid.sequence_parallel,
        "cp_comm_type": one_context,
        "hierarchical_context_parallel_sizes": one_context,
        "moe_token_dispatcher_type": one_rank and execution.is_node_limited,
        "moe_flex_dispatcher_backend": one_rank,
        "moe_shared_expert_overlap": RecomputeModule.SHARED_EXPERTS in recompute.modules
        or execution.overlap_moe_expert_parallel_comm,
        "cpu_offloading_num_layers": pipelined
        or recompute.granularity is not RecomputeGranularity.NONE,
        "offload_modules": full,
        "cuda_graph_impl": without_graphs,
        "cuda_graph_scope": without_graphs,
    }
    return _without(execution, *(name for name, is_idle in idle.items() if is_idle))


def _with_scope(execution: Execution, recompute: Recompute) -> Execution:
    """The modules that Megatron captures, less those that it refuses to.

    The router is not captured where the module ``moe`` is recomputed (0.16.1 tc:1790), and no
    feed-forward half where the all-to-all of tokens overlaps another micro batch (tc:1898).
    """
    if execution.cuda_graph_impl is not GraphImpl.TRANSFORMER_ENGINE:
        return execution
    left_out = _ROUTER if RecomputeModule.MOE in recompute.modules else frozenset()
    if execution.overlap_moe_expert_parallel_comm:
        left_out |= {"mlp"}  # which the schedule calls by itself
    scope = tuple(name for name in execution.cuda_graph_scope if name not in left_out)
    if scope == execution.cuda_graph_scope:
        return execution
    impl = execution.cuda_graph_impl if scope else PLAIN.cuda_graph_impl
    return replace(execution, cuda_graph_impl=impl, cuda_graph_scope=scope)
