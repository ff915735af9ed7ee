"""What Megatron accepts of an ``Execution`` on a layout, rule by rule, each with its words.

``execution_rules`` leaves out what a layout has no room for; a search keeps to these rules in what
it chooses, and a launch is held to them.

Source lines are those of Megatron-LM core_v0.16.1: ``args`` is ``megatron/training/arguments.py``,
``tc`` ``megatron/core/transformer/transformer_config.py``; "(run)" is what its own validation lets
pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from nest_megatron.cluster.records import Precision
from nest_megatron.model.execution import (
    PLAIN,
    ContextTraffic,
    FlexBackend,
    GraphImpl,
    TokenDispatcher,
)
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.cuda_graphs import CudaGraphs
from nest_megatron.parallel.launch_rule import Rule, Violation, violations
from nest_megatron.parallel.recompute import RecomputeGranularity, RecomputeModule
from nest_megatron.parallel.rules import LaunchRequest

#: Modules that ``--offload-modules`` takes outside experts, and inside.
_OFFLOADED = {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"}
_OFFLOADED_OF_EXPERTS = {"expert_fc1", "moe_act", "fused_group_mlp"}
_OF_0_20 = {"fused_group_mlp", "gdp_qkv"}
#: Groups that DeepEP has buffer sizes for. Source: deepseek-ai/DeepEP, deep_ep/buffer.py
#: (``Buffer.get_dispatch_config``); its first releases lack 48 and 96.
DEEPEP_RANKS = frozenset({2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160})

_OVERLAP = "overlap_moe_expert_parallel_comm"
#: In the order of this module.
EXECUTION_RULES: list[Rule] = []
_Limits = Callable[[LaunchRequest], Iterator[str | Violation]]


def allows_execution(request: LaunchRequest) -> bool:
    """Whether Megatron accepts how a request's layers are carried out."""
    return not any(violations(request, EXECUTION_RULES))


def decisive_modules(spec: TransformerSpec, *, graphs: bool) -> frozenset[RecomputeModule]:
    """Modules whose recomputation a rule of this module may forbid in a model.

    Args:
        graphs: CUDA graphs may be among what is chosen, of whatever part of a layer.
    """
    found = frozenset({RecomputeModule.MOE, RecomputeModule.SHARED_EXPERTS})
    whole = CudaGraphs(impl=GraphImpl.TRANSFORMER_ENGINE.value)
    return found | whole.without_modules(spec) if graphs else found


def _rule(name: str, field: str, source: str) -> Callable[[_Limits], _Limits]:
    """Makes a rule of a function that says what limit a request breaks, or which other field does.

    It is asked only where the field is not at Megatron's default.
    """

    def add(limits: _Limits) -> _Limits:
        def check(request: LaunchRequest) -> Violation | None:
            value = getattr(request.execution, field)
            if value == getattr(PLAIN, field):
                return None
            found = next(limits(request), None)
            if not isinstance(found, str):
                return found
            fix = "Leave it out, or change the layout."
            return Violation(what=field, value=value, limit=found, fix=fix)

        EXECUTION_RULES.append(Rule(name=name, source=source, check=check))
        return limits

    return add


def _is_local(request: LaunchRequest) -> bool:
    return request.transformer_impl == "local"


def _recomputes_layers(request: LaunchRequest) -> bool:
    return request.recompute.granularity is RecomputeGranularity.FULL


@_rule("permute_fusion", "moe_permute_fusion", "moe/moe_utils.py (run)")
def _permute_fusion(request: LaunchRequest) -> Iterator[str]:
    if _is_local(request):
        yield "only Transformer Engine sorts tokens in one kernel"


@_rule("router_fusion", "moe_router_fusion", "moe/moe_utils.py (run)")
def _router_fusion(request: LaunchRequest) -> Iterator[str]:
    if _is_local(request):
        yield "only Transformer Engine has the router in one kernel"


@_rule("flex_group", "moe_flex_dispatcher_backend", "moe/token_dispatcher.py:1346")
def _flex_group(request: LaunchRequest) -> Iterator[str]:
    if request.spec.is_moe and request.dims.expert_ranks == 1:
        yield "the flex dispatcher sends tokens among several ranks (etp * ep above 1)"


@_rule(
    "deepep_ranks",
    "moe_flex_dispatcher_backend",
    "moe/fused_a2a.py:56, DeepEP's buffer.py (run)",
)
def _deepep_ranks(request: LaunchRequest) -> Iterator[str]:
    deepep = request.execution.moe_flex_dispatcher_backend is FlexBackend.DEEPEP
    if deepep and request.dims.expert_ranks not in DEEPEP_RANKS:
        yield f"DeepEP has buffers for {', '.join(map(str, sorted(DEEPEP_RANKS)))} expert ranks"


@_rule("ncclep_release", "moe_flex_dispatcher_backend", "0.20 tc:898, token_dispatcher.py:1853")
def _ncclep_release(request: LaunchRequest) -> Iterator[str]:
    backend = request.execution.moe_flex_dispatcher_backend
    if request.is_0_16 and backend is FlexBackend.NCCLEP:
        yield "0.16.1 has no NCCL EP"


