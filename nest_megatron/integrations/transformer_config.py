"""megatron-core's ``TransformerConfig``, and what NeMo and Megatron-Bridge add to it, as a model.

Fields are read by name from anything that has them: a built config, a provider, or the Fiddle
``Config`` that would build one. What is ``None`` there follows Megatron's own default rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations.architecture import refused_class, refused_field, refused_model
from nest_megatron.integrations.fields import ABSENT, attribute, class_names, shown, value_or
from nest_megatron.model.spec import ModelFamily, TransformerSpec

#: Name of an activation function -> the name in a ``TransformerSpec``.
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "fast_gelu": "gelu",
    "openai_gelu": "gelu",
    "gelu_impl": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "squared_relu": "squared_relu",
}

#: Pattern in a class's name -> what this planner lacks to plan such a model: a better reason for
#: families that are well known; any other that is not known is refused by ``architecture``.
_REFUSED_CLASSES: Mapping[str, str] = {
    "Mamba": "state-space layers are not described",
    "^SSM": "state-space layers are not described",
    "NemotronH": "state-space layers are not described",
    "Hyena": "convolution layers are not described",
    "^T5": "encoder-decoder models have two stacks",
    "Gemma2": "its extra norms and capped scores are not described",
    "Gemma3": "its extra norms and two kinds of windows are not described",
    "Llama4": "its chunked attention and two kinds of layers are not described",
    "Qwen3Next": "linear-attention layers are not described",
    "Heterogeneous": "every layer may have another shape",
    "VL(Model|Config|Provider|$)": "vision towers are not described",
    "Vision": "vision towers are not described",
    "Llava": "vision towers are not described",
    "Neva": "vision towers are not described",
    "Ministral3": "vision towers are not described",
    "Omni": "multimodal models are not described",
    "Audio": "multimodal models are not described",
    "Diffusion": "diffusion models are not described",
    "^DiT": "diffusion models are not described",
    "Flux": "diffusion models are not described",
    "Embedding": "embedding models have another head and another batch",
    "Reranker": "rerankers have another head and another batch",
}


def spec_from_transformer_config(
    config: Any, *, seq_length: int, vocab_size: int, vocab_is_padded: bool
) -> TransformerSpec:
    """Read the shape of a model.

    Args:
        seq_length: tokens of one training sample, which the data decides.
        vocab_size: rows of the embedding; before padding, unless ``vocab_is_padded``.

    Raises:
        UnplannableModelError: if this planner does not describe such a model, naming what it lacks.
        UserInputError: if the shape is impossible.

    Source: ``megatron.core.transformer.transformer_config``, NeMo's ``GPTConfig``,
    Megatron-Bridge's ``GPTModelProvider``.
    """
    refuse_unplannable(config)
    absolute = value_or(config, "position_embedding_type", "rope") == "learned_absolute"
    longest = max(seq_length, value_or(config, "seq_length", 0)) if absolute else None
    return TransformerSpec(
        name=class_names(config)[0],
        family=_family(config),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=value_or(config, "ffn_hidden_size", 4 * config.hidden_size),
        seq_length=seq_length,
        max_position_embeddings=longest,
        vocab_size=vocab_size,
        vocab_is_padded=vocab_is_padded,
        make_vocab_size_divisible_by=value_or(config, "make_vocab_size_divisible_by", 128),
        position_embedding_type=value_or(config, "position_embedding_type", "rope"),
        rotary_base=int(value_or(config, "rotary_base", 10_000)),
        rotary_percent=value_or(config, "rotary_percent", 1.0),
        **_attention(config),
        **_blocks(config),
        **_experts(config),
        **_latent(config),
        mtp_num_layers=value_or(config, "mtp_num_layers", 0) or None,
        source="the framework's own configuration",
    )


def refuse_unplannable(config: Any, *wrappers: Any) -> None:
    """Raise for models that this planner does not describe.

    Args:
        wrappers: what holds the config, such as NeMo's model class; looked at by name.

    Raises:
        UnplannableModelError: naming the class or the field, and what is lacking.
    """
    names = [name for each in (*wrappers, config) for name in class_names(each)]
    for name in names:
        lacking = next(
            (why for part, why in _REFUSED_CLASSES.items() if re.search(part, name)), None
        )
        if lacking:
            raise _unplannable("model", name, lacking)
    classes = (refused_class(config), *map(refused_model, wrappers))
    for name, lacking in filter(None, classes):
        raise _unplannable("model", name, lacking)
    if (refused := refused_field(config)) is not None:
        name, value, lacking = refused
        raise _unplannable(f"model.{name}", shown(value), lacking)
    for field in ("num_layers", "hidden_size", "num_attention_heads"):
        if not value_or(config, field, 0):
            raise _unplannable(f"model.{field}", None, "its layers are not megatron-core's")


def refuse_adapters(adapters: Any, where: str) -> None:
    """Raise for a job that trains adapters beside frozen weights (LoRA and its like).

    Args:
        adapters: what the job states of them, or ``None``.
        where: the field that states it.

    Raises:
        UnplannableModelError: naming the field.
    """
    if adapters is not None:
        name = class_names(adapters)[0]
        raise _unplannable(where, name, "weights that are not trained are not described")


def _family(config: Any) -> ModelFamily:
    bert = any("Bert" in name for name in class_names(config))
    return ModelFamily.BERT if bert else ModelFamily.GPT


def _attention(config: Any) -> dict[str, Any]:
    window = value_or(config, "window_size", None)
    slides = window is not None and window[0] >= 0
    skip = value_or(config, "window_attn_skip_freq", None) if slides else None
    if skip is not None and not isinstance(skip, int):
        raise _unplannable(
            "model.window_attn_skip_freq",
            skip,
            "only a fixed rhythm of sliding and full layers is described",
        )
    return {
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": value_or(config, "num_query_groups", None),
        "kv_channels": value_or(config, "kv_channels", None),
        "add_qkv_bias": value_or(config, "add_qkv_bias", False),
        "qk_layernorm": value_or(config, "qk_layernorm", False),
        "softmax_type": value_or(config, "softmax_type", "vanilla"),
        "attention_dropout": value_or(config, "attention_dropout", 0.1),
        # Megatron counts the tokens to the left, without the token itself
        "window_size": window[0] + 1 if slides else None,
        "window_attn_skip_freq": skip,
    }


def _blocks(config: Any) -> dict[str, Any]:
    return {
        "normalization": value_or(config, "normalization", "LayerNorm"),
        "layernorm_epsilon": value_or(config, "layernorm_epsilon", 1e-5),
        "apply_layernorm_1p": value_or(config, "layernorm_zero_centered_gamma", False),
        "activation": _activation(config),
        "gated_linear_unit": value_or(config, "gated_linear_unit", False),
        "add_bias_linear": value_or(config, "add_bias_linear", True),
        "hidden_dropout": value_or(config, "hidden_dropout", 0.1),
        "untie_embeddings_and_output_weights": not value_or(
            config, "share_embeddings_and_output_weights", True
        ),
    }


def _activation(config: Any) -> str:
    function = value_or(config, "activation_func", None)
    if function is None:
        return "gelu"
    function = getattr(function, "func", function)  # functools.partial(gelu, approximate=...)
    name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
    if name not in _ACTIVATIONS:
        raise _unplannable(
            "model.activation_func", name, f"described are {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]


def _experts(config: Any) -> dict[str, Any]:
    experts = value_or(config, "num_moe_experts", None)
    if not experts:
        return {}
    return {
        "num_experts": experts,
        "moe_layer_pattern": _moe_pattern(config),
        "moe_ffn_hidden_size": value_or(config, "moe_ffn_hidden_size", None),
        "moe_router_topk": value_or(config, "moe_router_topk", 2),
        "moe_shared_expert_intermediate_size": value_or(
            config, "moe_shared_expert_intermediate_size", None
        ),
        "moe_router_enable_expert_bias": value_or(config, "moe_router_enable_expert_bias", False),
    }


def _moe_pattern(config: Any) -> tuple[int, ...]:
    """Which layers have experts. Source: ``get_gpt_decoder_layer_specs``."""
    frequency = value_or(config, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        return tuple(int(i % frequency == 0) for i in range(config.num_layers))
    if not isinstance(frequency, list | tuple):
        raise UserInputError(
            "model.moe_layer_freq",
            value=frequency,
            limit="it is a whole number or a list with one 0 or 1 a layer",
            fix="Correct it.",
        )
    return tuple(frequency)


def _latent(config: Any) -> dict[str, Any]:
    if not value_or(config, "multi_latent_attention", False):
        return {}
    names = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    given = {name: attribute(config, name) for name in names}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": value_or(config, "q_lora_rank", None),
        **{name: value for name, value in given.items() if value is not ABSENT},
    }


def _unplannable(what: str, value: object, limit: str) -> UnplannableModelError:
    return UnplannableModelError(
        what, value=value, limit=limit, fix="Launch this job without nest."
    )
