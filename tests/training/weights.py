"""Weights that do not depend on the layout: drawn from a parameter's global name, then cut.

The same cut serves to compare the trained weights of a layout with those of the one-rank run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state

from nest_megatron.model.spec import TransformerSpec

Weights = dict[str, torch.Tensor]


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to a routed expert, so that the expert grid lays it."""
    return ".mlp.experts." in name


def global_parameters(spec: TransformerSpec, models: list[Any]) -> Iterator[tuple[str, Any]]:
    """This rank's parameters under the names that they have in the whole model."""
    for model in models:
        for name, parameter in model.named_parameters():
            yield _global_name(spec, model, name), parameter


def _global_name(spec: TransformerSpec, model: Any, name: str) -> str:
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number)
    if "local_experts" in parts:
        assert spec.num_experts is not None
        here = parts.index("local_experts") + 1
        local = spec.num_experts // parallel_state.get_expert_model_parallel_world_size()
        first = local * parallel_state.get_expert_model_parallel_rank()
        parts[here] = str(first + int(parts[here]))
    tied = not spec.untie_embeddings_and_output_weights
    if tied and parts == ["output_layer", "weight"]:
        parts = ["embedding", "word_embeddings", "weight"]
    return ".".join(parts)


def fill(spec: TransformerSpec, models: list[Any]) -> Weights:
    """Give every parameter its first value; copies of what this rank now holds."""
    begun = {}
    for name, parameter in global_parameters(spec, models):
        begun[name] = _initial_weight(name, parameter)
        parameter.data.copy_(begun[name])
    return begun


def _initial_weight(name: str, parameter: Any) -> torch.Tensor:
    """This rank's share of a parameter's first value.

    Norms begin at one; all else is normal with a standard deviation of 0.1, large enough that every
    layer matters to the loss.
    """
    count, _ = _tensor_shards(name, parameter)
    shape = list(parameter.shape)
    if count > 1:
        shape[parameter.partition_dim] *= count
    if "norm" in name:
        return torch.ones(shape)
    seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
    full = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1
    return shard_of(full, name, parameter)


def shard_of(full: torch.Tensor, name: str, parameter: Any) -> torch.Tensor:
    """This tensor rank's share of a whole weight."""
    count, rank = _tensor_shards(name, parameter)
    if count == 1:
        return full
    if "linear_fc1" in name:  # gate and projection lie one above the other, each cut by itself
        halves = full.unflatten(0, (2, -1)).chunk(count, dim=1)
        return halves[rank].flatten(0, 1)
    return full.chunk(count, dim=parameter.partition_dim)[rank]


def _tensor_shards(name: str, parameter: Any) -> tuple[int, int]:
    """How many tensor ranks share a parameter, and which of them this is."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return 1, 0
    if is_expert(name):
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )


def largest_stray(
    spec: TransformerSpec, models: list[Any], begun: Weights, reference: Weights
) -> tuple[str, float]:
    """The parameter that strayed furthest from the reference, relative to how far that moved.

    Args:
        begun: this rank's first weights.
        reference: the whole weights of the one-rank run after its training.
    """
    strays = {}
    for name, parameter in global_parameters(spec, models):
        wanted = shard_of(reference[name], name, parameter)
        moved = (wanted - begun[name]).norm()
        strays[name] = float((parameter.detach() - wanted).norm() / moved)
    return max(strays.items(), key=lambda item: item[1])
