"""What captured CUDA graphs forbid: recomputation, experts over several ranks, packed sequences.

A graph is replayed with fixed addresses and no new random numbers. Source: ``TransformerConfig``
(``tc``) and ``megatron/training/arguments.py`` (``args``), core_v0.16.1 / main at 0.20.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nest_megatron.layout.recompute import RecomputeModule
from nest_megatron.model.execution import Execution, GraphImpl
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen

#: Megatron's arguments by name, or fields of a framework's configuration.
Flags = Mapping[str, Any]
#: Those of jobs that pack several sequences into one.
PACKED = ("sft", "dataloader_inter_document_masking")
#: Those that request graphs, of both releases, and that say what they capture.
FIELDS = (
    *PACKED,
    "cuda_graph_impl",
    "enable_cuda_graph",
    "external_cuda_graph",
    "cuda_graph_scope",
    "cuda_graph_scope_deprecated",
    "cuda_graph_modules",
    "moe_input_jitter_eps",
    "moe_pad_experts_for_cuda_graph_inference",
)
_WHOLE_STEP = "full_iteration"


@frozen
class CudaGraphs:
    """The graphs that a job captures.

    Args:
        impl: of ``GraphImpl``; ``full_iteration`` is the whole step.
        scope: parts of a layer that are captured; none is the whole layer.
        jitters: router inputs get random numbers.
        pads_experts: ``--moe-pad-experts-for-cuda-graph-inference``.
        packs: sequences are packed.
    """

    impl: str
    scope: frozenset[str] = frozenset()
    jitters: bool = False
    pads_experts: bool = False
    packs: bool = False


def kept_modules(
    spec: TransformerSpec, execution: Execution, cuda_graphs: CudaGraphs | None
) -> frozenset[RecomputeModule]:
    """Modules that may not be recomputed with graphs (tc:1790-1822 / tc:2863-2907).

    Args:
        execution: what is captured.
        cuda_graphs: the job's own, if it has any.
    """
    impl, scope = execution.cuda_graph_impl, execution.cuda_graph_scope
    whole = impl is GraphImpl.FULL_ITERATION or not scope
    hidden, jitters = spec.hidden_dropout != 0.0, cuda_graphs is not None and cuda_graphs.jitters
    router = impl is GraphImpl.TRANSFORMER_ENGINE and "moe_router" in scope
    forbidden = {
        RecomputeModule.CORE_ATTN: spec.attention_dropout != 0.0 and (whole or "attn" in scope),
        RecomputeModule.MLP: hidden and (whole or "mlp" in scope),
        RecomputeModule.MOE: router or ((hidden or jitters) and (whole or "moe" in scope)),
    }
    return frozenset(module for module, refused in forbidden.items() if refused)


def cuda_graphs(values: Flags) -> CudaGraphs | None:
    """The graphs that a job requests, in any spelling; ``None`` for none.

    Args:
        values: of ``FIELDS``, by name; what is absent or ``None`` requests nothing.

    >>> cuda_graphs({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}).impl
    'full_iteration'
    >>> both = {"cuda_graph_modules": "full", "cuda_graph_scope": ["attn"]}  # 0.19 takes the latter
    >>> cuda_graphs({"cuda_graph_impl": "local", **both}).scope
    frozenset({'attn'})
    """
    impl = str(values.get("cuda_graph_impl") or "none")
    if values.get("enable_cuda_graph"):
        impl = "local"
    elif values.get("external_cuda_graph"):
        impl = "transformer_engine"
    if impl == "none":
        return None
    scopes = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
    # full is the default
    request = next((each for each in map(values.get, scopes) if each and each != "full"), ())
    if isinstance(request, str):
        request = request.split(",")
    elif not isinstance(request, list | tuple | set | frozenset):  # one member of an enumeration
        request = (request,)
    modules = frozenset(str(getattr(word, "name", word)).strip() for word in request) - {"full", ""}
    if impl == "local" and _WHOLE_STEP in modules:
        impl = _WHOLE_STEP
    return CudaGraphs(
        impl=impl,
        scope=modules - {_WHOLE_STEP},
        jitters=values.get("moe_input_jitter_eps") is not None,
        pads_experts=bool(values.get("moe_pad_experts_for_cuda_graph_inference")),
        packs=any(map(values.get, PACKED)),
    )
