"""Readers of Hugging Face configurations of families with routed experts."""

from __future__ import annotations

from nest_megatron.errors import UnplannableModelError
from nest_megatron.model.hugging_face_dense import mistral, upper_windows
from nest_megatron.model.hugging_face_fields import (
    ConfigFields,
    Shape,
    decoder,
    expert_layers,
    experts,
    frequency,
    joined,
    layer_norm,
    linear_biases,
    own_biases,
    rotary,
    same_biases,
    shared_experts,
    wide_qk_norm,
    windows,
)
from nest_megatron.model.variant import Bias


def mixtral(f: ConfigFields) -> Shape:
    """Mixtral."""
    return joined(mistral(f), experts(f, "num_local_experts", "intermediate_size"))


def _routed_biases(f: ConfigFields, *, qkv_alone: bool = False) -> Shape:
    """``attention_bias`` beside a router without one."""
    attends = f.flag("attention_bias")
    return linear_biases(qkv=attends, projection=attends and not qkv_alone, routed=True)


def _shared(f: ConfigFields, number: str) -> Shape:
    """Shared experts, each as wide as a routed one."""
    return shared_experts(f.whole("moe_intermediate_size") * f.count(number))


def qwen_experts(f: ConfigFields, number: str = "num_experts") -> Shape:
    """Experts in every n-th layer but those that ``mlp_only_layers`` names; of 0 experts none."""
    step = f.whole("decoder_sparse_step", 1)
    dense = f.items("mlp_only_layers", "layer numbers") or ()
    if not f.whole(number, least=0):
        f.weightless("moe_intermediate_size", "num_experts_per_tok")
        return {}
    return experts(f, number, "moe_intermediate_size") | expert_layers(
        f, lambda layer: (layer + 1) % step == 0 and layer not in dense
    )


def gated_shared_expert(f: ConfigFields, number: str = "num_experts") -> Shape:
    """A shared expert behind a gate, in a model that has experts."""
    size = f.count("shared_expert_intermediate_size")
    if not size or not f.whole(number, least=0):
        return {}
    return shared_experts(size) | {"moe_shared_expert_gate": True}


def qwen2_moe(f: ConfigFields) -> Shape:
    """Qwen 1.5 and 2 MoE: a gate on the shared expert."""
    return joined(
        decoder(f),
        upper_windows(f),
        linear_biases(qkv=f.flag("qkv_bias", True), routed=True),
        qwen_experts(f),
        gated_shared_expert(f),
    )


def qwen3_moe(f: ConfigFields) -> Shape:
    """Qwen 3 MoE; a window is on all layers."""
    slides = windows(f, lambda _: True) if f.flag("use_sliding_window") else {}
    number = "num_experts" if f.get("num_local_experts") is None else "num_local_experts"
    return joined(
        decoder(f),
        slides,
        _routed_biases(f),
        {"qk_layernorm": True},
        qwen_experts(f, number),
    )


def deepseek_v2(f: ConfigFields) -> Shape:
    """DeepSeek V2."""
    return joined(_deepseek(f), linear_biases(mlp=f.flag("mlp_bias"), routed=True))


def deepseek_v3(f: ConfigFields) -> Shape:
    """DeepSeek V3 and R1, Kimi K2, Moonlight: experts balanced by a bias."""
    return joined(_deepseek(f), {"moe_router_enable_expert_bias": True})


def deepseek_v32(f: ConfigFields) -> Shape:
    """DeepSeek V3.2: as V3, and an indexer chooses the tokens that attention sees."""
    if {*(f.items("layer_types", "text") or ())} - {"indexed_attention"}:
        raise f.wrong("layer_types", "all layers of this family are indexed_attention")
    return joined(
        deepseek_v3(f),
        {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": f.whole("index_n_heads"),
            "dsa_indexer_head_dim": f.whole("index_head_dim"),
            "dsa_indexer_topk": f.whole("index_topk"),
        },
    )


def glm_moe_dsa(f: ConfigFields) -> Shape:
    """GLM-5: as DeepSeek V3.2; layers that share the indexer of another are not read."""
    shared = {*(f.items("indexer_types", "text") or ()), *str(f.get("index_topk_pattern", ""))}
    if f.whole("index_topk_freq", 1) > 1 or shared & {"shared", "S"}:
        key = next(
            key
            for key in ("indexer_types", "index_topk_pattern", "index_topk_freq")
            if f.get(key) is not None
        )
        raise f.wrong(
            key,
            "layers that take the tokens of another layer's indexer are not read",
            kind=UnplannableModelError,
        )
    return deepseek_v32(f)


def glm4_moe_lite(f: ConfigFields) -> Shape:
    """GLM-4.7-Flash: latent attention and experts as DeepSeek V3's, the first layer dense."""
    return joined(_deepseek(f, first=1), {"moe_router_enable_expert_bias": True})


