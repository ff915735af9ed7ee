"""Every rule of Megatron-LM that a plan could break, in order, one function a rule.

``RULES`` begins with the rules on degrees (``nest_megatron.parallel.degree_rules``); those here
need the partition, the recomputation, the number format or the release. Sources name Megatron-LM
core_v0.16.1; "(run)" marks what its own validation lets pass and only training reveals.
"""

from __future__ import annotations

from collections.abc import Collection

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.formats import format_of, uneven_sides
from nest_megatron.cost_model.traits import Fp8Recipe
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.parser import VERSIONS
from nest_megatron.integrations.megatron_lm.write import has_activation_flag
from nest_megatron.model.spec import ModelFamily
from nest_megatron.parallel.degree_rules import DEGREE_RULES, Rule, Violation, violations
from nest_megatron.parallel.execution_checks import EXECUTION_RULES
from nest_megatron.parallel.layout import layout_string, parse_layout
from nest_megatron.parallel.recompute import RecomputeMethod, RecomputeModule
from nest_megatron.parallel.rules import (
    LaunchRequest,
    allows_uniform_recompute,
    decoder_layers,
    mtp_chunk,
    mtp_chunk_fits,
)

_POSITION_TYPES = {
    "0.16.1": ("learned_absolute", "rope", "relative", "none"),
    "0.20": ("learned_absolute", "rope", "yarn", "relative", "none"),
}
_MODULES_OF_EXPERTS = {
    RecomputeModule.MOE,
    RecomputeModule.MOE_ACT,
    RecomputeModule.SHARED_EXPERTS,
}
#: Modules that only Transformer Engine's layers recompute.
MODULES_OF_ENGINE = {
    RecomputeModule.LAYERNORM,
    RecomputeModule.MOE_ACT,
    RecomputeModule.MLA_UP_PROJ,
}


def check(request: LaunchRequest) -> tuple[tuple[Rule, Violation], ...]:
    """Every rule that a request breaks, in the order of ``RULES``."""
    return tuple(violations(request, RULES))


def require_launchable(request: LaunchRequest, *, but: Collection[str] = ()) -> None:
    """Raise on the first broken rule.

    Args:
        but: names of rules that do not matter.

    Raises:
        UserInputError: naming what is wrong, its value, the limit and the fix.
    """
    for rule, found in violations(request, [rule for rule in RULES if rule.name not in but]):
        limit = f"{found.limit} (Megatron-LM {rule.source})"
        raise UserInputError(found.what, value=found.value, limit=limit, fix=found.fix)


def _version(request: LaunchRequest) -> Violation | None:
    if request.version in VERSIONS:
        return None
    return Violation(
        what="version",
        value=request.version,
        limit="its flags are not recorded",
        fix=f"Use one of {', '.join(VERSIONS)}.",
    )


def _activation(request: LaunchRequest) -> Violation | None:
    spec = request.spec
    if has_activation_flag(spec):
        return None
    return Violation(
        what="activation",
        value=(spec.activation, spec.gated_linear_unit),
        limit="Megatron-LM's command line has no flag for it",
        fix="Launch through NeMo or Megatron-Bridge.",
    )


def _position(request: LaunchRequest) -> Violation | None:
    kind = request.spec.position_embedding_type
    allowed = _POSITION_TYPES.get(request.version, ())
    if request.spec.num_mtp_layers:
        allowed = tuple(name for name in allowed if name in ("rope", "none"))
    if kind in allowed:
        return None
    return Violation(
        what="position_embedding_type",
        value=kind,
        limit=f"Megatron {request.version} takes {', '.join(allowed)} for this model",
        fix="Use rope.",
    )


def _positions_cover_sequence(request: LaunchRequest) -> Violation | None:
    spec = request.spec
    if (spec.max_position_embeddings or spec.seq_length) >= spec.seq_length:
        return None
    return Violation(
        what="max_position_embeddings",
        value=spec.max_position_embeddings,
        limit=f"it is at least seq_length ({spec.seq_length})",
        fix="Raise it, or shorten the sequence.",
    )


def _bert(request: LaunchRequest) -> Violation | None:
    spec = request.spec
    extras = spec.num_experts or spec.num_mtp_layers or spec.multi_latent_attention
    if spec.family is not ModelFamily.BERT or not extras:
        return None
    return Violation(
        what="family",
        value=spec.family.value,
        limit="BERT's layer specification has no experts, latent attention or MTP",
        fix="Use family gpt.",
    )


