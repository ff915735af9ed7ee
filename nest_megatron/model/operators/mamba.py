"""A Mamba-2 layer: norm, input projection, convolution, chunked scan, gated norm, projection.

Source: ``megatron/core/ssm/mamba_mixer.py`` and ``mamba_context_parallel.py`` of megatron-core
0.16.1 and 0.20 (the same work in both), whose training pass calls one autograd function of
mamba_ssm, ``mamba_split_conv1d_scan_combined`` (``ops/triton/ssd_combined.py``). The algorithm is
section 6 of arXiv 2405.21060: inside a chunk products as in attention, between chunks states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nest_megatron.model.graph import (
    Group,
    LayerCollective,
    LayerGraph,
    Operator,
    OperatorKind,
    Part,
)
from nest_megatron.model.operators.attention import with_graph_inputs
from nest_megatron.model.operators.common import FP32, dropout_mask, gathered_block, gemm, streaming
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec

#: Tokens of a chunk: the default of ``MambaMixer``, which no layer specification changes.
CHUNK = 128


@dataclass(frozen=True, slots=True)
class _Widths:
    """Channels of a token on one rank.

    Args:
        inner: of all heads together.
        bc: of ``B`` and ``C`` together, as the scan sees them.
        projected: what the input projection puts out: ``z``, ``x``, ``B``, ``C`` and ``dt``.
        scanned: the same with the groups that context ranks copy.
    """

    inner: float
    heads: float
    groups: float
    state: int
    bc: float
    projected: float
    scanned: float


def _widths(spec: TransformerSpec, shard: LayerShard) -> _Widths:
    """Tensor ranks divide heads and groups; context ranks heads, and groups as far as they go."""
    tp, cp = shard.tensor_model_parallel_size, shard.context_parallel_size
    heads, state = spec.num_mamba_heads / tp, spec.mamba_state_dim
    inner, own = heads * spec.mamba_head_dim, spec.mamba_num_groups / tp
    groups = max(own, cp) if cp > 1 else own
    bc = 2 * groups * state
    return _Widths(
        inner=inner,
        heads=heads,
        groups=groups,
        state=state,
        bc=bc,
        projected=2 * inner + 2 * own * state + heads,
        scanned=2 * inner + bc + heads,
    )


def mamba_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """A Mamba-2 layer with its norm and residual."""
    act, hidden = shard.activation_bytes, spec.hidden_size
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    hidden_bytes, widths = shard.hidden_bytes(spec), _widths(spec, shard)
    inner_bytes = tokens * widths.inner * act
    num_bytes = tokens * (widths.inner + widths.bc) * act
    operators = (
        streaming("input_norm", Part.SSM, 2 * hidden_bytes),
        gemm(shard, "in_proj", Part.SSM, tokens, hidden, widths.projected),
        *exchange_copies(shard, tokens * widths.scanned * act, inner_bytes),
        streaming("conv1d", Part.SSM, 2 * num_bytes, backward=2.5),
        _scan(widths, tokens, act),
        streaming("gated_norm", Part.SSM, 2 * inner_bytes),
        gemm(shard, "out_proj", Part.SSM, tokens, widths.inner, hidden),
        streaming("residual", Part.SSM, 3 * hidden_bytes, backward=0.67),
    )
    saved = (
        (Part.SSM, local * hidden * shard.input_bytes),
        # what the kernel is given, what it makes before the gate, what the norm is given
        (Part.SSM, tokens * (widths.scanned + 2 * widths.inner) * act),
        (Part.SSM, tokens * widths.groups * FP32),  # one deviation of the norm for each group
        (Part.SSM, tokens * widths.inner * shard.input_bytes),
        dropout_mask(spec, local),
    )
    collectives = (
        *gathered_block(spec, shard, Part.SSM, Part.SSM, "in_proj", "out_proj"),
        *exchanges(shard, tokens * widths.scanned * act, inner_bytes, calls=5),
    )
    graph = LayerGraph(
        operators=operators,
        collectives=collectives,
        input_bytes=hidden_bytes,
        saved_bytes=saved,
        working_bytes=_working_bytes(widths, tokens, act),
    )
    return with_graph_inputs(graph, shard, "mamba")


def _scan(widths: _Widths, tokens: float, act: int) -> Operator:
    """The five kernels of the chunked scan (``_mamba_chunk_scan_combined_fwd``) and their gradient.

    Forward, with states of ``inner * state`` for each chunk: the products of ``B`` and ``x`` (the
    states), of ``C`` and ``B`` (scores of a chunk, in float32), of scores and ``x`` (the causal
    half) and of ``C`` and states. States are written and read in float32, passed on in 16 bits.
    The backward pass makes states and scores again, then the gradient of each product
    (``_mamba_chunk_scan_combined_bwd``); it goes over tensors as wide as ``x`` 17 times and over
    those of the states in 34 bytes an element.
    """
    inner, state, groups = widths.inner, widths.state, widths.groups
    bc_bytes, score_bytes = groups * state * act, groups * CHUNK * FP32
    states = inner * state / CHUNK
    steps = widths.heads * FP32
    return Operator(
        name="scan",
        part=Part.SSM,
        kind=OperatorKind.SCAN,
        flops=tokens * (4 * inner * state + inner * CHUNK + 2 * groups * CHUNK * state),
        bytes_moved=tokens
        * (5 * inner * act + 12 * states + 4 * bc_bytes + 2 * score_bytes + 6 * steps),
        backward_flops=tokens
        * (10 * inner * state + 3 * inner * CHUNK + 6 * groups * CHUNK * state),
        backward_bytes_moved=tokens
        * (17 * inner * act + 34 * states + 10 * bc_bytes + 7 * score_bytes + 20 * steps),
        num_kernels=5,
        has_weight=False,
    )


def _working_bytes(widths: _Widths, tokens: float, act: int) -> float:
    """Gradients of the kernel's input and output, and its states in float32 and 16 bits."""
    states = 2 * widths.inner * widths.state / CHUNK * (FP32 + act)
    return tokens * ((widths.scanned + 2 * widths.inner) * act + states)


def exchange_copies(shard: LayerShard, into: float, out_of: float) -> Iterator[Operator]:
    """What context parallelism copies: pieces for the exchange, their sum, the order of tokens.

    Attention's order is undone before the scan and made again behind it.
    """
    if shard.context_parallel_size > 1:
        moved = 6 * into + 6 * out_of
        yield streaming("exchange_copies", Part.SSM, moved, backward=1.0, kernels=20)


def exchanges(
    shard: LayerShard, into: float, out_of: float, *, calls: int
) -> Iterator[LayerCollective]:
    """Sequence for heads, in so many calls, and back in one, among context-parallel ranks."""
    if shard.context_parallel_size == 1:
        return
    for backward in (False, True):
        for name, size, count in (("heads", into, calls), ("sequence", out_of, 1)):
            yield LayerCollective(
                name,
                Part.SSM,
                "all_to_all",
                size / count,
                group=Group.CONTEXT,
                backward=backward,
                num_calls=count,
            )
