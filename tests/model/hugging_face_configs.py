"""Configurations of every Hugging Face type at sizes that nobody published, by a seed.

Values are drawn key by key from what the family's configuration class accepts, so that every switch
that adds or drops a weight is met in both positions.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Config = dict[str, Any]
Draw = random.Random
Part = Callable[[Draw], Config]

_FLAG = (False, True)


def sizes(draw: Draw) -> Config:
    """Heads, groups of them, and a hidden size that the heads divide."""
    heads = draw.choice((4, 6, 8, 10, 12, 15, 16))
    groups = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    return {
        "hidden_size": heads * 2 * draw.randint(4, 24),
        "intermediate_size": draw.randint(17, 900),
        "num_hidden_layers": draw.randint(1, 7),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": draw.randint(300, 5000),
        "max_position_embeddings": draw.choice((512, 1000, 2048, 40960)),
    }


def of(**choices: Sequence[Any] | Callable[[Draw], Any]) -> Part:
    """One value for each key: of those named, or drawn by a function."""

    def part(draw: Draw) -> Config:
        return {
            key: value(draw) if callable(value) else draw.choice(value)
            for key, value in choices.items()
        }

    return part


def named(part: Part, **names: str) -> Part:
    """The same under other names; an empty one leaves a key out."""

    def renamed(draw: Draw) -> Config:
        drawn = {names.get(key, key): value for key, value in part(draw).items()}
        return {key: value for key, value in drawn.items() if key}

    return renamed


def even(low: int, high: int) -> Callable[[Draw], int]:
    """An even number from ``2 * low`` to ``2 * high``."""
    return lambda draw: 2 * draw.randint(low, high)


def any_of(low: int, high: int) -> Callable[[Draw], int]:
    """A whole number from ``low`` to ``high``."""
    return lambda draw: draw.randint(low, high)


def routed(number: str, size: str = "moe_intermediate_size", top: str = "") -> Part:
    """Experts under a family's own keys."""

    def part(draw: Draw) -> Config:
        experts = draw.randint(2, 9)
        found = {number: experts, top or "num_experts_per_tok": draw.randint(1, experts)}
        return found | ({size: draw.randint(9, 300)} if size != "intermediate_size" else {})

    return part


