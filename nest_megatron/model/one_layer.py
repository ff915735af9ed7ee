"""The model that a single decoder layer makes: what its extraction and its profile depend on."""

from __future__ import annotations

import dataclasses

from nest_megatron.model.parameters import last_layer_kind
from nest_megatron.model.spec import LayerKind, TransformerSpec


def one_layer(spec: TransformerSpec, kind: LayerKind) -> TransformerSpec:
    """The same model with a single decoder layer, of the given kind where it is a layer's."""
    if kind is LayerKind.MTP:
        kind, mtp = last_layer_kind(spec), 1
    else:
        mtp = None
    is_moe = kind is LayerKind.MOE
    return dataclasses.replace(
        spec,
        num_layers=1,
        num_experts=spec.num_experts if is_moe else None,
        moe_layer_pattern=(1,) if is_moe else (),
        mtp_num_layers=mtp,
    )
