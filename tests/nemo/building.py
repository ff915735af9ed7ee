"""A framework's own model on the meta device, to count its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from nest_megatron.layout.dims import ParallelDims
from nest_megatron.megatron_core.stage import as_rank
from nest_megatron.model.spec import TransformerSpec
from tests.contract.megatron_shims import meta_megatron

#: What changes no parameter, and needs CUDA, Transformer Engine or more than one rank.
PLAIN: dict[str, Any] = {
    "apply_rope_fusion": False,
    "attention_backend": None,
    "bias_activation_fusion": False,
    "context_parallel_size": 1,
    "cross_entropy_loss_fusion": False,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_token_dispatcher_type": "alltoall",
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "overlap_moe_expert_parallel_comm": False,
    "perform_initialization": False,
    "pipeline_model_parallel_layout": None,
    "pipeline_model_parallel_size": 1,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_modules": None,
    "recompute_num_layers": None,
    "sequence_parallel": False,
    "tensor_model_parallel_size": 1,
    "use_transformer_engine_full_layer_spec": False,
    "virtual_pipeline_model_parallel_size": None,
}


def make_plain(config: Any) -> None:
    """Set what changes no parameter so that the model is built here."""
    for name, value in PLAIN.items():
        if hasattr(config, name):
            setattr(config, name, value)


@contextlib.contextmanager
def one_rank(spec: TransformerSpec) -> Iterator[None]:
    """Let megatron-core build the whole model, without Transformer Engine."""
    from megatron.core.transformer import attention

    with (
        meta_megatron(),
        mock.patch.object(attention, "HAVE_TE", False),
        as_rank(spec, ParallelDims(), 0),
    ):
        yield


def count(model: Any) -> int:
    """Parameters of a module."""
    return sum(parameter.numel() for parameter in model.parameters())