def square(draw: Draw) -> Config:
    """Heads that fill the hidden size, said so."""
    drawn = sizes(draw)
    return {**drawn, "head_dim": drawn["hidden_size"] // drawn["num_attention_heads"]}


def falcon(draw: Draw) -> Config:
    """Falcon has as many groups as its switches say; ALiBi goes with the old decoder."""
    drawn = sizes(draw)
    groups, size = drawn.pop("num_key_value_heads"), drawn.pop("intermediate_size")
    return {**drawn, "num_kv_heads": groups, "ffn_hidden_size": size}


def opt(draw: Draw) -> Config:
    """OPT's post-norm models may have no final norm and narrow embeddings."""
    drawn = sizes(draw)
    del drawn["num_key_value_heads"]
    drawn["ffn_dim"] = drawn.pop("intermediate_size")
    drawn["word_embed_proj_dim"] = draw.choice((drawn["hidden_size"], draw.randint(8, 99)))
    return drawn


def mamba2_heads(hidden: str = "hidden_size", prefix: str = "mamba_") -> Part:
    """Mamba heads whose product with their size is the expansion of the hidden size."""

    def part(draw: Draw) -> Config:
        size = draw.choice((4, 8, 16))
        return {"_head": size, "_prefix": prefix, "_hidden": hidden}

    return part


def _finished(drawn: Config) -> Config:
    """Mamba's heads are many enough to fill twice the hidden size."""
    if "_head" not in drawn:
        return drawn
    size, prefix = drawn.pop("_head"), drawn.pop("_prefix")
    expand, hidden = drawn.get(f"{prefix}expand", 2), drawn[drawn.pop("_hidden")]
    while expand * hidden % size:
        size //= 2
    names = ("n_heads", "d_head") if prefix else ("num_heads", "head_dim")
    return {**drawn, f"{prefix}{names[0]}": expand * hidden // size, f"{prefix}{names[1]}": size}


_HEAD = of(head_dim=even(4, 40))
_TIED = of(tie_word_embeddings=_FLAG)
_ATTENTION_BIAS = of(attention_bias=_FLAG)
_WINDOWS = of(use_sliding_window=_FLAG, sliding_window=(None, 64, 512), max_window_layers=(0, 2, 9))
_SPARSE = of(decoder_sparse_step=(1, 2, 3), mlp_only_layers=([], [0], [1, 2]))
_NO_GROUPS = named(sizes, num_key_value_heads="")
_GPT2 = named(
    sizes,
    hidden_size="n_embd",
    num_hidden_layers="n_layer",
    num_attention_heads="n_head",
    max_position_embeddings="n_positions",
    num_key_value_heads="",
    intermediate_size="",
)
_LATENT = of(
    q_lora_rank=(None, 48, 96),
    kv_lora_rank=any_of(8, 99),
    qk_nope_head_dim=even(4, 40),
    qk_rope_head_dim=even(4, 40),
    v_head_dim=even(4, 40),
)
_LATER_DEEPSEEK = (
    *(sizes, _LATENT, _TIED, _ATTENTION_BIAS, routed("n_routed_experts")),
    of(n_shared_experts=any_of(1, 3), first_k_dense_replace=any_of(0, 4)),
)
_DEEPSEEK = (*_LATER_DEEPSEEK, lambda draw: {"num_key_value_heads": None})
_GRANITE_MOE = (sizes, _TIED, _ATTENTION_BIAS, routed("num_local_experts", "intermediate_size"))
_MAMBA2 = of(
    mamba_n_groups=(1, 2),
    mamba_d_state=any_of(4, 40),
    mamba_d_conv=(2, 4),
    mamba_expand=(1, 2, 4),
    mamba_conv_bias=_FLAG,
    mamba_proj_bias=_FLAG,
)

_DELTA = of(
    linear_conv_kernel_dim=(2, 4),
    linear_key_head_dim=even(4, 40),
    linear_value_head_dim=even(4, 40),
    linear_num_key_heads=(2, 4),
    linear_num_value_heads=(4, 8),
)
_INDEXER = of(
    q_lora_rank=(48, 96),
    index_n_heads=(2, 4),
    # the indexer turns as many channels as attention does
    index_head_dim=even(40, 60),
    index_topk=(16, 64),
)

#: Types that transformers 5 has and 4.57 has not.
NEWER: Mapping[str, tuple[Part, ...]] = {
    "deepseek_v32": (*_LATER_DEEPSEEK, _INDEXER),
    "glm4_moe_lite": (
        *(*_LATER_DEEPSEEK, of(mlp_layer_types=(None, ["dense", "sparse", "dense"]))),
        of(num_hidden_layers=(3,), first_k_dense_replace=(1,)),
    ),
    "glm_moe_dsa": (*_LATER_DEEPSEEK, _INDEXER),
    "minimax_m2": (sizes, _HEAD, _TIED, routed("num_local_experts", "intermediate_size")),
    "nemotron_h": (
        *(named(sizes, num_hidden_layers=""), _HEAD, routed("n_routed_experts")),
        of(
            layers_block_type=(
                ["linear_attention", "mlp", "full_attention", "mlp"],
                ["linear_attention", "moe", "full_attention", "moe", "moe"],
            ),
            mamba_num_heads=(8, 16),
            mamba_head_dim=(4, 8),
            ssm_state_size=any_of(4, 40),
            n_groups=(1, 2),
            conv_kernel=(2, 4),
            use_conv_bias=_FLAG,
            use_bias=_FLAG,
            moe_latent_size=(None, 24),
            moe_shared_expert_intermediate_size=any_of(9, 300),
        ),
    ),
    "qwen3_5_moe_text": (
        *(sizes, _HEAD, _TIED, _ATTENTION_BIAS, routed("num_experts"), _DELTA),
        of(shared_expert_intermediate_size=any_of(9, 300)),
    ),
    "qwen3_5_text": (sizes, _HEAD, _TIED, _ATTENTION_BIAS, _DELTA),
}
#: Types that are none of transformers: code that came with the model builds them.
OWN_CODE: Mapping[str, tuple[Part, ...]] = {
    "bailing_moe_v2": (
        *(sizes, _HEAD, routed("num_experts")),
        of(
            use_qkv_bias=_FLAG,
            use_bias=_FLAG,
            use_qk_norm=_FLAG,
            num_shared_experts=any_of(1, 3),
            first_k_dense_replace=any_of(0, 4),
        ),
    ),
}
#: The parts that a configuration of each type is drawn from.
SPACES: Mapping[str, tuple[Part, ...]] = {
    "arcee": (sizes, _HEAD, _TIED, _ATTENTION_BIAS, of(mlp_bias=_FLAG)),
    "bamba": (
        *(sizes, _TIED, _ATTENTION_BIAS, _MAMBA2, mamba2_heads()),
        of(mlp_bias=_FLAG, attn_layer_indices=(None, [0], [1, 3])),
    ),
    "bloom": (
        named(
            _NO_GROUPS,
            num_hidden_layers="n_layer",
            num_attention_heads="n_head",
            intermediate_size="",
            max_position_embeddings="",
        ),
        _TIED,
        of(apply_residual_connection_post_layernorm=_FLAG),
    ),
    "codegen": (_GPT2, _TIED, of(n_inner=(None, 77, 300), n_head=(4, 8), n_embd=(96, 192, 160))),
    "cohere": (sizes, _TIED, _ATTENTION_BIAS, of(use_qk_norm=_FLAG, logit_scale=(0.0625, 1.0))),
    "cohere2": (sizes, _TIED, _ATTENTION_BIAS, of(sliding_window=(64, 512))),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "dots1": (
        *(sizes, _HEAD, _TIED, _ATTENTION_BIAS, routed("n_routed_experts")),
        of(n_shared_experts=any_of(1, 3), first_k_dense_replace=any_of(0, 4)),
        of(sliding_window=(None, 64), max_window_layers=(0, 2, 9)),
    ),
    "ernie4_5": (sizes, _HEAD, _TIED, of(use_bias=_FLAG)),
    "ernie4_5_moe": (
        *(sizes, _TIED, routed("moe_num_experts", top="moe_k")),
        of(
            use_bias=_FLAG,
            moe_num_shared_experts=any_of(0, 3),
            num_hidden_layers=(4, 5, 6),
            moe_layer_start_index=any_of(0, 2),
            moe_layer_end_index=(3, 40, -1),
            moe_layer_interval=(1, 2),
        ),
    ),
    "exaone4": (sizes, _HEAD, _TIED, of(sliding_window=(64, 99), sliding_window_pattern=(2, 4))),
    "falcon": (
        *(falcon, _TIED, of(bias=_FLAG, multi_query=_FLAG, parallel_attn=_FLAG, alibi=_FLAG)),
        of(new_decoder_architecture=_FLAG, num_ln_in_parallel_attn=(None, 1, 2)),
    ),
    "gemma": (sizes, _HEAD, _TIED, _ATTENTION_BIAS),
    "gemma2": (sizes, _HEAD, _TIED, _ATTENTION_BIAS, of(sliding_window=(64, 4096))),
    "gemma3_text": (
        *(sizes, _HEAD, _TIED, _ATTENTION_BIAS),
        of(sliding_window=(64, 512), final_logit_softcapping=(None, 30.0)),
    ),
    "glm": (sizes, _HEAD, _TIED, _ATTENTION_BIAS),
    "glm4": (sizes, _HEAD, _TIED, _ATTENTION_BIAS),
    "glm4_moe": (
        *(sizes, _HEAD, _TIED, _ATTENTION_BIAS, routed("n_routed_experts")),
        of(n_shared_experts=any_of(1, 3), first_k_dense_replace=any_of(0, 4), use_qk_norm=_FLAG),
    ),
    "gpt2": (_GPT2, _TIED, of(n_inner=(None, 77, 300))),
    "gpt_bigcode": (_GPT2, _TIED, of(n_inner=(None, 77, 300), multi_query=_FLAG)),
    "gpt_neox": (
        *(_NO_GROUPS, _TIED, _ATTENTION_BIAS),
        of(use_parallel_residual=_FLAG, rotary_pct=(0.25, 1.0)),
    ),
    "gpt_oss": (
        *(sizes, _HEAD, _TIED, _ATTENTION_BIAS, routed("num_local_experts", "intermediate_size")),
        of(sliding_window=(64, 128)),
    ),
    "gptj": (_GPT2, _TIED, of(n_inner=(None, 77, 300), rotary_dim=(4, 8))),
    "granite": (sizes, _TIED, _ATTENTION_BIAS, of(mlp_bias=_FLAG, residual_multiplier=(0.2, 1.0))),
    "granitemoe": _GRANITE_MOE,
    "granitemoehybrid": (
        *(*_GRANITE_MOE, _MAMBA2, mamba2_heads()),
        of(num_local_experts=(0, 4), num_experts_per_tok=(1, 2)),
        of(shared_intermediate_size=(24, 48), num_hidden_layers=(3,)),
        of(layer_types=(["mamba", "attention", "mamba"], ["attention", "mamba", "mamba"])),
    ),
    "granitemoeshared": (*_GRANITE_MOE, of(shared_intermediate_size=(0, 24, 48))),
    "helium": (square, _TIED, _ATTENTION_BIAS, of(mlp_bias=_FLAG)),
    "hunyuan_v1_dense": (sizes, _HEAD, _TIED, _ATTENTION_BIAS),
    "hunyuan_v1_moe": (
        *(sizes, _HEAD, _TIED, _ATTENTION_BIAS),
        routed("num_experts", "intermediate_size", "moe_topk"),
    ),
    "llama": (sizes, _HEAD, _TIED, _ATTENTION_BIAS, of(mlp_bias=_FLAG)),
    "llama4_text": (
        *(sizes, _HEAD, _TIED, _ATTENTION_BIAS, routed("num_local_experts", "intermediate_size")),
        of(
            intermediate_size_mlp=any_of(9, 300),
            interleave_moe_layer_step=(1, 2),
            use_qk_norm=_FLAG,
            attention_chunk_size=(64, 8192),
        ),
    ),
    "mamba2": (
        of(
            hidden_size=(32, 48, 80),
            num_hidden_layers=any_of(1, 6),
            vocab_size=any_of(99, 999),
            state_size=any_of(4, 40),
            conv_kernel=(2, 4),
            expand=(1, 2, 4),
            n_groups=(1, 2),
            use_bias=_FLAG,
            use_conv_bias=_FLAG,
        ),
        *(_TIED, mamba2_heads(prefix="")),
    ),
    "ministral": (sizes, _HEAD, _TIED, of(sliding_window=(None, 64))),
    "mistral": (sizes, _HEAD, _TIED, of(sliding_window=(None, 64))),
    "mixtral": (
        *(sizes, _HEAD, _TIED, routed("num_local_experts", "intermediate_size")),
        of(sliding_window=(None, 64)),
    ),
    "nemotron": (sizes, _HEAD, _TIED, _ATTENTION_BIAS, of(mlp_bias=_FLAG)),
    "olmo": (sizes, _TIED, _ATTENTION_BIAS, of(clip_qkv=(None, 8.0))),
    "olmo2": (sizes, _TIED, _ATTENTION_BIAS),
    "olmo3": (sizes, _TIED, _ATTENTION_BIAS, of(sliding_window=(64, 4096))),
    "olmoe": (sizes, _TIED, _ATTENTION_BIAS, routed("num_experts", "intermediate_size")),
    "opt": (
        *(opt, _TIED),
        of(
            do_layer_norm_before=_FLAG,
            enable_bias=_FLAG,
            layer_norm_elementwise_affine=_FLAG,
            _remove_final_layer_norm=_FLAG,
        ),
    ),
    "persimmon": (_NO_GROUPS, _TIED, of(qk_layernorm=_FLAG)),
    "phi": (sizes, _TIED, of(qk_layernorm=_FLAG)),
    "phi3": (sizes, _TIED, of(sliding_window=(None, 64), partial_rotary_factor=(0.5, 1.0))),
    "phimoe": (
        *(sizes, _TIED, _ATTENTION_BIAS, routed("num_local_experts", "intermediate_size")),
        of(lm_head_bias=_FLAG, sliding_window=(None, 64)),
    ),
    "qwen2": (sizes, _TIED, _WINDOWS),
    "qwen2_moe": (
        *(sizes, _TIED, _WINDOWS, routed("num_experts"), _SPARSE),
        of(shared_expert_intermediate_size=any_of(9, 300), qkv_bias=_FLAG),
    ),
    "qwen3": (sizes, _HEAD, _TIED, _WINDOWS, _ATTENTION_BIAS),
    "qwen3_moe": (
        *(sizes, _HEAD, _TIED, _ATTENTION_BIAS, routed("num_experts"), _SPARSE),
        of(use_sliding_window=_FLAG, sliding_window=(None, 64)),
    ),
    "qwen3_next": (
        *(sizes, _HEAD, _TIED, _ATTENTION_BIAS, routed("num_experts"), _SPARSE),
        *(of(shared_expert_intermediate_size=any_of(9, 300)), _DELTA),
    ),
    "seed_oss": (
        *(sizes, _HEAD, _TIED, _ATTENTION_BIAS),
        of(mlp_bias=_FLAG, attention_out_bias=_FLAG),
    ),
    "smollm3": (sizes, _TIED, _WINDOWS, _ATTENTION_BIAS, of(mlp_bias=_FLAG)),
    "stablelm": (
        *(sizes, _TIED),
        of(use_qkv_bias=_FLAG, qk_layernorm=_FLAG, use_parallel_residual=_FLAG),
    ),
    "starcoder2": (sizes, _TIED, of(use_bias=_FLAG, sliding_window=(None, 64))),
}


def generated(model_type: str, seed: int) -> Config:
    """The keyword arguments of a configuration of this type; the same for the same seed."""
    draw = random.Random(zlib.crc32(model_type.encode()) + seed)
    drawn: Config = {"model_type": model_type, "pad_token_id": 0}
    for part in {**SPACES, **NEWER, **OWN_CODE}[model_type]:
        drawn |= part(draw)
    return _finished(drawn)
