"""Readers of dense families' Hugging Face configurations, each named after its ``model_type``.

Source of every reader: the configuration class and the layers of that family in ``transformers``;
``tests/model/hugging_face_judged.json`` holds what those build.
"""

from __future__ import annotations

from nest_megatron.model.hugging_face_fields import (
    ConfigFields,
    Shape,
    activation,
    attention,
    decoder,
    joined,
    layer_norm,
    linear_biases,
    norms,
    own_biases,
    rotary,
    same_biases,
    side_by_side,
    variant,
    wide_qk_norm,
    windows,
)
from nest_megatron.model.variant import Bias, NormParameters, NormPlacement


def llama(f: ConfigFields) -> Shape:
    """Llama 1 to 3."""
    return joined(decoder(f), all_biases(f))


def all_biases(f: ConfigFields) -> Shape:
    """``attention_bias`` of all four projections of attention, ``mlp_bias`` of the MLP's."""
    attends = f.flag("attention_bias")
    return linear_biases(qkv=attends, projection=attends, mlp=f.flag("mlp_bias"))


def mistral(f: ConfigFields) -> Shape:
    """Mistral 7B to Large; a window is on all layers."""
    return joined(decoder(f), windows(f, lambda _: True))


def ministral(f: ConfigFields) -> Shape:
    """Ministral: as Mistral."""
    return mistral(f)


def qwen2(f: ConfigFields) -> Shape:
    """Qwen 2 and 2.5: biases on queries, keys and values."""
    return joined(decoder(f), upper_windows(f), linear_biases(qkv=True))


def upper_windows(f: ConfigFields) -> Shape:
    """Qwen windows the layers after the first ``max_window_layers``, where it does at all."""
    first = f.count("max_window_layers")
    found = windows(f, lambda layer: layer >= first)
    return found if f.flag("use_sliding_window") else {}


def qwen3(f: ConfigFields) -> Shape:
    """Qwen 3: norms of queries and keys."""
    return joined(decoder(f), upper_windows(f), all_biases(f), {"qk_layernorm": True})


def gemma(f: ConfigFields) -> Shape:
    """Gemma 1."""
    return joined(decoder(f), all_biases(f), {"activation": activation(f, default="gelu")})


def gemma2(f: ConfigFields) -> Shape:
    """Gemma 2: norms around each block, capped scores and logits, every other layer slides."""
    return _gemma_sandwich(f, windows(f, lambda layer: (layer + 1) % 2 != 0))


def gemma3_text(f: ConfigFields) -> Shape:
    """Gemma 3: norms around each block and of queries and keys, five of six layers slide."""
    period = f.whole("sliding_window_pattern", f.whole("_sliding_window_pattern", 6))
    slides = windows(f, lambda layer: (layer + 1) % period != 0)
    return joined(_gemma_sandwich(f, slides), {"qk_layernorm": True})


def _gemma_sandwich(f: ConfigFields, slides: Shape) -> Shape:
    act = {"activation": activation(f, "hidden_activation", "gelu_pytorch_tanh")}
    caps = {
        name: f.number(name, 0.0)
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
        if f.get(name) is not None
    }
    around = norms(NormPlacement.SANDWICH)
    return joined(
        decoder(f, "hidden_activation"), all_biases(f), slides, act, around, variant(**caps)
    )


def phi(f: ConfigFields) -> Shape:
    """Phi 1 to 2: attention beside the MLP, biases everywhere, on the output layer too."""
    return joined(
        decoder(f),
        layer_norm(f),
        rotary(f, partial=0.5),
        same_biases(True),
        side_by_side(),
        own_biases(Bias.OUTPUT_LAYER),
        {"gated_linear_unit": False, "qk_layernorm": f.flag("qk_layernorm")},
    )


def phi3(f: ConfigFields) -> Shape:
    """Phi 3, 3.5 and 4."""
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        if f.flag(name):
            raise f.wrong(name, "this family has no biases")
    return joined(decoder(f), windows(f, lambda _: True))


def olmo(f: ConfigFields) -> Shape:
    """OLMo 1: norms without weights."""
    return joined(decoder(f), all_biases(f), layer_norm(f, "norm_eps", NormParameters.NONE))


def olmo2(f: ConfigFields) -> Shape:
    """OLMo 2: norms behind the blocks alone, and of queries and keys over all heads."""
    return joined(decoder(f), all_biases(f), norms(NormPlacement.POST), wide_qk_norm())


def olmo3(f: ConfigFields) -> Shape:
    """OLMo 3: as OLMo 2, three of four layers slide."""
    return joined(olmo2(f), windows(f, lambda layer: (layer + 1) % 4 != 0))


