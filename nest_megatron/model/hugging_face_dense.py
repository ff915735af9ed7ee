"""Dense families of Hugging Face configurations.

Source of every family: its configuration class and layers in ``transformers``;
``tests/model/hugging_face_judged.json`` holds what those build.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from nest_megatron.errors import UnplannableModelError
from nest_megatron.model.hugging_face_fields import (
    ALL_BIASES,
    POST_NORM,
    SANDWICH_NORM,
    UNGATED,
    WIDE_QK_NORM,
    ConfigFields,
    Family,
    Parts,
    Shape,
    activation,
    decoder,
    extra_biases,
    fewer_groups,
    head_size,
    joined,
    layer_norm,
    linear_biases,
    qk_norm,
    repeats,
    rotary,
    same_biases,
    side_by_side,
    sizes,
    switches,
    untied,
    variant,
    where,
    windows,
    windows_but_every,
)
from nest_megatron.model.variant import Bias, NormParameters, NormPlacement


def upper_windows(f: ConfigFields) -> Shape:
    """Windows on the layers after the first ``max_window_layers``."""
    first = f.count("max_window_layers")
    return windows(f, lambda layer: layer >= first)


def _capped(f: ConfigFields) -> Shape:
    """Scores and logits that are capped, where the file says at what."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    found = {name: f.number(name, 0.0) for name in caps if f.get(name) is not None}
    return variant(**found) if found else {}


def _square_projection(f: ConfigFields) -> Shape:
    if f.whole("num_attention_heads") * f.whole("head_dim", 128) != f.whole("hidden_size"):
        raise f.wrong("head_dim", "it must be hidden_size / num_attention_heads")
    return {}


