"""Hugging Face configurations give the same shapes as the catalogue, or are refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.hugging_face import (
    DEFAULT_SEQ_LENGTH,
    FAMILIES,
    HuggingFaceModel,
    read_hf_model,
)
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.model.variant import ModelVariant, NormPlacement

MODELS = Path(__file__).parents[2] / "hydra_configs" / "model"


def spec_from_hf_config(
    config: Mapping[str, object], name: str, *, seq_length: int | None = None
) -> TransformerSpec:
    """The model alone."""
    return read_hf_model(config, name, seq_length=seq_length).spec


LLAMA3_70B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

CONFIGS: dict[str, dict[str, object]] = {
    "llama3_70b": LLAMA3_70B,
    "llama3_1_405b": {
        **LLAMA3_70B,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 128,
        "num_hidden_layers": 126,
    },
    "llama2_7b": {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "mixtral_8x7b": {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "gpt_oss_120b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-05,
        "rope_theta": 150000,
        "sliding_window": 128,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "bert_large": {
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "type_vocab_size": 2,
        "vocab_size": 30522,
    },
    "nemotron4_340b": {
        "model_type": "nemotron",
        "head_dim": 192,
        "hidden_act": "relu2",
        "hidden_size": 18432,
        "intermediate_size": 73728,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-05,
        "num_attention_heads": 96,
        "num_hidden_layers": 96,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 256000,
    },
}


def catalogue(name: str) -> TransformerSpec:
    """One entry of the catalogue."""
    return spec_from_mapping(yaml.safe_load((MODELS / f"{name}.yaml").read_text(encoding="utf-8")))


def same_shape(spec: TransformerSpec) -> TransformerSpec:
    """The spec with its optional spellings resolved and its source dropped."""
    return dataclasses.replace(
        spec, num_query_groups=spec.query_groups, kv_channels=spec.head_dim, source=""
    )


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_config_gives_the_catalogue_entry(name: str) -> None:
    entry = catalogue(name)
    spec = spec_from_hf_config(CONFIGS[name], name, seq_length=entry.seq_length)
    assert same_shape(spec) == same_shape(entry)
    assert "config.json" in spec.source


def test_sequence_length_defaults_to_the_shorter_of_context_and_ours() -> None:
    assert spec_from_hf_config(CONFIGS["bert_large"], "b").seq_length == 512
    assert spec_from_hf_config(CONFIGS["gpt_oss_120b"], "g").seq_length == DEFAULT_SEQ_LENGTH


def test_gpt2() -> None:
    config: dict[str, object] = {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 1600,
        "n_head": 25,
        "n_layer": 48,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    spec = spec_from_hf_config(config, "gpt2-xl")
    assert (spec.num_layers, spec.hidden_size, spec.ffn_hidden_size) == (48, 1600, 6400)
    assert (spec.activation, spec.position_embedding_type) == ("gelu", "learned_absolute")
    assert spec.add_bias_linear
    assert not spec.untie_embeddings_and_output_weights


def test_qwen2_has_biases_on_qkv_alone() -> None:
    spec = spec_from_hf_config({**LLAMA3_70B, "model_type": "qwen2"}, "q")
    assert spec.add_qkv_bias
    assert not spec.add_bias_linear
    assert not spec.qk_layernorm


def test_qwen3_normalises_queries_and_keys() -> None:
    assert spec_from_hf_config({**LLAMA3_70B, "model_type": "qwen3"}, "q").qk_layernorm


def test_mistral_slides_on_all_layers() -> None:
    spec = spec_from_hf_config({**LLAMA3_70B, "model_type": "mistral", "sliding_window": 4096}, "m")
    assert (spec.window_size, spec.window_attn_skip_freq) == (4096, None)


def test_deepseek_v2_shares_two_experts_and_has_no_bias_or_mtp() -> None:
    config = {
        key: value
        for key, value in CONFIGS["deepseek_v3"].items()
        if key != "num_nextn_predict_layers"
    }
    config.update(model_type="deepseek_v2", topk_method="group_limited_greedy", n_shared_experts=2)
    spec = spec_from_hf_config(config, "v2")
    assert spec.moe_shared_expert_intermediate_size == 4096
    assert not spec.moe_router_enable_expert_bias
    assert spec.mtp_num_layers is None


def test_dense_layers_among_qwen3_experts() -> None:
    config = {**CONFIGS["qwen3_30b_a3b"], "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert spec_from_hf_config(config, "q").moe_layer_pattern[:6] == (0, 1, 0, 0, 0, 1)


def test_transformers_5_nests_the_rotary_base() -> None:
    config = {key: value for key, value in LLAMA3_70B.items() if key != "rope_theta"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    assert spec_from_hf_config(config, "l").rotary_base == 500_000


@pytest.mark.parametrize("model_type", ["llama", "starcoder2", "glm"])
@pytest.mark.parametrize("nested", [True, False])
def test_a_fraction_of_the_rotary_base_is_rounded(model_type: str, nested: bool) -> None:
    config = {key: value for key, value in LLAMA3_70B.items() if key != "rope_theta"}
    config["model_type"] = model_type

    def read_with(theta: float) -> HuggingFaceModel:
        field = {"rope_theta": theta}
        return read_hf_model({**config, **({"rope_parameters": field} if nested else field)}, "s")

    read = read_with(999999.4420358813)
    assert read.spec.rotary_base == 999_999
    told = "s: rope_theta 999999.4420358813 is taken as 999999: Megatron-LM's --rotary-base"
    assert sum(note.startswith(told) for note in read.notes) == 1
    assert not any("rotary-base" in note for note in read_with(1e6).notes)
    where = "model s: rope_parameters: config" if nested else "model s: config"
    for wrong in (0.5, float("nan"), float("inf")):
        with pytest.raises(UserInputError, match=rf"{where}\.json: rope_theta.*at least 1"):
            read_with(wrong)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("zamba2", "mixes attention"),
        ("falcon_mamba", "state-space"),
        ("t5", "encoder-decoder"),
        ("bart", "encoder-decoder"),
        ("mllama", "vision"),
        ("llamma", "nearest name: llama"),
        ("gemma3n_text", "embeddings in every layer"),
        ("dbrx", "this architecture is not supported; architectures says LlamaForCausalLM"),
        (None, "not supported"),
    ],
)
def test_unplannable_models_are_refused_with_what_is_supported(
    model_type: str | None, reason: str
) -> None:
    with pytest.raises(UnplannableModelError, match=reason) as error:
        spec_from_hf_config({**LLAMA3_70B, "model_type": model_type}, "x")
    assert all(supported in str(error.value) for supported in FAMILIES)


@pytest.mark.parametrize(
    "extra", [{"vision_config": {}}, {"is_encoder_decoder": True}, {"add_cross_attention": True}]
)
def test_unplannable_parts_are_refused(extra: dict[str, object]) -> None:
    with pytest.raises(UnplannableModelError, match="Supported"):
        spec_from_hf_config({**LLAMA3_70B, **extra}, "x")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", "8192"),
        ("num_hidden_layers", 80.5),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", float("nan")),
        ("hidden_act", "tanh"),
        ("tie_word_embeddings", "no"),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 7),
    ],
)
def test_wrong_field_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UserInputError, match="model x"):
        spec_from_hf_config({**LLAMA3_70B, key: value}, "x")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("num_hidden_layers", "16", 'num_hidden_layers = "16"'),
        ("tie_word_embeddings", "false", 'tie_word_embeddings = "false"'),
    ],
)
def test_text_in_the_place_of_a_number_is_told_as_text(key: str, value: str, told: str) -> None:
    with pytest.raises(UserInputError) as error:
        spec_from_hf_config({**LLAMA3_70B, key: value}, "x")
    assert told.endswith(f" = {error.value.value}")


def test_a_text_model_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"text_config = 'hello'"):
        spec_from_hf_config({"model_type": "gemma3", "text_config": "hello"}, "g")


def test_an_empty_list_of_layers_without_rotation_is_absent() -> None:
    config = {"model_type": "llama4_text", "num_hidden_layers": 8, "attention_chunk_size": 64}
    assert spec_from_hf_config({**config, "no_rope_layers": []}, "l") == spec_from_hf_config(
        config, "l"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 10**12), ("layer_types", [{}]), ("layer_types", ["full_attention"])],
)
def test_lists_and_layers_of_no_model_are_refused(key: str, value: object) -> None:
    with pytest.raises(UserInputError, match=key):
        spec_from_hf_config({**CONFIGS["gpt_oss_120b"], key: value}, "g")
    with pytest.raises(UserInputError, match="model_type"):
        spec_from_hf_config({**LLAMA3_70B, "model_type": [value]}, "x")


def test_an_empty_pattern_of_windows_is_refused() -> None:
    config = {**LLAMA3_70B, "model_type": "exaone4", "sliding_window": 64}
    assert spec_from_hf_config({**config, "sliding_window_pattern": "LLLG"}, "x").window_size == 64
    with pytest.raises(UserInputError, match="sliding_window_pattern"):
        spec_from_hf_config({**config, "sliding_window_pattern": ""}, "x")


def test_windows_of_any_order_are_read() -> None:
    kinds = ["full_attention", *["sliding_attention"] * 35]
    spec = spec_from_hf_config({**CONFIGS["gpt_oss_120b"], "layer_types": kinds}, "g")
    assert spec.window_attn_skip_freq == (0, *[1] * 35)
    config = {**LLAMA3_70B, "model_type": "qwen2", "use_sliding_window": True}
    upper = {**config, "sliding_window": 4096, "max_window_layers": 70}
    assert spec_from_hf_config(upper, "q").window_attn_skip_freq == (*[0] * 70, *[1] * 10)
    long = {**upper, "sliding_window": 8192}
    assert spec_from_hf_config(long, "q").window_size is None, "as long as the context"
    with pytest.raises(UserInputError, match="layer_types"):
        spec_from_hf_config({**CONFIGS["gpt_oss_120b"], "layer_types": kinds[1:]}, "g")


GEMMA3_4B: dict[str, object] = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 34,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
}


def test_gemma3_without_its_vision_tower_is_the_catalogues() -> None:
    read = read_hf_model(GEMMA3_4B, "gemma3_4b")
    assert read.unread == ()
    written = yaml.safe_load((MODELS / "gemma3_4b.yaml").read_text(encoding="utf-8"))
    catalogued = spec_from_mapping(written)
    assert read.spec.variant == ModelVariant(norm_placement=NormPlacement.SANDWICH)
    assert dataclasses.replace(read.spec, source=catalogued.source) == catalogued


def test_the_text_model_of_a_composed_config_is_read_and_its_encoder_named() -> None:
    text = {key: value for key, value in GEMMA3_4B.items() if key != "num_attention_heads"}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    read = read_hf_model(config, "g")
    assert read.spec == read_hf_model(GEMMA3_4B, "g").spec
    assert read.notes == (
        "g: the text model alone is read; the encoder of model_type gemma3 is not.",
        "g: neither weights nor work depend on these of config.json: query_pre_attn_scalar, "
        "rope_local_base_freq.",
        "g: not in config.json, so transformers' own default: num_attention_heads 8.",
    )


def test_a_flat_file_of_text_and_images_is_read_as_its_text_model() -> None:
    flat = {**LLAMA3_70B, "model_type": "qwen2_5_vl", "vision_config": {}, "image_token_id": 9}
    read = read_hf_model(flat, "q")
    assert read.spec.add_qkv_bias
    assert "encoder of model_type qwen2_5_vl" in read.notes[0]


def test_a_misspelt_field_is_refused_with_the_right_one() -> None:
    config = {key: value for key, value in LLAMA3_70B.items() if key != "num_key_value_heads"}
    with pytest.raises(UserInputError, match=r"no such field\. Write num_key_value_heads"):
        spec_from_hf_config({**config, "num_key_value_head": 8}, "x")


def test_what_is_not_read_is_listed() -> None:
    config = {**LLAMA3_70B, "logit_scale": 0.1, "residual_multiplier": 0.2, "eos_token_id": 2}
    assert read_hf_model(config, "x").unread == ("logit_scale", "residual_multiplier")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_local_experts", 8),
        ("use_linear_attention", True),
        ("ssm_state_size", 128),
        ("mamba_d_conv", 4),
        ("state_size", 16),
        ("num_nextn_predict_layers", 1),
        ("layer_types", ["linear_attention"] * 80),
        ("index_head_dim", 128),
        ("sliding_window", 4096),
        ("rope_percent", 0.5),
        ("kv_lora_rank", 512),
    ],
)
def test_an_architecture_field_that_is_not_read_is_refused(key: str, value: object) -> None:
    with pytest.raises(UnplannableModelError, match=key):
        read_hf_model({**LLAMA3_70B, key: value}, "x")
    assert read_hf_model({**LLAMA3_70B, key: None}, "x").unread == ()


#: What published configurations carry beside the keys that give the shape.
CARRIED: dict[str, dict[str, object]] = {
    "llama3_70b": {
        "is_llama_config": True,
        "rope_interleaved": False,
        "max_sequence_length": 2048,
        "pretraining_tp": 1,
        "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
        "transformers.js_config": {"dtype": "q4"},
        "output_attentions": True,
        "_attn_implementation_autoset": True,
    },
    "qwen3_30b_a3b": {
        "layer_types": ["full_attention"] * 48,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    },
    "deepseek_v3": {
        "ep_size": 1,
        "head_dim": 64,
        "qk_head_dim": 192,
        "quantization_config": {"weight_block_size": [128, 128]},
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    "gpt_oss_120b": {"initial_context_length": 4096, "swiglu_limit": 7.0},
    "bert_large": {
        "attention_probs_dropout_prob": 0.1,
        "directionality": "bidi",
        "pooler_fc_size": 768,
        "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128,
    },
}


@pytest.mark.parametrize("name", CARRIED)
def test_keys_of_published_configurations_are_silent(name: str) -> None:
    assert read_hf_model({**CONFIGS[name], **CARRIED[name]}, name).unread == ()


def test_long_context_qwen2_is_read() -> None:
    windows = {"max_window_layers": 70, "sliding_window": 131072, "use_sliding_window": False}
    long = {"dual_chunk_attention_config": {"chunk_size": 262144}}
    config = {**LLAMA3_70B, "model_type": "qwen2", **windows, **long, "use_mrope": False}
    assert read_hf_model(config, "q").unread == ()


@pytest.mark.parametrize("name", CONFIGS)
def test_real_configurations_are_read_whole(name: str) -> None:
    assert read_hf_model(CONFIGS[name], name).unread == ()
