"""A block whose weights are frozen, with the adapters that train beside them.

Frozen products make no weight gradient: their backward pass is the data gradient alone, their input
is not saved nor gathered again for it, and nothing hides the traffic of that data gradient
(Transformer Engine's ``_Linear.backward``; ``linear_with_frozen_weight`` of megatron-core).

An adapter is two products in 16 bits around ``dim`` columns (``ParallelLinearAdapter`` of
Megatron-Bridge 0.3.1 and NeMo 2.7.3): ``linear_in`` and ``linear_out``, both divided over the
tensor ranks, then the scaling and the sum with what the frozen product puts out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from nest_megatron.model.encoder import PROJECTIONS, Adapters, PeftScheme
from nest_megatron.model.graph import (
    Group,
    LayerCollective,
    LayerGraph,
    Operator,
    OperatorKind,
    Part,
)
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.operators.common import gemm, streaming
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import Name


class _Split(Name):
    """How the tensor ranks divide the product that is adapted."""

    COLUMNS = "columns"
    ROWS = "rows"
    WHOLE = "whole"


#: Operator -> its module in a layer, and how ranks divide it.
_MODULES = {
    "qkv": ("self_attention.linear_qkv", _Split.COLUMNS),
    "projection": ("self_attention.linear_proj", _Split.ROWS),
    "query_up": ("self_attention.linear_q_up_proj", _Split.COLUMNS),
    "kv_up": ("self_attention.linear_kv_up_proj", _Split.COLUMNS),
    "fc1": ("mlp.linear_fc1", _Split.COLUMNS),
    "fc2": ("mlp.linear_fc2", _Split.ROWS),
    "shared_fc1": ("mlp.shared_experts.linear_fc1", _Split.COLUMNS),
    "shared_fc2": ("mlp.shared_experts.linear_fc2", _Split.ROWS),
    "expert_fc1": ("mlp.experts.linear_fc1", _Split.COLUMNS),
    "expert_fc2": ("mlp.experts.linear_fc2", _Split.ROWS),
    "cross_query": ("cross_attention.linear_q", _Split.COLUMNS),
    "cross_key_value": ("cross_attention.linear_kv", _Split.COLUMNS),
    "cross_projection": ("cross_attention.linear_proj", _Split.ROWS),
    "in_proj": ("mixer.in_proj", _Split.COLUMNS),
    "out_proj": ("mixer.out_proj", _Split.ROWS),
    "output_layer": ("output_layer", _Split.COLUMNS),
}
#: Operators whose input the layer saves anyway: attention keeps what it puts out.
_KEPT_INPUTS = ("projection", "cross_projection")


class AdaptedProduct(NamedTuple):
    """A product of one rank with an adapter: ``rows x inner`` by ``inner x columns``.

    ``name`` is the adapter's, ``ranks`` the tensor ranks that divide it; another adapter of the
    same operator may have saved the input already (``shares_input``).
    """

    adapters: Adapters
    shard: LayerShard
    operator: Operator
    name: str
    split: _Split
    rows: float
    inner: float
    columns: float
    ranks: int
    shares_input: bool

    @property
    def parameters(self) -> int:
        """Of the adapter on one rank: its two products, and DoRA's magnitude of each column."""
        columns = self.columns if self.split is _Split.COLUMNS else self.columns / self.ranks
        inner = self.inner if self.split is _Split.ROWS else self.inner / self.ranks
        magnitude = self.columns if self.adapters.scheme is PeftScheme.DORA else 0
        return round(self.adapters.dim * (columns + inner) + magnitude)

    @property
    def gathers_sequence(self) -> bool:
        """Whether the output of a row-parallel product is divided over the ranks by tokens."""
        is_dense = self.operator.part is not Part.EXPERTS
        return self.split is _Split.ROWS and self.shard.sequence_parallel and is_dense

    @property
    def out_elements(self) -> float:
        """Elements of the sum of both outputs."""
        elements = self.rows * self.columns
        return elements / self.ranks if self.gathers_sequence else elements


