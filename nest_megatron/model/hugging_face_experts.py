"""Families with routed experts of Hugging Face configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from nest_megatron.errors import UnplannableModelError
from nest_megatron.model.hugging_face_dense import (
    HUNYUAN,
    MISTRAL,
    UPPER_WINDOWS,
    WITHOUT_HEAD_DIM,
    upper_windows,
)
from nest_megatron.model.hugging_face_fields import (
    ROUTED_BIASES,
    WIDE_QK_NORM,
    ConfigFields,
    Family,
    Parts,
    Reader,
    Shape,
    decoder,
    extra_biases,
    frequency,
    head_size,
    joined,
    layer_norm,
    linear_biases,
    qk_norm,
    repeats,
    rotary,
    same_biases,
    sizes,
    switches,
    untied,
    where,
    windows,
    windows_but_every,
)
from nest_megatron.model.variant import Bias


def experts(number: str, size: str, top: str = "num_experts_per_tok") -> Reader:
    """Routed experts; the keys that a family has for their number, size and share."""
    return sizes(num_experts=number, moe_ffn_hidden_size=size, moe_router_topk=top)


def expert_layers(f: ConfigFields, routes: Callable[[int], bool]) -> Shape:
    """Which layers route tokens to experts."""
    return {"moe_layer_freq": [int(routes(i)) for i in range(f.whole("num_hidden_layers"))]}


def shared_experts(size: int) -> Shape:
    """Shared experts of this inner size together, if any."""
    return {"moe_shared_expert_intermediate_size": size or None}


#: Experts balanced by a bias.
BALANCED: Shape = {"moe_router_enable_expert_bias": True}


def predicted_tokens(key: str) -> Reader:
    """Layers of multi-token prediction, if any."""
    return lambda f: {"mtp_num_layers": f.count(key) or None}


def _shared(number: str) -> Reader:
    """Shared experts, each as wide as a routed one."""
    return lambda f: shared_experts(f.whole("moe_intermediate_size") * f.count(number))


def _behind_dense(f: ConfigFields) -> Shape:
    """Experts in all layers but the first ones."""
    first = f.count("first_k_dense_replace")
    return expert_layers(f, lambda layer: layer >= first)


def qwen_experts(f: ConfigFields, number: str = "num_experts") -> Shape:
    """Experts in every n-th layer but those that ``mlp_only_layers`` names; of 0 experts none."""
    step = f.whole("decoder_sparse_step", 1)
    dense = f.items("mlp_only_layers", "layer numbers") or ()
    if not f.whole(number, least=0):
        f.weightless("moe_intermediate_size", "num_experts_per_tok")
        return {}
    return joined(f, experts(number, "moe_intermediate_size")) | expert_layers(
        f, lambda layer: (layer + 1) % step == 0 and layer not in dense
    )


def _qwen3_experts(f: ConfigFields) -> Shape:
    renamed = f.get("num_local_experts") is not None
    return qwen_experts(f, "num_local_experts" if renamed else "num_experts")


def gated_shared_expert(f: ConfigFields) -> Shape:
    """A shared expert behind a gate, in a model that has experts."""
    size = f.count("shared_expert_intermediate_size")
    if not size or not f.whole("num_experts", least=0):
        return {}
    return shared_experts(size) | {"moe_shared_expert_gate": True}


def _indexer(f: ConfigFields) -> Shape:
    """What chooses the tokens that attention sees."""
    if {*(f.items("layer_types", "text") or ())} - {"indexed_attention"}:
        raise f.wrong("layer_types", "all layers of this family are indexed_attention")
    return joined(
        f,
        {"experimental_attention_variant": "dsa"},
        sizes(
            dsa_indexer_n_heads="index_n_heads",
            dsa_indexer_head_dim="index_head_dim",
            dsa_indexer_topk="index_topk",
        ),
    )


def _own_indexers(f: ConfigFields) -> Shape:
    shared = {*(f.items("indexer_types", "text") or ()), *str(f.get("index_topk_pattern", ""))}
    if f.whole("index_topk_freq", 1) > 1 or shared & {"shared", "S"}:
        keys = ("indexer_types", "index_topk_pattern", "index_topk_freq")
        raise f.wrong(
            next(key for key in keys if f.get(key) is not None),
            "layers that take the tokens of another layer's indexer are not read",
            kind=UnplannableModelError,
        )
    return {}


def _deepseek_layers(f: ConfigFields, first: int = 0) -> Shape:
    """Experts behind the first layers, or in the layers that a list names."""
    first, period = f.whole("first_k_dense_replace", first, least=0), f.whole("moe_layer_freq", 1)
    named = f.items("mlp_layer_types", "text", of_layers=True)
    if not {*(named or ())} <= {"dense", "sparse"}:
        raise f.wrong("mlp_layer_types", "it must name dense or sparse")

    def routes(layer: int) -> bool:
        return named[layer] == "sparse" if named else layer >= first and layer % period == 0

    return expert_layers(f, routes)


def _latent_attention(f: ConfigFields) -> Shape:
    return joined(
        f,
        {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "num_query_groups": None,
            "q_lora_rank": None if f.get("q_lora_rank") is None else f.whole("q_lora_rank"),
        },
        sizes(
            kv_channels="qk_nope_head_dim",
            kv_lora_rank="kv_lora_rank",
            qk_head_dim="qk_nope_head_dim",
            qk_pos_emb_head_dim="qk_rope_head_dim",
            v_head_dim="v_head_dim",
        ),
    )


def _gpt_oss(f: ConfigFields) -> Shape:
    top = "num_experts_per_tok"
    if f.get(top) is None:
        top = "experts_per_token"
    biases = {"add_bias_linear": True}
    if not f.flag("attention_bias", True):
        biases = extra_biases(Bias.MLP, Bias.ROUTER)
    return joined(f, biases, experts("num_local_experts", "intermediate_size", top))


def _minimax_m2(f: ConfigFields) -> Shape:
    """Rotated channels, the router's bias and MTP modules of MiniMax M2, without what it lacks."""
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
    size = head_size(f)
    return {
        **repeats(use_qk_norm=True, qk_norm_type="per_layer")(f),
        **rotary(f.whole("rotary_dim", size) / size)(f),
        "moe_router_enable_expert_bias": f.flag("use_routing_bias", True),
        "mtp_num_layers": mtp or None,
    }


