"""Families with state-space or linear-attention layers of Hugging Face configurations.

A layer of theirs that has a mixer and an MLP is two layers in Megatron's pattern of a hybrid model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from nest_megatron.errors import UnplannableModelError
from nest_megatron.model.hugging_face_experts import (
    BALANCED,
    GRANITE,
    experts,
    gated_shared_expert,
    predicted_tokens,
    qwen_experts,
    shared_experts,
)
from nest_megatron.model.hugging_face_fields import (
    ALL_BIASES,
    ROUTED_BIASES,
    UNGATED,
    ConfigFields,
    Family,
    Parts,
    Reader,
    Shape,
    activation,
    decoder,
    extra_biases,
    fewer_groups,
    frequency,
    joined,
    qk_norm,
    repeats,
    rotary,
    sizes,
    untied,
    variant,
    where,
)
from nest_megatron.model.spec import DELTA_NET_SIZES
from nest_megatron.model.variant import Bias

_MAMBA, _ATTENTION, _MLP, _EXPERTS = "M*-E"
_NO_POSITIONS: Shape = {"position_embedding_type": "none"}
_MAMBA_BIASES = extra_biases(Bias.MAMBA_IN, Bias.MAMBA_OUT)
#: Words for a layer, the older and the newer ones, by Megatron's symbol.
_WORDS = {
    **dict.fromkeys(("mamba", "linear_attention"), _MAMBA),
    **dict.fromkeys(("attention", "full_attention"), _ATTENTION),
    "mlp": _MLP,
    "moe": _EXPERTS,
}


def _pattern(symbols: Sequence[str]) -> Shape:
    """Megatron's pattern; MLPs and experts count as layers."""
    pattern = "".join(symbols)
    return {"num_layers": len(pattern), "hybrid_layer_pattern": pattern}


def _named(f: ConfigFields, key: str) -> list[str]:
    """Megatron's symbols of the layers that a list names."""
    kinds = f.items(key, "text") or []
    if not {*kinds} <= _WORDS.keys():
        raise f.wrong(key, f"its words are {', '.join(_WORDS)}")
    return [_WORDS[kind] for kind in kinds]


def _layers(f: ConfigFields, attends: Callable[[int], bool], each_token: str = _MLP) -> Shape:
    """Layers of a mixer and an MLP or experts."""
    layers = range(f.whole("num_hidden_layers"))
    return _pattern([(_ATTENTION if attends(i) else _MAMBA) + each_token for i in layers])


def _mamba2(f: ConfigFields) -> Shape:
    """Mamba-2 layers by the keys of Bamba and Granite 4."""
    inner, heads = f.whole("mamba_expand", 2) * f.whole("hidden_size"), f.whole("mamba_n_heads")
    automatic = f.get("mamba_d_head", "auto") == "auto"
    size = inner // heads if automatic else f.whole("mamba_d_head")
    if heads * size != inner:
        raise f.wrong("mamba_d_head", f"mamba_n_heads times it must be {inner}")
    return joined(
        f,
        sizes(mamba_num_heads="mamba_n_heads", mamba_state_dim="mamba_d_state"),
        {"mamba_head_dim": size, "mamba_num_groups": f.whole("mamba_n_groups", 1)},
        _convolution("mamba_d_conv", "mamba_conv_bias"),
        where("mamba_proj_bias", _MAMBA_BIASES),
    )


def _convolution(kernel: str, bias: str) -> Reader:
    return lambda f: variant(mamba_conv_kernel=f.whole(kernel, 4), mamba_conv_bias=f.flag(bias))


def _bamba_layers(f: ConfigFields) -> Shape:
    attending = f.items("attn_layer_indices", "layer numbers") or ()
    return _layers(f, lambda layer: layer in attending)


def _granite_layers(f: ConfigFields) -> Shape:
    """Layers of Granite 4, what works on each token, and positions."""
    f.items("layer_types", "text", of_layers=True)
    kinds = _named(f, "layer_types") or [_MAMBA] * f.whole("num_hidden_layers")
    routes = f.count("num_local_experts") > 0
    shared = f.whole("shared_intermediate_size")
    each_token = (*GRANITE, shared_experts(shared))
    if not routes:
        f.weightless("num_experts_per_tok")
        each_token = (decoder, ALL_BIASES, {"ffn_hidden_size": shared})
    return joined(
        f,
        *each_token,
        _layers(f, lambda layer: kinds[layer] == _ATTENTION, _EXPERTS if routes else _MLP),
        {} if f.get("position_embedding_type") == "rope" else _NO_POSITIONS,
    )


