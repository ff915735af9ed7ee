"""Readers of Hugging Face configurations of families with state-space or linear-attention layers.

A layer of theirs that has a mixer and an MLP is two layers in Megatron's pattern of a hybrid model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nest_megatron.model.hugging_face_dense import all_biases
from nest_megatron.model.hugging_face_experts import (
    gated_shared_expert,
    granitemoe,
    qwen_experts,
)
from nest_megatron.model.hugging_face_fields import (
    ConfigFields,
    Shape,
    activation,
    decoder,
    experts,
    frequency,
    joined,
    linear_biases,
    own_biases,
    rotary,
    shared_experts,
    variant,
)
from nest_megatron.model.spec import DELTA_NET_SIZES
from nest_megatron.model.variant import Bias

_MAMBA, _ATTENTION, _MLP, _EXPERTS = "M*-E"
_NO_POSITIONS: Shape = {"position_embedding_type": "none"}
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


def _mamba2(f: ConfigFields, inner: int) -> Shape:
    """Mamba-2 layers by the keys of Bamba, Granite 4 and Falcon-H1."""
    heads = f.whole("mamba_n_heads")
    given = f.get("mamba_d_head", "auto")
    size = inner // heads if given == "auto" else f.whole("mamba_d_head")
    if heads * size != inner:
        raise f.wrong("mamba_d_head", f"mamba_n_heads times it must be {inner}")
    return joined(
        {
            "mamba_num_heads": heads,
            "mamba_head_dim": size,
            "mamba_num_groups": f.whole("mamba_n_groups", 1),
            "mamba_state_dim": f.whole("mamba_d_state"),
        },
        _convolution(f.whole("mamba_d_conv", 4), f.flag("mamba_conv_bias", True)),
        own_biases(Bias.MAMBA_IN, Bias.MAMBA_OUT, where=f.flag("mamba_proj_bias")),
    )


def _convolution(kernel: int, has_bias: bool) -> Shape:
    return variant(mamba_conv_kernel=kernel, mamba_conv_bias=has_bias)


def bamba(f: ConfigFields) -> Shape:
    """Bamba: Mamba-2 or attention, each with an MLP."""
    attending = f.items("attn_layer_indices", "layer numbers") or ()
    inner = f.whole("mamba_expand", 2) * f.whole("hidden_size")
    layers = _layers(f, lambda layer: layer in attending)
    return joined(decoder(f), _mamba2(f, inner), all_biases(f), layers)


def granitemoehybrid(f: ConfigFields) -> Shape:
    """Granite 4: Mamba-2 or attention, each with experts and a shared one, or with that alone."""
    f.items("layer_types", "text", of_layers=True)
    kinds = _named(f, "layer_types") or [_MAMBA] * f.whole("num_hidden_layers")
    routes = f.count("num_local_experts") > 0
    inner = f.whole("mamba_expand", 2) * f.whole("hidden_size")
    shared = f.whole("shared_intermediate_size")
    layers = _layers(f, lambda layer: kinds[layer] == _ATTENTION, _EXPERTS if routes else _MLP)
    around = decoder(f)
    if routes:
        around = joined(granitemoe(f), shared_experts(shared))
    else:
        f.weightless("num_experts_per_tok")
        around = joined(around, all_biases(f), {"ffn_hidden_size": shared})
    positions = {} if f.get("position_embedding_type") == "rope" else _NO_POSITIONS
    return joined(around, _mamba2(f, inner), layers, positions)


def mamba2(f: ConfigFields) -> Shape:
    """Mamba-2 alone."""
    hidden, layers = f.whole("hidden_size"), f.whole("num_hidden_layers")
    return joined(
        {
            "hidden_size": hidden,
            "ffn_hidden_size": hidden,
            "num_attention_heads": 1,
            "vocab_size": f.whole("vocab_size"),
            "longest": 8192,
            "layernorm_epsilon": f.number("layer_norm_epsilon", 1e-5),
            "untie_embeddings_and_output_weights": not f.flag("tie_word_embeddings", True),
            "mamba_num_heads": f.whole("num_heads"),
            "mamba_head_dim": f.whole("head_dim"),
            "mamba_num_groups": f.whole("n_groups"),
            "mamba_state_dim": f.whole("state_size"),
        },
        _pattern([_MAMBA] * layers),
        _convolution(f.whole("conv_kernel", 4), f.flag("use_conv_bias", True)),
        own_biases(Bias.MAMBA_IN, Bias.MAMBA_OUT, where=f.flag("use_bias")),
        _NO_POSITIONS,
    )


def nemotron_h(f: ConfigFields) -> Shape:
    """Nemotron-H and Nemotron 3: the pattern is Megatron's own."""
    if f.count("num_nextn_predict_layers"):
        raise f.wrong("num_nextn_predict_layers", "MTP layers of this family are not read")
    for name in ("attention_bias", "tie_word_embeddings"):
        if f.flag(name):
            raise f.wrong(name, "this family has no such biases and ties no weights")
    pattern = "".join(_named(f, "layers_block_type")) or f.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or f.whole("num_hidden_layers", len(pattern)) != len(pattern):
        raise f.wrong("hybrid_override_pattern", "it must have a symbol for each layer")
    if f.flag("mlp_bias") and _EXPERTS in pattern:
        raise f.wrong("mlp_bias", "biases of experts are not read for this family")
    heads, hidden = f.whole("num_attention_heads"), f.whole("hidden_size")
    groups = f.whole("num_key_value_heads", heads)
    size = f.whole("head_dim", f.whole("attention_head_dim", 128))
    return joined(
        _pattern(pattern),
        {
            "hidden_size": hidden,
            "ffn_hidden_size": f.whole("intermediate_size", hidden),
            "num_attention_heads": heads,
            "num_query_groups": None if groups == heads else groups,
            "kv_channels": size,
            "max_position_embeddings": f.whole("max_position_embeddings"),
            "vocab_size": f.whole("vocab_size"),
            "layernorm_epsilon": f.number("layer_norm_epsilon", f.number("norm_eps", 1e-5)),
            "activation": activation(f, "mlp_hidden_act", "relu2"),
            "gated_linear_unit": False,
            "mamba_num_heads": f.whole("mamba_num_heads"),
            "mamba_head_dim": f.whole("mamba_head_dim"),
            "mamba_num_groups": f.whole("n_groups", 8),
            "mamba_state_dim": f.whole("ssm_state_size", 128),
        },
        _routed(f) if _EXPERTS in pattern else {},
        _convolution(f.whole("conv_kernel", 4), f.flag("use_conv_bias", True)),
        own_biases(Bias.MLP, where=f.flag("mlp_bias")),
        own_biases(Bias.MAMBA_IN, Bias.MAMBA_OUT, where=f.flag("use_bias")),
        _NO_POSITIONS,
    )


