"""The second half of a decoder layer: norm, MLP or routed experts, residual."""

from __future__ import annotations

from collections.abc import Iterator

from nest_megatron.model.execution import TokenDispatcher
from nest_megatron.model.graph import Group, LayerCollective, LayerGraph, Operator, Part
from nest_megatron.model.operators.common import (
    FP32,
    dispatch_buffer_bytes,
    dropout_mask,
    gathered_block,
    gemm,
    offloaded_experts,
    residual_sum,
    routed_tokens,
    streaming,
)
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec


def experts_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Routed experts behind an all-to-all, shared ones if there are some, norm and residual.

    Routing is taken as balanced; an imbalance factor belongs to the cost model.
    """
    hidden_bytes, etp = shard.hidden_bytes(spec), shard.expert_tensor_parallel_size
    tokens = routed_tokens(spec, shard)
    graph = LayerGraph(
        operators=(
            streaming("mlp_norm", Part.MLP_NORM, 2 * hidden_bytes),
            residual_sum("mlp_residual", hidden_bytes),
        ),
        saved_bytes=(
            (Part.RESIDUAL, hidden_bytes),
            dropout_mask(spec, shard.tokens_between_blocks(spec)),
            (Part.MLP_NORM, hidden_bytes),
        ),
        working_bytes=_working_bytes(spec, shard, tokens, spec.expert_ffn_hidden_size / etp),
    )
    graph += _router(spec, shard) + _experts(spec, shard) + _dispatch(spec, shard)
    if spec.moe_latent_size:
        graph += _latent(spec, shard)
    if spec.moe_shared_expert_intermediate_size:
        graph += _shared_experts(spec, shard)
    return offloaded_experts(graph, spec, shard)


def _working_bytes(spec: TransformerSpec, shard: LayerShard, tokens: float, widest: float) -> float:
    """Gradients alive at the widest point of a layer's backward pass, and the gathered input."""
    act = shard.activation_bytes
    gradients = tokens * widest * (spec.num_gates + 1) * act
    working = gradients + 2 * tokens * spec.hidden_size * act
    return working + dispatch_buffer_bytes(spec, shard)


def _mlp_operators(
    spec: TransformerSpec,
    shard: LayerShard,
    part: Part,
    prefix: str,
    tokens: float,
    ffn: float,
    *,
    num_experts: int = 0,
) -> Iterator[Operator]:
    """Two products of an MLP, or of all experts of a rank, and the activation between them.

    Its input is cast to fp8 and back, where it is kept so (``BiasSwiGLUFunction``), each in a
    kernel.
    """
    act, gates = shard.activation_bytes, spec.num_gates
    width, inside = spec.hidden_size, part
    if num_experts:
        width, inside = spec.routed_size, Part.EXPERT_ACTIVATION
    up, down = f"{prefix}fc1", f"{prefix}fc2"
    yield gemm(shard, up, part, tokens, width, gates * ffn, num_experts=num_experts)
    name = f"{prefix}activation"
    yield streaming(name, inside, tokens * (gates + 1) * ffn * act, backward=1.67)
    if _keeps_fp8(spec, shard):
        moved = tokens * ffn * gates * (act + 1)
        yield streaming(f"{name}_casts", inside, moved, backward=1.0)
    yield gemm(shard, down, part, tokens, ffn, width, num_experts=num_experts)


def _keeps_fp8(spec: TransformerSpec, shard: LayerShard) -> bool:
    return shard.fp8_activation_input and spec.gated_linear_unit and shard.fused_activation


def _activation_bytes(spec: TransformerSpec, shard: LayerShard) -> int:
    """What an activation function keeps of each element that it puts out.

    Its input; a gated one that is not fused (``F.silu(gate) * up``) the activated half as well.
    """
    if _keeps_fp8(spec, shard):
        return spec.num_gates
    halves = 1 if not spec.gated_linear_unit else 2 if shard.fused_activation else 3
    return halves * shard.activation_bytes


