"""What Megatron accepts of an ``Execution`` on a layout, rule by rule, each with its words.

``execution_rules`` leaves out what a layout has no room for; here is what is said of a plan that
has it all the same.

Source lines are those of Megatron-LM core_v0.16.1: ``args`` is ``megatron/training/arguments.py``,
``tc`` ``megatron/core/transformer/transformer_config.py``; "(run)" marks what its own validation
lets pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nest_megatron.cluster.records import Precision
from nest_megatron.model.execution import (
    PLAIN,
    ContextTraffic,
    FlexBackend,
    GraphImpl,
    TokenDispatcher,
)
from nest_megatron.parallel.cuda_graphs import CudaGraphs
from nest_megatron.parallel.degree_rules import Rule, rule, violations
from nest_megatron.parallel.recompute import RecomputeGranularity, RecomputeModule
from nest_megatron.parallel.rules import LaunchRequest

#: Modules that ``--offload-modules`` takes outside experts, and inside.
_OFFLOADED = {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"}
_OFFLOADED_OF_EXPERTS = {"expert_fc1", "moe_act", "fused_group_mlp"}
_OF_0_20 = {"fused_group_mlp", "gdp_qkv"}
#: Groups that DeepEP has buffer sizes for. Source: deepseek-ai/DeepEP, deep_ep/buffer.py
#: (``Buffer.get_dispatch_config``); its first releases lack 48 and 96.
DEEPEP_RANKS = frozenset({2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160})


def allows_execution(request: LaunchRequest) -> bool:
    """Whether Megatron accepts how a request's layers are carried out."""
    return not any(violations(request, EXECUTION_RULES))


def _rule(
    name: str, field: str, source: str, holds: Callable[[LaunchRequest], bool], limit: str
) -> Rule:
    """A rule on a field, asked only where it is not at Megatron's default."""
    return rule(
        name,
        source,
        lambda request: (
            getattr(request.execution, field) == getattr(PLAIN, field) or holds(request)
        ),
        what=field,
        limit=limit,
        fix="Leave it out, or change the layout.",
    )


def _engine(request: LaunchRequest) -> bool:
    return request.transformer_impl != "local"


def _recomputes_layers(request: LaunchRequest) -> bool:
    return request.recompute.granularity is RecomputeGranularity.FULL


def _few_mtp_layers(request: LaunchRequest) -> bool:
    """At most one; on 0.16.1 it needs a pipeline."""
    layers = request.spec.num_mtp_layers
    alone = request.is_0_16 and request.dims.pipeline_model_parallel_size == 1
    return layers == 0 or (layers == 1 and not alone)


def _graphs_beside_overlap(request: LaunchRequest) -> bool:
    impl, scope = request.execution.cuda_graph_impl, set(request.execution.cuda_graph_scope)
    if impl is GraphImpl.TRANSFORMER_ENGINE:
        return bool(scope) and not {"moe", "mlp"} & scope
    return impl is GraphImpl.NONE or not request.is_0_16


def _overlaps_shared(request: LaunchRequest) -> bool:
    how = request.execution
    if not request.spec.moe_shared_expert_intermediate_size:
        return True  # the flag says nothing
    kinds = (TokenDispatcher.ALLTOALL, TokenDispatcher.FLEX)[: 1 if request.is_0_16 else 2]
    return (
        how.moe_token_dispatcher_type in kinds
        and not how.overlap_moe_expert_parallel_comm
        and RecomputeModule.SHARED_EXPERTS not in request.recompute.modules
    )