def _deepseek(f: ConfigFields, first: int = 0) -> Shape:
    first, period = f.whole("first_k_dense_replace", first, least=0), f.whole("moe_layer_freq", 1)
    named = f.items("mlp_layer_types", "text", of_layers=True)
    if not {*(named or ())} <= {"dense", "sparse"}:
        raise f.wrong("mlp_layer_types", "it must name dense or sparse")

    def routes(layer: int) -> bool:
        return named[layer] == "sparse" if named else layer >= first and layer % period == 0

    return joined(
        decoder(f),
        _latent_attention(f),
        experts(f, "n_routed_experts", "moe_intermediate_size"),
        expert_layers(f, routes),
        _shared(f, "n_shared_experts"),
        _predicted_tokens(f),
        own_biases(Bias.LATENT_DOWN, Bias.PROJECTION, where=f.flag("attention_bias")),
    )


def _predicted_tokens(f: ConfigFields) -> Shape:
    return {"mtp_num_layers": f.count("num_nextn_predict_layers") or None}


def _latent_attention(f: ConfigFields) -> Shape:
    rank = f.get("q_lora_rank")
    return {
        "multi_latent_attention": True,
        "num_query_groups": None,
        "kv_channels": f.whole("qk_nope_head_dim"),
        "qk_layernorm": True,
        "q_lora_rank": None if rank is None else f.whole("q_lora_rank"),
        "kv_lora_rank": f.whole("kv_lora_rank"),
        "qk_head_dim": f.whole("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": f.whole("qk_rope_head_dim"),
        "v_head_dim": f.whole("v_head_dim"),
    }


def gpt_oss(f: ConfigFields) -> Shape:
    """GPT-OSS: biases everywhere, attention sinks, every other layer slides."""
    top = "num_experts_per_tok"
    if f.get(top) is None:
        top = "experts_per_token"
    biases: Shape = {"add_bias_linear": True}
    if not f.flag("attention_bias", True):
        biases = own_biases(Bias.MLP, Bias.ROUTER)
    return joined(
        decoder(f),
        {"activation": "quick_gelu"},  # the file says silu; the experts use a clamped quick GELU
        biases,
        {"softmax_type": "learnable"},
        windows(f, lambda layer: (layer + 1) % 2 != 0),
        experts(f, "num_local_experts", "intermediate_size", top),
    )


def minimax_m2(f: ConfigFields) -> Shape:
    """MiniMax M2: norms of queries and keys over all heads, experts balanced by a bias."""
    if not f.flag("use_qk_norm", True) or f.get("qk_norm_type", "per_layer") != "per_layer":
        key = "qk_norm_type" if f.flag("use_qk_norm", True) else "use_qk_norm"
        raise f.wrong(key, "this family has norms of queries and keys over all heads")
    if 0 in (f.items("attn_type_list", "numbers", of_layers=True) or ()):
        raise f.wrong(
            "attn_type_list",
            "its linear (lightning) attention, a 0, is not supported",
            kind=UnplannableModelError,
        )
    mtp = f.count("num_mtp_modules") * f.flag("use_mtp", True)
    if f.whole("mtp_transformer_layers", 1) > 1 and mtp:
        raise f.wrong(
            "mtp_transformer_layers",
            "an MTP module of Megatron has one layer",
            kind=UnplannableModelError,
        )
    around = decoder(f)
    size = f.whole("head_dim", f.whole("hidden_size") // f.whole("num_attention_heads"))
    return joined(
        around,
        rotary(f, partial=f.whole("rotary_dim", size) / size),
        wide_qk_norm(),
        {"moe_router_enable_expert_bias": f.flag("use_routing_bias", True)},
        experts(f, "num_local_experts", "intermediate_size"),
        {"mtp_num_layers": mtp or None},
    )


def phimoe(f: ConfigFields) -> Shape:
    """Phi 3.5 MoE: LayerNorm, a bias on the output layer."""
    output = own_biases(Bias.OUTPUT_LAYER, where=f.flag("lm_head_bias"))
    return joined(
        decoder(f, own_size=False),
        layer_norm(f, "rms_norm_eps"),
        windows(f, lambda _: True),
        _routed_biases(f),
        output,
        experts(f, "num_local_experts", "intermediate_size"),
    )


def olmoe(f: ConfigFields) -> Shape:
    """OLMoE: norms of queries and keys over all heads."""
    found = experts(f, "num_experts", "intermediate_size")
    return joined(decoder(f, own_size=False), _routed_biases(f), wide_qk_norm(), found)


def glm4_moe(f: ConfigFields) -> Shape:
    """GLM-4.5 and 4.6."""
    first = f.whole("first_k_dense_replace", 1, least=0)
    return joined(
        decoder(f),
        rotary(f, partial=0.5),
        _routed_biases(f, qkv_alone=True),
        {"qk_layernorm": f.flag("use_qk_norm"), "moe_router_enable_expert_bias": True},
        experts(f, "n_routed_experts", "moe_intermediate_size"),
        expert_layers(f, lambda layer: layer >= first),
        _shared(f, "n_shared_experts"),
        _predicted_tokens(f),
    )


def dots1(f: ConfigFields) -> Shape:
    """dots.llm1: norms of queries and keys; the upper layers slide."""
    first = f.count("first_k_dense_replace")
    upper = f.count("max_window_layers")
    return joined(
        decoder(f),
        windows(f, lambda layer: layer >= upper),
        _routed_biases(f),
        {"qk_layernorm": True, "moe_router_enable_expert_bias": True},
        experts(f, "n_routed_experts", "moe_intermediate_size"),
        expert_layers(f, lambda layer: layer >= first),
        _shared(f, "n_shared_experts"),
    )


def llama4_text(f: ConfigFields) -> Shape:
    """Llama 4: a shared expert as wide as the others, attention in chunks on rotated layers."""
    step = f.whole("interleave_moe_layer_step", 1)
    named = f.items("moe_layers", "layer numbers")

    def routes(layer: int) -> bool:
        return (layer + 1) % step == 0 if named is None else layer in named

    size = f.whole("intermediate_size")
    return joined(
        decoder(f),
        _chunks(f),
        _routed_biases(f),
        {"ffn_hidden_size": f.whole("intermediate_size_mlp", size)},
        experts(f, "num_local_experts", "intermediate_size"),
        expert_layers(f, routes),
        shared_experts(size),
    )


def _chunks(f: ConfigFields) -> Shape:
    """The layers that attend in chunks; the others are not rotated."""
    layers, size = range(f.whole("num_hidden_layers")), f.get("attention_chunk_size")
    rotated = f.items("no_rope_layers", "0 and 1", of_layers=True)
    kinds = f.items("layer_types", "text")
    flags = [bool(rotated[i]) if rotated else (i + 1) % 4 != 0 for i in layers]
    if kinds is not None:
        if len(kinds) != len(layers) or not {*kinds} <= {"chunked_attention", "full_attention"}:
            raise f.wrong("layer_types", "it must name chunked_attention or full_attention")
        flags = [kind == "chunked_attention" for kind in kinds]
    if size is None or not any(flags):
        return {}
    found = frequency(flags)
    unrotated = [1 - flag for flag in found] if isinstance(found, list) else found
    return {
        "attention_chunk_size": f.whole("attention_chunk_size"),
        "no_rope_freq": unrotated,
    }


def granitemoe(f: ConfigFields) -> Shape:
    """Granite 3 MoE."""
    found = experts(f, "num_local_experts", "intermediate_size")
    return joined(decoder(f), _routed_biases(f), found)


def granitemoeshared(f: ConfigFields) -> Shape:
    """Granite 3 MoE with a shared expert."""
    return joined(granitemoe(f), shared_experts(f.count("shared_intermediate_size")))


def ernie4_5_moe(f: ConfigFields) -> Shape:
    """ERNIE 4.5 21B and 300B; the bias that balances experts counts as a parameter."""
    has_bias, num_layers = f.flag("use_bias"), f.whole("num_hidden_layers")
    first, period = f.whole("moe_layer_start_index", 1, least=0), f.whole("moe_layer_interval", 1)
    last = f.whole("moe_layer_end_index", -1, least=-1)
    last = num_layers - 1 if last == -1 else last
    return joined(
        decoder(f),
        same_biases(has_bias, routed=True),
        own_biases(Bias.EXPERT_BIAS),
        own_biases(Bias.OUTPUT_LAYER, where=has_bias),
        {"moe_router_enable_expert_bias": True},
        experts(f, "moe_num_experts", "moe_intermediate_size", "moe_k"),
        expert_layers(f, lambda layer: (layer + 1) % period == 0 and first <= layer <= last),
        _shared(f, "moe_num_shared_experts"),
    )


def hunyuan_v1_moe(f: ConfigFields) -> Shape:
    """Hunyuan MoE: a shared expert as wide as the others; what is listed is alike in all layers."""
    for key in ("use_cla", "use_mla", "moe_layer_num_skipped"):
        if f.get(key, False):
            raise f.wrong(
                key, "a model of this family that has it is not read", kind=UnplannableModelError
            )
    if not f.flag("use_qk_norm", True):
        raise f.wrong("use_qk_norm", "this family has norms of queries and keys")
    size = f.whole("moe_intermediate_size", f.whole("intermediate_size"))
    return joined(
        decoder(f),
        _routed_biases(f),
        {"qk_layernorm": True},
        experts(f, "num_experts", "intermediate_size", "moe_topk"),
        {"moe_ffn_hidden_size": size},
        shared_experts(size * f.whole("num_shared_expert", 1, least=0)),
    )


def bailing_moe_v2(f: ConfigFields) -> Shape:
    """Ling and Ring 2.0: norms of queries and keys, experts balanced by a bias."""
    first = f.count("first_k_dense_replace")
    biases = linear_biases(qkv=f.flag("use_qkv_bias"), projection=f.flag("use_bias"), routed=True)
    return joined(
        decoder(f),
        biases,
        {
            "qk_layernorm": f.flag("use_qk_norm", True),
            "moe_router_enable_expert_bias": True,
            "untie_embeddings_and_output_weights": not f.flag("tie_word_embeddings"),
        },
        experts(f, "num_experts", "moe_intermediate_size"),
        expert_layers(f, lambda layer: layer >= first),
        _shared(f, "num_shared_experts"),
        _predicted_tokens(f),
    )