def _nemotron_h(f: ConfigFields) -> Shape:
    """The pattern of Nemotron-H, its attention and experts, without what the family lacks."""
    if f.count("num_nextn_predict_layers"):
        limit = "MTP layers of this family are not read"
        raise f.wrong("num_nextn_predict_layers", limit, "Write 0 to plan the model without them.")
    pattern = "".join(_named(f, "layers_block_type")) or f.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or f.whole("num_hidden_layers", len(pattern)) != len(pattern):
        raise f.wrong("hybrid_override_pattern", "it must have a symbol for each layer")
    if f.flag("mlp_bias") and _EXPERTS in pattern:
        limit = "biases of experts are not read for this family"
        raise f.wrong("mlp_bias", limit, kind=UnplannableModelError)
    heads = f.whole("num_attention_heads")
    return joined(
        f,
        _pattern(pattern),
        {
            "ffn_hidden_size": f.whole("intermediate_size", f.whole("hidden_size")),
            "num_query_groups": fewer_groups(f.whole("num_key_value_heads", heads), heads),
            "kv_channels": f.whole("head_dim", f.whole("attention_head_dim", 128)),
            "layernorm_epsilon": f.number("layer_norm_epsilon", f.number("norm_eps", 1e-5)),
            "mamba_num_groups": f.whole("n_groups", 8),
            "mamba_state_dim": f.whole("ssm_state_size", 128),
        },
        _routed if _EXPERTS in pattern else {},
    )


def _routed(f: ConfigFields) -> Shape:
    """Experts of Nemotron 3: balanced by a bias, one or more shared ones of a size of their own."""
    shared = f.count("moe_shared_expert_intermediate_size")
    shared = shared if f.whole("n_shared_experts", 1, least=0) else 0
    return joined(
        f,
        experts("n_routed_experts", "moe_intermediate_size"),
        shared_experts(shared),
        BALANCED,
        {} if f.get("moe_latent_size") is None else sizes("moe_latent_size"),
    )


def _dense_alone(f: ConfigFields) -> Shape:
    if f.count("num_experts"):
        raise f.wrong("num_experts", "this type is dense", "Set model_type to qwen3_5_moe_text.")
    return {}


def _of_qwen3_5(f: ConfigFields) -> Shape:
    if f.flag("mtp_use_dedicated_embeddings"):
        raise f.wrong("mtp_use_dedicated_embeddings", "Megatron's MTP layers share the embedding")
    return predicted_tokens("mtp_num_hidden_layers")(f)


def _linear(f: ConfigFields) -> Shape:
    """The layers of linear attention, by ``layer_types`` or the family's own rule."""
    interval = f.whole("full_attention_interval", 4)
    marked = f.marked_layers("linear_attention", lambda layer: (layer + 1) % interval != 0)
    if not any(marked):
        return {}
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": frequency(marked) or [1] * len(marked),
    }


#: Gated delta nets and gated attention, beside what works on each token.
_GATED_DELTA: Parts = (
    rotary(0.25),
    ROUTED_BIASES,
    qk_norm,
    repeats(attn_output_gate=True),
    {"attention_output_gate": True, "apply_layernorm_1p": True},
    _linear,
    sizes(*DELTA_NET_SIZES),
)
_QWEN_EXPERTS: Parts = (qwen_experts, gated_shared_expert)

FAMILIES: Mapping[str, Family] = {
    "bamba": (
        "Bamba: Mamba-2 or attention, each with an MLP",
        (decoder, _mamba2, ALL_BIASES, _bamba_layers),
    ),
    "granitemoehybrid": (
        "Granite 4: Mamba-2 or attention, each with experts and a shared one, or with that alone",
        (_granite_layers, _mamba2),
    ),
    "mamba2": (
        "Mamba-2 alone",
        (
            sizes(
                "hidden_size",
                "vocab_size",
                ffn_hidden_size="hidden_size",
                mamba_num_heads="num_heads",
                mamba_head_dim="head_dim",
                mamba_num_groups="n_groups",
                mamba_state_dim="state_size",
            ),
            repeats(intermediate_size=lambda f: f.whole("num_heads") * f.whole("head_dim")),
            {"num_attention_heads": 1, "longest": 8192},
            lambda f: {"layernorm_epsilon": f.number("layer_norm_epsilon", 1e-5)},
            untied,
            lambda f: _pattern([_MAMBA] * f.whole("num_hidden_layers")),
            _convolution("conv_kernel", "use_conv_bias"),
            where("use_bias", _MAMBA_BIASES),
            _NO_POSITIONS,
        ),
    ),
    "nemotron_h": (
        "Nemotron-H and Nemotron 3: the pattern is Megatron's own",
        (
            sizes(
                "hidden_size",
                "num_attention_heads",
                "max_position_embeddings",
                "vocab_size",
                "mamba_num_heads",
                "mamba_head_dim",
            ),
            activation("mlp_hidden_act", "relu2"),
            UNGATED,
            repeats(attention_bias=False, tie_word_embeddings=False),
            _nemotron_h,
            _convolution("conv_kernel", "use_conv_bias"),
            where("mlp_bias", extra_biases(Bias.MLP)),
            where("use_bias", _MAMBA_BIASES),
            _NO_POSITIONS,
        ),
    ),
    "qwen3_next": (
        "Qwen 3 Next: gated delta nets, every fourth layer attends in full, behind a gate",
        (decoder, *_GATED_DELTA, *_QWEN_EXPERTS),
    ),
    "qwen3_5_moe_text": (
        "Qwen 3.5 MoE: as Qwen 3 Next, and MTP layers",
        (
            partial(decoder, ffn="moe_intermediate_size"),
            *_GATED_DELTA,
            *_QWEN_EXPERTS,
            _of_qwen3_5,
        ),
    ),
    "qwen3_5_text": (
        "Qwen 3.5 dense: as Qwen 3 Next without experts, and MTP layers",
        (_dense_alone, decoder, *_GATED_DELTA, _of_qwen3_5),
    ),
}
