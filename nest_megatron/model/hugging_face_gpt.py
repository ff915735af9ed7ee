"""Readers of the families that came with GPT-2 and BERT, whose configurations have older keys."""

from __future__ import annotations

from nest_megatron.model.hugging_face_fields import (
    ConfigFields,
    Shape,
    activation,
    joined,
    layer_norm,
    linear_biases,
    side_by_side,
    variant,
)
from nest_megatron.model.variant import Bias, NormParameters

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
    f.weightless("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    f.weightless("num_key_value_heads", "inference_runner", "validate_runner_input")
    f.weightless("pre_allocate_kv_cache", "max_sequence_length", "max_batch_size")
    groups = 1 if f.flag("multi_query", True) else None
    return joined(gpt2(f), {"num_query_groups": groups})


def gptj(f: ConfigFields) -> Shape:
    """GPT-J: attention beside the MLP, biases on the MLP and the output layer."""
    f.weightless("rotary", "scale_attn_weights")
    head_dim = f.whole("n_embd") // f.whole("n_head")
    if not head_dim:
        raise f.wrong("n_head", "it must be at most n_embd")
    rotated = f.whole("rotary_dim", head_dim)
    return joined(
        _gpt(f),
        {"position_embedding_type": "rope", "rotary_percent": min(1.0, rotated / head_dim)},
        linear_biases(mlp=True),
        side_by_side(),
        variant(biases=(Bias.OUTPUT_LAYER,)),
    )


def codegen(f: ConfigFields) -> Shape:
    """CodeGen: as GPT-J."""
    return gptj(f)


def bloom(f: ConfigFields) -> Shape:
    """BLOOM: ALiBi, and a norm behind the word embedding."""
    f.weightless("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion")
    f.weightless("apply_residual_connection_post_layernorm", "offset_alibi", "n_inner", "n_embed")
    f.weightless("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id")
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
    f.weightless("layerdrop", "dropout", "activation_dropout", "init_std")
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
        linear_biases(qkv=has_bias, projection=has_bias, mlp=has_bias),
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
