"""What is known of an extracted unit; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nest_megatron.model.graph import LayerGraph
from nest_megatron.model.parameters import ParameterCount


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedLayer:
    """What a recompute setting makes of a layer.

    Args:
        saved_bytes: kept from the forward to the backward pass, the layer's input included.
        recomputed_flops: of the GEMMs that the backward pass does again.
        recomputed_bytes_moved: memory traffic of all that it does again.
    """

    saved_bytes: float
    recomputed_flops: float
    recomputed_bytes_moved: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedLayer:
    """One unit as megatron-core builds and runs it on one rank.

    Args:
        recompute: by the setting's label; a setting that these modules cannot carry out is absent.
        provenance: versions, implementation and what was replaced.
    """

    graph: LayerGraph
    parameters: ParameterCount
    recompute: Mapping[str, RecomputedLayer]
    provenance: Mapping[str, str]
