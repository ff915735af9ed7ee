"""How the work of layers is done on a layout, what is recomputed, and the products' number format.

``execution_rules`` leaves out what does nothing on a layout; a search keeps to these rules in what
it chooses, and a launch is held to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter

from nest_megatron.cluster.records import Precision
from nest_megatron.documents import packaged
from nest_megatron.layout.cuda_graphs import kept_modules
from nest_megatron.layout.plan import MEGATRON_LM
from nest_megatron.layout.recompute import RecomputeModule
from nest_megatron.layout.rulebook.facts import (
    DEEPEP_RANKS,
    LaunchRequest,
    Release,
    Rule,
    matrix_sides,
    violations,
)
from nest_megatron.model.execution import (
    ContextTraffic,
    Execution,
    FlexBackend,
    GraphImpl,
    TokenDispatcher,
)
from nest_megatron.model.spec import TransformerSpec

#: Modules that ``--offload-modules`` takes outside experts, and inside.
_OFFLOADED = {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"}
_OFFLOADED_OF_EXPERTS = {"expert_fc1", "moe_act", "fused_group_mlp"}
_BACKENDS_SINCE = {
    FlexBackend.DEEPEP: (0, 0),
    FlexBackend.HYBRIDEP: (0, 16),
    FlexBackend.NCCLEP: (0, 19),
}
_OFFLOADED_SINCE = {"fused_group_mlp": (0, 19), "gdp_qkv": (0, 20)}
_OVERLAP, _FLEX = "overlap_moe_expert_parallel_comm", "moe_flex_dispatcher_backend"
_GRAPHS, _OFFLOADS = "cuda_graph_impl", "offload_modules"
#: Captured modules that read where sequences begin.
_MIXERS = frozenset({"attn", "mamba"})


def decisive_modules(spec: TransformerSpec, *, graphs: bool) -> frozenset[RecomputeModule]:
    """Modules whose recomputation a rule of this table may forbid in a model.

    Args:
        graphs: CUDA graphs may be among what is chosen, of whatever part of a layer.
    """
    found = frozenset({RecomputeModule.MOE, RecomputeModule.SHARED_EXPERTS})
    whole = Execution(cuda_graph_impl=GraphImpl.LOCAL)
    return found | kept_modules(spec, whole, None) if graphs else found


def _exchanges_whole_heads(
    spec: TransformerSpec, execution: Execution, context_split: tuple[int, int] | None
) -> bool:
    if context_split is None:
        return True
    tp, cp = context_split
    size = cp if execution.cp_comm_type is ContextTraffic.A2A else 1
    if execution.cp_comm_type is ContextTraffic.A2A_P2P:
        size = next(iter(execution.hierarchical_context_parallel_sizes), 1)
    groups = (max(1, count // tp) for count in spec.query_group_counts)
    return not any(count % size for count in (spec.num_attention_heads // tp, *groups))


def _offloads_what_is_there(spec: TransformerSpec, execution: Execution, release: Release) -> bool:
    modules = set(execution.offload_modules)
    known = _OFFLOADED | _OFFLOADED_OF_EXPERTS | {*_OFFLOADED_SINCE}
    known -= {name for name, since in _OFFLOADED_SINCE.items() if release < since}
    if not spec.is_moe:
        known -= _OFFLOADED_OF_EXPERTS
    return modules <= known and ("core_attn" in modules or "attn_proj" not in modules)


def _rule(
    id: str,
    when: str,
    source: str,
    holds: Callable[..., bool] | str,
    limit: str,
    *,
    until: str = "",
    framework: str = "",
) -> Rule:
    """A rule that looks where a field of ``Execution`` is not at Megatron's default.

    A field of experts says nothing in a model without.
    """
    fix = "Leave it out, or change the layout."
    about = attrgetter("is_moe") if when.startswith("moe_") else None
    return Rule(
        id,
        source,
        holds,
        when,
        limit,
        fix,
        when=when,
        until=until,
        framework=framework,
        about=about,
    )


FORMAT_RULES = (
    Rule(
        "fp8_shapes",
        "Transformer Engine assert_dim_for_fp8_exec (run)",
        "!uneven_sides",
        "tensor_model_parallel_size",
        "{precision} matrices have sides of whole {sides}s; found {uneven}",
        "Lower the tensor-parallel size, or train in 16 bits.",
        words={"sides": matrix_sides, "uneven": lambda uneven_sides: [*uneven_sides]},
        reason="sides of matrices divide by the number format's",
    ),
    Rule(
        "fp8_tokens",
        "Transformer Engine assert_dim_for_fp8_exec, MXFP8Quantizer.make_empty",
        lambda tokens_on_rank, token_multiple: not any(n % token_multiple for n in tokens_on_rank),
        "micro_batch_size",
        "{precision} matrices have a multiple of {token_multiple} tokens on each rank; found "
        "{tokens_on_rank}",
        "Use another micro batch, or fewer ranks that split a sequence.",
        reason="tokens on each rank divide by the number format's",
    ),
)

EXECUTION_RULES = (
    *(_rule(**row) for row in packaged(__package__, "layer_rules.json")),
    _rule(
        "deepep_ranks",
        _FLEX,
        "moe/fused_a2a.py:56, DeepEP's buffer.py (run)",
        lambda execution, has_deepep_buffers: (
            execution.moe_flex_dispatcher_backend is not FlexBackend.DEEPEP or has_deepep_buffers
        ),
        f"DeepEP has buffers for {', '.join(map(str, sorted(DEEPEP_RANKS)))} expert ranks",
    ),
    _rule(
        "flex_release",
        _FLEX,
        "0.16 tc:571; 0.20 tc:898, token_dispatcher.py:1853",
        lambda execution, release: (
            release >= _BACKENDS_SINCE[execution.moe_flex_dispatcher_backend]
        ),
        "Megatron-LM has HybridEP since 0.16, and NCCL EP since 0.19",
    ),
    _rule(
        "expert_overlap_dispatcher",
        _OVERLAP,
        "tc:1863-1869",
        lambda execution, one_expert_rank: (
            not one_expert_rank
            and execution.moe_token_dispatcher_type is not TokenDispatcher.ALLGATHER
        ),
        "it needs expert parallelism, and the alltoall or the flex dispatcher",
    ),
    _rule(
        "expert_overlap_pipeline",
        _OVERLAP,
        "tc:1857",
        lambda is_pipelined, is_interleaved: is_interleaved or not is_pipelined,
        "with a pipeline it needs virtual stages",
    ),
    _rule(
        "expert_overlap_recompute",
        _OVERLAP,
        "tc:1871, model_chunk_schedule_plan.py (run; 0.20 tc:3030)",
        lambda recomputes_layers, modules: (
            not (recomputes_layers or RecomputeModule.MOE in modules)
        ),
        "neither whole layers nor the module moe may be recomputed",
    ),
    _rule(
        "expert_overlap_precision",
        _OVERLAP,
        "tc:1882",
        lambda precision: precision is not Precision.FP32,
        "the model is in 16 bits",
    ),
    _rule(
        "expert_overlap_mtp",
        _OVERLAP,
        "tc:1889",
        lambda spec, is_pipelined, release: (
            spec.num_mtp_layers <= (0 if release in ((0, 16), (0, 17)) and not is_pipelined else 1)
        ),
        "the model has one MTP layer at most, on 0.16 and 0.17 only with a pipeline",
    ),
    _rule(
        "expert_overlap_graphs",
        _OVERLAP,
        "tc:1898",
        lambda execution, release: (
            {"moe", "mlp"}.isdisjoint(execution.cuda_graph_scope or {"mlp"})
            if execution.cuda_graph_impl is GraphImpl.TRANSFORMER_ENGINE
            else execution.cuda_graph_impl is GraphImpl.NONE or release >= (0, 18)
        ),
        "CUDA graphs may hold neither experts nor whole layers",
    ),
    _rule(
        "shared_overlap",
        "moe_shared_expert_overlap",
        "tc:1090, tc:1232, tc:1886",
        lambda spec, execution, modules, release: (
            not spec.moe_shared_expert_intermediate_size  # without them the flag says nothing
            or (
                (
                    execution.moe_token_dispatcher_type is TokenDispatcher.ALLTOALL
                    or (execution.is_node_limited and release >= (0, 18))
                )
                and not execution.overlap_moe_expert_parallel_comm
                and RecomputeModule.SHARED_EXPERTS not in modules
            )
        ),
        "tokens go by alltoall (by flex too since 0.18), the all-to-all overlaps nothing else, and "
        "shared experts are not recomputed",
    ),
    _rule(
        "context_levels",
        "cp_comm_type",
        "args:403-408",
        lambda execution: (
            execution.cp_comm_type is not ContextTraffic.A2A_P2P
            or len(execution.hierarchical_context_parallel_sizes) == 2
        ),
        "a2a+p2p needs two sizes that multiply to the context-parallel size",
    ),
    _rule(
        "context_sizes",
        "hierarchical_context_parallel_sizes",
        "args:405",
        lambda execution, cp: math.prod(execution.hierarchical_context_parallel_sizes) == cp,
        "they multiply to the context-parallel size",
    ),
    _rule(
        "context_heads",
        "cp_comm_type",
        "Transformer Engine context_parallel.py (run)",
        _exchanges_whole_heads,
        "ranks that exchange heads get whole heads and whole query groups each",
    ),
    Rule(
        "windows_under_cp",
        "Transformer Engine context_parallel.py attn_forward_func_with_cp (run)",
        lambda one_context_rank, execution: (
            one_context_rank
            or execution.cp_comm_type in (ContextTraffic.A2A, ContextTraffic.ALL_GATHER)
        ),
        "context_parallel_size",
        "sliding windows have no kernel with the ring exchange of keys and values",
        "Use 1, or cp_comm_type a2a.",
        about=lambda spec: spec.window_size is not None,
    ),
    Rule(
        "cuda_graph_recompute",
        "tc:1780-1822",
        lambda kept_modules, modules: modules.isdisjoint(kept_modules),
        "recompute_modules",
        "a captured CUDA graph cannot recompute it (a graph has no new random numbers for dropout "
        "or jitter)",
        "Leave them out, or change the graphs.",
        value=lambda kept_modules, modules: sorted(
            module.value for module in modules & kept_modules
        ),
        when=_GRAPHS,
    ),
    Rule(
        "cuda_graph_full_recompute",
        "tc:1780-1822",
        lambda execution, recomputes_layers: (
            not recomputes_layers or execution.cuda_graph_impl is GraphImpl.FULL_ITERATION
        ),
        "recompute_granularity",
        "{execution.cuda_graph_impl} CUDA graphs of layers hold no full recomputation; a graph of "
        "the full iteration does",
        "Free recompute, or change the graphs.",
        value=lambda: "full",
        when=_GRAPHS,
    ),
    _rule(
        "cuda_graph_recomputes",
        _GRAPHS,
        "0.15 tc:1397",
        lambda execution, modules: (
            not modules
            or (
                execution.cuda_graph_impl is GraphImpl.TRANSFORMER_ENGINE
                and execution.cuda_graph_scope == ("attn",)
                and modules.isdisjoint({"core_attn", "mla_up_proj"})
            )
        ),
        "before 0.16 modules are recomputed beside Transformer Engine's graphs of attention alone",
        until="0.15",
    ),
    Rule(
        # 0.16 and 0.17 pad experts for local graphs over several ranks
        "cuda_graph_experts",
        "args:1158",
        lambda execution, cuda_graphs, one_expert_rank: (
            one_expert_rank
            or (cuda_graphs is not None and cuda_graphs.pads_experts)
            or execution.cuda_graph_impl not in (GraphImpl.LOCAL, GraphImpl.FULL_ITERATION)
        ),
        "expert_model_parallel_size",
        "local CUDA graphs with expert parallelism need --moe-pad-experts-for-cuda-graph-inference",
        "Use 1, add that flag, or change the graphs.",
        when=_GRAPHS,
        framework=MEGATRON_LM,
        since="0.16",
        until="0.17",
    ),
    _rule(
        # the job's own graphs are its own matter, and the buffers of fixed sizes that 0.18 has for
        # experts in a graph of the step (moe_expert_rank_capacity_factor, moe_paged_stash)
        "graphs_experts",
        _GRAPHS,
        "tc:1762 (run)",
        lambda spec, execution, cuda_graphs, release: (
            cuda_graphs is not None
            or not spec.is_moe
            or "moe" not in (execution.cuda_graph_scope or {"moe"})
            or (release >= (0, 18) and execution.cuda_graph_impl is GraphImpl.FULL_ITERATION)
        ),
        "experts that nothing pads to a capacity get as many tokens as come, which no graph holds",
    ),
    Rule(
        "graphs_packs",
        "transformer_layer.py:1020, cuda_graphs.py:1256 (run)",
        lambda execution, cuda_graphs: (
            not (cuda_graphs and cuda_graphs.packs)
            or execution.scope_of_layer_graphs is None
            or _MIXERS.isdisjoint(execution.cuda_graph_scope or _MIXERS)
        ),
        _GRAPHS,
        "graphs hold neither attention nor Mamba layers of packed sequences, whose lengths change",
        "Leave it out, or name modules without these.",
        when=_GRAPHS,
        since="0.16",
    ),
    _rule(
        "graphs_modules",
        _GRAPHS,
        "0.15 args:1497",
        lambda execution: {*execution.cuda_graph_scope} <= {"attn"},
        "before 0.16 graphs hold whole layers, or attention alone",
        until="0.15",
    ),
    _rule(
        "offloaded_layers",
        "cpu_offloading_num_layers",
        "tc:1137-1151, tc:1722",
        lambda spec, execution, is_pipelined, recomputes_layers, modules, release: (
            release >= (0, 16)
            and execution.cpu_offloading_num_layers < spec.num_layers
            and execution.cuda_graph_impl is GraphImpl.NONE
            and not (is_pipelined or recomputes_layers or modules)
        ),
        "since 0.16 fewer layers move than there are, without pipeline, recomputation and graphs",
    ),
    _rule(
        "offloaded_modules",
        _OFFLOADS,
        "tc:1273-1292, args:1222",
        lambda spec, execution, is_local, release: (
            not is_local
            and release >= (0, 16)
            and _offloads_what_is_there(spec, execution, release)
        ),
        "the release and the model have these modules, attn_proj goes with core_attn, and "
        "Transformer Engine moves them",
    ),
    _rule(
        "offloaded_recomputed",
        _OFFLOADS,
        "tc:1269, 0.20 tc:2163",
        lambda execution, recomputes_layers, modules: (
            not (
                recomputes_layers
                or execution.cpu_offloading_num_layers > 0
                or (
                    RecomputeModule.MOE in modules
                    and not _OFFLOADED_OF_EXPERTS.isdisjoint(execution.offload_modules)
                )
            )
        ),
        "what is recomputed, or moved with its layer, is not there to be moved",
    ),
    _rule(
        "offloaded_graphs",
        _OFFLOADS,
        "0.18 tc:2351, 0.19 tc:2596",
        lambda execution, release: (
            release < (0, 18)
            or (
                "moe" not in execution.cuda_graph_scope
                and (
                    execution.cuda_graph_impl is not GraphImpl.LOCAL
                    or (
                        release >= (0, 19)
                        and execution.cuda_graph_scope != ()
                        and _OFFLOADED_OF_EXPERTS.issuperset(execution.offload_modules)
                    )
                )
            )
        ),
        "since 0.18 it goes with graphs of Transformer Engine without experts, and since 0.19 with "
        "local ones of named modules where it moves modules of experts alone",
    ),
)


def allows_execution(request: LaunchRequest) -> bool:
    """Whether Megatron accepts how the work of a request's layers is done."""
    return not any(violations(request.facts, EXECUTION_RULES))


