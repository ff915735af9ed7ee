"""CUDA graphs of a job, and the recomputation that megatron-core takes beside them.

Source: ``TransformerConfig.__post_init__`` of megatron-core 0.16.1 and 0.20.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.recompute import RecomputeModule

#: Fields that say it, in both releases.
FIELDS = (
    "cuda_graph_impl",
    "enable_cuda_graph",
    "external_cuda_graph",
    "cuda_graph_scope",
    "cuda_graph_modules",
)
_WHOLE_ITERATION = "full_iteration"
#: Words for a whole layer.
_WHOLE_LAYER = frozenset(("full", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphs:
    """What is captured.

    Args:
        impl: ``local``, ``transformer_engine`` or ``full_iteration``.
        scope: parts of a layer; empty is the whole of it.
    """

    impl: str
    scope: frozenset[str]

    def allows_full_recompute(self) -> bool:
        """Whole layers are recomputed inside a graph of the whole iteration alone."""
        return self.impl == _WHOLE_ITERATION or self.scope == {_WHOLE_ITERATION}

    def without_modules(self, spec: TransformerSpec) -> frozenset[RecomputeModule]:
        """Modules that may not be recomputed: captured ones with dropout, routed experts."""
        whole = not self.scope or self.allows_full_recompute()
        found = set()
        if self.impl == "transformer_engine" and "moe_router" in self.scope:
            found.add(RecomputeModule.MOE)
        if spec.attention_dropout and (whole or "attn" in self.scope):
            found.add(RecomputeModule.CORE_ATTN)
        if spec.hidden_dropout and (whole or "mlp" in self.scope):
            found.add(RecomputeModule.MLP)
        if spec.hidden_dropout and (whole or "moe" in self.scope):
            found.add(RecomputeModule.MOE)
        return frozenset(found)


def cuda_graphs(values: Mapping[str, Any]) -> CudaGraphs | None:
    """The graphs of a job, or ``None`` where it captures none.

    Args:
        values: by the names in ``FIELDS``; any of them may be absent.

    >>> cuda_graphs({"enable_cuda_graph": True, "cuda_graph_scope": "full"}).impl
    'local'
    >>> cuda_graphs({"cuda_graph_impl": "none"}) is None
    True
    """
    impl = str(values.get("cuda_graph_impl") or "none")
    if impl == "none" and values.get("enable_cuda_graph"):
        impl = "local"
    elif impl == "none" and values.get("external_cuda_graph"):
        impl = "transformer_engine"
    if impl == "none":
        return None
    stated = values.get("cuda_graph_scope") or values.get("cuda_graph_modules") or ()
    parts = stated.split(",") if isinstance(stated, str) else stated
    parts = parts if isinstance(parts, list | tuple | set) else [parts]
    names = {str(getattr(part, "name", part)) for part in parts}
    return CudaGraphs(impl=impl, scope=frozenset(names - _WHOLE_LAYER))