def adapted_products(
    graph: LayerGraph, spec: TransformerSpec, shard: LayerShard
) -> Iterator[AdaptedProduct]:
    """The adapters of a block."""
    assert spec.adapters is not None
    for op in graph.operators:
        count = 0
        for path, split, share in _modules(spec, op.name):
            if not spec.adapters.adapts(path, spec.num_layers):
                continue
            rows = 2.0 * op.input_elements * op.output_elements / op.flops
            of_experts = op.part is Part.EXPERTS
            degree = "expert_tensor_parallel_size" if of_experts else "tensor_model_parallel_size"
            yield AdaptedProduct(
                adapters=spec.adapters,
                shard=shard,
                operator=op,
                name=path.rpartition(".")[2] if share < 1.0 else op.name,
                split=split,
                rows=rows,
                inner=op.input_elements / rows,
                columns=share * op.output_elements / rows,
                ranks=getattr(shard, degree),
                shares_input=count > 0,
            )
            count += 1


def _modules(spec: TransformerSpec, name: str) -> Iterator[tuple[str, _Split, float]]:
    """Modules that an operator stands for, and their shares of its columns."""
    assert spec.adapters is not None
    if name == "mla_down":
        parts = {"q": spec.q_lora_rank or 0, "kv": spec.kv_lora_rank + spec.qk_pos_emb_head_dim}
        for part, width in parts.items():
            if width:
                path = f"self_attention.linear_{part}_down_proj"
                yield path, _Split.WHOLE, width / sum(parts.values())
        return
    if name not in _MODULES:
        return
    path, split = _MODULES[name]
    if name == "query_up" and not spec.q_lora_rank:
        path = "self_attention.linear_q_proj"
    parent, _, module = path.rpartition(".")
    if spec.adapters.scheme is not PeftScheme.CANONICAL_LORA or module not in PROJECTIONS:
        yield path, split, 1.0
        return
    widths: tuple[int, ...] = (1, 1)
    if name == "qkv":
        widths = (spec.num_attention_heads, spec.query_groups, spec.query_groups)
    for one, width in zip(PROJECTIONS[module], widths, strict=True):
        yield f"{parent}.{one}", split, width / sum(widths)


def adapted(
    graph: LayerGraph, spec: TransformerSpec, shard: LayerShard, block: LayerBlock
) -> LayerGraph:
    """A block in which weights are frozen and adapters are trained.

    Args:
        graph: the block, with nothing saved for weight gradients (``saved_input_bytes`` of 0).
    """
    assert spec.adapters is not None
    has_backward = block is not LayerBlock.EMBEDDING
    frozen = replace(
        graph,
        operators=tuple(frozen_operator(op, has_backward=has_backward) for op in graph.operators),
        collectives=tuple(_without_weight_gradients(graph, has_backward=has_backward)),
    )
    return sum(map(_adapter, adapted_products(graph, spec, shard)), frozen)


def _is_trained(op: Operator) -> bool:
    """Whether a product's weight has a gradient where nothing is frozen."""
    return op.has_weight and op.kind in (OperatorKind.GEMM, OperatorKind.GROUPED_GEMM)


def frozen_operator(op: Operator, *, has_backward: bool) -> Operator:
    """An operator whose weight is not trained; ``has_backward`` if its input has a gradient."""
    if not has_backward:
        return replace(op, backward_flops=0.0, backward_bytes_moved=0.0, frozen=True)
    if not _is_trained(op):
        return op
    return replace(op, backward_flops=op.flops, backward_bytes_moved=op.bytes_moved, frozen=True)


def _without_weight_gradients(
    graph: LayerGraph, *, has_backward: bool
) -> Iterator[LayerCollective]:
    products = {op.name for op in graph.operators if _is_trained(op)}
    for call in graph.collectives:
        if not call.backward or call.hidden_under not in products:
            if has_backward or not call.backward:
                yield call
        elif not call.name.endswith(".regather"):
            yield replace(call, hidden_under="")


def _adapter(product: AdaptedProduct) -> LayerGraph:
    adapters, shard, op = product.adapters, product.shard, product.operator
    act = shard.activation_bytes
    rows, inner, dim = product.rows, product.inner, float(adapters.dim)
    ranks, is_row = product.ranks, product.split is _Split.ROWS
    narrow = dim if is_row else dim / ranks
    wide = product.columns if product.split is _Split.COLUMNS else product.columns / ranks
    products = tuple(
        gemm(shard, f"{product.name}_adapter_{name}", op.part, rows, deep, columns, fp8=False)
        for name, deep, columns in (("in", inner, narrow), ("out", dim, wide))
    )
    saved = rows * dim * act
    pre = bool(adapters.dropout) and adapters.dropout_position == "pre"
    if pre or not (op.name in _KEPT_INPUTS or product.shares_input):
        saved += rows * inner * act
    if adapters.dropout:
        saved += rows * inner if pre else product.out_elements
    extra = _magnitude(product) if adapters.scheme is PeftScheme.DORA else LayerGraph()
    return extra + LayerGraph(
        operators=(*products, *_elementwise(product)),
        collectives=tuple(_traffic(product)),
        saved_bytes=((op.part, saved),),
    )


