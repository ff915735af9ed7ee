"""One rank's layers, ready to build and run: configuration, groups, and what a machine lacks."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import DEGREES, ParallelDims
from nest_megatron.layout.recompute import NO_RECOMPUTE, Recompute, RecomputeGranularity
from nest_megatron.layout.rulebook.degrees import launched_expert_tensor_size
from nest_megatron.megatron_core.units import Layers, described_layers
from nest_megatron.model.execution import Implementation
from nest_megatron.model.heterogeneous import block_configs
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.parameters import one_layer
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import DELTA_NET_SIZES, LATENT_SIZES, MAMBA_SIZES, TransformerSpec
from nest_megatron.packages import require_package
from nest_megatron.plain import Name, to_plain


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

    from nest_megatron.megatron_core.substitutes import (  # which imports torch
        balanced_routing,
        fused_kernels,
        quiet,
        without_gpu,
        without_transformer_engine,
    )

    spec = one_layer(spec, kind)
    dims = smallest_dims(spec, shard)
    shapes_only = where is Where.SHAPES
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet())
        if where is not Where.GPU:
            stack.enter_context(without_gpu())
        if implementation is Implementation.LOCAL:
            stack.enter_context(without_transformer_engine(shapes_only=shapes_only))
        if shapes_only:
            from nest_megatron.megatron_core import scans  # which imports torch

            ranks = shard.context_parallel_size
            stack.enter_context(fused_kernels(flash=shard.flash_attention, context_ranks=ranks))
            stack.enter_context(scans.kernels(kind))
        stack.enter_context(balanced_routing())
        stack.enter_context(as_rank(spec, dims, 0))
        model_parallel_cuda_manual_seed(1)
        if make_layers is not None:
            yield make_layers(spec, shard)
            return
        has_engine = implementation is Implementation.TRANSFORMER_ENGINE
        selective = recompute.granularity is RecomputeGranularity.SELECTIVE
        config = transformer_config(
            spec,
            dims,
            sequence_parallel=shard.sequence_parallel,
            recompute=recompute if selective else NO_RECOMPUTE,
            **{
                **_defaults(spec),
                "use_cpu_initialization": where is not Where.GPU,
                "moe_grouped_gemm": spec.is_moe and has_engine,  # as plans launch them
                **changes,
            },
        )
        yield described_layers(spec, shard, config, implementation)


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


def smallest_dims(spec: TransformerSpec, shard: LayerShard) -> ParallelDims:
    """The smallest world in which a layer is divided as the shard says.

    Context ranks are left out: they change no weight, and the tokens of one are given as they are.
    """
    tp, ep, etp = shard.tensor_model_parallel_size, 1, shard.tensor_model_parallel_size
    if spec.is_moe:
        ep, etp = shard.expert_model_parallel_size, shard.expert_tensor_parallel_size
    return ParallelDims(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        data_parallel_size=math.lcm(tp, ep * etp) // tp,
    )


@contextlib.contextmanager
def as_rank(spec: TransformerSpec, dims: ParallelDims, rank: int) -> Iterator[None]:
    """Be one rank of a job; what its groups communicate does nothing.

    Raises:
        RuntimeError: by torch, if this process is in a process group already.
    """
    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts one before it that names the rank, for good
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=dims.world_size
    )
    try:
        parallel_state.initialize_model_parallel(
            **_degrees(spec, dims), order=dims.rank_order.value, create_gloo_process_groups=False
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
        sys.excepthook = hook


#: Fields that a ``TransformerConfig`` shares with our spec, and those of latent attention alone.
_SAME_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "gated_linear_unit",
    "add_bias_linear",
    "qk_layernorm",
    "softmax_type",
    "window_attn_skip_freq",
    "mtp_num_layers",
    "attention_output_gate",
)
_EXPERT_FIELDS = (
    "moe_router_topk",
    "moe_router_enable_expert_bias",
    "moe_latent_size",
    "moe_shared_expert_gate",
    "moe_shared_expert_intermediate_size",
)


def transformer_config(
    spec: TransformerSpec,
    dims: ParallelDims,
    *,
    sequence_parallel: bool,
    recompute: Recompute = NO_RECOMPUTE,
    **changes: Any,
) -> Any:
    """The ``TransformerConfig`` that Megatron's arguments would become.

    Args:
        changes: fields that are set to something else in the end.

    Raises:
        UserInputError: for a model whose layers are not megatron-core's own.

    Source: ``megatron.training.arguments.core_transformer_config_from_args``.
    """
    for name, value in spec.variant.differences().items():
        raise UserInputError(
            f"model {spec.name}: variant.{name}",
            value,
            "megatron-core's own layers do not have it",
            "Use a model that it builds.",
        )
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fields = {
        **_shape_fields(spec),
        **_expert_fields(spec),
        **_degrees(spec, dims),
        "sequence_parallel": sequence_parallel,
    }
    if recompute.granularity is not RecomputeGranularity.NONE:
        fields |= {
            f"recompute_{name}": value or None for name, value in to_plain(recompute).items()
        }
    fields |= changes
    if spec.heterogeneous_layers:
        from megatron.core.transformer.heterogeneous.heterogeneous_config import (
            HeterogeneousTransformerConfig,
        )

        layers = json.dumps(block_configs(spec.heterogeneous_layers))
        return HeterogeneousTransformerConfig(
            **fields, heterogeneous_layers_config_encoded_json=layers
        )
    if not spec.multi_latent_attention:
        return TransformerConfig(**fields)
    return MLATransformerConfig(
        **fields,
        **{name: getattr(spec, name) for name in LATENT_SIZES},
        rope_type="rope",
    )


def _shape_fields(spec: TransformerSpec) -> dict[str, Any]:
    import torch
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    functions = {
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
        "squared_relu": squared_relu,
        "quick_gelu": quick_gelu,
    }
    return {
        **{name: getattr(spec, name) for name in (*_SAME_FIELDS, *MAMBA_SIZES, *DELTA_NET_SIZES)},
        "num_query_groups": None if spec.multi_latent_attention else spec.num_query_groups,
        "activation_func": functions[spec.activation],
        "add_qkv_bias": spec.add_qkv_bias or spec.add_bias_linear,
        "window_size": None if spec.window_size is None else (spec.window_size - 1, 0),
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
    }


def _expert_fields(spec: TransformerSpec) -> dict[str, Any]:
    if spec.num_experts is None:
        return {}
    return {
        **{name: getattr(spec, name) for name in _EXPERT_FIELDS},
        "num_moe_experts": spec.num_experts,
        "moe_layer_freq": list(spec.moe_layer_pattern) or 1,
        "moe_ffn_hidden_size": spec.expert_ffn_hidden_size,
        "moe_router_pre_softmax": spec.moe_router_topk == 1,
        "moe_router_score_function": "sigmoid" if spec.moe_router_enable_expert_bias else "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }


def _degrees(spec: TransformerSpec, dims: ParallelDims) -> dict[str, Any]:
    vpp = dims.virtual_pipeline_model_parallel_size
    return {
        **{name: getattr(dims, name) for name in DEGREES if name != "data_parallel_size"},
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "expert_tensor_parallel_size": launched_expert_tensor_size(spec, dims),
    }


def require_megatron(command: str = "extract") -> None:
    """Refuse to go on without megatron-core.

    Raises:
        UserInputError: naming what to install, and what works without.
    """
    other = ", or add --closed-form to see the formulas that the planner uses"
    for name, package in (("torch", "torch"), ("megatron.core", "megatron-core")):
        limit = f"layers are built by megatron-core, and {package} is not installed"
        require_package(name, "megatron", command, limit, other if command == "extract" else "")
