"""What all layers' work is made of: GEMMs, streaming kernels, collectives, offloading.

A module offloads what autograd saves inside it, which is its input (``TransformerConfig.
offload_modules`` of megatron-core 0.16.1 and 0.20; ``off_interface`` in ``attention.py``,
``multi_latent_attention.py``, ``transformer_layer.py`` and ``moe/experts.py``). A norm that is
fused into the projection after it is no module of its own: ``qkv_linear`` offloads its input too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from nest_megatron.model.execution import FlexBackend
from nest_megatron.model.graph import LayerCollective, LayerGraph, Operator, OperatorKind, Part
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec

ACT = 2  # bytes of an activation element, but for single precision
FP32 = 4
_BUFFERED = (FlexBackend.HYBRIDEP, FlexBackend.NCCLEP)


def dropout_mask(spec: TransformerSpec, local: float) -> tuple[Part, float]:
    """The byte mask that dropout before a residual keeps."""
    return Part.RESIDUAL, local * spec.hidden_size if spec.hidden_dropout > 0 else 0.0


def routed_tokens(spec: TransformerSpec, shard: LayerShard) -> float:
    """Tokens that the experts of one rank see, each as often as it goes to one."""
    tokens = shard.tokens_between_blocks(spec) * spec.moe_router_topk
    return tokens * shard.expert_tensor_parallel_size


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
    is_grouped = num_experts > 1 and not shard.execution.use_transformer_engine_op_fuser
    return Operator(
        name=name,
        part=part,
        kind=OperatorKind.GROUPED_GEMM if num_experts else OperatorKind.GEMM,
        flops=flops,
        bytes_moved=activations + weight * width,
        backward_flops=2 * flops,
        backward_bytes_moved=2 * activations + weight * (width + 2 * FP32),
        fp8=fp8,
        num_gemms=num_experts if is_grouped else 1,
        parallel_rows=rows / num_experts if is_grouped else math.inf,
        input_elements=rows * inner,
        output_elements=rows * columns,
        weight_elements=weight,
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


def residual_sum(name: str, hidden_bytes: float, part: Part = Part.RESIDUAL) -> Operator:
    """The sum of a block's output and its input, dropout included."""
    return streaming(name, part, 3 * hidden_bytes, backward=0.67)


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


#: Layers whose bytes are on the device after all: one at work, one on its way back
#: (``bulk_reload_group``), and the last, which stays (``post_warmup_callback``).
_AT_ONCE = 3


def offloaded_attention(graph: LayerGraph, spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """The attention half of a layer without what its modules send to the host."""
    modules, saved = shard.execution.offload_modules, graph.saved_by_part()
    norm = "attn_norm" if spec.multi_latent_attention else "qkv_linear"
    moved: dict[Part, float] = {}
    if "qkv_linear" in modules:
        moved[Part.INPUT_NORM] = saved[Part.INPUT_NORM]
    if "core_attn" in modules:
        # queries, keys and values
        act, tokens = shard.activation_bytes, shard.tokens(spec)
        heads = spec.num_attention_heads / shard.tensor_model_parallel_size
        if spec.multi_latent_attention:
            each = 2 * (spec.qk_head_dim + spec.qk_pos_emb_head_dim) + spec.v_head_dim
            moved[Part.MLA_UP] = tokens * heads * each * act
        else:
            groups = max(spec.query_groups / shard.tensor_model_parallel_size, 1.0)
            moved[Part.QKV] = tokens * (heads + 2 * groups) * spec.head_dim * act
        if shard.keeps_scores(spec):  # whose scores are saved inside the module as well
            moved[Part.CORE_ATTENTION] = saved[Part.CORE_ATTENTION]
    if "attn_proj" in modules:
        moved[Part.PROJECTION] = saved[Part.PROJECTION]
    return _without(graph, moved, graph.input_bytes if norm in modules else 0.0)


def offloaded_experts(graph: LayerGraph, spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Experts without what their modules send to the host; a dense MLP sends nothing."""
    modules, routed = shard.execution.offload_modules, routed_tokens(spec, shard)
    moved = {Part.EXPERTS: 0.0}
    if "mlp_norm" in modules:
        moved[Part.RESIDUAL] = shard.hidden_bytes(spec)
    if "expert_fc1" in modules or "fused_group_mlp" in modules:
        moved[Part.EXPERTS] += routed * spec.routed_size * shard.input_bytes
    if "moe_act" in modules:
        ffn = spec.expert_ffn_hidden_size / shard.expert_tensor_parallel_size
        moved[Part.EXPERTS] += routed * spec.num_gates * ffn * shard.activation_bytes
    return _without(graph, moved)


def _without(graph: LayerGraph, moved: dict[Part, float], whole_input: float = 0.0) -> LayerGraph:
    """The graph with bytes on the host that come back for the backward pass."""
    total = sum(moved.values()) + whole_input
    if not total:
        return graph
    return dataclasses.replace(
        graph,
        input_bytes=graph.input_bytes - whole_input,
        saved_bytes=(*graph.saved_bytes, *((part, -num) for part, num in moved.items())),
        offloaded_bytes=total,
        working_bytes=graph.working_bytes + _AT_ONCE * total,
    )