def _elementwise(product: AdaptedProduct) -> Iterator[Operator]:
    """Dropout, scaling and sum forward; scaling, and the sum of both data gradients, backward.

    What a row-parallel adapter's ranks gathered is put in order by one more copy.
    """
    act, part = product.shard.activation_bytes, product.operator.part
    outputs, inputs = product.out_elements, product.rows * product.inner
    forward, backward, kernels = 5 * outputs * act, (2 * outputs + 3 * inputs) * act, 2
    if product.split is not _Split.COLUMNS and product.ranks > 1:
        forward += 2 * product.rows * product.columns * act
        kernels += 1
    if product.adapters.dropout:
        dropped = inputs if product.adapters.dropout_position == "pre" else outputs
        forward += dropped * (2 * act + 1)
        backward += dropped * (2 * act + 1)
        kernels += 1
    name = f"{product.name}_adapter_sum"
    yield streaming(name, part, forward, backward=backward / forward, kernels=kernels)


def _traffic(product: AdaptedProduct) -> Iterator[LayerCollective]:
    """Tensor-parallel traffic of an adapter, none of which anything hides.

    ``linear_in`` is gathered or summed, and so is its gradient. A row-parallel adapter gathers its
    whole output, takes its own tokens of it where the sequence is divided, and gathers their
    gradients. The input of a column-parallel one has been gathered with the norm before it
    (``return_layernorm_output_gathered``), which adds its gradient before it is scattered.
    """
    if product.ranks == 1:
        return
    adapters, shard, rows = product.adapters, product.shard, product.rows
    act, part = shard.activation_bytes, product.operator.part
    group = Group.EXPERT_TENSOR if part is Part.EXPERTS else Group.TENSOR
    low, whole = rows * adapters.dim * act, rows * product.columns * act
    is_row, divided = product.split is _Split.ROWS, product.gathers_sequence
    calls = [("in", "all_reduce" if is_row else "all_gather", low, False)]
    calls += [("in_grad", "all_reduce", low, True)]
    if divided and adapters.a2a_experimental:
        calls += [("out", "all_to_all", whole / product.ranks, way) for way in (False, True)]
    elif product.split is not _Split.COLUMNS:
        calls += [("out", "all_gather", whole, False)]
        calls += [("out", "all_gather", whole, True)] if divided else []
    if not is_row and not shard.sequence_parallel:
        calls += [("input_grad", "all_reduce", rows * product.inner * act, True)]
    for what, kind, num_bytes, backward in calls:
        name = f"{product.name}_adapter.{what}"
        yield LayerCollective(name, part, kind, num_bytes, group=group, backward=backward)


def _magnitude(product: AdaptedProduct) -> LayerGraph:
    """DoRA's norm of the adapted weight, made in every forward pass, and the product with it.

    The product of both matrices is written, the weight added, and the sum read for the norm
    (``DoRALinear._get_weight_norm``); the sum of both outputs stays for the magnitude's gradient.
    """
    act, part, dim = product.shard.activation_bytes, product.operator.part, product.adapters.dim
    weights, outputs = product.inner * product.columns, product.out_elements
    norm = Operator(
        name=f"{product.name}_adapter_norm",
        part=part,
        kind=product.operator.kind,
        flops=2.0 * weights * dim,
        bytes_moved=5 * weights * act,
        num_kernels=3,
        frozen=True,
    )
    name = f"{product.name}_adapter_magnitude"
    scaled = streaming(name, part, 2 * outputs * act, backward=2.0, kernels=1)
    gathered = product.columns if product.split is _Split.ROWS else product.inner
    traffic = LayerCollective(
        f"{product.name}_adapter.weight", part, "all_gather", gathered * dim * act
    )
    return LayerGraph(
        operators=(norm, scaled),
        collectives=(traffic,) if product.ranks > 1 else (),
        saved_bytes=((part, outputs * act),),
    )
