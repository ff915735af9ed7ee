"""What all layers' work is made of: GEMMs, streaming kernels, collectives."""

from __future__ import annotations

from collections.abc import Iterator

from nest_megatron.model.execution import FlexBackend
from nest_megatron.model.graph import LayerCollective, Operator, OperatorKind, Part
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec

ACT = 2  # bytes of an activation element, but for single precision
FP32 = 4
_BUFFERED = (FlexBackend.HYBRIDEP, FlexBackend.NCCLEP)


def dropout_mask(spec: TransformerSpec, local: float) -> tuple[Part, float]:
    """The byte mask that dropout before a residual keeps."""
    return Part.RESIDUAL, local * spec.hidden_size if spec.hidden_dropout > 0 else 0.0


def dispatch_buffer_bytes(spec: TransformerSpec, shard: LayerShard) -> float:
    """HybridEP's buffers, one for tokens sent out and one for tokens coming back.

    Each has a place for every token of every rank of the expert group, since all of them may come
    here (``HybridEPBuffer``: ``max_num_of_tokens``); all layers share them. NCCL EP runs the same
    kernels.
    """
    if shard.execution.moe_flex_dispatcher_backend not in _BUFFERED or not spec.is_moe:
        return 0.0
    size = shard.hidden_bytes(spec) * spec.routed_size / spec.hidden_size
    return 2 * shard.expert_model_parallel_size * size


def gemm(
    shard: LayerShard,
    name: str,
    part: Part,
    rows: float,
    inner: float,
    columns: float,
    *,
    fp8: bool = True,
    num_experts: int = 0,
) -> Operator:
    """A GEMM of ``rows x inner`` activations with an ``inner x columns`` weight.

    Args:
        num_experts: experts of this rank, each with such a weight: one grouped kernel.
    """
    width = shard.activation_bytes
    flops = 2.0 * rows * inner * columns
    activations = rows * (inner + columns) * width
    weight = inner * columns * (num_experts or 1)
    is_fused = shard.execution.use_transformer_engine_op_fuser
    return Operator(
        name=name,
        part=part,
        kind=OperatorKind.GROUPED_GEMM if num_experts else OperatorKind.GEMM,
        flops=flops,
        bytes_moved=activations + weight * width,
        backward_flops=2 * flops,
        backward_bytes_moved=2 * activations + weight * (width + 2 * FP32),
        fp8=fp8,
        num_gemms=1 if is_fused or not num_experts else num_experts,
        input_elements=rows * inner,
        output_elements=rows * columns,
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
    """Tensor-parallel traffic of a column-parallel and a row-parallel projection around a block."""
    size = shard.tokens(spec) * spec.hidden_size * shard.activation_bytes
    yield from row_parallel(shard, part_out, last, size)
    yield from column_parallel(shard, part_in, first, size)


def column_parallel(
    shard: LayerShard, part: Part, name: str, num_bytes: float
) -> Iterator[LayerCollective]:
    """Tensor-parallel traffic of a projection whose columns are divided.

    With sequence parallelism the input is gathered forward; backward it is gathered again for the
    weight gradient under the data gradient, and the data gradient is scattered under the weight's
    (``LinearWithGradAccumulationAndAsyncCommunication``). Without, the data gradient is summed
    under the weight's.

    Args:
        num_bytes: the whole input of one rank.
    """
    if shard.tensor_model_parallel_size == 1:
        return
    calls = [("all_reduce", "all_reduce")]
    if shard.sequence_parallel:
        yield LayerCollective(f"{name}.gather", part, "all_gather", num_bytes)
        calls = [("regather", "all_gather"), ("scatter", "reduce_scatter")]
    for what, kind in calls:
        yield LayerCollective(
            f"{name}.{what}", part, kind, num_bytes, backward=True, hidden_under=name
        )


def row_parallel(
    shard: LayerShard, part: Part, name: str, num_bytes: float
) -> Iterator[LayerCollective]:
    """Tensor-parallel traffic of a projection whose rows are divided: its output is summed.

    Args:
        num_bytes: the whole output of one rank.
    """
    if shard.tensor_model_parallel_size == 1:
        return
    if not shard.sequence_parallel:
        yield LayerCollective(f"{name}.all_reduce", part, "all_reduce", num_bytes)
        return
    yield LayerCollective(f"{name}.scatter", part, "reduce_scatter", num_bytes)
    yield LayerCollective(f"{name}.gather", part, "all_gather", num_bytes, backward=True)
