"""What of a layer's kept activations goes to the host (``--fine-grained-activation-offloading``).

A module offloads what autograd keeps inside it, which is its input (``TransformerConfig.
offload_modules`` of megatron-core 0.16.1 and 0.20; ``off_interface`` in ``attention.py``,
``multi_latent_attention.py``, ``transformer_layer.py`` and ``moe/experts.py``). A norm that is
fused into the projection after it is no module of its own: ``qkv_linear`` offloads its input too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nest_megatron.model.graph import LayerGraph, Part
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import LayerKind, TransformerSpec

#: Layers whose bytes are on the device after all: one at work, one on its way back
#: (``bulk_reload_group``), and the last, which stays (``post_warmup_callback``).
_AT_ONCE = 3


def offloaded_attention(graph: LayerGraph, spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """The attention half of a layer without what its modules send to the host."""
    norm = "attn_norm" if spec.multi_latent_attention else "qkv_linear"
    whole_input = graph.input_bytes if norm in shard.execution.offload_modules else 0.0
    return _without(graph, dict(_of_attention(graph, spec, shard)), whole_input)


def offloaded_feed_forward(
    graph: LayerGraph, spec: TransformerSpec, kind: LayerKind, shard: LayerShard
) -> LayerGraph:
    """The other half of a layer without what its modules send to the host: experts alone do."""
    if kind is not LayerKind.MOE:
        return graph
    return _without(graph, dict(_of_experts(spec, shard)))


def _of_attention(
    graph: LayerGraph, spec: TransformerSpec, shard: LayerShard
) -> Iterator[tuple[Part, float]]:
    """Bytes by part, each part once."""
    modules, kept = shard.execution.offload_modules, graph.saved_by_part()
    if "qkv_linear" in modules:
        yield Part.INPUT_NORM, kept[Part.INPUT_NORM]
    if "core_attn" in modules:
        yield _queries(spec, shard)
        if not shard.flash_attention:  # whose scores are kept inside the module as well
            yield Part.CORE_ATTENTION, kept[Part.CORE_ATTENTION]
    if "attn_proj" in modules:
        yield Part.PROJECTION, kept[Part.PROJECTION]


def _queries(spec: TransformerSpec, shard: LayerShard) -> tuple[Part, float]:
    """Queries, keys and values, which core attention keeps."""
    tokens, tp = shard.tokens(spec), shard.tensor_model_parallel_size
    heads = spec.num_attention_heads / tp
    if spec.multi_latent_attention:
        each = 2 * (spec.qk_head_dim + spec.qk_pos_emb_head_dim) + spec.v_head_dim
        return Part.MLA_UP, tokens * heads * each * shard.activation_bytes
    groups = max(spec.query_groups / tp, 1.0)
    return Part.QKV, tokens * (heads + 2 * groups) * spec.head_dim * shard.activation_bytes


def _of_experts(spec: TransformerSpec, shard: LayerShard) -> Iterator[tuple[Part, float]]:
    modules = shard.execution.offload_modules
    local, act = shard.tokens_between_blocks(spec), shard.activation_bytes
    routed = local * spec.moe_router_topk * shard.expert_tensor_parallel_size
    gates = 2 if spec.gated_linear_unit else 1
    ffn = spec.expert_ffn_hidden_size / shard.expert_tensor_parallel_size
    if "mlp_norm" in modules:
        yield Part.RESIDUAL, local * spec.hidden_size * act
    inside = 0.0
    if "expert_fc1" in modules or "fused_group_mlp" in modules:
        inside += routed * spec.hidden_size * shard.input_bytes
    if "moe_act" in modules:
        inside += routed * gates * ffn * act
    yield Part.EXPERTS, inside


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