def cohere(f: ConfigFields) -> Shape:
    """Command R: attention beside the MLP, norms without bias."""
    qk_norm = wide_qk_norm() if f.flag("use_qk_norm") else {}
    return joined(_cohere(f), qk_norm)


def _cohere(f: ConfigFields) -> Shape:
    norm = layer_norm(f, learned=NormParameters.WEIGHT)
    return joined(decoder(f), all_biases(f), norm, side_by_side())


def cohere2(f: ConfigFields) -> Shape:
    """Command R7B and A: as Cohere, three of four layers slide."""
    period = f.whole("sliding_window_pattern", f.whole("_sliding_window_pattern", 4))
    return joined(_cohere(f), windows(f, lambda layer: (layer + 1) % period != 0))


def falcon(f: ConfigFields) -> Shape:
    """Falcon 7B (one norm, one group), 40B and 180B (two norms, groups), RW (neither)."""
    new, heads = f.flag("new_decoder_architecture"), f.whole("num_attention_heads")
    groups = 1 if f.flag("multi_query", True) else heads
    given = f.whole("num_kv_heads", heads)
    groups = given if new else groups
    hidden, has_bias = f.whole("hidden_size"), f.flag("bias")
    beside = {}
    if f.flag("parallel_attn", True):
        two = f.whole("num_ln_in_parallel_attn", 2 if new else 1) == 2
        beside = side_by_side(NormPlacement.PRE if two else NormPlacement.SHARED)
    return joined(
        {
            "num_layers": f.whole("num_hidden_layers"),
            "hidden_size": hidden,
            "ffn_hidden_size": f.whole("ffn_hidden_size", 4 * hidden),
            "num_attention_heads": heads,
            "num_query_groups": None if groups == heads else groups,
            "max_position_embeddings": f.whole("max_position_embeddings", 2048),
            "vocab_size": f.whole("vocab_size"),
            "activation": activation(f, "activation", "gelu"),
            "gated_linear_unit": False,
            "untie_embeddings_and_output_weights": not f.flag("tie_word_embeddings", True),
            **({"position_embedding_type": "alibi"} if f.flag("alibi") else rotary(f)),
        },
        layer_norm(f, "layer_norm_epsilon"),
        same_biases(has_bias),
        beside,
    )


def glm(f: ConfigFields) -> Shape:
    """GLM-4 9B: biases on queries, keys and values."""
    biases = linear_biases(qkv=f.flag("attention_bias", True))
    return joined(decoder(f), rotary(f, partial=0.5), biases)


