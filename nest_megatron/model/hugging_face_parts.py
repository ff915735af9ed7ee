"""What the readers of Hugging Face configurations share: attention, norms, biases, windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nest_megatron.model.hugging_face_fields import ConfigFields
from nest_megatron.model.variant import Bias, NormParameters, NormPlacement

Shape = dict[str, Any]

_ACTIVATIONS: Mapping[str, str] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python"), "gelu"),
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def joined(*shapes: Shape) -> Shape:
    """Parts of a description as one; the fields of their variants add up, biases too."""
    variant: Shape = {}
    for shape in shapes:
        found = shape.get("variant", {})
        biases = (*variant.get("biases", ()), *found.get("biases", ()))
        variant |= {**found, **({"biases": biases} if biases else {})}
    rest = {key: value for shape in shapes for key, value in shape.items() if key != "variant"}
    return rest | ({"variant": variant} if variant else {})


def activation(f: ConfigFields, key: str = "hidden_act", default: str = "silu") -> str:
    """Megatron's name of an activation."""
    value = f.get(key, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise f.wrong(key, f"known activations are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def rotary(f: ConfigFields, default: int = 10_000, partial: float = 1.0) -> Shape:
    """Base and share of the rotary embedding; transformers 5 nests them in ``rope_parameters``."""
    nested = f.get("rope_parameters")
    inner = ConfigFields(nested if isinstance(nested, Mapping) else {}, "rope_parameters")
    base = f.whole("rope_theta", default)
    share = f.number("partial_rotary_factor", partial)
    share = inner.number("partial_rotary_factor", share)
    if not 0 < share <= 1:
        raise f.wrong("partial_rotary_factor", "it must be above 0 and at most 1")
    return {
        "rotary_base": inner.whole("rope_theta", base),
        **({"rotary_percent": share} if share != 1 else {}),
    }


def attention(f: ConfigFields, *, own_size: bool = True) -> Shape:
    """Heads, query groups (if fewer) and head size (if not the quotient).

    Args:
        own_size: the family has a ``head_dim``.
    """
    heads, hidden = f.whole("num_attention_heads"), f.whole("hidden_size")
    groups = f.whole("num_key_value_heads", heads)
    size = f.whole("head_dim", hidden // heads) if own_size else hidden // heads
    return {
        "num_attention_heads": heads,
        "num_query_groups": None if groups == heads else groups,
        "kv_channels": None if size * heads == hidden else size,
    }


def decoder(
    f: ConfigFields,
    act: str = "hidden_act",
    *,
    own_size: bool = True,
    ffn: str = "intermediate_size",
) -> Shape:
    """What all Llama-like decoders share.

    Args:
        act: the key that names their activation.
        own_size: as of ``attention``.
        ffn: the key of the inner size of their MLP.
    """
    return {
        "num_layers": f.whole("num_hidden_layers"),
        "hidden_size": f.whole("hidden_size"),
        "ffn_hidden_size": f.whole(ffn),
        **attention(f, own_size=own_size),
        "max_position_embeddings": f.whole("max_position_embeddings"),
        "vocab_size": f.whole("vocab_size"),
        **rotary(f),
        "layernorm_epsilon": f.number("rms_norm_eps", 1e-6),
        "activation": activation(f, act),
        "untie_embeddings_and_output_weights": not f.flag("tie_word_embeddings", True),
    }


def layer_norm(
    f: ConfigFields, key: str = "layer_norm_eps", learned: NormParameters = NormParameters.ALL
) -> Shape:
    """A LayerNorm, with the key of its epsilon."""
    shape: Shape = {"normalization": "LayerNorm", "layernorm_epsilon": f.number(key, 1e-5)}
    return shape | ({} if learned is NormParameters.ALL else variant(norm_parameters=learned))


def variant(**fields: Any) -> Shape:
    """A description of what Megatron's layers do not have."""
    return {"variant": fields}


def norms(placement: NormPlacement) -> Shape:
    """Norms that do not stand before their blocks alone."""
    return variant(norm_placement=placement)


def side_by_side(norm: NormPlacement = NormPlacement.SHARED) -> Shape:
    """Attention and MLP that read the same hidden states, behind one norm or one each."""
    return variant(parallel_attention=True, norm_placement=norm)


def wide_qk_norm() -> Shape:
    """Norms of queries and keys over all heads."""
    return {"qk_layernorm": True, **variant(qk_norm_full_width=True)}


def linear_biases(
    *, qkv: bool = False, projection: bool = False, mlp: bool = False, routed: bool = False
) -> Shape:
    """Biases of the projections, in Megatron's switch where it says them all.

    Args:
        routed: the model has a router without one, which Megatron's switch would give it.
    """
    if qkv and projection and mlp and not routed:
        return {"add_bias_linear": True}
    given = {Bias.PROJECTION: projection, Bias.MLP: mlp}
    biases = tuple(bias for bias, has_it in given.items() if has_it)
    return {"add_qkv_bias": qkv} | (variant(biases=biases) if biases else {})


def windows(f: ConfigFields, slides: Callable[[int], bool]) -> Shape:
    """Sliding windows by ``layer_types``, or where it is silent by the family's own rule.

    A window as long as the longest context changes nothing and is left out.
    """
    size = f.whole("sliding_window", 0, least=0) or None
    layers = range(f.whole("num_hidden_layers"))
    kinds = f.items("layer_types", "text")
    if kinds is None:
        marked = [slides(layer) for layer in layers]
    else:
        if len(kinds) != len(layers) or not {*kinds} <= {_FULL, _SLIDING}:
            limit = f"it must name {_FULL} or {_SLIDING} for each of the {len(layers)} layers"
            raise f.wrong("layer_types", limit)
        marked = [kind == _SLIDING for kind in kinds]
    if size is None or not any(marked) or size >= f.whole("max_position_embeddings", size + 1):
        return {}
    return {"window_size": size, "window_attn_skip_freq": frequency(marked)}


def frequency(marked: Sequence[bool]) -> int | list[int] | None:
    """Marked layers in Megatron's notation: none for all, all but every n-th, or a flag each.

    >>> frequency([True, True, False, True, True, False])
    3
    """
    plain = [layer for layer, is_marked in enumerate(marked, start=1) if not is_marked]
    if not plain:
        return None
    if plain == list(range(plain[0], len(marked) + 1, plain[0])):
        return plain[0]
    return [int(is_marked) for is_marked in marked]


def experts(f: ConfigFields, number: str, size: str, top: str = "num_experts_per_tok") -> Shape:
    """Routed experts; the keys that a family has for their number, size and share."""
    return {
        "num_experts": f.whole(number),
        "moe_ffn_hidden_size": f.whole(size),
        "moe_router_topk": f.whole(top),
    }


def expert_layers(f: ConfigFields, routes: Callable[[int], bool]) -> Shape:
    """Which layers route tokens to experts."""
    return {"moe_layer_freq": [int(routes(i)) for i in range(f.whole("num_hidden_layers"))]}


def shared_experts(size: int) -> Shape:
    """Shared experts of this inner size together, if any."""
    return {"moe_shared_expert_intermediate_size": size or None}