@_rule("expert_overlap_dispatcher", _OVERLAP, "tc:1863-1869")
def _overlap_dispatcher(request: LaunchRequest) -> Iterator[str]:
    gathers = request.execution.moe_token_dispatcher_type is TokenDispatcher.ALLGATHER
    ep = request.dims.expert_model_parallel_size
    if gathers or ep == 1 or not request.spec.is_moe:
        yield "it needs expert parallelism, and the alltoall or the flex dispatcher"


@_rule("expert_overlap_pipeline", _OVERLAP, "tc:1857")
def _overlap_pipeline(request: LaunchRequest) -> Iterator[str]:
    dims = request.dims
    if dims.pipeline_model_parallel_size > 1 and dims.virtual_pipeline_model_parallel_size == 1:
        yield "with a pipeline it needs virtual stages"


@_rule(
    "expert_overlap_recompute",
    _OVERLAP,
    "tc:1871, model_chunk_schedule_plan.py (run; 0.20 tc:3030)",
)
def _overlap_recompute(request: LaunchRequest) -> Iterator[str]:
    if _recomputes_layers(request) or RecomputeModule.MOE in request.recompute.modules:
        yield "neither whole layers nor the module moe may be recomputed"


@_rule("expert_overlap_precision", _OVERLAP, "tc:1882")
def _overlap_precision(request: LaunchRequest) -> Iterator[str]:
    if request.precision is Precision.FP32:
        yield "the model is in 16 bits"


@_rule("expert_overlap_mtp", _OVERLAP, "tc:1889")
def _overlap_mtp(request: LaunchRequest) -> Iterator[str]:
    alone = request.is_0_16 and request.dims.pipeline_model_parallel_size == 1
    if request.spec.num_mtp_layers > (0 if alone else 1):
        yield "the model has one MTP layer at most, on 0.16.1 only with a pipeline"


@_rule("expert_overlap_graphs", _OVERLAP, "tc:1898")
def _overlap_graphs(request: LaunchRequest) -> Iterator[str]:
    impl, scope = request.execution.cuda_graph_impl, set(request.execution.cuda_graph_scope)
    allowed = impl is GraphImpl.NONE or not request.is_0_16
    if impl is GraphImpl.TRANSFORMER_ENGINE:
        allowed = bool(scope) and not {"moe", "mlp"} & scope
    if not allowed:
        yield "CUDA graphs may hold neither experts nor whole layers"


@_rule("expert_overlap_fsdp", _OVERLAP, "model_chunk_schedule_plan.py (run)")
def _overlap_fsdp(request: LaunchRequest) -> Iterator[str]:
    if request.is_0_16 and request.zero.is_fsdp:
        yield "0.16.1's schedule passes by the layers' forward, where Megatron-FSDP gathers weights"


@_rule("delayed_wgrad", "delay_wgrad_compute", "args:1210")
def _delayed_wgrad(request: LaunchRequest) -> Iterator[str]:
    if _is_local(request):
        yield "only Transformer Engine puts weight gradients off"


@_rule("shared_overlap", "moe_shared_expert_overlap", "tc:1090, tc:1232, tc:1886")
def _shared_overlap(request: LaunchRequest) -> Iterator[str]:
    how = request.execution
    kinds = (TokenDispatcher.ALLTOALL, TokenDispatcher.FLEX)[: 1 if request.is_0_16 else 2]
    overlaps = (
        how.moe_token_dispatcher_type in kinds
        and not how.overlap_moe_expert_parallel_comm
        and RecomputeModule.SHARED_EXPERTS not in request.recompute.modules
    )
    # without shared experts the flag says nothing
    if request.spec.moe_shared_expert_intermediate_size and not overlaps:
        yield (
            "tokens go by alltoall (by flex too on 0.20), the all-to-all overlaps nothing else, "
            "and shared experts are not recomputed"
        )


@_rule("tensor_overlap", "tp_comm_overlap", "args:915, training/initialize.py:270")
def _tensor_overlap(request: LaunchRequest) -> Iterator[str]:
    split = request.dims.tensor_model_parallel_size > 1
    if _is_local(request) or (split and not request.sequence_parallel):
        yield "it needs sequence parallelism and Transformer Engine"


def _levels_match(request: LaunchRequest) -> bool:
    sizes = request.execution.hierarchical_context_parallel_sizes
    return math.prod(sizes) == request.dims.context_parallel_size


@_rule("context_levels", "cp_comm_type", "args:403-408")
def _context_levels(request: LaunchRequest) -> Iterator[str]:
    how = request.execution
    two = len(how.hierarchical_context_parallel_sizes) == 2
    if how.cp_comm_type is ContextTraffic.A2A_P2P and not (two and _levels_match(request)):
        yield "a2a+p2p needs two sizes that multiply to the context-parallel size"


