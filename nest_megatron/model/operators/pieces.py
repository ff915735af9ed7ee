"""What all layers' work is made of: products, streaming kernels, tensor-parallel collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nest_megatron.model.graph import Group, LayerCollective, Operator, OperatorKind, Part
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec

ACT = 2  # bytes of an activation element
FP32 = 4


@dataclass(frozen=True, slots=True)
class Pieces:
    """A stretch of a layer: its operators, its collectives and what it keeps."""

    operators: tuple[Operator, ...] = ()
    collectives: tuple[LayerCollective, ...] = ()
    saved: tuple[tuple[Part, float], ...] = ()

    def __add__(self, other: Pieces) -> Pieces:
        return Pieces(
            self.operators + other.operators,
            self.collectives + other.collectives,
            self.saved + other.saved,
        )


def dropout_mask(spec: TransformerSpec, local: float) -> tuple[Part, float]:
    """The byte mask that dropout before a residual keeps."""
    return Part.RESIDUAL, local * spec.hidden_size if spec.hidden_dropout > 0 else 0.0


def gemm(
    name: str, part: Part, rows: float, inner: float, columns: float, *, fp8: bool = True
) -> Operator:
    """A product of ``rows x inner`` activations with an ``inner x columns`` weight."""
    flops = 2.0 * rows * inner * columns
    activations = rows * (inner + columns) * ACT
    weight = inner * columns
    return Operator(
        name=name,
        part=part,
        kind=OperatorKind.GEMM,
        flops=flops,
        bytes_moved=activations + weight * ACT,
        backward_flops=2 * flops,
        backward_bytes_moved=2 * activations + weight * (ACT + 2 * FP32),
        fp8=fp8,
    )


def streaming(
    name: str, part: Part, num_bytes: float, *, backward: float = 2.0, kernels: int = 1
) -> Operator:
    """A memory-bound kernel that moves ``num_bytes`` forward and ``backward`` times that back."""
    return Operator(
        name=name,
        part=part,
        kind=OperatorKind.MEMORY_BOUND,
        bytes_moved=num_bytes,
        backward_bytes_moved=backward * num_bytes,
        num_kernels=kernels,
    )


def gathered_block(
    spec: TransformerSpec, shard: LayerShard, part_in: Part, part_out: Part, first: str, last: str
) -> Iterator[LayerCollective]:
    """Tensor-parallel collectives around a column-parallel and a row-parallel projection.

    With sequence parallelism: all-gather in, reduce-scatter out, and their mirror images backward,
    where the input is gathered again for the weight gradient under the data gradient of ``first``
    and the scatter runs under its weight gradient
    (``LinearWithGradAccumulationAndAsyncCommunication``).
    Without: all-reduce forward behind ``last``, all-reduce backward under the weight gradient.
    """
    if shard.tensor_model_parallel_size == 1:
        return
    size = shard.tokens(spec) * spec.hidden_size * ACT
    tensor = Group.TENSOR
    if not shard.sequence_parallel:
        yield LayerCollective(
            name=f"{last}.all_reduce",
            part=part_out,
            kind="all_reduce",
            group=tensor,
            message_bytes=size,
        )
        yield LayerCollective(
            name=f"{first}.all_reduce",
            part=part_in,
            kind="all_reduce",
            group=tensor,
            message_bytes=size,
            backward=True,
            hidden_under=first,
        )
        return
    for name, part, kind, backward, under in (
        (f"{first}.gather", part_in, "all_gather", False, ""),
        (f"{last}.scatter", part_out, "reduce_scatter", False, ""),
        (f"{last}.gather", part_out, "all_gather", True, ""),
        (f"{first}.regather", part_in, "all_gather", True, first),
        (f"{first}.scatter", part_in, "reduce_scatter", True, first),
    ):
        yield LayerCollective(
            name=name,
            part=part,
            kind=kind,
            group=tensor,
            message_bytes=size,
            backward=backward,
            hidden_under=under,
        )
