"""The first half of a layer of linear attention: a gated delta net with its norm and residual.

Source: ``megatron/core/ssm/gated_delta_net.py`` of 0.16.1 and ``ssm/gated_delta_net/`` of 0.20,
whose rule is a chain of kernels of flash-linear-attention (``fla/ops/gated_delta_rule/chunk.py``).
Query and key heads are copied before it to as many as there are value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nest_megatron.model.graph import LayerGraph, Operator, OperatorKind, Part
from nest_megatron.model.operators.attention import with_graph_inputs
from nest_megatron.model.operators.common import FP32, dropout_mask, gathered_block, gemm, streaming
from nest_megatron.model.operators.mamba import exchange_copies, exchanges
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec

#: Tokens of a chunk: the default of ``chunk_gated_delta_rule``.
CHUNK = 64


@dataclass(frozen=True, slots=True)
class _Widths:
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


def _widths(spec: TransformerSpec, shard: LayerShard) -> _Widths:
    tp = shard.tensor_model_parallel_size
    heads = spec.linear_num_value_heads / tp
    return _Widths(
        heads=heads,
        query=spec.linear_num_key_heads * spec.linear_key_head_dim / tp,
        value=heads * spec.linear_value_head_dim,
        copied=heads * spec.linear_key_head_dim,
    )


def gated_delta_net_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """A gated delta net with its norm and residual."""
    act, hidden = shard.activation_bytes, spec.hidden_size
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    widths, hidden_bytes = _widths(spec, shard), shard.hidden_bytes(spec)
    value_bytes = tokens * widths.value * act
    is_copied = spec.linear_num_value_heads > spec.linear_num_key_heads
    copies = tokens * 2 * widths.copied * act if is_copied else 0.0
    operators = (
        streaming("input_norm", Part.SSM, 2 * hidden_bytes),
        gemm(shard, "in_proj", Part.SSM, tokens, hidden, widths.projected),
        # transposed, convolved with its activation; back in the order of tokens on the way
        streaming("conv1d", Part.SSM, 4 * tokens * widths.convolved * act, backward=1.5, kernels=2),
        *_inputs_of_rule(widths, tokens, act, copies),
        _rule(spec, widths, tokens, act),
        streaming("gated_norm", Part.SSM, 4 * value_bytes, kernels=3),
        *exchange_copies(shard, tokens * widths.projected * act, value_bytes),
        gemm(shard, "out_proj", Part.SSM, tokens, widths.value, hidden),
        streaming("residual", Part.SSM, 3 * hidden_bytes, backward=0.67),
    )
    saved = (
        (Part.SSM, local * hidden * shard.input_bytes),
        (Part.SSM, tokens * _saved_inside(widths, act) + copies),
        (Part.SSM, tokens * widths.value * shard.input_bytes),  # of the output projection
        dropout_mask(spec, local),
    )
    collectives = (
        *gathered_block(spec, shard, Part.SSM, Part.SSM, "in_proj", "out_proj"),
        *exchanges(shard, tokens * widths.projected * act, value_bytes, calls=1),
    )
    graph = LayerGraph(
        operators=operators,
        collectives=collectives,
        input_bytes=hidden_bytes,
        saved_bytes=saved,
        working_bytes=tokens * (2 * widths.projected + 4 * widths.copied) * act,
    )
    return with_graph_inputs(graph, shard, "attn")


def _saved_inside(widths: _Widths, act: int) -> float:
    """Bytes a token between the two projections, copies of heads apart.

    The convolution keeps its input; the norms of queries and keys their output and a deviation; the
    rule values, one product inside each chunk, a decay (cumulated, float32) and a strength; the
    decay the input and output of its softplus, the strength its sigmoid; the gated norm its input
    and output, a deviation and the gate.
    """
    inside = widths.convolved + 2 * widths.query + widths.value + widths.heads * CHUNK
    gates = widths.heads * (FP32 + 2 * FP32 + act)
    norm = 3 * widths.value * act + widths.heads * FP32
    return inside * act + gates + norm + 2 * widths.heads * FP32


def _inputs_of_rule(widths: _Widths, tokens: float, act: int, copies: float) -> Iterator[Operator]:
    """Queries and keys normed and copied to all heads, values and gates laid out anew."""
    moved = tokens * (4 * 2 * widths.query + 4 * widths.value) * act + 1.5 * copies
    yield streaming("rule_inputs", Part.SSM, moved, backward=1.0, kernels=8)
    gates = tokens * widths.heads * (6 * FP32 + 4 * act)
    yield streaming("decay", Part.SSM, gates, backward=1.0, kernels=6)


def _rule(spec: TransformerSpec, widths: _Widths, tokens: float, act: int) -> Operator:
    """The gated delta rule over chunks, and its gradient (``chunk_gated_delta_rule_fwd``).

    Forward, for each value head with keys of ``K`` and values of ``V``: keys with keys, the inverse
    of that triangle, what it makes of keys and values (``w``, ``u``); states against ``w`` and with
    keys; queries with states and keys, and those scores with values. The backward pass makes
    ``w``, ``u`` and states again, then the gradient of each product.
    """
    key, value, heads = widths.copied, spec.linear_value_head_dim, widths.heads
    states = key * value  # of all heads, a product with them for each token
    inside = CHUNK * key, CHUNK * widths.value, heads * CHUNK * CHUNK
    state_bytes = states / CHUNK * act
    return Operator(
        name="delta_rule",
        part=Part.SSM,
        kind=OperatorKind.SCAN,
        flops=tokens * (6 * states + 6 * inside[0] + 4 * inside[1] + inside[2] / 3),
        bytes_moved=tokens
        * ((7 * key + 6 * widths.value + 2 * heads * CHUNK) * act + 2 * state_bytes),
        backward_flops=tokens * (16 * states + 18 * inside[0] + 10 * inside[1] + 4 * inside[2]),
        backward_bytes_moved=tokens
        * ((21 * key + 15 * widths.value + 2 * heads * CHUNK) * act + 4 * state_bytes),
        num_kernels=5,
        has_weight=False,
    )
