"""Everything in place to build and run one rank's layers: substitutes, groups, configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from nest_megatron.megatron_core.config import transformer_config
from nest_megatron.megatron_core.groups import as_rank, smallest_dims
from nest_megatron.megatron_core.substitutes import (
    balanced_routing,
    fused_kernels,
    quiet,
    without_gpu,
    without_transformer_engine,
)
from nest_megatron.megatron_core.units import Layers, local_layers, transformer_engine_layers
from nest_megatron.model.implementation import Implementation
from nest_megatron.model.parameters import one_layer
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import LayerKind, TransformerSpec
from nest_megatron.names import Name
from nest_megatron.parallel.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
)


class Where(Name):
    """What the layers run on."""

    SHAPES = "shapes"  # fake tensors: nothing is computed or allocated
    CPU = "cpu"
    GPU = "gpu"


#: Makes the layers of one rank as a job's own script does.
MakeLayers = Callable[[TransformerSpec, LayerShard], Layers]


@contextlib.contextmanager
def staged(
    spec: TransformerSpec,
    kind: LayerKind,
    shard: LayerShard,
    *,
    where: Where,
    implementation: Implementation = Implementation.LOCAL,
    recompute: Recompute = NO_RECOMPUTE,
    make_layers: MakeLayers | None = None,
    **changes: Any,
) -> Iterator[Layers]:
    """The layers of one rank, ready to be built with ``units.build`` inside.

    Args:
        recompute: selective modules go into the configuration.
        make_layers: makes them instead, where the groups exist.
        changes: fields of the configuration that are set to something else.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    spec = one_layer(spec, kind)
    dims = smallest_dims(spec, shard)
    layers = local_layers
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet())
        if where is not Where.GPU:
            stack.enter_context(without_gpu())
        if implementation is Implementation.LOCAL:
            shapes_only = where is Where.SHAPES
            stack.enter_context(without_transformer_engine(shapes_only=shapes_only))
        else:
            layers = transformer_engine_layers
        if where is Where.SHAPES:
            stack.enter_context(
                fused_kernels(
                    flash=shard.flash_attention, context_ranks=shard.context_parallel_size
                )
            )
        stack.enter_context(balanced_routing())
        stack.enter_context(as_rank(spec, dims, 0))
        model_parallel_cuda_manual_seed(1)
        if make_layers is not None:
            yield make_layers(spec, shard)
            return
        selective = recompute.granularity is RecomputeGranularity.SELECTIVE
        config = transformer_config(
            spec,
            dims,
            None,
            sequence_parallel=shard.sequence_parallel,
            recompute=recompute if selective else NO_RECOMPUTE,
            **{**_defaults(spec), **changes},
        )
        yield layers(spec, shard, config)


def _defaults(spec: TransformerSpec) -> dict[str, Any]:
    """Where Megatron-LM's arguments differ from the configuration's own defaults."""
    fused = spec.activation in ("silu", "quick_gelu") and spec.gated_linear_unit
    if spec.activation == "gelu" and not spec.is_moe:  # experts' weights go with the others alone
        fused = spec.gated_linear_unit or spec.add_bias_linear
    return {
        "attention_softmax_in_fp32": False,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": True,
        "hidden_dropout": spec.hidden_dropout,
        "attention_dropout": spec.attention_dropout,
    }