@_rule("context_sizes", "hierarchical_context_parallel_sizes", "args:405")
def _context_sizes(request: LaunchRequest) -> Iterator[str]:
    if not _levels_match(request):
        yield "they multiply to the context-parallel size"


@_rule("context_heads", "cp_comm_type", "Transformer Engine context_parallel.py (run)")
def _context_heads(request: LaunchRequest) -> Iterator[str]:
    how, tp = request.execution, request.dims.tensor_model_parallel_size
    size = request.dims.context_parallel_size if how.cp_comm_type is ContextTraffic.A2A else 1
    if how.cp_comm_type is ContextTraffic.A2A_P2P:
        levels = how.hierarchical_context_parallel_sizes
        size = levels[0] if levels else 1
    heads = request.spec.num_attention_heads // tp
    groups = (max(1, count // tp) for count in request.spec.query_group_counts)
    if heads % size or any(count % size for count in groups):
        yield "ranks that exchange heads get whole heads and whole query groups each"


@_rule("cuda_graph_recompute", "cuda_graph_impl", "tc:1780-1822")
def _graphs_recompute(request: LaunchRequest) -> Iterator[Violation]:
    graphs, recompute = request.captured, request.recompute
    if graphs is None or graphs.allows_recompute(request.spec, recompute):
        return
    if recompute.method is None:
        forbidden = graphs.without_modules(request.spec).intersection(recompute.modules)
        yield Violation(
            what="recompute_modules",
            value=sorted(module.value for module in forbidden),
            limit="a captured CUDA graph cannot recompute it (a graph has no new random numbers "
            "for dropout or jitter)",
            fix="Leave them out, or change the graphs.",
        )
        return
    yield Violation(
        what="recompute_granularity",
        value="full",
        limit=f"{graphs.impl} CUDA graphs of layers hold no full recomputation; a graph of the "
        "full iteration does",
        fix="Free recompute, or change the graphs.",
    )


@_rule("cuda_graph_experts", "cuda_graph_impl", "args:1158")
def _graphs_ranks(request: LaunchRequest) -> Iterator[Violation]:
    graphs, ep = request.captured, request.dims.expert_model_parallel_size
    if graphs is not None and not graphs.allows_experts(ep, request.version):
        yield Violation(
            what="expert_model_parallel_size",
            value=ep,
            limit="local CUDA graphs with expert parallelism need "
            "--moe-pad-experts-for-cuda-graph-inference",
            fix="Use 1, add that flag, or change the graphs.",
        )


@_rule("graphs_experts", "cuda_graph_impl", "tc:1762 (run)")
def _graphs_experts(request: LaunchRequest) -> Iterator[str]:
    how = request.execution
    scope, whole_step = how.cuda_graph_scope, how.cuda_graph_impl is GraphImpl.FULL_ITERATION
    # the job's own graphs are its own matter, and the buffers of fixed sizes that 0.20 has for
    # experts in a graph of the step (moe_expert_rank_capacity_factor, moe_paged_stash)
    planned = request.cuda_graphs is None and (request.is_0_16 or not whole_step)
    if planned and request.spec.is_moe and (not scope or "moe" in scope):
        yield "experts without a capacity get as many tokens as come, which no graph holds"


@_rule("offloaded_layers", "cpu_offloading_num_layers", "tc:1137-1151, tc:1722")
def _offloaded_layers(request: LaunchRequest) -> Iterator[str]:
    how = request.execution
    if (
        how.cpu_offloading_num_layers >= request.spec.num_layers
        or how.cuda_graph_impl is not GraphImpl.NONE
        or request.dims.pipeline_model_parallel_size > 1
        or request.recompute.granularity is not RecomputeGranularity.NONE
    ):
        yield "fewer layers move than there are, without a pipeline, recomputation and CUDA graphs"


@_rule("offloaded_modules", "offload_modules", "tc:1273-1292, args:1222")
def _offloaded_modules(request: LaunchRequest) -> Iterator[str]:
    modules = set(request.execution.offload_modules)
    known = _OFFLOADED | _OFFLOADED_OF_EXPERTS | _OF_0_20
    known -= _OF_0_20 if request.is_0_16 else set()
    known -= set() if request.spec.is_moe else _OFFLOADED_OF_EXPERTS
    alone = "attn_proj" in modules and "core_attn" not in modules
    if alone or _is_local(request) or not modules <= known:
        yield (
            "the release and the model have these modules, attn_proj goes with core_attn, and "
            "Transformer Engine moves them"
        )


@_rule("offloaded_recomputed", "offload_modules", "tc:1269, 0.20 tc:2163")
def _offloaded_twice(request: LaunchRequest) -> Iterator[str]:
    modules, recomputed = set(request.execution.offload_modules), request.recompute.modules
    inside = RecomputeModule.MOE in recomputed and modules & _OFFLOADED_OF_EXPERTS
    whole = request.execution.cpu_offloading_num_layers > 0
    if _recomputes_layers(request) or whole or inside:
        yield "what is recomputed, or moved with its layer, is not there to be moved"
