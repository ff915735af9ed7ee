"""From a plain mapping, or from Megatron's arguments, to a ``TransformerSpec``.

Source: ``megatron.training.arguments.validate_args`` and ``core_transformer_config_from_args``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from nest_megatron.errors import UnplannableModelError, UserInputError, nearest
from nest_megatron.model.layer_pattern import moe_layer_pattern, read_frequency
from nest_megatron.model.spec import (
    DELTA_NET_SIZES,
    LATENT_SIZES,
    MAMBA_SIZES,
    ModelFamily,
    TransformerSpec,
)
from nest_megatron.plain import Source, from_plain, without_unit

#: Megatron's defaults where a ``TransformerSpec`` has others.
MEGATRON_DEFAULTS: Mapping[str, object] = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "untie_embeddings_and_output_weights": False,
}
#: Arguments that are fields of a ``TransformerSpec`` as they are.
SAME_NAMES = (
    "kv_channels",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "normalization",
    "layernorm_epsilon",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "qk_l2_norm",
    "softmax_type",
    "hidden_dropout",
    "attention_dropout",
    "untie_embeddings_and_output_weights",
    "multi_latent_attention",
    *LATENT_SIZES,
)
#: Sizes of Mamba layers and gated delta nets, gates; ``None`` is Megatron's default.
LINEAR_NAMES = ("attention_output_gate", *MAMBA_SIZES, *DELTA_NET_SIZES)
#: Those of a model with experts, beside their number and which layers have them.
EXPERT_NAMES = (
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_shared_expert_intermediate_size",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_gate",
    "moe_latent_size",
)


def spec_from_arguments(
    values: Mapping[str, Any], spelled: Callable[[str], str], **fields: Any
) -> TransformerSpec:
    """The shape that Megatron gives a model.

    Args:
        values: Megatron's arguments by destination; what is absent or ``None`` is not given.
        spelled: how the user writes an argument, for messages.
        fields: of the spec, at least those without a default.

    Raises:
        UnplannableModelError: for layers that alternate in another way than Megatron's number says.
        UserInputError: if the shape is impossible.
    """
    found = {**MEGATRON_DEFAULTS, **_chosen_values(values, (*SAME_NAMES, *LINEAR_NAMES))}
    inner = 4 * fields["hidden_size"]
    if values.get("swiglu"):  # two thirds of it, in whole 64s
        inner = inner * 2 // 3 // 64 * 64
    centered = values.get("layernorm_zero_centered_gamma") or values.get("apply_layernorm_1p")
    found |= {
        "ffn_hidden_size": values.get("ffn_hidden_size") or inner,
        "num_attention_heads": values.get("num_attention_heads"),
        "apply_layernorm_1p": bool(centered),
        "mtp_num_layers": values.get("mtp_num_layers") or None,
        **_variant(values, spelled),
    }
    window = values.get("window_size")
    if window and window[0] >= 0:  # Megatron counts the tokens to the left of a token
        found["window_size"] = int(window[0]) + 1
        found["window_attn_skip_freq"] = _frequency(values.get("window_attn_skip_freq"))
    hybrid = fields.get("hybrid_layer_pattern")
    if values.get("group_query_attention"):
        found["num_query_groups"] = values.get("num_query_groups")
    if values.get("num_experts"):
        found |= _chosen_values(values, ("num_experts", *EXPERT_NAMES))
        frequency = values.get("moe_layer_freq")
        frequency = 1 if frequency is None else frequency
        flags = () if hybrid else moe_layer_pattern(frequency, fields["num_layers"])
        found["moe_layer_pattern"] = flags
    return TransformerSpec(**{**found, **fields})


def _variant(values: Mapping[str, Any], spelled: Callable[[str], str]) -> dict[str, Any]:
    """Layers of linear attention (0.20 spells the variant ``gdn``), and those without rotation."""
    variant = values.get("experimental_attention_variant")
    found: dict[str, Any] = {}
    if variant:
        if str(variant) not in _VARIANTS:
            raise UnplannableModelError(
                spelled("experimental_attention_variant"),
                variant,
                f"of the variants {', '.join(_VARIANTS)} are supported",
                "Launch this job without nest.",
            )
        found["experimental_attention_variant"] = _VARIANTS[str(variant)]
        found["linear_attention_freq"] = _frequency(values.get("linear_attention_freq"))
        if variant == "dsa":
            found |= {**_SPARSE_DEFAULTS, **_chosen_values(values, tuple(_SPARSE_DEFAULTS))}
    if values.get("no_rope_freq"):
        found["no_rope_freq"] = _frequency(values["no_rope_freq"])
    return found


_VARIANTS = {"gated_delta_net": "gated_delta_net", "gdn": "gated_delta_net", "dsa": "dsa"}
#: Sizes of sparse attention's indexer; Megatron has no defaults for them.
_SPARSE_DEFAULTS = dict.fromkeys(
    ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
)


def _frequency(value: Any) -> int | tuple[int, ...] | None:
    """A period, or one flag for each layer."""
    value = read_frequency(value) if isinstance(value, str) else value
    return tuple(value) if isinstance(value, list | tuple) else value


def _chosen_values(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: values[name] for name in names if values.get(name) is not None}


#: Values that the cost model knows how to price.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "family": tuple(ModelFamily),
    "position_embedding_type": ("rope", "yarn", "learned_absolute", "none", "alibi"),
    "normalization": ("RMSNorm", "LayerNorm"),
    "activation": ("gelu", "silu", "relu", "squared_relu", "quick_gelu"),
    "softmax_type": ("vanilla", "learnable"),
}
_MAY_BE_ZERO = ("mtp_num_layers", "hidden_dropout", "attention_dropout")
_AT_MOST_ONE = ("rotary_percent", "hidden_dropout", "attention_dropout")
#: What the settings ``peft.*`` say; a plan file has it, too.
_NO_KEY = "adapters"
_SOURCE = Source(
    correct="Correct the model's description.",
    add="Add {name} to the model's description.",
    has_units=True,
)


def known_keys() -> tuple[str, ...]:
    """Fields of ``TransformerSpec``, the pattern of expert layers as ``moe_layer_freq``."""
    names = (field.name for field in dataclasses.fields(TransformerSpec) if field.name != _NO_KEY)
    return tuple("moe_layer_freq" if name == "moe_layer_pattern" else name for name in names)


def spec_from_mapping(mapping: Mapping[str, object]) -> TransformerSpec:
    """Check a model description and build its spec.

    Args:
        mapping: one value for each field of ``TransformerSpec`` that differs from its default, with
            ``moe_layer_freq`` in the place of ``moe_layer_pattern``. Numbers may have a prefix
            (``128Ki``).

    Raises:
        UserInputError: for an unknown or missing key, a value of the wrong type (numbers written as
            text without a prefix included), a number that is NaN, infinite or not positive, or an
            impossible shape.
    """
    model = f"model {mapping.get('name', '(no name)')}:"
    known = known_keys()
    for key, value in mapping.items():
        if key not in known and key != _NO_KEY:
            raise UserInputError(
                f"{model} {key}", value, "there is no such field", nearest(str(key), known)
            )
    fields: dict[str, Any] = dict(mapping)
    if "num_layers" in fields:  # the pattern below is as long
        what = f"{model} num_layers"
        fields["num_layers"] = without_unit(fields["num_layers"], "num_layers", what)
    freq = fields.pop("moe_layer_freq", None)
    if fields.get("num_experts") is None:
        if freq not in (None, 1):
            raise UserInputError(
                f"{model} moe_layer_freq",
                freq,
                "it names expert layers but num_experts is not set",
                "Set num_experts, or drop moe_layer_freq.",
            )
    elif freq is None and fields.get("hybrid_layer_pattern"):
        pass  # it says which layers route
    elif isinstance(fields.get("num_layers"), int):  # what else it is, is refused below
        pattern = moe_layer_pattern(1 if freq is None else freq, fields["num_layers"])
        fields["moe_layer_pattern"] = pattern
    spec = from_plain(TransformerSpec, fields, model, _SOURCE)
    for field in dataclasses.fields(spec):
        _check_value(f"{model} {field.name}", field.name, getattr(spec, field.name))
        if field.name in mapping and getattr(spec, field.name) != field.default:
            _check_needed(model, field.name, spec)
    return spec


def _check_needed(model: str, name: str, spec: TransformerSpec) -> None:
    """Refuse a field that says nothing, as another one is not there that it belongs to."""
    needed = {
        "num_experts": name.startswith("moe_"),
        "multi_latent_attention": name in LATENT_SIZES,
        "window_size": name == "window_attn_skip_freq",
    }
    for field, belongs in needed.items():
        if belongs and not getattr(spec, field):
            raise UserInputError(
                f"{model} {name}",
                getattr(spec, name),
                f"it says nothing without {field}",
                f"Set {field}, or drop {name}.",
            )


def _check_value(what: str, name: str, value: object) -> None:
    """Refuse a text that is not known, and a number outside of what its field means."""
    if name in CHOICES:
        if value not in CHOICES[name]:
            limit = f"it must be one of {', '.join(CHOICES[name])}"
            raise UserInputError(what, value, limit, nearest(str(value), CHOICES[name]))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        most = 1.0 if name in _AT_MOST_ONE else math.inf
        if not (0 < value <= most or (value == 0 and name in _MAY_BE_ZERO)):
            least = "of at least 0" if name in _MAY_BE_ZERO else "above 0"
            raise UserInputError(
                what,
                value,
                f"it must be a number {least}" + (" and at most 1" if most == 1.0 else ""),
                _SOURCE.correct,
            )