def chatglm(f: ConfigFields) -> Shape:
    """ChatGLM 2 and 3, GLM-4 9B by its first file: the model's own code, in closed form."""
    if not f.flag("post_layer_norm", True):
        raise f.wrong("post_layer_norm", "a model without a final norm is not supported")
    heads, hidden = f.whole("num_attention_heads"), f.whole("hidden_size")
    groups = f.whole("multi_query_group_num", 1) if f.flag("multi_query_attention") else heads
    everywhere = f.flag("add_bias_linear")
    norm: Shape = {"layernorm_epsilon": f.number("layernorm_epsilon", 1e-5)}
    return joined(
        {
            "num_layers": f.whole("num_layers"),
            "hidden_size": hidden,
            "ffn_hidden_size": f.whole("ffn_hidden_size"),
            "num_attention_heads": heads,
            "num_query_groups": None if groups == heads else groups,
            "kv_channels": f.whole("kv_channels", hidden // heads),
            "max_position_embeddings": f.whole("seq_length"),
            "vocab_size": f.whole("padded_vocab_size", f.whole("vocab_size", 65_024)),
            "rotary_percent": 0.5,
            "untie_embeddings_and_output_weights": not f.flag("tie_word_embeddings"),
        },
        norm if f.flag("rmsnorm", True) else layer_norm(f, "layernorm_epsilon"),
        linear_biases(
            qkv=everywhere or f.flag("add_qkv_bias"), projection=everywhere, mlp=everywhere
        ),
    )


def glm4(f: ConfigFields) -> Shape:
    """GLM-4 of April 2025: norms around each block."""
    return joined(glm(f), norms(NormPlacement.SANDWICH))


def nemotron(f: ConfigFields) -> Shape:
    """Nemotron 3 and 4, Minitron: squared ReLU, LayerNorm with a weight around 1."""
    share = f.number("rope_percent", 0.5)
    return joined(
        decoder(f),
        layer_norm(f, "norm_eps"),
        rotary(f, partial=share),
        all_biases(f),
        {"apply_layernorm_1p": True, "gated_linear_unit": False},
    )


def granite(f: ConfigFields) -> Shape:
    """Granite 3: Llama with multipliers, which weigh nothing."""
    return llama(f)


def starcoder2(f: ConfigFields) -> Shape:
    """StarCoder 2."""
    has_bias = f.flag("use_bias", True)
    return joined(
        decoder(f),
        layer_norm(f, "norm_epsilon"),
        same_biases(has_bias),
        windows(f, lambda _: True),
        {"gated_linear_unit": False},
    )


def stablelm(f: ConfigFields) -> Shape:
    """StableLM 2 and 3B; norms of queries and keys have a weight for each channel of each head."""
    beside = side_by_side() if f.flag("use_parallel_residual") else {}
    qk_norm = wide_qk_norm() if f.flag("qk_layernorm") else {}
    biases = linear_biases(qkv=f.flag("use_qkv_bias"))
    return joined(decoder(f), layer_norm(f), rotary(f, partial=0.25), biases, beside, qk_norm)


def ernie4_5(f: ConfigFields) -> Shape:
    """ERNIE 4.5 0.3B."""
    has_bias = f.flag("use_bias")
    return joined(decoder(f), same_biases(has_bias))


def seed_oss(f: ConfigFields) -> Shape:
    """Seed-OSS: the output projection of attention has a bias of its own."""
    biases = linear_biases(
        qkv=f.flag("attention_bias", True),
        projection=f.flag("attention_out_bias"),
        mlp=f.flag("mlp_bias"),
    )
    return joined(decoder(f), biases)


def exaone4(f: ConfigFields) -> Shape:
    """EXAONE 4: norms behind the blocks alone, and of queries and keys; three of four slide."""
    pattern = f.get("sliding_window_pattern", 4)
    letters = pattern if isinstance(pattern, str) else ""
    period = len(letters) or f.whole("sliding_window_pattern", 4)
    slides = windows(f, lambda layer: (layer + 1) % period != 0)
    return joined(decoder(f), slides, norms(NormPlacement.POST), {"qk_layernorm": True})


def smollm3(f: ConfigFields) -> Shape:
    """SmolLM 3: every fourth layer is not rotated, and slides where any does."""
    rotated = f.items("no_rope_layers", "0 and 1", of_layers=True)
    period = f.whole("no_rope_layer_interval", 4)

    def slides(layer: int) -> bool:
        return not rotated[layer] if rotated else (layer + 1) % period == 0

    found = windows(f, slides)
    return joined(decoder(f), all_biases(f), found if f.flag("use_sliding_window") else {})


def arcee(f: ConfigFields) -> Shape:
    """Arcee AFM: Llama with a squared ReLU."""
    return joined(llama(f), {"gated_linear_unit": False})


def helium(f: ConfigFields) -> Shape:
    """Helium: the output projection of attention is square and has no bias."""
    if f.whole("num_attention_heads") * f.whole("head_dim", 128) != f.whole("hidden_size"):
        raise f.wrong("head_dim", "it must be hidden_size / num_attention_heads")
    biases = linear_biases(qkv=f.flag("attention_bias"), mlp=f.flag("mlp_bias"))
    return joined(decoder(f), biases)


def hunyuan_v1_dense(f: ConfigFields) -> Shape:
    """Hunyuan dense: norms of queries and keys."""
    return joined(decoder(f), all_biases(f), {"qk_layernorm": True})


def persimmon(f: ConfigFields) -> Shape:
    """Persimmon: squared ReLU, biases everywhere, norms of queries and keys."""
    return joined(
        decoder(f, own_size=False),
        layer_norm(f),
        rotary(f, 25_000, partial=0.5),
        same_biases(True),
        {"gated_linear_unit": False, "qk_layernorm": f.flag("qk_layernorm", True)},
    )


def gpt_neox(f: ConfigFields) -> Shape:
    """GPT-NeoX and Pythia: attention beside the MLP, with a norm for each."""
    attends = f.flag("attention_bias", True)
    beside = side_by_side(NormPlacement.PRE) if f.flag("use_parallel_residual", True) else {}
    share = f.number("rotary_pct", 0.25)
    return joined(
        decoder(f, own_size=False),
        layer_norm(f),
        rotary(f, f.whole("rotary_emb_base", 10_000), partial=share),
        linear_biases(qkv=attends, projection=attends, mlp=True),
        beside,
        {"gated_linear_unit": False, **attention(f, own_size=False)},
    )


#: Rows of OPT's table of positions that no position has.
_OPT_OFFSET = 2


def _sizes(f: ConfigFields, **keys: str) -> Shape:
    """The fields of a description by the key that a family has for each."""
    return {field: f.whole(key) for field, key in keys.items()}


def _absolute(f: ConfigFields) -> Shape:
    """What all these families share; their output layer is the word embedding by default."""
    return {
        "position_embedding_type": "learned_absolute",
        "gated_linear_unit": False,
        "vocab_size": f.whole("vocab_size"),
        "untie_embeddings_and_output_weights": not f.flag("tie_word_embeddings", True),
    }


def _gpt(f: ConfigFields) -> Shape:
    """The keys of GPT-2, which GPT-J, CodeGen and GPT-BigCode took over."""
    return joined(
        _absolute(f),
        _sizes(
            f,
            num_layers="n_layer",
            hidden_size="n_embd",
            num_attention_heads="n_head",
            max_position_embeddings="n_positions",
        ),
        layer_norm(f, "layer_norm_epsilon"),
        {
            "ffn_hidden_size": f.whole("n_inner", 4 * f.whole("n_embd")),
            "activation": activation(f, "activation_function", "gelu_new"),
        },
    )


def gpt2(f: ConfigFields) -> Shape:
    """GPT-2."""
    return joined(_gpt(f), {"add_bias_linear": True})


def gpt_bigcode(f: ConfigFields) -> Shape:
    """StarCoder 1: one group of keys and values."""
    groups = 1 if f.flag("multi_query", True) else None
    return joined(gpt2(f), {"num_query_groups": groups})


def gptj(f: ConfigFields) -> Shape:
    """GPT-J: attention beside the MLP, biases on the MLP and the output layer."""
    head_dim = f.whole("n_embd") // f.whole("n_head")
    if not head_dim:
        raise f.wrong("n_head", "it must be at most n_embd")
    rotated = f.whole("rotary_dim", head_dim)
    return joined(
        _gpt(f),
        {"position_embedding_type": "rope", "rotary_percent": min(1.0, rotated / head_dim)},
        linear_biases(mlp=True),
        side_by_side(),
        own_biases(Bias.OUTPUT_LAYER),
    )


def codegen(f: ConfigFields) -> Shape:
    """CodeGen: as GPT-J."""
    return gptj(f)


def bloom(f: ConfigFields) -> Shape:
    """BLOOM: ALiBi, and a norm behind the word embedding."""
    hidden = f.whole("n_embed", f.whole("hidden_size"))
    return joined(
        _absolute(f),
        _sizes(f, num_layers="n_layer", num_attention_heads="n_head"),
        layer_norm(f, "layer_norm_epsilon"),
        {
            "hidden_size": hidden,
            "ffn_hidden_size": 4 * hidden,
            "position_embedding_type": "alibi",
            "activation": "gelu",
            "add_bias_linear": True,
            "longest": f.whole("seq_length", 2048),
        },
        variant(embedding_norm=True),
    )


def opt(f: ConfigFields) -> Shape:
    """OPT: two rows before the first position; the 350M model has norms behind its residuals."""
    hidden, longest = f.whole("hidden_size"), f.whole("max_position_embeddings")
    narrow, has_bias = f.whole("word_embed_proj_dim", hidden), f.flag("enable_bias", True)
    last = f.flag("do_layer_norm_before", True) and not f.flag("_remove_final_layer_norm")
    learns = f.flag("layer_norm_elementwise_affine", True)
    learned = NormParameters.ALL if learns else NormParameters.NONE
    return joined(
        _absolute(f),
        _sizes(
            f,
            num_layers="num_hidden_layers",
            num_attention_heads="num_attention_heads",
            ffn_hidden_size="ffn_dim",
        ),
        layer_norm(f, "layer_norm_eps", learned),
        same_biases(has_bias),
        {
            "hidden_size": hidden,
            "max_position_embeddings": longest + _OPT_OFFSET,
            "longest": longest,
            "activation": activation(f, "activation_function", "relu"),
        },
        variant(final_norm=last, embedding_size=None if narrow == hidden else narrow),
    )


def bert(f: ConfigFields) -> Shape:
    """BERT."""
    if f.get("position_embedding_type", "absolute") != "absolute":
        raise f.wrong("position_embedding_type", "only absolute positions are supported")
    return joined(
        _absolute(f),
        _sizes(
            f,
            num_layers="num_hidden_layers",
            hidden_size="hidden_size",
            num_attention_heads="num_attention_heads",
            ffn_hidden_size="intermediate_size",
            max_position_embeddings="max_position_embeddings",
        ),
        layer_norm(f),
        {"family": "bert", "activation": activation(f, default="gelu"), "add_bias_linear": True},
    )