def _llama4(f: ConfigFields) -> Shape:
    """The layers that have experts, with a shared one, and the size of the others."""
    named = f.items("moe_layers", "layer numbers")
    step = f.whole("interleave_moe_layer_step", 1, least=1 if named is None else 0)

    def routes(layer: int) -> bool:
        return (layer + 1) % step == 0 if named is None else layer in named

    size = f.whole("intermediate_size")
    return {
        "ffn_hidden_size": f.whole("intermediate_size_mlp", size),
        **expert_layers(f, routes),
        **shared_experts(size),
    }


def _chunks(f: ConfigFields) -> Shape:
    """The layers that attend in chunks; the others are not rotated."""
    rotated = f.items("no_rope_layers", "0 and 1", of_layers=True)
    flags = f.marked_layers(
        "chunked_attention",
        lambda layer: bool(rotated[layer]) if rotated else (layer + 1) % 4 != 0,
    )
    if f.get("attention_chunk_size") is None or not any(flags):
        return {}
    found = frequency(flags)
    return {
        "attention_chunk_size": f.whole("attention_chunk_size"),
        "no_rope_freq": [1 - flag for flag in found] if isinstance(found, list) else found,
    }


def _ernie_layers(f: ConfigFields) -> Shape:
    first, period = f.whole("moe_layer_start_index", 1, least=0), f.whole("moe_layer_interval", 1)
    last = f.whole("moe_layer_end_index", -1, least=-1)
    last = f.whole("num_hidden_layers") - 1 if last == -1 else last
    return expert_layers(f, lambda layer: (layer + 1) % period == 0 and first <= layer <= last)


def _hunyuan_moe(f: ConfigFields) -> Shape:
    """Experts of Hunyuan, without what the family lacks."""
    for key in ("use_cla", "use_mla", "moe_layer_num_skipped"):
        if f.get(key, False):
            raise f.wrong(
                key, "a model of this family that has it is not read", kind=UnplannableModelError
            )
    size = f.whole("moe_intermediate_size", f.whole("intermediate_size"))
    return {
        "moe_ffn_hidden_size": size,
        **shared_experts(size * f.whole("num_shared_expert", 1, least=0)),
    }


_OF_DEEPSEEK: Parts = (
    decoder,
    _latent_attention,
    experts("n_routed_experts", "moe_intermediate_size"),
    _shared("n_shared_experts"),
    predicted_tokens("num_nextn_predict_layers"),
    where("attention_bias", extra_biases(Bias.LATENT_DOWN, Bias.PROJECTION)),
)
#: Experts balanced by a bias in all layers but the first ones, and shared ones.
_BEHIND_DENSE: Parts = (
    BALANCED,
    experts("n_routed_experts", "moe_intermediate_size"),
    _behind_dense,
    _shared("n_shared_experts"),
)
_DEEPSEEK_V32: Parts = (*_OF_DEEPSEEK, _deepseek_layers, BALANCED, _indexer)
_OF_LOCAL_EXPERTS = experts("num_local_experts", "intermediate_size")
GRANITE: Parts = (decoder, ROUTED_BIASES, _OF_LOCAL_EXPERTS)

