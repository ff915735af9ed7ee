"""What of a layer's saved activations goes to the host (``--fine-grained-activation-offloading``).

A module offloads what autograd saves inside it, which is its input (``TransformerConfig.
offload_modules`` of megatron-core 0.16.1 and 0.20; ``off_interface`` in ``attention.py``,
``multi_latent_attention.py``, ``transformer_layer.py`` and ``moe/experts.py``). A norm that is
fused into the projection after it is no module of its own: ``qkv_linear`` offloads its input too.
"""

from __future__ import annotations

import dataclasses

from nest_megatron.model.graph import LayerGraph, Part
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec

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
        part, num_bytes = _queries(spec, shard)
        moved[part] = num_bytes
        if shard.keeps_scores(spec):  # whose scores are saved inside the module as well
            moved[Part.CORE_ATTENTION] = saved[Part.CORE_ATTENTION]
    if "attn_proj" in modules:
        moved[Part.PROJECTION] = saved[Part.PROJECTION]
    return _without(graph, moved, graph.input_bytes if norm in modules else 0.0)


def _queries(spec: TransformerSpec, shard: LayerShard) -> tuple[Part, float]:
    """Queries, keys and values, which core attention saves."""
    tokens, tp = shard.tokens(spec), shard.tensor_model_parallel_size
    heads = spec.num_attention_heads / tp
    if spec.multi_latent_attention:
        each = 2 * (spec.qk_head_dim + spec.qk_pos_emb_head_dim) + spec.v_head_dim
        return Part.MLA_UP, tokens * heads * each * shard.activation_bytes
    groups = max(spec.query_groups / tp, 1.0)
    return Part.QKV, tokens * (heads + 2 * groups) * spec.head_dim * shard.activation_bytes


def offloaded_experts(graph: LayerGraph, spec: TransformerSpec, shard: LayerShard) -> LayerGraph:
    """Experts without what their modules send to the host; a dense MLP sends nothing."""
    modules, etp = shard.execution.offload_modules, shard.expert_tensor_parallel_size
    routed = shard.tokens_between_blocks(spec) * spec.moe_router_topk * etp
    gates = 2 if spec.gated_linear_unit else 1
    moved = {Part.EXPERTS: 0.0}
    if "mlp_norm" in modules:
        moved[Part.RESIDUAL] = shard.hidden_bytes(spec)
    if "expert_fc1" in modules or "fused_group_mlp" in modules:
        moved[Part.EXPERTS] += routed * spec.routed_size * shard.input_bytes
    if "moe_act" in modules:
        ffn = spec.expert_ffn_hidden_size / etp
        moved[Part.EXPERTS] += routed * gates * ffn * shard.activation_bytes
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