def _heads_divide(request: LaunchRequest) -> bool:
    """Each rank of the all-to-all has whole heads and whole query groups."""
    how, tp = request.execution, request.dims.tensor_model_parallel_size
    size = request.dims.context_parallel_size
    if how.cp_comm_type is ContextTraffic.A2A_P2P and how.hierarchical_context_parallel_sizes:
        size = how.hierarchical_context_parallel_sizes[0]
    elif how.cp_comm_type is not ContextTraffic.A2A:
        return True
    heads = request.spec.num_attention_heads // tp
    groups = max(1, request.spec.query_groups // tp)
    return heads % size == 0 and groups % size == 0


def _levels_match(request: LaunchRequest) -> bool:
    sizes = request.execution.hierarchical_context_parallel_sizes
    return math.prod(sizes) == request.dims.context_parallel_size


def _has_levels(request: LaunchRequest) -> bool:
    how = request.execution
    if how.cp_comm_type is not ContextTraffic.A2A_P2P:
        return True
    return len(how.hierarchical_context_parallel_sizes) == 2 and _levels_match(request)


def _graphs_allow_layout(request: LaunchRequest) -> bool:
    """The job's own graphs, or those of its execution."""
    how = request.execution
    graphs = request.cuda_graphs or CudaGraphs(
        impl=how.cuda_graph_impl.value, scope=frozenset(how.cuda_graph_scope)
    )
    recomputes = graphs.allows_recompute(request.spec, request.recompute)
    ep = request.dims.expert_model_parallel_size
    return recomputes and graphs.allows_experts(ep, request.version)


def _graphs_leave_experts(request: LaunchRequest) -> bool:
    """Experts without a capacity get as many tokens as come: the host must know how many."""
    how = request.execution
    if request.cuda_graphs is not None or not request.spec.is_moe:
        return True  # the job's own graphs are its own matter
    return bool(how.cuda_graph_scope) and "moe" not in how.cuda_graph_scope


def _moves_layers(request: LaunchRequest) -> bool:
    how = request.execution
    return (
        how.cpu_offloading_num_layers < request.spec.num_layers
        and how.cuda_graph_impl is GraphImpl.NONE
        and request.dims.pipeline_model_parallel_size == 1
        and request.recompute.granularity is RecomputeGranularity.NONE
    )


def _modules_exist(request: LaunchRequest) -> bool:
    modules = set(request.execution.offload_modules)
    known = _OFFLOADED | _OFFLOADED_OF_EXPERTS | _OF_0_20
    known -= _OF_0_20 if request.is_0_16 else set()
    alone = "attn_proj" in modules and "core_attn" not in modules
    has = request.spec.is_moe or not modules & _OFFLOADED_OF_EXPERTS
    return modules <= known and not alone and has and _engine(request)


def _modules_are_saved(request: LaunchRequest) -> bool:
    modules, recomputed = set(request.execution.offload_modules), request.recompute.modules
    inside = RecomputeModule.MOE in recomputed and modules & _OFFLOADED_OF_EXPERTS
    whole = request.execution.cpu_offloading_num_layers > 0
    return not (_recomputes_layers(request) or whole or inside)


_OVERLAP = "overlap_moe_expert_parallel_comm"
#: Name of a rule -> its field, its source, what holds, and that in words.
_ROWS: dict[str, tuple[str, str, Callable[[LaunchRequest], bool], str]] = {
    "permute_fusion": (
        "moe_permute_fusion",
        "moe/moe_utils.py (run)",
        _engine,
        "only Transformer Engine sorts tokens in one kernel",
    ),
    "router_fusion": (
        "moe_router_fusion",
        "moe/moe_utils.py (run)",
        _engine,
        "only Transformer Engine has the router in one kernel",
    ),
    "flex_group": (
        "moe_flex_dispatcher_backend",
        "moe/token_dispatcher.py:1346",
        lambda request: not request.spec.is_moe or request.dims.expert_ranks > 1,
        "the flex dispatcher exchanges tokens among several ranks (etp * ep above 1)",
    ),
    "deepep_ranks": (
        "moe_flex_dispatcher_backend",
        "moe/fused_a2a.py:56, DeepEP's buffer.py (run)",
        lambda request: (
            request.execution.moe_flex_dispatcher_backend is not FlexBackend.DEEPEP
            or request.dims.expert_ranks in DEEPEP_RANKS
        ),
        f"DeepEP has buffers for {', '.join(map(str, sorted(DEEPEP_RANKS)))} expert ranks",
    ),
    "ncclep_release": (
        "moe_flex_dispatcher_backend",
        "0.20 tc:898, token_dispatcher.py:1853",
        lambda request: (
            not request.is_0_16
            or request.execution.moe_flex_dispatcher_backend is not FlexBackend.NCCLEP
        ),
        "0.16.1 has no NCCL EP",
    ),
    "expert_overlap_exchange": (
        _OVERLAP,
        "tc:1863-1869",
        lambda request: (
            request.spec.is_moe
            and request.dims.expert_model_parallel_size > 1
            and request.execution.moe_token_dispatcher_type is not TokenDispatcher.ALLGATHER
        ),
        "it needs expert parallelism, and the alltoall or the flex dispatcher",
    ),
    "expert_overlap_pipeline": (
        _OVERLAP,
        "tc:1857",
        lambda request: (
            request.dims.pipeline_model_parallel_size == 1
            or request.dims.virtual_pipeline_model_parallel_size > 1
        ),
        "with a pipeline it needs virtual stages",
    ),
    "expert_overlap_recompute": (
        _OVERLAP,
        "tc:1871, model_chunk_schedule_plan.py (run; 0.20 tc:3030)",
        lambda request: (
            not _recomputes_layers(request) and RecomputeModule.MOE not in request.recompute.modules
        ),
        "neither whole layers nor the module moe may be recomputed",
    ),
    "expert_overlap_precision": (
        _OVERLAP,
        "tc:1882",
        lambda request: request.precision is not Precision.FP32,
        "the model is in 16 bits",
    ),
    "expert_overlap_mtp": (
        _OVERLAP,
        "tc:1889",
        _few_mtp_layers,
        "the model has one MTP layer at most, on 0.16.1 only with a pipeline",
    ),
    "expert_overlap_graphs": (
        _OVERLAP,
        "tc:1898",
        _graphs_beside_overlap,
        "CUDA graphs may hold neither experts nor whole layers",
    ),
    "expert_overlap_fsdp": (
        _OVERLAP,
        "model_chunk_schedule_plan.py (run)",
        lambda request: not (request.is_0_16 and request.zero.is_fsdp),
        "0.16.1's schedule passes by the layers' forward, where Megatron-FSDP gathers weights",
    ),
    "delayed_wgrad": (
        "delay_wgrad_compute",
        "args:1210",
        _engine,
        "only Transformer Engine puts weight gradients off",
    ),
    "shared_overlap": (
        "moe_shared_expert_overlap",
        "tc:1090, tc:1232, tc:1886",
        _overlaps_shared,
        "tokens go by alltoall (by flex too on 0.20), the all-to-all overlaps nothing else, and "
        "shared experts are not recomputed",
    ),
    "tensor_overlap": (
        "tp_comm_overlap",
        "args:915, training/initialize.py:270",
        lambda request: (
            _engine(request)
            and (request.sequence_parallel or request.dims.tensor_model_parallel_size == 1)
        ),
        "it needs sequence parallelism and Transformer Engine",
    ),
    "context_levels": (
        "cp_comm_type",
        "args:403-408",
        _has_levels,
        "a2a+p2p needs two sizes that multiply to the context-parallel size",
    ),
    "context_sizes": (
        "hierarchical_context_parallel_sizes",
        "args:405",
        _levels_match,
        "they multiply to the context-parallel size",
    ),
    "context_heads": (
        "cp_comm_type",
        "Transformer Engine context_parallel.py (run)",
        _heads_divide,
        "ranks that exchange heads get whole heads and whole query groups each",
    ),
    "graphs_recompute": (
        "cuda_graph_impl",
        "tc:1780-1822, args:1158",
        _graphs_allow_layout,
        "CUDA graphs hold neither full recomputation nor, on 0.16.1, experts over several ranks",
    ),
    "graphs_experts": (
        "cuda_graph_impl",
        "tc:1762 (run)",
        _graphs_leave_experts,
        "experts without a capacity get as many tokens as come, which no graph holds",
    ),
    "offloaded_layers": (
        "cpu_offloading_num_layers",
        "tc:1137-1151, tc:1722",
        _moves_layers,
        "fewer layers move than there are, without a pipeline, recomputation and CUDA graphs",
    ),
    "offloaded_modules": (
        "offload_modules",
        "tc:1273-1292, args:1222",
        _modules_exist,
        "the release and the model have these modules, attn_proj goes with core_attn, and "
        "Transformer Engine moves them",
    ),
    "offloaded_again": (
        "offload_modules",
        "tc:1269, 0.20 tc:2163",
        _modules_are_saved,
        "what is recomputed, or moved with its layer, is not there to be moved",
    ),
}
EXECUTION_RULES = tuple(_rule(name, *row) for name, row in _ROWS.items())
