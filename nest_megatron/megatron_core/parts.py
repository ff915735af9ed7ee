"""Where megatron-core's modules stand in our division of a layer into parts."""

from __future__ import annotations

import re

from nest_megatron.model.graph import Part
from nest_megatron.model.spec import LayerKind

#: Patterns of module paths inside a decoder layer; the first that matches counts.
_LAYER: tuple[tuple[str, Part], ...] = (
    (r"input_layernorm", Part.INPUT_NORM),
    (r"self_attention\.core_attention", Part.CORE_ATTENTION),
    (r"self_attention\.linear_proj", Part.PROJECTION),
    (r"self_attention\.(linear_(q|kv)_down_proj|kv_layernorm)", Part.MLA_DOWN),
    (r"self_attention\.linear_(q|kv)_up_proj|self_attention\.linear_q_proj", Part.MLA_UP),
    (r"self_attention", Part.QKV),
    (r"pre_mlp_layernorm", Part.MLP_NORM),
    (r"mlp\.router", Part.ROUTER),
    (r"mlp\.shared_experts", Part.SHARED_EXPERTS),
    (r"mlp\.experts\.local_experts\.\d+$", Part.EXPERT_ACTIVATION),
    (r"mlp\.experts\.activation", Part.EXPERT_ACTIVATION),
    (r"mlp\.experts", Part.EXPERTS),
)
_PATTERNS = tuple((re.compile(pattern), part) for pattern, part in _LAYER)
_INSIDE_MTP = "transformer_layer"


def part_of(path: str, kind: LayerKind, *, latent_attention: bool) -> Part:
    """The part that a module belongs to.

    >>> part_of("self_attention.linear_qkv", LayerKind.DENSE, latent_attention=False).value
    'qkv'
    >>> part_of("", LayerKind.DENSE, latent_attention=False).value
    'residual'
    """
    if kind is LayerKind.EMBEDDING:
        return Part.EMBEDDING
    if kind is LayerKind.HEAD:
        return Part.HEAD
    if kind is LayerKind.MTP:
        if not path.startswith(_INSIDE_MTP):
            return Part.MTP
        path = path.removeprefix(_INSIDE_MTP).removeprefix(".")
    if not path:
        return Part.RESIDUAL
    part = next((part for pattern, part in _PATTERNS if pattern.match(path)), None)
    if part is Part.QKV and latent_attention:
        return Part.MLA_DOWN if path.endswith("q_layernorm") else Part.MLA_UP
    if part is not None:
        return part
    return Part.DISPATCH if kind is not LayerKind.DENSE else Part.MLP


def operator_name(path: str) -> str:
    """The name of a module in tables: all experts of a rank are one.

    >>> operator_name("mlp.experts.local_experts.3.linear_fc1")
    'mlp.experts.local_experts.*.linear_fc1'
    """
    return re.sub(r"\.local_experts\.\d+", ".local_experts.*", path) or "layer"
