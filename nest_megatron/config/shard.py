"""How a configuration divides one layer, and Megatron's rules on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nest_megatron.config.compose import Composed
from nest_megatron.errors import UserInputError
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.degree_rules import DEGREE_RULES, violations
from nest_megatron.parallel.dims import ParallelDims
from nest_megatron.parallel.rules import LaunchRequest

#: Degrees that change what one rank does in a layer.
DEGREES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def read_shard(
    composed: Composed, spec: TransformerSpec, flags: Mapping[str, Any] = MappingProxyType({})
) -> LayerShard:
    """How the configuration divides a layer; what is not given is Megatron's default.

    Args:
        flags: a command's, which count where the configuration says nothing.

    Raises:
        UserInputError: for degrees that Megatron does not build this model with.
    """
    parallel, train = composed.config.parallel, composed.config.train
    given = {name: _first(getattr(parallel, name), flags.get(name)) for name in DEGREES}
    degrees = {name: 1 if value is None else value for name, value in given.items()}
    tp = degrees["tensor_model_parallel_size"]
    if spec.num_experts is not None and given["expert_tensor_parallel_size"] is None:
        degrees["expert_tensor_parallel_size"] = tp  # Megatron's own default
    sequence_parallel = parallel.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = flags.get("sequence_parallel", tp > 1) and tp > 1
    micro_batch_size = train.micro_batch_size
    if micro_batch_size is None:
        micro_batch_size = flags.get("micro_batch_size") or 1
    shard = LayerShard(
        tensor_model_parallel_size=tp,
        context_parallel_size=degrees["context_parallel_size"],
        expert_model_parallel_size=degrees["expert_model_parallel_size"],
        expert_tensor_parallel_size=degrees["expert_tensor_parallel_size"],
        micro_batch_size=micro_batch_size,
        sequence_parallel=sequence_parallel,
    )
    _check(spec, shard)
    return shard


def _first(given: int | None, otherwise: int | None) -> int | None:
    return otherwise if given is None else given


def _check(spec: TransformerSpec, shard: LayerShard) -> None:
    """Megatron's rules on degrees, on the smallest grid that holds them."""
    if shard.micro_batch_size < 1:
        raise UserInputError(
            "train.micro_batch_size",
            value=shard.micro_batch_size,
            limit="it must be a whole number of at least 1",
            fix="Give the sequences of one micro batch.",
        )
    degrees = {name: getattr(shard, name) for name in DEGREES}
    for name, value in degrees.items():
        if value < 1:
            ParallelDims(**{name: value})  # says what is wrong with it
    experts = shard.expert_model_parallel_size * shard.expert_tensor_parallel_size
    ranks = shard.tensor_model_parallel_size * shard.context_parallel_size
    replicas = experts // math.gcd(experts, ranks)
    request = LaunchRequest(
        spec=spec,
        dims=ParallelDims(**degrees, data_parallel_size=replicas),
        micro_batch_size=shard.micro_batch_size,
        global_batch_size=shard.micro_batch_size * replicas,
        sequence_parallel=shard.sequence_parallel,
        moe_grouped_gemm=spec.is_moe,
    )
    for _, broken in violations(request, DEGREE_RULES):
        raise UserInputError(broken.what, value=broken.value, limit=broken.limit, fix=broken.fix)