def _engine_for_context(request: LaunchRequest) -> Violation | None:
    local = request.transformer_impl == "local"
    if not local or request.dims.context_parallel_size == 1:
        return None
    return Violation(
        what="context_parallel_size",
        value=request.dims.context_parallel_size,
        limit="only Transformer Engine's attention splits the sequence",
        fix="Use transformer_impl transformer_engine.",
    )


def _engine_for_grouped_gemm(request: LaunchRequest) -> Violation | None:
    if not request.moe_grouped_gemm or request.transformer_impl != "local":
        return None
    return Violation(
        what="moe_grouped_gemm",
        value=True,
        limit="without Transformer Engine it needs the grouped_gemm package, in bf16",
        fix="Use transformer_impl transformer_engine.",
    )


def _partition_shape(request: LaunchRequest) -> Violation | None:
    partition, dims = request.partition, request.dims
    if partition is None:
        if dims.pipeline_model_parallel_size == 1:
            return None
        return _bad_partition(None, "a pipeline needs one")
    found = (
        partition.pipeline_model_parallel_size,
        partition.num_chunks,
        partition.boundaries[-1],
    )
    expected = (
        dims.pipeline_model_parallel_size,
        dims.num_chunks,
        len(request.spec.layer_kinds()),
    )
    if found == expected:
        return None
    return _bad_partition(found, f"ranks, virtual stages and units must be {expected}")


def _bad_partition(value: object, limit: str) -> Violation:
    return Violation(what="partition", value=value, limit=limit, fix="Divide the model again.")


def _layout(request: LaunchRequest) -> Violation | None:
    if request.partition is None or _partition_shape(request):
        return None
    text = layout_string(request.spec, request.partition)
    again = parse_layout(text, request.spec, request.dims.pipeline_model_parallel_size)
    if again == request.partition:
        return None
    return _bad_partition(text, "it has no layout string")


def _mtp_stage(request: LaunchRequest) -> Violation | None:
    if request.partition is None or _partition_shape(request):
        return None
    chunk = mtp_chunk(request.spec, request.partition)
    dims = request.dims
    pp, vpp = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
    if chunk is None or mtp_chunk_fits(chunk, pp, vpp):
        return None
    return Violation(
        what="partition",
        value=chunk,
        limit="MTP layers lie in the last virtual stage of their rank, and not on the first rank",
        fix="Move them into the last stage.",
    )


def _recompute_uniform(request: LaunchRequest) -> Violation | None:
    recompute = request.recompute
    if recompute.method is not RecomputeMethod.UNIFORM or recompute.num_layers is None:
        return None
    if request.partition is None:
        layers: tuple[int, ...] = (request.spec.num_layers,)
    else:
        layers = decoder_layers(request.spec, request.partition)
    if allows_uniform_recompute(layers, recompute.num_layers, request.version):
        return None
    return Violation(
        what="recompute_num_layers",
        value=recompute.num_layers,
        limit=f"uniform groups must divide every virtual stage's layers {sorted(set(layers))}",
        fix="Use 1, or the block method.",
    )


def _recompute_modules_exist(request: LaunchRequest) -> Violation | None:
    spec, modules = request.spec, set(request.recompute.modules)
    absent = set() if spec.is_moe else modules & _MODULES_OF_EXPERTS
    if not spec.moe_shared_expert_intermediate_size:
        absent |= modules & {RecomputeModule.SHARED_EXPERTS}
    if not spec.multi_latent_attention:
        absent |= modules & {RecomputeModule.MLA_UP_PROJ}
    if not absent:
        return None
    return _bad_modules(absent, "the model has no such module")


def _recompute_expert_activation(request: LaunchRequest) -> Violation | None:
    wanted = RecomputeModule.MOE_ACT in request.recompute.modules
    if not wanted or request.moe_grouped_gemm:
        return None
    return _bad_modules({RecomputeModule.MOE_ACT}, "it needs moe_grouped_gemm")


def _recompute_local(request: LaunchRequest) -> Violation | None:
    if request.transformer_impl != "local":
        return None
    modules = set(request.recompute.modules)
    broken = modules & MODULES_OF_ENGINE
    if request.spec.add_bias_linear:
        broken |= modules & {RecomputeModule.MLP}
    if not broken:
        return None
    return _bad_modules(broken, "the local layers cannot compute it again")


def _recompute_fp8(request: LaunchRequest) -> Violation | None:
    delayed = request.precision is Precision.FP8 and request.fp8_recipe == "delayed"
    broken = set(request.recompute.modules) & {RecomputeModule.MOE_ACT, RecomputeModule.LAYERNORM}
    if not delayed or not broken:
        return None
    return _bad_modules(broken, "delayed scaling of fp8 cannot compute it again")


