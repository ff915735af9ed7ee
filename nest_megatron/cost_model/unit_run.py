"""Time and memory of one unit as it runs under a recompute setting."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from nest_megatron.cost_model.graph_times import ROUTED
from nest_megatron.cost_model.layer_cost import PassTime, UnitTimes
from nest_megatron.layout.recompute import (
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
    selective_recompute,
)
from nest_megatron.model.execution import Execution, GraphImpl, TokenDispatcher
from nest_megatron.model.graph import Part
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.plain import frozen
from nest_megatron.units import Seconds


@frozen
class UnitRun:
    """A unit as it runs under a recompute setting, ``recompute`` what its backward pass does again.

    ``saved_bytes`` stay from the forward to the backward pass of a micro batch, ``working_bytes``
    are the largest extra memory while the backward pass runs.
    """

    forward: PassTime
    backward: PassTime
    recompute: PassTime
    saved_bytes: float
    working_bytes: float

    def __add__(self, other: UnitRun) -> UnitRun:
        return UnitRun(
            forward=self.forward.plus(other.forward),
            backward=self.backward.plus(other.backward),
            recompute=self.recompute.plus(other.recompute),
            saved_bytes=self.saved_bytes + other.saved_bytes,
            working_bytes=max(self.working_bytes, other.working_bytes),
        )


#: What each module of selective recomputation recomputes, and what it then need not keep.
#: Source: the checkpointing calls of megatron-core 0.16.1 (attention.py, transformer_layer.py,
#: moe_layer.py, mlp.py, multi_latent_attention.py) with Transformer Engine's fused modules.
_RECOMPUTED: Mapping[RecomputeModule, frozenset[Part]] = {
    RecomputeModule.CORE_ATTN: frozenset({Part.CORE_ATTENTION}),
    RecomputeModule.LAYERNORM: frozenset({Part.INPUT_NORM, Part.MLP_NORM}),
    RecomputeModule.MLA_UP_PROJ: frozenset({Part.MLA_UP}),
    RecomputeModule.MLP: frozenset({Part.MLP_NORM, Part.MLP}),
    RecomputeModule.MOE_ACT: frozenset({Part.EXPERT_ACTIVATION}),
    RecomputeModule.SHARED_EXPERTS: frozenset({Part.SHARED_EXPERTS}),
    RecomputeModule.MOE: ROUTED | {Part.ROUTER, Part.SHARED_EXPERTS},
}


@functools.cache
def _recomputed_parts(
    recompute: Recompute, kind: LayerKind, *, latent_attention: bool
) -> frozenset[Part]:
    """Parts of one layer that selective recomputation covers.

    The norm before a dense MLP or a grouped-query projection is fused into the projection, which
    keeps its output, so ``layernorm`` reaches only the norms that stand alone: before experts and
    before latent attention.
    """
    modules = set(recompute.modules)
    if not kind.has_mlp:
        modules.discard(RecomputeModule.MLP)
    parts = frozenset().union(*(_RECOMPUTED[module] for module in modules))
    if RecomputeModule.LAYERNORM in modules:
        if not latent_attention:
            parts -= {Part.INPUT_NORM}
        if not kind.has_experts and RecomputeModule.MLP not in modules:
            parts -= {Part.MLP_NORM}
    return parts


def run_unit(
    times: UnitTimes,
    kind: LayerKind,
    recompute: Recompute,
    *,
    latent_attention: bool,
    inputs_on_host: bool = False,
    norm_stays: bool = False,
    num_layers: int = 1,
) -> UnitRun:
    """A unit under a recompute setting; embedding and head are never recomputed.

    ``full`` is taken as it acts on a layer that it covers; ``uniform`` saves one input for each
    group of layers and holds a group's activations while it works backwards through it.

    Args:
        inputs_on_host: full recomputation moves the inputs of layers to the host's memory.
        norm_stays: the norm before experts is saved whatever the setting says.
        num_layers: that the unit is made of, of which one at a time is recomputed.
    """
    repeated, working = PassTime(), times.working_bytes
    saved = times.input_bytes + sum(times.saved_bytes.values())
    if recompute.granularity is RecomputeGranularity.FULL and not kind.is_end:
        is_uniform = recompute.method is RecomputeMethod.UNIFORM
        group = (recompute.num_layers or 1) if is_uniform else 1
        # the next layer's input comes back from the host next to this one's
        more = times.input_bytes if inputs_on_host else -times.input_bytes
        repeated = times.whole_forward.less(times.not_recomputed)
        working += (group * saved + more) / num_layers
        saved = 0.0 if inputs_on_host else times.input_bytes / group
    elif recompute.modules and not kind.is_end:
        parts = _recomputed_parts(recompute, kind, latent_attention=latent_attention)
        if norm_stays:
            parts -= {Part.MLP_NORM}
        dropped = sum([num for part, num in times.saved_bytes.items() if part in parts])
        for part, time in times.forward.items():
            if part in parts:
                repeated = repeated.plus(time)
        if Part.MLP in parts:  # which the layer ends with
            repeated = repeated.less(times.not_recomputed)
        working, saved = working + dropped / num_layers, saved - dropped
    return UnitRun(
        forward=times.whole_forward,
        backward=times.backward,
        recompute=repeated,
        saved_bytes=saved,
        working_bytes=working,
    )


def recomputed_alone(
    times: UnitTimes, kind: LayerKind, module: RecomputeModule, *, latent_attention: bool
) -> tuple[Seconds, float]:
    """What a layer takes longer with one module recomputed, at least, and the bytes not saved.

    Modules that do not lie in one another add up.
    """
    parts = _recomputed_parts(
        selective_recompute([module]), kind, latent_attention=latent_attention
    )
    again = sum([time.total for part, time in times.forward.items() if part in parts])
    if Part.MLP in parts:
        again -= times.not_recomputed.total
    return again, sum([num for part, num in times.saved_bytes.items() if part in parts])


def norm_stays(execution: Execution) -> bool:
    """Whether Megatron saves the norm before experts though it was to be recomputed.

    Its output leaves the graph of the router at a fixed address, unless the token all-to-all is
    prepared inside (``can_recompute_pre_mlp_layernorm_for_cudagraph``).
    """
    scope = execution.cuda_graph_scope
    if execution.cuda_graph_impl is not GraphImpl.TRANSFORMER_ENGINE or "moe_router" not in scope:
        return False
    prepared = "moe_preprocess" in scope and not execution.moe_shared_expert_overlap
    return not (prepared and execution.moe_token_dispatcher_type is TokenDispatcher.ALLTOALL)
