"""Types of Hugging Face configurations under other names, what is not read of a file, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.model.hugging_face import read_hf_model
from nest_megatron.model.parameters import active_model_parameters, model_parameters
from nest_megatron.model.spec import TransformerSpec

Config = dict[str, Any]

HERE = Path(__file__).parent
JUDGED: dict[str, Config] = {
    model["name"]: model
    for name in ("", "_5", "_own")
    for model in json.loads((HERE / f"hugging_face_judged{name}.json").read_text("utf-8"))["models"]
}
KIMI = JUDGED["Kimi-K2"]["config"]
QWEN35 = JUDGED["Qwen3.5-35B-A3B"]
LLAMA: Config = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
#: The fields of MiniMaxAI/MiniMax-M2.5 that change the shape, of 4 layers.
MINIMAX: Config = {
    "model_type": "minimax_m2",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 200064,
    "max_position_embeddings": 196608,
    "rotary_dim": 64,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "use_mtp": True,
    "num_mtp_modules": 3,
    "mtp_transformer_layers": 1,
    "attn_type_list": [1, 1, 1, 1],
    "tie_word_embeddings": False,
}
#: Of tencent/Hunyuan-A13B-Instruct, of 2 layers.
HUNYUAN: Config = {
    "model_type": "hunyuan_v1_moe",
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 64,
    "moe_topk": 8,
    "vocab_size": 128167,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
#: Of ChatGLM's own code, of 2 layers.
CHATGLM: Config = {
    "model_type": "chatglm",
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_layers": 2,
    "num_attention_heads": 4,
    "padded_vocab_size": 1024,
    "seq_length": 64,
}


def spec_of(config: Config) -> TransformerSpec:
    return read_hf_model(config, "x").spec


@pytest.mark.parametrize("composed", [True, False])
def test_kimi_is_read_as_deepseek_v3(composed: bool) -> None:
    config = {**KIMI, "model_type": "kimi_k2"}
    if composed:
        around = {"model_type": "kimi_k25", "vision_config": {"hidden_size": 1152}}
        config = {**around, "text_config": config, "use_unified_vision_chunk": True}
    read = read_hf_model(config, "x")
    assert read.spec == spec_of(KIMI)
    assert model_parameters(read.spec) == JUDGED["Kimi-K2"]["parameters"] == 1_026_408_209_408
    if composed:
        assert read.unread == ("use_unified_vision_chunk",)
        assert "encoder of model_type kimi_k25 is not" in read.notes[0]


def test_qwen3_5_is_read_with_its_mtp_layer() -> None:
    text = {**QWEN35["config"], "mtp_num_hidden_layers": 1, "attn_output_gate": True}
    vision = {"vision_config": {"depth": 27}, "tie_word_embeddings": False}
    spec = spec_of({"model_type": "qwen3_5_moe", "text_config": text, **vision})
    assert spec.num_mtp_layers == 1
    assert model_parameters(spec) == QWEN35["parameters"]
    assert active_model_parameters(spec) == QWEN35["active_parameters"]
    text = {**JUDGED["qwen3_5_text-100"]["config"]}
    del text["model_type"]
    spec = spec_of({"model_type": "qwen3_5", "text_config": text, **vision})
    assert model_parameters(spec) == JUDGED["qwen3_5_text-100"]["parameters"]


@pytest.mark.parametrize(
    ("sparse", "dense"),
    [("qwen3_next", "qwen3_5_text"), ("qwen3_moe", "qwen3"), ("qwen2_moe", "qwen2")],
)
def test_no_experts_is_a_dense_model(sparse: str, dense: str) -> None:
    config = {
        **JUDGED[f"{dense}-100"]["config"],
        "num_experts": 0,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 77,
        "decoder_sparse_step": 1,
    }
    if sparse != "qwen3_moe":
        config["shared_expert_intermediate_size"] = 77
    if sparse == "qwen3_moe":
        config |= {"layer_types": None, "use_sliding_window": False}
    spec = spec_of({**config, "model_type": sparse})
    assert not spec.is_moe
    assert model_parameters(spec) == JUDGED[f"{dense}-100"]["parameters"]


def test_a_list_of_one_number_for_each_layer_is_that_number() -> None:
    listed = {"moe_topk": [8, 8], "num_experts": [64, 64], "moe_intermediate_size": [3072, 3072]}
    spec = spec_of({**HUNYUAN, **listed, "num_shared_expert": [1, 1], "attention_head_dim": 128})
    assert spec == spec_of(HUNYUAN)
    assert spec.moe_router_topk == 8
    for name, value in {"moe_topk": [8, 4], "hidden_size": [4096, 2048]}.items():
        with pytest.raises(UnplannableModelError, match=f"{name}.*layers that differ in it"):
            spec_of({**HUNYUAN, name: value})
    for value in ([8, 8, 8], [8]):
        with pytest.raises(UserInputError, match="moe_topk"):
            spec_of({**HUNYUAN, "moe_topk": value})
    with pytest.raises(UnplannableModelError, match="use_cla"):
        spec_of({**HUNYUAN, "use_cla": True})


@pytest.mark.parametrize(
    ("name", "key", "value", "other"),
    [
        ("Qwen3-30B-A3B", "use_qk_norm", True, False),
        ("Qwen3-8B", "use_qk_norm", True, False),
        ("hunyuan_v1_dense-100", "use_qk_norm", True, False),
        ("hunyuan_v1_dense-100", "use_rotary_pos_emb", True, False),
        ("hunyuan_v1_moe-100", "use_rotary_pos_emb", True, False),
        ("hunyuan_v1_dense-100", "attention_head_dim", 12, 30),
        ("hunyuan_v1_moe-100", "attention_head_dim", 44, 48),
        ("dots1-100", "moe_layer_freq", 1, 2),
        ("Phi-4", "lm_head_bias", False, True),
        ("qwen3_next-100", "attn_output_gate", True, False),
        ("mamba2-100", "intermediate_size", 320, 160),
        ("Ling-mini-2.0", "rotary_dim", 128, 64),
        ("chatglm", "num_hidden_layers", 2, 3),
        ("ERNIE-4.5-21B-A3B", "num_nextn_predict_layers", 1, None),
        ("starcoder2-100", "attention_softmax_in_fp32", True, None),
        ("starcoder2-100", "scale_attention_softmax_in_fp32", True, None),
        ("hunyuan_v1_dense-100", "org_vocab_size", 128167, None),
    ],
)
def test_a_key_may_repeat_what_is_known(name: str, key: str, value: Any, other: Any) -> None:
    config = CHATGLM if name == "chatglm" else JUDGED[name]["config"]
    spec = spec_of(config)
    read = read_hf_model({**config, key: value}, "x")
    assert (read.spec, read.unread) == (spec, ())
    if other is not None:
        told = f"config.json: {key} = {other}: other keys, or the family, say {value}"
        with pytest.raises(UserInputError, match=told):
            spec_of({**config, key: other})


def test_partly_rotated_channels_may_be_counted() -> None:
    config = {**JUDGED["Ling-mini-2.0"]["config"], "partial_rotary_factor": 0.5}
    assert spec_of({**config, "rotary_dim": 64}) == spec_of(config)


def test_nemotron_s_mtp_layers_are_refused_with_the_way_out() -> None:
    config = {**JUDGED["nemotron_h-100"]["config"], "num_nextn_predict_layers": 1}
    told = "num_nextn_predict_layers = 1.*Write 0 to plan the model without them"
    with pytest.raises(UserInputError, match=told):
        spec_of(config)
    assert spec_of({**config, "num_nextn_predict_layers": 0}).num_mtp_layers == 0


def test_llama4_without_experts_has_no_step_of_them() -> None:
    config = {**JUDGED["Llama-4-Scout"]["config"], "moe_layers": []}
    assert not any(spec_of({**config, "interleave_moe_layer_step": 0}).moe_layer_pattern)
    with pytest.raises(UserInputError, match="interleave_moe_layer_step"):
        spec_of({**config, "moe_layers": None, "interleave_moe_layer_step": 0})


def test_what_minimax_says_is_read() -> None:
    spec = spec_of(MINIMAX)
    assert (spec.num_mtp_layers, spec.rotary_percent) == (3, 0.5)
    assert spec_of({**MINIMAX, "use_mtp": False}).num_mtp_layers == 0
    assert not spec_of({**MINIMAX, "use_routing_bias": False}).moe_router_enable_expert_bias
    for changed in (
        {"attn_type_list": [1, 0, 0, 1]},
        {"qk_norm_type": "per_head"},
        {"mtp_transformer_layers": 2},
        {"shared_intermediate_size": 512},
    ):
        with pytest.raises(UserInputError, match=next(iter(changed))):
            spec_of({**MINIMAX, **changed})


@pytest.mark.parametrize(
    ("changed", "hint"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architectures says LlamaForCausalLM: if that is so, set model_type to llama",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"]},
            "architectures says Qwen3MoeForCausalLM: if that is so, set model_type to qwen3_moe",
        ),
        (
            {"model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"]},
            "if that is so, set model_type to bailing_moe_v2",
        ),
        (
            {"architectures": ["MyCompanyForCausalLM"], "auto_map": {"AutoConfig": "x.Y"}},
            "if its layers are Llama's, as which it has 8,030,261,248 parameters, set model_type "
            "to llama",
        ),
    ],
)
def test_a_renamed_type_is_refused_with_the_way_out(changed: Config, hint: str) -> None:
    with pytest.raises(UnplannableModelError, match=hint):
        spec_of({**LLAMA, "model_type": "mycompany", **changed})


@pytest.mark.parametrize(
    "changed",
    [
        {"n_routed_experts": 8},
        {"clip_qkv": 8.0},
        {"hidden_size": None},
        {"model_type": "gemma4_text"},
    ],
)
def test_other_layers_than_llamas_have_no_such_hint(changed: Config) -> None:
    with pytest.raises(UnplannableModelError) as error:
        spec_of({**LLAMA, "model_type": "mycompany", **changed})
    assert "set model_type" not in str(error.value)


def test_only_sizes_make_a_hint() -> None:
    with pytest.raises(UnplannableModelError) as error:
        spec_of({"model_type": "mycompany"})
    assert "llama:" not in str(error.value)


@pytest.mark.parametrize(
    ("model_type", "lacking"),
    [
        ("gemma4", "global_head_dim"),
        ("longcat_flash", "zero_expert_num"),
        ("step3p5", "attention_other_setting"),
        ("mimo_v2_flash", "swa_num_key_value_heads"),
        ("kimi_linear", "Kimi delta attention"),
        ("bailing_hybrid", "Kimi delta attention"),
        ("minimax", "lightning"),
        ("minimax_m1", "lightning"),
        ("hf_olmo", "d_model.*name ends in -hf"),
        ("glm4v_moe_text", r"nearest name: glm4_moe\)"),
        ("gemma3_txt", r"nearest name: gemma3_text\)"),
        ("minimax_m3_vl_text", "an indexer chooses"),
        ("minimax_m9", "this architecture is not supported"),
        ("falcon_h1", "side by side"),
        ("jamba", "not Mamba-2"),
    ],
)
def test_a_family_that_cannot_be_described_says_what_is_missing(
    model_type: str, lacking: str
) -> None:
    with pytest.raises(UnplannableModelError, match=lacking):
        spec_of({**LLAMA, "model_type": model_type, "text_config": None})


def test_the_first_chatglm_is_refused() -> None:
    config = {"model_type": "chatglm", "hidden_size": 4096, "inner_hidden_size": 16384}
    with pytest.raises(UnplannableModelError, match="first ChatGLM is not supported"):
        spec_of(config)


def test_sparse_attention_is_read_with_its_indexer() -> None:
    spec = spec_of(JUDGED["GLM-5"]["config"])
    assert (spec.experimental_attention_variant, spec.dsa_indexer_topk) == ("dsa", 2048)
    for changed in (
        {"indexer_types": ["full", "shared"] * 39},
        {"index_topk_freq": 4},
        {"index_topk_pattern": "FS" * 39},
    ):
        config = {**JUDGED["GLM-5"]["config"], "indexer_types": None, **changed}
        told = rf"{next(iter(changed))}.*indexer.*nearest model in a file \(docs/adding\.md"
        with pytest.raises(UnplannableModelError, match=told):
            spec_of(config)


@pytest.mark.parametrize("name", [name for name in JUDGED if name.endswith("-100")])
def test_a_word_of_its_own_is_named_in_every_family(name: str) -> None:
    config = {**JUDGED[name]["config"], "own_word": 1, "torch_dtype": "bfloat16"}
    read = read_hf_model(config, "x")
    assert read.unread == ("own_word",)
    assert "torch_dtype" in " ".join(read.notes)
    with pytest.raises(UserInputError, match="own_experts"):
        read_hf_model({**config, "own_experts": 2}, "x")


def test_more_heads_than_channels_are_refused() -> None:
    with pytest.raises(UserInputError, match=r"n_head.*at most n_embd"):
        spec_of({**JUDGED["gptj-100"]["config"], "n_embd": 1})


def test_every_field_that_is_set_and_not_read_is_named() -> None:
    known = {"attention_dropout": 0.1, "rope_scaling": {"factor": 8.0}, "pretraining_tp": 2}
    read = read_hf_model({**LLAMA, **known, "head_scale": 3, "max_length": 0}, "x")
    assert read.unread == ("head_scale",)
    assert read.notes[0] == (
        "x: neither weights nor work depend on these of config.json: attention_dropout, "
        "pretraining_tp, rope_scaling."
    )
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": 14,
        "tokens_per_second": 2,
        "own_word": 1,
    }
    around = {"model_type": "qwen2_5_vl", "vision_config": vision, "own": 1}
    read = read_hf_model({**around, "text_config": {**LLAMA, "model_type": "qwen2"}}, "x")
    assert read.unread == ("own", "vision_config.own_word")
    assert "config.json: vision_config.tokens_per_second." in read.notes[0]