FAMILIES: Mapping[str, Family] = {
    "mixtral": ("Mixtral", (*MISTRAL, _OF_LOCAL_EXPERTS)),
    "qwen2_moe": (
        "Qwen 1.5 and 2 MoE: a gate on the shared expert",
        (
            decoder,
            UPPER_WINDOWS,
            linear_biases(qkv="qkv_bias", routed=True),
            qwen_experts,
            gated_shared_expert,
        ),
    ),
    "qwen3_moe": (
        "Qwen 3 MoE; a window is on all layers",
        (
            decoder,
            lambda f: windows(f) if f.flag("use_sliding_window") else {},
            ROUTED_BIASES,
            qk_norm,
            _qwen3_experts,
        ),
    ),
    "deepseek_v2": (
        "DeepSeek V2",
        (*_OF_DEEPSEEK, _deepseek_layers, linear_biases(mlp="mlp_bias", routed=True)),
    ),
    "deepseek_v3": (
        "DeepSeek V3 and R1, Kimi K2, Moonlight: experts balanced by a bias",
        (*_OF_DEEPSEEK, _deepseek_layers, BALANCED),
    ),
    "deepseek_v32": (
        "DeepSeek V3.2: as V3, and an indexer chooses the tokens that attention sees",
        _DEEPSEEK_V32,
    ),
    "glm_moe_dsa": (
        "GLM-5: as DeepSeek V3.2; layers that share the indexer of another are not read",
        (_own_indexers, *_DEEPSEEK_V32),
    ),
    "glm4_moe_lite": (
        "GLM-4.7-Flash: latent attention and experts as DeepSeek V3's, the first layer dense",
        (*_OF_DEEPSEEK, partial(_deepseek_layers, first=1), BALANCED),
    ),
    "gpt_oss": (
        "GPT-OSS: biases everywhere, attention sinks, every other layer slides",
        (
            decoder,
            {"activation": "quick_gelu"},  # the file says silu, the experts clamp a quick GELU
            {"softmax_type": "learnable"},
            windows_but_every(2),
            _gpt_oss,
        ),
    ),
    "minimax_m2": (
        "MiniMax M2: norms of queries and keys over all heads, experts balanced by a bias",
        (decoder, WIDE_QK_NORM, _minimax_m2, _OF_LOCAL_EXPERTS),
    ),
    "phimoe": (
        "Phi 3.5 MoE: LayerNorm, a bias on the output layer",
        (
            WITHOUT_HEAD_DIM,
            layer_norm("rms_norm_eps"),
            windows,
            ROUTED_BIASES,
            where("lm_head_bias", extra_biases(Bias.OUTPUT_LAYER)),
            _OF_LOCAL_EXPERTS,
        ),
    ),
    "olmoe": (
        "OLMoE: norms of queries and keys over all heads",
        (
            WITHOUT_HEAD_DIM,
            ROUTED_BIASES,
            WIDE_QK_NORM,
            experts("num_experts", "intermediate_size"),
        ),
    ),
    "glm4_moe": (
        "GLM-4.5 and 4.6",
        (
            decoder,
            rotary(0.5),
            linear_biases(qkv="attention_bias", routed=True),
            switches(qk_layernorm="use_qk_norm"),
            *_BEHIND_DENSE,
            predicted_tokens("num_nextn_predict_layers"),
        ),
    ),
    "dots1": (
        "dots.llm1: norms of queries and keys; the upper layers slide",
        (
            decoder,
            upper_windows,
            ROUTED_BIASES,
            qk_norm,
            repeats(moe_layer_freq=1),
            *_BEHIND_DENSE,
        ),
    ),
    "llama4_text": (
        "Llama 4: a shared expert as wide as the others, attention in chunks on rotated layers",
        (decoder, _chunks, ROUTED_BIASES, _OF_LOCAL_EXPERTS, _llama4),
    ),
    "granitemoe": ("Granite 3 MoE", GRANITE),
    "granitemoeshared": (
        "Granite 3 MoE with a shared expert",
        (*GRANITE, lambda f: shared_experts(f.count("shared_intermediate_size"))),
    ),
    "ernie4_5_moe": (
        "ERNIE 4.5 21B and 300B; the bias that balances experts counts as a parameter",
        (
            decoder,
            same_biases("use_bias", routed=True),
            extra_biases(Bias.EXPERT_BIAS),
            where("use_bias", extra_biases(Bias.OUTPUT_LAYER)),
            BALANCED,
            experts("moe_num_experts", "moe_intermediate_size", "moe_k"),
            _ernie_layers,
            _shared("moe_num_shared_experts"),
        ),
    ),
    "hunyuan_v1_moe": (
        "Hunyuan MoE: a shared expert as wide as the others; what is listed is alike in all layers",
        (
            decoder,
            ROUTED_BIASES,
            *HUNYUAN,
            experts("num_experts", "intermediate_size", "moe_topk"),
            _hunyuan_moe,
        ),
    ),
    "bailing_moe_v2": (
        "Ling and Ring 2.0: norms of queries and keys, experts balanced by a bias",
        (
            decoder,
            linear_biases(qkv="use_qkv_bias", projection="use_bias", routed=True),
            lambda f: {"qk_layernorm": f.flag("use_qk_norm", True)},
            repeats(rotary_dim=lambda f: head_size(f) * f.number("partial_rotary_factor", 1.0)),
            BALANCED,
            partial(untied, default=False),
            experts("num_experts", "moe_intermediate_size"),
            _behind_dense,
            _shared("num_shared_experts"),
            predicted_tokens("num_nextn_predict_layers"),
        ),
    ),
}
