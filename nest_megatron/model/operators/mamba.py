"""A Mamba-2 layer and a gated delta net: convolution, scan and gated norm between projections.

Source: ``megatron/core/ssm/mamba_mixer.py`` and ``mamba_context_parallel.py`` of megatron-core
0.16.1 and 0.20 (the same work in both), whose training pass calls one autograd function of
mamba_ssm, ``mamba_split_conv1d_scan_combined`` (``ops/triton/ssd_combined.py``). The algorithm is
section 6 of arXiv 2405.21060: inside a chunk products as in attention, between chunks states.

The gated delta net: ``megatron/core/ssm/gated_delta_net.py`` of 0.16.1 and
``ssm/gated_delta_net/`` of 0.20, whose rule is a chain of kernels of flash-linear-attention
(``fla/ops/gated_delta_rule/chunk.py``). Query and key heads are copied before it to as many as
there are value heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from nest_megatron.model.graph import (
    Group,
    LayerCollective,
    LayerGraph,
    Operator,
    OperatorKind,
    Part,
)
from nest_megatron.model.operators.attention import with_graph_inputs
from nest_megatron.model.operators.common import (
    FP32,
    dropout_mask,
    gathered_block,
    gemm,
    residual_sum,
    streaming,
)
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen

#: Tokens of a chunk: the default of ``MambaMixer``, which no layer specification changes.
CHUNK = 128


@frozen
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
    act, tokens, widths = shard.activation_bytes, shard.tokens(spec), _widths(spec, shard)
    scanned_bytes, inner_bytes = tokens * widths.scanned * act, tokens * widths.inner * act
    convolved_bytes = tokens * (widths.inner + widths.bc) * act
    states = 2 * widths.inner * widths.state / CHUNK * (FP32 + act)
    between = LayerGraph(
        operators=(
            *_exchange_copies(shard, scanned_bytes, inner_bytes),
            # read and written once; the backward pass first does it again
            streaming("conv1d", Part.SSM, 2 * convolved_bytes, backward=2.5),
            _scan(widths, tokens, act),
            streaming("gated_norm", Part.SSM, 2 * inner_bytes),
        ),
        collectives=tuple(_exchanges(shard, scanned_bytes, inner_bytes, calls=5)),
        saved_bytes=(
            # what the kernel is given, what it makes before the gate, what the norm is given
            (Part.SSM, tokens * (widths.scanned + 2 * widths.inner) * act),
            (Part.SSM, tokens * widths.groups * FP32),  # one deviation of the norm for each group
        ),
        # gradients of the kernel's input and output, and its states in float32 and 16 bits
        working_bytes=tokens * ((widths.scanned + 2 * widths.inner) * act + states),
    )
    graph = _mixer(spec, shard, widths.projected, widths.inner, between)
    return with_graph_inputs(graph, shard, "mamba")


def _mixer(
    spec: TransformerSpec, shard: LayerShard, projected: float, inner: float, between: LayerGraph
) -> LayerGraph:
    """Norm, input projection, what lies between, output projection, residual.

    Args:
        projected, inner: what the first projection puts out, and what the second is given and
            keeps, on one rank.
    """
    tokens, hidden = shard.tokens(spec), spec.hidden_size
    local, hidden_bytes = shard.tokens_between_blocks(spec), shard.hidden_bytes(spec)
    return LayerGraph(
        operators=(
            streaming("input_norm", Part.SSM, 2 * hidden_bytes),
            gemm(shard, "in_proj", Part.SSM, tokens, hidden, projected),
            *between.operators,
            gemm(shard, "out_proj", Part.SSM, tokens, inner, hidden),
            residual_sum("residual", hidden_bytes, Part.SSM),
        ),
        collectives=(
            *gathered_block(spec, shard, Part.SSM, Part.SSM, "in_proj", "out_proj"),
            *between.collectives,
        ),
        input_bytes=hidden_bytes,
        saved_bytes=(
            (Part.SSM, local * hidden * shard.input_bytes),
            *between.saved_bytes,
            (Part.SSM, tokens * inner * shard.input_bytes),
            dropout_mask(spec, local),
        ),
        working_bytes=between.working_bytes,
    )


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


def _exchange_copies(shard: LayerShard, into: float, out_of: float) -> Iterator[Operator]:
    """What context parallelism copies: pieces for the exchange, their sum, the order of tokens.

    Attention's order is undone before the scan and made again behind it.
    """
    if shard.context_parallel_size > 1:
        moved = 6 * into + 6 * out_of
        yield streaming("exchange_copies", Part.SSM, moved, backward=1.0, kernels=20)


def _exchanges(
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


#: Tokens of a chunk: the default of ``chunk_gated_delta_rule``.
DELTA_CHUNK = 64


@frozen
class _DeltaWidths:
    """Channels of a token on one rank.

    Args:
        heads: of values, and of queries and keys once they are copied.
        query, value: of all heads together, the former before they are copied.
        copied: of queries, or of keys, behind that.
    """

    heads: float
    query: float
    value: float
    copied: float

    @property
    def convolved(self) -> float:
        """Queries, keys and values."""
        return 2 * self.query + self.value

    @property
    def projected(self) -> float:
        """What the input projection puts out: those, an output gate and two gates a head."""
        return self.convolved + self.value + 2 * self.heads


def _delta_widths(spec: TransformerSpec, shard: LayerShard) -> _DeltaWidths:
    tp = shard.tensor_model_parallel_size
    heads = spec.linear_num_value_heads / tp
    return _DeltaWidths(
        heads=heads,
        query=spec.linear_num_key_heads * spec.linear_key_head_dim / tp,
        value=heads * spec.linear_value_head_dim,
        copied=heads * spec.linear_key_head_dim,
    )


def gated_delta_net_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """A gated delta net with its norm and residual."""
    act, tokens, widths = shard.activation_bytes, shard.tokens(spec), _delta_widths(spec, shard)
    projected_bytes, value_bytes = tokens * widths.projected * act, tokens * widths.value * act
    is_copied = spec.linear_num_value_heads > spec.linear_num_key_heads
    copies = tokens * 2 * widths.copied * act if is_copied else 0.0
    moved = tokens * (4 * 2 * widths.query + 4 * widths.value) * act + 1.5 * copies
    gates = tokens * widths.heads * (6 * FP32 + 4 * act)
    convolved = 4 * tokens * widths.convolved * act
    between = LayerGraph(
        operators=(
            # transposed, convolved with its activation; back in the order of tokens on the way
            streaming("conv1d", Part.SSM, convolved, backward=1.5, kernels=2),
            # queries and keys normed and copied to all heads, values and gates laid out again
            streaming("rule_inputs", Part.SSM, moved, backward=1.0, kernels=8),
            streaming("decay", Part.SSM, gates, backward=1.0, kernels=6),
            _rule(spec, widths, tokens, act),
            streaming("gated_norm", Part.SSM, 4 * value_bytes, kernels=3),
            *_exchange_copies(shard, projected_bytes, value_bytes),
        ),
        collectives=tuple(_exchanges(shard, projected_bytes, value_bytes, calls=1)),
        saved_bytes=((Part.SSM, tokens * _saved_inside(widths, act) + copies),),
        working_bytes=tokens * (2 * widths.projected + 4 * widths.copied) * act,
    )
    graph = _mixer(spec, shard, widths.projected, widths.value, between)
    return with_graph_inputs(graph, shard, "attn")


def _saved_inside(widths: _DeltaWidths, act: int) -> float:
    """Bytes a token between the two projections, copies of heads apart.

    The convolution keeps its input; the norms of queries and keys their output and a deviation; the
    rule values, one product inside each chunk, a decay (cumulated, float32) and a strength; the
    decay the input and output of its softplus, the strength its sigmoid; the gated norm its input
    and output, a deviation and the gate.
    """
    inside = widths.convolved + 2 * widths.query + widths.value + widths.heads * DELTA_CHUNK
    gates = widths.heads * (FP32 + 2 * FP32 + act)
    norm = 3 * widths.value * act + widths.heads * FP32
    return inside * act + gates + norm + 2 * widths.heads * FP32


def _rule(spec: TransformerSpec, widths: _DeltaWidths, tokens: float, act: int) -> Operator:
    """The gated delta rule over chunks, and its gradient (``chunk_gated_delta_rule_fwd``).

    Forward, for each value head with keys of ``K`` and values of ``V``: keys with keys, the inverse
    of that triangle, what it makes of keys and values (``w``, ``u``); states against ``w`` and with
    keys; queries with states and keys, and those scores with values. The backward pass makes
    ``w``, ``u`` and states again, then the gradient of each product.
    """
    key, heads = widths.copied, widths.heads
    states = key * spec.linear_value_head_dim  # of all heads, a product with them for each token
    inside = DELTA_CHUNK * key, DELTA_CHUNK * widths.value, heads * DELTA_CHUNK * DELTA_CHUNK
    state_bytes = states / DELTA_CHUNK * act
    return Operator(
        name="delta_rule",
        part=Part.SSM,
        kind=OperatorKind.SCAN,
        flops=tokens * (6 * states + 6 * inside[0] + 4 * inside[1] + inside[2] / 3),
        bytes_moved=tokens
        * ((7 * key + 6 * widths.value + 2 * heads * DELTA_CHUNK) * act + 2 * state_bytes),
        backward_flops=tokens * (16 * states + 18 * inside[0] + 10 * inside[1] + 4 * inside[2]),
        backward_bytes_moved=tokens
        * ((21 * key + 15 * widths.value + 2 * heads * DELTA_CHUNK) * act + 4 * state_bytes),
        num_kernels=5,
        has_weight=False,
    )