def _recompute_graphed(request: LaunchRequest) -> Violation | None:
    graphs, recompute = request.cuda_graphs, request.recompute
    if graphs is None or graphs.allows_recompute(request.spec, recompute):
        return None
    if recompute.method is not None:
        return Violation(
            what="recompute_granularity",
            value="full",
            limit=f"{graphs.impl} CUDA graphs of layers hold no full recomputation; a graph of the "
            "full iteration does",
            fix="Free recompute, or change the graphs.",
        )
    forbidden = graphs.without_modules(request.spec).intersection(recompute.modules)
    return _bad_modules(set(forbidden), "a captured CUDA graph cannot compute it again")


def _experts_graphed(request: LaunchRequest) -> Violation | None:
    graphs, ep = request.cuda_graphs, request.dims.expert_model_parallel_size
    if graphs is None or graphs.allows_experts(ep, request.version):
        return None
    return Violation(
        what="expert_model_parallel_size",
        value=ep,
        limit="local CUDA graphs with expert parallelism need "
        "--moe-pad-experts-for-cuda-graph-inference",
        fix="Use 1, add that flag, or change the graphs.",
    )


def _bad_modules(modules: set[RecomputeModule], limit: str) -> Violation:
    return Violation(
        what="recompute_modules",
        value=sorted(module.value for module in modules),
        limit=limit,
        fix="Leave them out.",
    )


def _fp8_engine(request: LaunchRequest) -> Violation | None:
    if not request.precision.is_quantized or request.transformer_impl != "local":
        return None
    return Violation(
        what="fp8_format" if request.precision is Precision.FP8 else "fp4_format",
        value=request.precision.value,
        limit=f"only Transformer Engine computes in {request.precision}",
        fix="Use transformer_impl transformer_engine.",
    )


def _fp8_shapes(request: LaunchRequest) -> Violation | None:
    number_format = format_of(request.precision, Fp8Recipe(request.fp8_recipe))
    if number_format is None:
        return None
    uneven = list(uneven_sides(request.spec, request.dims, number_format))
    if not uneven:
        return None
    return Violation(
        what="tensor_model_parallel_size",
        value=request.dims.tensor_model_parallel_size,
        limit=f"{request.precision} matrices have sides of whole {number_format.sides}s; "
        f"found {uneven}",
        fix="Lower the tensor-parallel size.",
    )


_TC = "transformer_config.py"
LAUNCH_RULES: tuple[Rule, ...] = (
    Rule(name="known_version", source="arguments_data", check=_version),
    Rule(name="activation_flag", source="arguments.py:1334-1348", check=_activation),
    Rule(name="position_type", source="arguments.py:1231, :1645", check=_position),
    Rule(name="positions", source="arguments.py:833", check=_positions_cover_sequence),
    Rule(name="bert_layers", source="bert_layer_specs.py", check=_bert),
    Rule(name="cp_engine", source="dot_product_attention.py:58 (run)", check=_engine_for_context),
    Rule(name="grouped_gemm", source="moe/experts.py:81", check=_engine_for_grouped_gemm),
    Rule(name="partition_shape", source=f"arguments.py:520, {_TC}:1340", check=_partition_shape),
    Rule(name="layout_grammar", source="pipeline_parallel_layer_layout.py:281", check=_layout),
    Rule(name="mtp_stage", source="pipeline_parallel_layer_layout.py:128-146", check=_mtp_stage),
    Rule(
        name="recompute_uniform",
        source="transformer_block.py:532, :444 (run)",
        check=_recompute_uniform,
    ),
    Rule(name="recompute_modules", source=f"{_TC}:1219, modules", check=_recompute_modules_exist),
    Rule(name="recompute_moe_act", source=f"{_TC}:1214", check=_recompute_expert_activation),
    Rule(
        name="recompute_local", source="tensor_parallel/random.py:592 (run)", check=_recompute_local
    ),
    Rule(name="recompute_fp8", source=f"{_TC}:1242", check=_recompute_fp8),
    Rule(name="cuda_graph_recompute", source=f"{_TC}:1780-1822", check=_recompute_graphed),
    Rule(name="cuda_graph_experts", source="arguments.py:1158", check=_experts_graphed),
    Rule(name="fp8_engine", source="fp8_utils.py (run)", check=_fp8_engine),
    Rule(
        name="fp8_shapes",
        source="Transformer Engine assert_dim_for_fp8_exec (run)",
        check=_fp8_shapes,
    ),
)

RULES: tuple[Rule, ...] = (*DEGREE_RULES, *LAUNCH_RULES, *EXECUTION_RULES)