def _routed(f: ConfigFields) -> Shape:
    """Experts of Nemotron 3: balanced by a bias, one or more shared ones of a size of their own."""
    shared = f.count("moe_shared_expert_intermediate_size")
    shared = shared if f.whole("n_shared_experts", 1, least=0) else 0
    latent = f.get("moe_latent_size")
    return joined(
        experts(f, "n_routed_experts", "moe_intermediate_size"),
        shared_experts(shared),
        {"moe_router_enable_expert_bias": True},
        {} if latent is None else {"moe_latent_size": f.whole("moe_latent_size")},
    )


def qwen3_next(f: ConfigFields) -> Shape:
    """Qwen 3 Next: gated delta nets, every fourth layer attends in full, behind a gate."""
    return joined(_gated_delta(f), qwen_experts(f), gated_shared_expert(f))


def qwen3_5_moe_text(f: ConfigFields) -> Shape:
    """Qwen 3.5 MoE: as Qwen 3 Next, and MTP layers."""
    around = _gated_delta(f, ffn="moe_intermediate_size")
    return joined(around, qwen_experts(f), gated_shared_expert(f), _of_qwen3_5(f))


def qwen3_5_text(f: ConfigFields) -> Shape:
    """Qwen 3.5 dense: as Qwen 3 Next without experts, and MTP layers."""
    if f.count("num_experts"):
        raise f.wrong("num_experts", "this type is dense", "Set model_type to qwen3_5_moe_text.")
    return joined(_gated_delta(f), _of_qwen3_5(f))


def _of_qwen3_5(f: ConfigFields) -> Shape:
    if f.flag("mtp_use_dedicated_embeddings"):
        raise f.wrong("mtp_use_dedicated_embeddings", "Megatron's MTP layers share the embedding")
    if not f.flag("attn_output_gate", True):
        raise f.wrong("attn_output_gate", "attention of this family has a gate")
    return {"mtp_num_layers": f.count("mtp_num_hidden_layers") or None}


def _gated_delta(f: ConfigFields, ffn: str = "intermediate_size") -> Shape:
    """Gated delta nets and gated attention, without what works on each token."""
    interval, layers = f.whole("full_attention_interval", 4), range(f.whole("num_hidden_layers"))
    attends = f.flag("attention_bias")
    return joined(
        decoder(f, ffn=ffn),
        rotary(f, partial=0.25),
        linear_biases(qkv=attends, projection=attends, routed=True),
        {"qk_layernorm": True, "attention_output_gate": True, "apply_layernorm_1p": True},
        _linear(f, [(i + 1) % interval != 0 for i in layers]),
        {name: f.whole(name) for name in DELTA_NET_SIZES},
    )


def _linear(f: ConfigFields, marked: Sequence[bool]) -> Shape:
    """The layers of linear attention, by ``layer_types`` or the family's own rule."""
    kinds = f.items("layer_types", "text")
    if kinds is not None:
        if len(kinds) != len(marked) or not {*kinds} <= {"linear_attention", "full_attention"}:
            raise f.wrong("layer_types", "it must name linear_attention or full_attention")
        marked = [kind == "linear_attention" for kind in kinds]
    if not any(marked):
        return {}
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": frequency(marked) or [1] * len(marked),
    }
