"""Every rule of Megatron-LM that a plan could break, in order, one function a rule.

``RULES`` begins with those that a search holds its candidates to: on degrees, on recomputation and
on execution (``nest_megatron.parallel``). Those here need the partition, the number format or the
command line. Sources name Megatron-LM core_v0.16.1; "(run)" marks what its own validation lets pass
and only training reveals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.formats import FP8_SHAPES
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.parser import VERSIONS
from nest_megatron.integrations.megatron_lm.write import has_activation_flag
from nest_megatron.model.spec import ModelFamily
from nest_megatron.parallel.degree_rules import DEGREE_RULES
from nest_megatron.parallel.execution_checks import EXECUTION_RULES
from nest_megatron.parallel.launch_rule import Rule, Violation, violations
from nest_megatron.parallel.recompute import RecomputeMethod
from nest_megatron.parallel.recompute_rules import RECOMPUTE_RULES
from nest_megatron.parallel.rules import (
    LaunchRequest,
    allows_uniform_recompute,
    cuts_anywhere,
    decoder_layers,
    mtp_chunk,
    mtp_chunk_fits,
)
from nest_megatron.parallel.stage_layout import (
    is_uneven_at_ends,
    is_uniform,
    layout_string,
    parse_layout,
)

_TC = "transformer_config.py"
_ENGINE = "Use transformer_impl transformer_engine."
_POSITION_TYPES = {
    "0.16.1": ("learned_absolute", "rope", "relative", "none"),
    "0.20": ("learned_absolute", "rope", "yarn", "relative", "none"),
}
_launch_rules: list[Rule] = []


def check(request: LaunchRequest, *, but: Collection[str] = ()) -> Iterator[tuple[Rule, Violation]]:
    """Rules that a request breaks, in the order of ``RULES``, but those that ``but`` names."""
    return violations(request, (rule for rule in RULES if rule.name not in but))


def first_broken(request: LaunchRequest, *, but: Collection[str] = ()) -> str:
    """The first rule that a request breaks, in words with its source; empty for none."""
    broken = check(request, but=but)
    return next((f"{v.what} = {v.value}: {v.limit} ({r.source})" for r, v in broken), "")


def require_launchable(request: LaunchRequest, *, but: Collection[str] = ()) -> None:
    """Raise on the first broken rule, those of the names in ``but`` apart."""
    for rule, found in check(request, but=but):
        limit = f"{found.limit} (Megatron-LM {rule.source})"
        raise UserInputError(found.what, value=found.value, limit=limit, fix=found.fix)


_Breaches = Callable[[LaunchRequest], Iterator[Violation]]


def _rule(name: str, source: str) -> Callable[[_Breaches], _Breaches]:
    """Make the next rule of a function that says how a request breaks it."""

    def add(breaches: _Breaches) -> _Breaches:
        def first(request: LaunchRequest) -> Violation | None:
            return next(breaches(request), None)

        _launch_rules.append(Rule(name=name, source=source, check=first))
        return breaches

    return add


def _broken(what: str, value: object, limit: str, fix: str) -> Violation:
    return Violation(what=what, value=value, limit=limit, fix=fix)


@_rule("known_version", "arguments_data")
def _version(request: LaunchRequest) -> Iterator[Violation]:
    if request.version not in VERSIONS:
        fix = f"Use one of {', '.join(VERSIONS)}."
        yield _broken("version", request.version, "its flags are not recorded", fix)


@_rule("activation_flag", "arguments.py:1334-1348")
def _activation(request: LaunchRequest) -> Iterator[Violation]:
    spec = request.spec
    if not has_activation_flag(spec):
        yield _broken(
            "activation",
            (spec.activation, spec.gated_linear_unit),
            "Megatron-LM's command line has no flag for it",
            "Launch through NeMo or Megatron-Bridge.",
        )


@_rule("variant", "core/models/gpt/gpt_layer_specs.py")
def _variant(request: LaunchRequest) -> Iterator[Violation]:
    for name, value in request.spec.variant.differences().items():
        limit = "Megatron-LM's own layers do not have it"
        yield _broken(f"variant.{name}", value, limit, "Plan for a framework that builds it.")


@_rule("position_type", "arguments.py:1231, :1645")
def _position(request: LaunchRequest) -> Iterator[Violation]:
    kind = request.spec.position_embedding_type
    allowed = _POSITION_TYPES.get(request.version, ())
    if request.spec.num_mtp_layers:
        allowed = tuple(name for name in allowed if name in ("rope", "none"))
    if kind not in allowed:
        limit = f"Megatron {request.version} takes {', '.join(allowed)} for this model"
        yield _broken("position_embedding_type", kind, limit, "Use rope.")


@_rule("sparse_attention", "experimental_attention_variant_module_specs.py")
def _sparse_attention(request: LaunchRequest) -> Iterator[Violation]:
    variant = request.spec.experimental_attention_variant
    if variant == "dsa" and request.is_0_16:
        limit = "Megatron-LM 0.16.1 builds no such layers"
        yield _broken("experimental_attention_variant", variant, limit, "Use Megatron-LM 0.20.")


@_rule("positions", "arguments.py:833")
def _positions_cover_sequence(request: LaunchRequest) -> Iterator[Violation]:
    positions, length = request.spec.max_position_embeddings, request.spec.seq_length
    if positions and positions < length:
        limit, fix = f"it is at least seq_length ({length})", "Raise it, or shorten the sequence."
        yield _broken("max_position_embeddings", positions, limit, fix)


@_rule("bert_layers", "bert_layer_specs.py")
def _bert(request: LaunchRequest) -> Iterator[Violation]:
    spec = request.spec
    extras = spec.num_experts or spec.num_mtp_layers or spec.multi_latent_attention
    if spec.family is ModelFamily.BERT and extras:
        limit = "BERT's layer specification has no experts, latent attention or MTP"
        yield _broken("family", spec.family.value, limit, "Use family gpt.")


@_rule("grouped_gemm", "moe/experts.py:81")
def _engine_for_grouped_gemm(request: LaunchRequest) -> Iterator[Violation]:
    if request.moe_grouped_gemm and request.transformer_impl == "local":
        limit = "without Transformer Engine it needs the grouped_gemm package, in bf16"
        yield _broken("moe_grouped_gemm", True, limit, _ENGINE)


@_rule("partition_shape", f"arguments.py:520, {_TC}:1340")
def _partition_shape(request: LaunchRequest) -> Iterator[Violation]:
    partition, dims = request.partition, request.dims
    pp = dims.pipeline_model_parallel_size
    if partition is None:
        if pp > 1:
            yield _bad_partition(None, "a pipeline needs one")
        return
    ranks, units = partition.pipeline_model_parallel_size, partition.boundaries[-1]
    found = (ranks, partition.num_chunks, units)
    expected = (pp, dims.num_chunks, request.spec.num_units)
    if found != expected:
        yield _bad_partition(found, f"ranks, virtual stages and units must be {expected}")


def _bad_partition(value: object, limit: str, fix: str = "Divide the model again.") -> Violation:
    return _broken("partition", value, limit, fix)


def _has_shape(request: LaunchRequest) -> bool:
    return next(_partition_shape(request), None) is None


@_rule("encoder_stages", "pretrain_vlm.py model_provider")
def _encoder_stages(request: LaunchRequest) -> Iterator[Violation]:
    partition = request.partition
    if not request.spec.has_split_encoder or partition is None or not _has_shape(request):
        return
    if not is_uniform(request.spec, partition):
        limit = "a layout would reach the encoder's configuration, which is a copy"
        yield _bad_partition(layout_string(request.spec, partition), limit, "Use even stages.")


@_rule("layout_grammar", "pipeline_parallel_layer_layout.py:281")
def _layout(request: LaunchRequest) -> Iterator[Violation]:
    spec, partition = request.spec, request.partition
    if partition is not None and _has_shape(request):
        text = layout_string(spec, partition)
        if parse_layout(text, spec, partition.pipeline_model_parallel_size) != partition:
            yield _bad_partition(text, "it has no layout string")


@_rule("mtp_stage", "pipeline_parallel_layer_layout.py:128-146")
def _mtp_stage(request: LaunchRequest) -> Iterator[Violation]:
    dims, partition = request.dims, request.partition
    if partition is None or not _has_shape(request):
        return
    chunk = mtp_chunk(request.spec, partition)
    pp, vpp = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
    hybrid = bool(request.spec.hybrid_layer_pattern)
    if chunk is not None and not mtp_chunk_fits(chunk, pp, vpp, hybrid=hybrid):
        limit = "MTP layers lie in the last virtual stage of their rank, and not on the first rank"
        yield _bad_partition(chunk, limit, "Move them into the last stage.")


@_rule("hybrid_stages", "ssm/mamba_block.py")
def _hybrid_stages(request: LaunchRequest) -> Iterator[Violation]:
    spec, partition = request.spec, request.partition
    if partition is None or cuts_anywhere(spec, request.version) or not _has_shape(request):
        return
    if not (is_uniform(spec, partition) or is_uneven_at_ends(spec, partition)):
        limit = "a hybrid model of 0.16.1 has as many layers on each rank between first and last"
        yield _bad_partition(layout_string(spec, partition), limit, "Use even stages, or 0.20.")


@_rule("recompute_uniform", "transformer_block.py:532, :444 (run)")
def _recompute_uniform(request: LaunchRequest) -> Iterator[Violation]:
    recompute, partition = request.recompute, request.partition
    if recompute.method is not RecomputeMethod.UNIFORM or recompute.num_layers is None:
        return
    layers: tuple[int, ...] = (request.spec.num_layers,)
    if request.spec.encoder_num_layers is not None:
        layers += (request.spec.encoder_num_layers,)
    elif partition is not None:
        layers = decoder_layers(request.spec, partition)
    if not allows_uniform_recompute(layers, recompute.num_layers, request.version):
        limit = f"uniform groups must divide every virtual stage's layers {sorted(set(layers))}"
        fix = "Use 1, or the block method."
        yield _broken("recompute_num_layers", recompute.num_layers, limit, fix)


@_rule("fp8_engine", "fp8_utils.py (run)")
def _fp8_engine(request: LaunchRequest) -> Iterator[Violation]:
    precision = request.precision
    if precision.is_quantized and request.transformer_impl == "local":
        what = "fp8_format" if precision is Precision.FP8 else "fp4_format"
        limit = f"only Transformer Engine computes in {precision}"
        yield _broken(what, precision.value, limit, _ENGINE)


RULES: tuple[Rule, ...] = (
    *DEGREE_RULES,
    *RECOMPUTE_RULES,
    FP8_SHAPES,
    *_launch_rules,
    *EXECUTION_RULES,
)
