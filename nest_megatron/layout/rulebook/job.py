"""What a framework builds and its command line states of a model, whatever the layout."""

from __future__ import annotations

from nest_megatron.cluster.records import Precision
from nest_megatron.layout.rulebook.facts import RELEASES, release_number
from nest_megatron.layout.rulebook.rule import Rule
from nest_megatron.model.spec import ModelFamily, TransformerSpec

#: The one framework with these rules; others state in a configuration what its flags cannot.
MEGATRON_LM = "Megatron-LM"
#: Flags of activations, by name and gating; ``None`` for the one without a flag.
ACTIVATION_FLAGS = {
    ("gelu", False): None,
    ("silu", True): "swiglu",
    ("squared_relu", False): "squared_relu",
    ("quick_gelu", True): "quick_geglu",
}
_ENGINE = "Use transformer_impl transformer_engine."


def has_activation_flag(spec: TransformerSpec) -> bool:
    """Whether Megatron-LM's command line can state the model's activation."""
    return (spec.activation, spec.gated_linear_unit) in ACTIVATION_FLAGS


def _position_types(spec: TransformerSpec, version: str) -> tuple[str, ...]:
    if version not in RELEASES:
        return ()
    if spec.num_mtp_layers:
        return ("rope", "none")
    newer = ("yarn",) if release_number(version) >= (0, 18) else ()
    return ("learned_absolute", "rope", *newer, "relative", "none")


JOB_RULES = (
    Rule(
        "known_version",
        "arguments_data",
        lambda version: version in RELEASES,
        "version",
        "its flags are not recorded",
        f"Use one of {', '.join(RELEASES)}.",
        framework=MEGATRON_LM,
    ),
    Rule(
        "activation_flag",
        "arguments.py:1334-1348",
        has_activation_flag,
        "activation",
        "Megatron-LM's command line has no flag for it",
        "Launch through NeMo or Megatron-Bridge.",
        value=lambda spec: (spec.activation, spec.gated_linear_unit),
        framework=MEGATRON_LM,
    ),
    Rule(
        "variant",
        "core/models/gpt/gpt_layer_specs.py",
        lambda spec: not spec.variant.differences(),
        "variant.{field}",
        "Megatron-LM's own layers do not have it",
        "Plan for a framework that builds it.",
        value=lambda spec: next(iter(spec.variant.differences().values())),
        words={"field": lambda spec: next(iter(spec.variant.differences()))},
        framework=MEGATRON_LM,
    ),
    Rule(
        "position_type",
        "arguments.py:1231, :1645",
        lambda spec, version: spec.position_embedding_type in _position_types(spec, version),
        "position_embedding_type",
        "Megatron {version} takes {types} for this model",
        "Use rope.",
        words={"types": lambda spec, version: ", ".join(_position_types(spec, version))},
        framework=MEGATRON_LM,
    ),
    Rule(
        "sparse_attention",
        "experimental_attention_variant_module_specs.py",
        lambda spec: spec.experimental_attention_variant != "dsa",
        "experimental_attention_variant",
        "Megatron-LM builds no such layers before 0.18",
        "Use Megatron-LM 0.18.",
        until="0.17",
    ),
    Rule(
        "positions",
        "arguments.py:833",
        lambda spec: not 0 < (spec.max_position_embeddings or 0) < spec.seq_length,
        "max_position_embeddings",
        "it is at least seq_length ({seq_length})",
        "Raise it, or shorten the sequence.",
        framework=MEGATRON_LM,
    ),
    Rule(
        "bert_layers",
        "bert_layer_specs.py",
        lambda spec: (
            spec.family is not ModelFamily.BERT
            or not (spec.num_experts or spec.num_mtp_layers or spec.multi_latent_attention)
        ),
        "family",
        "BERT's layer specification has no experts, latent attention or MTP",
        "Use family gpt.",
        value=lambda spec: spec.family.value,
    ),
    Rule(
        "grouped_gemm",
        "moe/experts.py:81",
        lambda moe_grouped_gemm, is_local: not (moe_grouped_gemm and is_local),
        "moe_grouped_gemm",
        "without Transformer Engine it needs the grouped_gemm package, in bf16",
        _ENGINE,
    ),
)

ENGINE_RULES = (
    Rule(
        "fp8_engine",
        "fp8_utils.py (run)",
        lambda precision, is_local: not (precision.is_quantized and is_local),
        "{number_format}_format",
        "only Transformer Engine computes in {precision}",
        _ENGINE,
        value=lambda precision: precision.value,
        words={"number_format": lambda precision: "fp8" if precision is Precision.FP8 else "fp4"},
    ),
)