_MODULES, _LEAVE_OUT = "recompute_modules", "Leave them out."
#: Modules that only Transformer Engine's layers recompute.
_OF_ENGINE = frozenset(
    {RecomputeModule.LAYERNORM, RecomputeModule.MOE_ACT, RecomputeModule.MLA_UP_PROJ}
)
#: Modules whose outputs delayed scaling keeps the largest values of.
_NOT_UNDER_DELAYED = frozenset({RecomputeModule.MOE_ACT, RecomputeModule.LAYERNORM})


def _of_engine(spec: TransformerSpec, modules: frozenset[RecomputeModule]) -> list[str]:
    biased = {RecomputeModule.MLP} if spec.add_bias_linear else frozenset()
    return sorted(module.value for module in modules & (_OF_ENGINE | biased))


RECOMPUTE_RULES = (
    Rule(
        "hybrid_recompute",
        "ssm/mamba_block.py (run, silent)",
        lambda spec, recomputes_layers: not (recomputes_layers and spec.hybrid_layer_pattern),
        "recompute_granularity",
        "MambaStack recomputes no whole layers before 0.18, and says nothing",
        "Use selective, or Megatron-LM 0.18.",
        value=lambda: "full",
        until="0.17",
    ),
    Rule(
        "recompute_mla_up_proj",
        "tc:1219",
        lambda spec, modules: (
            spec.multi_latent_attention or RecomputeModule.MLA_UP_PROJ not in modules
        ),
        _MODULES,
        "it needs multi_latent_attention",
        _LEAVE_OUT,
        value=lambda: ["mla_up_proj"],
    ),
    Rule(
        "recompute_moe_act",
        "tc:1214",
        lambda modules, moe_grouped_gemm: (
            moe_grouped_gemm or RecomputeModule.MOE_ACT not in modules
        ),
        _MODULES,
        "it needs moe_grouped_gemm",
        _LEAVE_OUT,
        value=lambda: ["moe_act"],
    ),
    Rule(
        "recompute_local",
        "tensor_parallel/random.py:592 (run)",
        lambda spec, modules, is_local: not (is_local and _of_engine(spec, modules)),
        _MODULES,
        "the local layers cannot recompute it",
        _LEAVE_OUT,
        value=_of_engine,
    ),
    Rule(
        "recompute_fp8",
        "tc:1242",
        lambda modules, precision, fp8_recipe: (
            modules.isdisjoint(_NOT_UNDER_DELAYED)
            or precision is not Precision.FP8
            or fp8_recipe != "delayed"
        ),
        _MODULES,
        "delayed scaling of fp8 cannot recompute it",
        _LEAVE_OUT,
        value=lambda modules: sorted(module.value for module in modules & _NOT_UNDER_DELAYED),
    ),
)


def allows_recompute(request: LaunchRequest) -> bool:
    """Whether Megatron accepts what a request recomputes, its execution apart."""
    return not any(violations(request.facts, RECOMPUTE_RULES))
