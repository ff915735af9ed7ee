"""A Hugging Face ``config.json``, already parsed, as a ``TransformerSpec``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from nest_megatron.errors import UnplannableModelError
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.hugging_face_fields import ConfigFields
from nest_megatron.model.spec import TransformerSpec

Config = Mapping[str, object]
Shape = dict[str, Any]

#: Sequence length taken when the caller gives none and the model allows more.
DEFAULT_SEQ_LENGTH = 8192

_ACTIVATIONS: Mapping[str, str] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu"),
    "quick_gelu": "quick_gelu",
    "relu2": "squared_relu",
}

#: Words in a ``model_type``, and why such a model cannot be planned; the first one counts.
_REFUSED: tuple[tuple[str, str], ...] = (
    ("gemma3n_text", "its embeddings in every layer are not supported"),
    ("mamba rwkv xlstm recurrent_gemma", "it is a state-space or recurrent model"),
    (
        "jamba zamba bamba nemotron_h falcon_h1 hybrid qwen3_next qwen3_5 kimi_linear minimax lfm2",
        "it mixes attention with state-space, linear-attention or convolution layers",
    ),
    ("t5 bart pegasus marian whisper encoder-decoder m2m", "it is an encoder-decoder model"),
    (
        "vit clip siglip llava vision _vl mllama pixtral paligemma llama4 gemma3 omni",
        "it is a vision or multimodal model",
    ),
    ("cohere", "its attention and MLP work side by side, and its logits are scaled"),
    ("gemma", "its scaled embeddings, extra norms and logit caps are not supported"),
)


def supported_model_types() -> tuple[str, ...]:
    """The ``model_type`` values that can be read, sorted."""
    return tuple(sorted(_READERS))


def read_hf_config(
    mapping: Config, name: str, *, seq_length: int | None = None
) -> tuple[TransformerSpec, tuple[str, ...]]:
    """The model of a Hugging Face configuration, and keys that may say more of it, unread.

    Args:
        mapping: the parsed ``config.json``.
        name: what to call the model.
        seq_length: in training; by default the smaller of the model's longest context and
            ``DEFAULT_SEQ_LENGTH``.

    Raises:
        UnplannableModelError: for an architecture that is not supported, or a field that describes
            a part of the model and is not read.
        UserInputError: if a field is missing, misspelt or has an impossible value.

    Source: the configuration classes of ``transformers`` and the layers they build.
    """
    model_type = _model_type(mapping, name)
    fields = ConfigFields(mapping, name)
    shape = {"name": name, **_READERS[model_type](fields)}
    shape["seq_length"] = (
        min(shape["max_position_embeddings"], DEFAULT_SEQ_LENGTH)
        if seq_length is None
        else seq_length
    )
    shape["source"] = f"Hugging Face config.json, model_type {model_type}"
    unread = fields.unread()
    return spec_from_mapping(shape), unread


def _model_type(mapping: Config, name: str) -> str:
    model_type = mapping.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        raise _unplannable(name, model_type, _why_unknown(str(model_type)))
    contents = {
        "it is an encoder-decoder model": mapping.get("is_encoder_decoder"),
        "it has a vision tower": mapping.get("vision_config") is not None,
        "it has cross-attention": mapping.get("add_cross_attention"),
    }
    for reason, refused in contents.items():
        if refused:
            raise _unplannable(name, model_type, reason)
    return model_type


def _why_unknown(model_type: str) -> str:
    for words, why in _REFUSED:
        if any(word in model_type for word in words.split()):
            return why
    close = difflib.get_close_matches(model_type, _READERS, n=1, cutoff=0.75)
    hint = f" (the nearest name: {close[0]})" if close else ""
    return f"this architecture is not supported{hint}"


def _unplannable(name: str, value: object, reason: str) -> UnplannableModelError:
    fix = f"Supported: {', '.join(supported_model_types())}."
    return UnplannableModelError(f"model {name}: model_type", value=value, limit=reason, fix=fix)


def _activation(f: ConfigFields, key: str = "hidden_act", default: str = "silu") -> str:
    value = f.get(key, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise f.wrong(key, f"known activations are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _rotary_base(f: ConfigFields, default: int = 10_000) -> int:
    """Base of the rotary embedding; transformers 5 nests it under ``rope_parameters``."""
    nested = f.get("rope_parameters")
    if isinstance(nested, Mapping) and "rope_theta" in nested:
        return ConfigFields(nested, "rope_parameters").whole("rope_theta")
    return f.whole("rope_theta", default)


def _attention(f: ConfigFields) -> Shape:
    """Heads, query groups (if fewer) and head size (if not the quotient)."""
    heads, hidden = f.whole("num_attention_heads"), f.whole("hidden_size")
    groups, size = f.whole("num_key_value_heads", heads), f.whole("head_dim", hidden // heads)
    return {
        "num_attention_heads": heads,
        "num_query_groups": None if groups == heads else groups,
        "kv_channels": None if size * heads == hidden else size,
    }


def _decoder(f: ConfigFields, activation: str = "hidden_act") -> Shape:
    """What all Llama-like decoders share; ``activation`` is the key that names theirs."""
    return {
        "num_layers": f.whole("num_hidden_layers"),
        "hidden_size": f.whole("hidden_size"),
        "ffn_hidden_size": f.whole("intermediate_size"),
        **_attention(f),
        "max_position_embeddings": f.whole("max_position_embeddings"),
        "vocab_size": f.whole("vocab_size"),
        "rotary_base": _rotary_base(f),
        "layernorm_epsilon": f.number("rms_norm_eps", 1e-6),
        "activation": _activation(f, activation),
        "untie_embeddings_and_output_weights": not f.flag("tie_word_embeddings"),
    }


def _llama(f: ConfigFields) -> Shape:
    attention, mlp = f.flag("attention_bias"), f.flag("mlp_bias")
    return {**_decoder(f), "add_bias_linear": mlp, "add_qkv_bias": attention and not mlp}


def _mistral(f: ConfigFields) -> Shape:
    return {**_decoder(f), "window_size": f.get("sliding_window")}


def _mixtral(f: ConfigFields) -> Shape:
    return {**_mistral(f), **_experts(f, "num_local_experts", "intermediate_size")}


def _experts(f: ConfigFields, number: str, size: str, per_token: int | None = None) -> Shape:
    """Routed experts; ``number`` and ``size`` are the keys that a family has for them."""
    return {
        "num_experts": f.whole(number),
        "moe_ffn_hidden_size": f.whole(size),
        "moe_router_topk": f.whole("num_experts_per_tok", per_token),
    }


def _qwen2(f: ConfigFields) -> Shape:
    """Qwen windows the layers after the first ``max_window_layers``, which Megatron cannot say."""
    upper, window = f.whole("max_window_layers", 0, least=0), f.get("sliding_window")
    slides = f.flag("use_sliding_window")
    if slides and upper:
        raise f.wrong("use_sliding_window", "a window on the upper layers only is not supported")
    return {**_decoder(f), "add_qkv_bias": True, "window_size": window if slides else None}


def _qwen3(f: ConfigFields) -> Shape:
    return {**_qwen2(f), "add_qkv_bias": f.flag("attention_bias"), "qk_layernorm": True}


def _qwen3_moe(f: ConfigFields) -> Shape:
    step = f.whole("decoder_sparse_step", 1)
    dense = f.items("mlp_only_layers", "layer numbers") or ()
    layers = range(f.whole("num_hidden_layers"))
    return {
        **_qwen3(f),
        **_experts(f, "num_experts", "moe_intermediate_size"),
        "moe_layer_freq": [int((i + 1) % step == 0 and i not in dense) for i in layers],
    }


def _deepseek(f: ConfigFields) -> Shape:
    first, period = f.whole("first_k_dense_replace", 0, least=0), f.whole("moe_layer_freq", 1)
    shared = f.whole("moe_intermediate_size") * f.whole("n_shared_experts", 0, least=0)
    layers = range(f.whole("num_hidden_layers"))
    return {
        **_decoder(f),
        **_latent_attention(f),
        **_experts(f, "n_routed_experts", "moe_intermediate_size"),
        "moe_layer_freq": [int(i >= first and i % period == 0) for i in layers],
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_router_enable_expert_bias": f.get("topk_method") == "noaux_tc",
        "mtp_num_layers": f.whole("num_nextn_predict_layers", 0, least=0) or None,
    }


def _latent_attention(f: ConfigFields) -> Shape:
    return {
        "multi_latent_attention": True,
        "num_query_groups": None,
        "kv_channels": f.whole("qk_nope_head_dim"),
        "qk_layernorm": True,
        "q_lora_rank": f.get("q_lora_rank"),
        "kv_lora_rank": f.whole("kv_lora_rank"),
        "qk_head_dim": f.whole("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": f.whole("qk_rope_head_dim"),
        "v_head_dim": f.whole("v_head_dim"),
    }


def _gpt_oss(f: ConfigFields) -> Shape:
    window = f.get("sliding_window")
    if not f.flag("attention_bias", True):
        raise f.wrong("attention_bias", "gpt-oss without biases is not supported")
    return {
        **_decoder(f),
        "activation": "quick_gelu",  # the file says silu; the experts use a clamped quick GELU
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "window_size": window,
        "window_attn_skip_freq": None if window is None else _full_attention_period(f),
        **_experts(f, "num_local_experts", "intermediate_size", f.whole("experts_per_token", 4)),
    }


def _gemma3_text(f: ConfigFields) -> Shape:
    """As the catalogue has it: the second norm after each block is left out (it weighs nothing)."""
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if f.get(cap) is not None:
            raise f.wrong(cap, "capped scores and logits are not supported")
    return {
        **_decoder(f, "hidden_activation"),
        "rotary_base": _rotary_base(f, 1_000_000),
        "activation": _activation(f, "hidden_activation", "gelu_pytorch_tanh"),
        "qk_layernorm": True,
        "window_size": f.whole("sliding_window", 4096),
        "window_attn_skip_freq": _full_attention_period(f, f.whole("sliding_window_pattern", 6)),
        "untie_embeddings_and_output_weights": not f.flag("tie_word_embeddings", True),
    }


def _full_attention_period(f: ConfigFields, unsaid: int = 2) -> int | None:
    """The n for which every n-th layer attends in full; gpt-oss has 2 where nothing is said."""
    kinds = f.items("layer_types", "text")
    if kinds is None:
        return unsaid
    full = [i for i, kind in enumerate(kinds, start=1) if kind == "full_attention"]
    if not full:
        return None
    if full != list(range(full[0], len(kinds) + 1, full[0])):
        raise f.wrong("layer_types", "full attention must come at every n-th layer")
    return full[0]


def _absolute(f: ConfigFields, epsilon: float, **keys: str) -> Shape:
    """What GPT-2 and BERT share; ``keys`` are the names that each has for a field."""
    return {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "add_bias_linear": True,
        "vocab_size": f.whole("vocab_size"),
        "layernorm_epsilon": f.number(keys.pop("layernorm_epsilon"), epsilon),
        "untie_embeddings_and_output_weights": not f.flag("tie_word_embeddings", True),
        **{field: f.whole(key) for field, key in keys.items()},
    }


def _gpt2(f: ConfigFields) -> Shape:
    return {
        **_absolute(
            f,
            1e-5,
            num_layers="n_layer",
            hidden_size="n_embd",
            num_attention_heads="n_head",
            max_position_embeddings="n_positions",
            layernorm_epsilon="layer_norm_epsilon",
        ),
        "ffn_hidden_size": f.whole("n_inner", 4 * f.whole("n_embd")),
        "activation": _activation(f, "activation_function", "gelu_new"),
    }


def _bert(f: ConfigFields) -> Shape:
    if f.get("position_embedding_type", "absolute") != "absolute":
        raise f.wrong("position_embedding_type", "only absolute positions are supported")
    return {
        "family": "bert",
        **_absolute(
            f,
            1e-12,
            num_layers="num_hidden_layers",
            hidden_size="hidden_size",
            num_attention_heads="num_attention_heads",
            ffn_hidden_size="intermediate_size",
            max_position_embeddings="max_position_embeddings",
            layernorm_epsilon="layer_norm_eps",
        ),
        "activation": _activation(f, default="gelu"),
    }


def _nemotron(f: ConfigFields) -> Shape:
    return {
        **_llama(f),
        "rotary_percent": f.number("partial_rotary_factor", f.number("rope_percent", 0.5)),
        "normalization": "LayerNorm",
        "layernorm_epsilon": f.number("norm_eps", 1e-5),
        "apply_layernorm_1p": True,
        "activation": _activation(f, default="relu2"),
        "gated_linear_unit": False,
    }


#: Readers by ``model_type``, which each is named after.
_READERS: Mapping[str, Callable[[ConfigFields], Shape]] = {
    read.__name__[1:]: read
    for read in (
        *(_bert, _gemma3_text, _gpt2, _gpt_oss, _llama, _mistral, _mixtral, _nemotron),
        *(_qwen2, _qwen3, _qwen3_moe),
    )
} | {"deepseek_v2": _deepseek, "deepseek_v3": _deepseek}