def mlp_graph(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """A dense MLP with its norm and residual."""
    tokens, local = shard.tokens(spec), shard.tokens_between_blocks(spec)
    ffn = spec.ffn_hidden_size / shard.tensor_model_parallel_size
    hidden_bytes = shard.hidden_bytes(spec)
    operators = (
        streaming("mlp_norm", Part.MLP_NORM, 2 * hidden_bytes),
        *_mlp_operators(spec, shard, Part.MLP, "", tokens, ffn),
        residual_sum("mlp_residual", hidden_bytes),
    )
    saved = (
        (Part.RESIDUAL, hidden_bytes),
        dropout_mask(spec, local),
        (Part.MLP_NORM, local * spec.hidden_size * shard.input_bytes),
        (Part.MLP, tokens * (_activation_bytes(spec, shard) + shard.input_bytes) * ffn),
    )
    return LayerGraph(
        operators=operators,
        collectives=tuple(gathered_block(spec, shard, Part.MLP, Part.MLP, "fc1", "fc2")),
        saved_bytes=saved,
        working_bytes=_working_bytes(spec, shard, tokens, ffn),
    )


def _router(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    experts, local = spec.num_experts or 0, shard.tokens_between_blocks(spec)
    scores = local * experts * FP32
    passes, kernels = (2, 2) if shard.execution.moe_router_fusion else (4, 20)
    operators = (
        gemm(shard, "router", Part.ROUTER, local, spec.hidden_size, experts, fp8=False),
        streaming("top_k", Part.ROUTER, passes * scores, kernels=kernels),
    )
    saved = ((Part.ROUTER, 2 * scores + local * experts),)
    return LayerGraph(operators=operators, saved_bytes=saved)


def _latent(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Projections to the width that routed experts see and back, whole on every rank.

    Source: ``fc1_latent_proj`` and ``fc2_latent_proj`` of ``MoELayer``; of the first the input is
    saved beside the norm's.
    """
    hidden, latent, local = spec.hidden_size, spec.routed_size, shard.tokens_between_blocks(spec)
    operators = (
        gemm(shard, "latent_down", Part.ROUTER, local, hidden, latent),
        gemm(shard, "latent_up", Part.ROUTER, local, latent, hidden),
    )
    saved = ((Part.ROUTER, local * (latent * shard.input_bytes + hidden * shard.cast_bytes)),)
    return LayerGraph(operators=operators, saved_bytes=saved)


def _experts(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Grouped GEMMs of this rank's experts over the tokens routed to them."""
    routed = routed_tokens(spec, shard)
    ffn = spec.expert_ffn_hidden_size / shard.expert_tensor_parallel_size
    here = max(1, (spec.num_experts or 1) // shard.expert_model_parallel_size)
    # Formats below 16 bits fill each expert's tokens up to a whole block: by half of it on average.
    routed += here * (shard.expert_alignment - 1) / 2
    products = _mlp_operators(spec, shard, Part.EXPERTS, "expert_", routed, ffn, num_experts=here)
    # A gated activation is fused with the router's weight and keeps its input only; any other
    # keeps its output too, as a factor of that weight (``TEGroupedMLP.forward``).
    output_bytes = shard.input_bytes + (0 if spec.gated_linear_unit else shard.activation_bytes)
    inside = spec.routed_size * shard.input_bytes + _activation_bytes(spec, shard) * ffn
    saved = (
        (Part.EXPERTS, routed * inside),
        (Part.EXPERT_ACTIVATION, routed * ffn * output_bytes),
    )
    return LayerGraph(operators=tuple(products), saved_bytes=saved)


def _dispatch(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Tokens sorted by expert, brought to the ranks that hold them, and back."""
    how = shard.execution
    hidden_bytes = shard.hidden_bytes(spec) * spec.routed_size / spec.hidden_size
    routed_bytes = hidden_bytes * spec.moe_router_topk
    is_flex = how.moe_token_dispatcher_type is TokenDispatcher.FLEX
    # One read and one write in a fused kernel, or in the dispatcher's own; else twice each.
    passes, kernels = (2, 3) if how.moe_permute_fusion or is_flex else (4, 8)
    # Tokens of each expert and each rank are counted first, and their number brought to the host.
    counting = 3 if is_flex else 10
    operators = tuple(
        streaming(name, Part.DISPATCH, passes * routed_bytes, backward=1.0, kernels=launches)
        for name, launches in (("permute", kernels + counting), ("unpermute", kernels))
    )
    traffic = _token_traffic(spec, shard, hidden_bytes)
    return LayerGraph(operators=operators, collectives=tuple(traffic))


def _token_traffic(
    spec: TransformerSpec, shard: LayerShard, hidden_bytes: float
) -> Iterator[LayerCollective]:
    """All-to-all of tokens to experts and back, gather over expert tensor ranks.

    Or every rank gets the tokens of all, and sums its share (``MoEAllGatherTokenDispatcher``).
    """
    ep, etp = shard.expert_model_parallel_size, shard.expert_tensor_parallel_size
    is_gathered = shard.execution.moe_token_dispatcher_type is TokenDispatcher.ALLGATHER
    size = hidden_bytes * (ep if is_gathered else spec.moe_router_topk)
    for backward in (False, True):
        if is_gathered:
            yield from _gather_and_scatter(Group.EXPERT, ep, size, backward)
        elif ep > 1:
            yield LayerCollective(
                "token_all_to_all",
                Part.DISPATCH,
                "all_to_all",
                size,
                group=Group.EXPERT,
                backward=backward,
                num_calls=2,
                copies=spec.moe_router_topk,
            )
        yield from _gather_and_scatter(Group.EXPERT_TENSOR, etp, size * etp, backward)


def _gather_and_scatter(
    group: Group, ranks: int, num_bytes: float, backward: bool
) -> Iterator[LayerCollective]:
    if ranks == 1:
        return
    for kind in ("all_gather", "reduce_scatter"):
        name = f"expert_{kind}"
        yield LayerCollective(name, Part.DISPATCH, kind, num_bytes, group=group, backward=backward)


def _shared_experts(spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    part, tokens = Part.SHARED_EXPERTS, shard.tokens(spec)
    ffn = (spec.moe_shared_expert_intermediate_size or 0) / shard.tensor_model_parallel_size
    hidden_bytes = shard.tokens_between_blocks(spec) * spec.hidden_size * shard.cast_bytes
    inside = tokens * (_activation_bytes(spec, shard) + shard.input_bytes) * ffn
    operators = tuple(_mlp_operators(spec, shard, part, "shared_", tokens, ffn))
    if spec.moe_shared_expert_gate:  # a product with one column, then with the experts' output
        output_bytes = shard.hidden_bytes(spec)
        operators += (streaming("shared_gate", part, 3 * output_bytes, kernels=3),)
        hidden_bytes += output_bytes
    return LayerGraph(
        operators=operators,
        collectives=tuple(gathered_block(spec, shard, part, part, "shared_fc1", "shared_fc2")),
        saved_bytes=((part, inside + hidden_bytes),),
    )