def _falcon(f: ConfigFields) -> Shape:
    """The layers of Falcon, of which a new decoder has as many groups as it says."""
    new, heads = f.flag("new_decoder_architecture"), f.whole("num_attention_heads")
    groups, one = f.whole("num_kv_heads", heads), f.flag("multi_query", True)
    if not new:
        groups = 1 if one else heads
    hidden, around = f.whole("hidden_size"), {}
    if f.flag("parallel_attn", True):
        two = f.whole("num_ln_in_parallel_attn", 2 if new else 1) == 2
        around = side_by_side(NormPlacement.PRE if two else NormPlacement.SHARED)
    return {
        "num_layers": f.whole("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": f.whole("ffn_hidden_size", 4 * hidden),
        "num_attention_heads": heads,
        "num_query_groups": fewer_groups(groups, heads),
        "max_position_embeddings": f.whole("max_position_embeddings", 2048),
        "vocab_size": f.whole("vocab_size"),
        **({"position_embedding_type": "alibi"} if f.flag("alibi") else rotary()(f)),
        **around,
    }


def _chatglm(f: ConfigFields) -> Shape:
    """The layers of ChatGLM by the model's own code, in closed form."""
    if f.get("inner_hidden_size") is not None:
        limit = "the first ChatGLM is not supported"
        raise f.wrong("inner_hidden_size", limit, kind=UnplannableModelError)
    heads, hidden = f.whole("num_attention_heads"), f.whole("hidden_size")
    groups = f.whole("multi_query_group_num", 1) if f.flag("multi_query_attention") else heads
    everywhere, epsilon = f.flag("add_bias_linear"), "layernorm_epsilon"
    norm = {epsilon: f.number(epsilon, 1e-5)}
    return joined(
        f,
        sizes("num_layers", "ffn_hidden_size"),
        {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": fewer_groups(groups, heads),
            "kv_channels": f.whole("kv_channels", hidden // heads),
            "max_position_embeddings": f.whole("seq_length"),
            "vocab_size": f.whole("padded_vocab_size", f.whole("vocab_size", 65_024)),
            "rotary_percent": 0.5,
        },
        untied(f, default=False),
        norm if f.flag("rmsnorm", True) else layer_norm(epsilon),
        linear_biases(
            qkv=everywhere or f.flag("add_qkv_bias"), projection=everywhere, mlp=everywhere
        ),
    )


def _exaone_windows(f: ConfigFields) -> Shape:
    """Windows on all layers but every n-th, of a number or of the letters of a period."""
    key = "sliding_window_pattern"
    letters = f.get(key)
    read = windows_but_every(len(letters)) if isinstance(letters, str) and letters else None
    return (read or windows_but_every(4, key))(f)


def _unrotated_windows(f: ConfigFields) -> Shape:
    """Windows on the layers that are not rotated."""
    rotated = f.items("no_rope_layers", "0 and 1", of_layers=True)
    period = f.whole("no_rope_layer_interval", 4)

    def slides(layer: int) -> bool:
        return not rotated[layer] if rotated else (layer + 1) % period == 0

    return windows(f, slides)


def _absolute(f: ConfigFields) -> Shape:
    """What families with learned positions share."""
    return joined(
        f,
        {"position_embedding_type": "learned_absolute"},
        UNGATED,
        sizes("vocab_size"),
        untied,
    )


def _gpt(f: ConfigFields) -> Shape:
    """The keys of GPT-2, which GPT-J, CodeGen and GPT-BigCode took over."""
    return joined(
        f,
        _absolute,
        sizes(
            num_layers="n_layer",
            hidden_size="n_embd",
            num_attention_heads="n_head",
            max_position_embeddings="n_positions",
        ),
        layer_norm("layer_norm_epsilon"),
        {"ffn_hidden_size": f.whole("n_inner", 4 * f.whole("n_embd"))},
        activation("activation_function", "gelu_new"),
    )


def _rotated_channels(f: ConfigFields) -> Shape:
    head_dim = f.whole("n_embd") // f.whole("n_head")
    if not head_dim:
        raise f.wrong("n_head", "it must be at most n_embd")
    share = min(1.0, f.whole("rotary_dim", head_dim) / head_dim)
    return {"position_embedding_type": "rope", "rotary_percent": share}


def _bloom(f: ConfigFields) -> Shape:
    """Sizes of BLOOM, whose positions have no end."""
    hidden = f.whole("n_embed", f.whole("hidden_size"))
    return {
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "position_embedding_type": "alibi",
        "activation": "gelu",
        "longest": f.whole("seq_length", 2048),
    }


#: Rows of OPT's table of positions that no position has.
_OPT_OFFSET = 2


def _opt(f: ConfigFields) -> Shape:
    """Sizes and norms of OPT."""
    hidden, longest = f.whole("hidden_size"), f.whole("max_position_embeddings")
    narrow = f.whole("word_embed_proj_dim", hidden)
    last = f.flag("do_layer_norm_before", True) and not f.flag("_remove_final_layer_norm")
    learns = f.flag("layer_norm_elementwise_affine", True)
    return joined(
        f,
        layer_norm(learned=NormParameters.ALL if learns else NormParameters.NONE),
        {
            "hidden_size": hidden,
            "max_position_embeddings": longest + _OPT_OFFSET,
            "longest": longest,
        },
        variant(final_norm=last, embedding_size=None if narrow == hidden else narrow),
    )


def _absolute_positions(f: ConfigFields) -> Shape:
    if f.get("position_embedding_type", "absolute") != "absolute":
        raise f.wrong("position_embedding_type", "only absolute positions are supported")
    return {}


LLAMA: Parts = (decoder, ALL_BIASES)
HUNYUAN: Parts = (
    qk_norm,
    repeats(attention_head_dim=head_size, use_rotary_pos_emb=True),
)
MISTRAL: Parts = (decoder, windows)
#: Qwen windows the upper layers, where it does at all.
UPPER_WINDOWS = where("use_sliding_window", upper_windows)
_BIASED: Shape = {"add_bias_linear": True}
_GEMMA: Parts = (
    partial(decoder, act="hidden_activation"),
    ALL_BIASES,
    activation("hidden_activation", "gelu_pytorch_tanh"),
    SANDWICH_NORM,
    _capped,
)
_OLMO2: Parts = (*LLAMA, POST_NORM, WIDE_QK_NORM)
_COHERE: Parts = (*LLAMA, layer_norm(learned=NormParameters.WEIGHT), side_by_side())
_GLM: Parts = (decoder, rotary(0.5), linear_biases(qkv="attention_bias"))
_GPT_J: Parts = (
    _gpt,
    _rotated_channels,
    linear_biases(mlp=True),
    side_by_side(),
    extra_biases(Bias.OUTPUT_LAYER),
)
WITHOUT_HEAD_DIM = partial(decoder, has_head_dim=False)

FAMILIES: Mapping[str, Family] = {
    "llama": ("Llama 1 to 3", LLAMA),
    "mistral": ("Mistral 7B to Large; a window is on all layers", MISTRAL),
    "ministral": ("Ministral: as Mistral", MISTRAL),
    "qwen2": (
        "Qwen 2 and 2.5: biases on queries, keys and values",
        (decoder, UPPER_WINDOWS, linear_biases(qkv=True)),
    ),
    "qwen3": ("Qwen 3: norms of queries and keys", (*LLAMA, UPPER_WINDOWS, qk_norm)),
    "gemma": ("Gemma 1", (*LLAMA, activation(default="gelu"))),
    "gemma2": (
        "Gemma 2: norms around each block, capped scores and logits, every other layer slides",
        (*_GEMMA, windows_but_every(2)),
    ),
    "gemma3_text": (
        "Gemma 3: norms around each block and of queries and keys, five of six layers slide",
        (
            *_GEMMA,
            windows_but_every(6, "sliding_window_pattern", "_sliding_window_pattern"),
            qk_norm,
        ),
    ),
    "phi": (
        "Phi 1 to 2: attention beside the MLP, biases everywhere, on the output layer too",
        (
            decoder,
            layer_norm(),
            rotary(0.5),
            same_biases(True),
            side_by_side(),
            extra_biases(Bias.OUTPUT_LAYER),
            UNGATED,
            switches(qk_layernorm="qk_layernorm"),
        ),
    ),
    "phi3": (
        "Phi 3, 3.5 and 4",
        (repeats(attention_bias=False, mlp_bias=False, lm_head_bias=False), *MISTRAL),
    ),
    "olmo": (
        "OLMo 1: norms without weights",
        (*LLAMA, layer_norm("norm_eps", NormParameters.NONE)),
    ),
    "olmo2": (
        "OLMo 2: norms behind the blocks alone, and of queries and keys over all heads",
        _OLMO2,
    ),
    "olmo3": ("OLMo 3: as OLMo 2, three of four layers slide", (*_OLMO2, windows_but_every(4))),
    "cohere": (
        "Command R: attention beside the MLP, norms without bias",
        (*_COHERE, where("use_qk_norm", WIDE_QK_NORM)),
    ),
    "cohere2": (
        "Command R7B and A: as Cohere, three of four layers slide",
        (*_COHERE, windows_but_every(4, "sliding_window_pattern", "_sliding_window_pattern")),
    ),
    "falcon": (
        "Falcon 7B (one norm, one group), 40B and 180B (two norms, groups), RW (neither)",
        (
            _falcon,
            UNGATED,
            activation("activation", "gelu"),
            layer_norm("layer_norm_epsilon"),
            same_biases("bias"),
            untied,
        ),
    ),
    "glm": ("GLM-4 9B: biases on queries, keys and values", _GLM),
    "chatglm": (
        "ChatGLM 2 and 3, GLM-4 9B by its first file: the model's own code, in closed form",
        (
            _chatglm,
            repeats(num_hidden_layers=lambda f: f.whole("num_layers"), post_layer_norm=True),
        ),
    ),
    "glm4": ("GLM-4 of April 2025: norms around each block", (*_GLM, SANDWICH_NORM)),
    "nemotron": (
        "Nemotron 3 and 4, Minitron: squared ReLU, LayerNorm with a weight around 1",
        (
            *LLAMA,
            layer_norm("norm_eps"),
            rotary(0.5, "rope_percent"),
            UNGATED,
            {"apply_layernorm_1p": True},
        ),
    ),
    "granite": ("Granite 3: Llama with multipliers, which weigh nothing", LLAMA),
    "starcoder2": (
        "StarCoder 2",
        (*MISTRAL, layer_norm("norm_epsilon"), same_biases("use_bias"), UNGATED),
    ),
    "stablelm": (
        "StableLM 2 and 3B; norms of queries and keys have a weight for each channel of each head",
        (
            decoder,
            layer_norm(),
            rotary(0.25),
            linear_biases(qkv="use_qkv_bias"),
            where("use_parallel_residual", side_by_side()),
            where("qk_layernorm", WIDE_QK_NORM),
        ),
    ),
    "ernie4_5": ("ERNIE 4.5 0.3B", (decoder, same_biases("use_bias"))),
    "seed_oss": (
        "Seed-OSS: the output projection of attention has a bias of its own",
        (
            decoder,
            linear_biases(qkv="attention_bias", projection="attention_out_bias", mlp="mlp_bias"),
        ),
    ),
    "exaone4": (
        "EXAONE 4: norms behind the blocks alone, and of queries and keys; three of four slide",
        (decoder, _exaone_windows, POST_NORM, qk_norm),
    ),
    "smollm3": (
        "SmolLM 3: every fourth layer is not rotated, and slides where any does",
        (*LLAMA, where("use_sliding_window", _unrotated_windows)),
    ),
    "arcee": ("Arcee AFM: Llama with a squared ReLU", (*LLAMA, UNGATED)),
    "helium": (
        "Helium: the output projection of attention is square and has no bias",
        (decoder, _square_projection, linear_biases(qkv="attention_bias", mlp="mlp_bias")),
    ),
    "hunyuan_v1_dense": ("Hunyuan dense: norms of queries and keys", (*LLAMA, *HUNYUAN)),
    "persimmon": (
        "Persimmon: squared ReLU, biases everywhere, norms of queries and keys",
        (
            WITHOUT_HEAD_DIM,
            layer_norm(),
            rotary(0.5),
            same_biases(True),
            UNGATED,
            switches(qk_layernorm="qk_layernorm"),
        ),
    ),
    "gpt_neox": (
        "GPT-NeoX and Pythia: attention beside the MLP, with a norm for each",
        (
            WITHOUT_HEAD_DIM,
            layer_norm(),
            rotary(0.25, "rotary_pct", "rotary_emb_base"),
            linear_biases(qkv="attention_bias", projection="attention_bias", mlp=True),
            where("use_parallel_residual", side_by_side(NormPlacement.PRE)),
            UNGATED,
        ),
    ),
    "gpt2": ("GPT-2", (_gpt, _BIASED)),
    "gpt_bigcode": (
        "StarCoder 1: one group of keys and values",
        (
            _gpt,
            _BIASED,
            lambda f: {"num_query_groups": 1 if f.flag("multi_query", True) else None},
        ),
    ),
    "gptj": ("GPT-J: attention beside the MLP, biases on the MLP and the output layer", _GPT_J),
    "codegen": ("CodeGen: as GPT-J", _GPT_J),
    "bloom": (
        "BLOOM: ALiBi, and a norm behind the word embedding",
        (
            _absolute,
            sizes(num_layers="n_layer", num_attention_heads="n_head"),
            layer_norm("layer_norm_epsilon"),
            _bloom,
            _BIASED,
            variant(embedding_norm=True),
        ),
    ),
    "opt": (
        "OPT: two rows before the first position; the 350M model has norms behind its residuals",
        (
            _absolute,
            sizes(
                num_layers="num_hidden_layers",
                num_attention_heads="num_attention_heads",
                ffn_hidden_size="ffn_dim",
            ),
            activation("activation_function", "relu"),
            same_biases("enable_bias"),
            _opt,
        ),
    ),
    "bert": (
        "BERT",
        (
            _absolute_positions,
            _absolute,
            sizes(
                num_layers="num_hidden_layers",
                hidden_size="hidden_size",
                num_attention_heads="num_attention_heads",
                ffn_hidden_size="intermediate_size",
                max_position_embeddings="max_position_embeddings",
            ),
            layer_norm(),
            activation(default="gelu"),
            {"family": "bert"},
            _BIASED,
        ),
    ),
}
