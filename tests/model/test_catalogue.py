"""The model catalogue: every file loads, and a wrong description is refused with the fix."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import yaml

from nest_megatron.catalogue_files import catalogue_names
from nest_megatron.config.catalogue import with_seq_length
from nest_megatron.errors import UserInputError
from nest_megatron.model.catalogue import CHOICES, known_keys, spec_from_mapping
from nest_megatron.model.hugging_face import read_hf_model
from nest_megatron.model.layer_pattern import LayerKind, moe_layer_pattern
from nest_megatron.model.parameters import total_parameters
from nest_megatron.model.spec import ModelFamily, TransformerSpec

CONFIGS = Path(__file__).parents[2] / "hydra_configs"
NAMES = catalogue_names("model")

TINY: dict[str, object] = {
    "name": "tiny",
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 128,
    "vocab_size": 1000,
}


def load(name: str) -> TransformerSpec:
    """One entry of the catalogue, read with plain YAML as Hydra would hand it over."""
    text = (CONFIGS / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    return spec_from_mapping(yaml.safe_load(text))


def test_the_catalogue_holds_the_promised_models() -> None:
    assert set(NAMES) >= {
        "bert_large",
        "deepseek_v3",
        "gpt3_175b",
        "gpt3_35b",
        "gpt_oss_120b",
        "llama2_7b",
        "llama3_1_405b",
        "llama3_70b",
        "llama3_8b",
        "mixtral_8x22b",
        "mixtral_8x7b",
        "mixtral_scaled",
        "nemotron4_340b",
        "qwen3_235b_a22b",
        "qwen3_30b_a3b",
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_loads_under_its_own_name_with_a_source(name: str) -> None:
    spec = load(name)
    assert spec.name == name
    assert len(spec.source) > 20
    assert len(spec.layer_kinds()) == spec.num_stacked_layers + 2 + bool(spec.num_mtp_layers)


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_fits_its_context(name: str) -> None:
    spec = load(name)
    assert spec.max_position_embeddings is not None
    assert spec.seq_length <= spec.max_position_embeddings


@pytest.mark.parametrize(
    ("name", "longest"), [("llama3_8b", 16384), ("nemotron_h_8b", 16384), ("gpt3_5b", 2048)]
)
def test_only_learned_positions_end_before_a_longer_sequence(name: str, longest: int) -> None:
    assert with_seq_length(load(name), 16384).max_position_embeddings == longest


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "groups", "head_dim", "ffn"),
    [
        ("bert_large", 24, 1024, 16, 16, 64, 4096),
        ("gpt3_175b", 96, 12288, 96, 96, 128, 49152),
        ("llama2_7b", 32, 4096, 32, 32, 128, 11008),
        ("llama3_8b", 32, 4096, 32, 8, 128, 14336),
        ("llama3_70b", 80, 8192, 64, 8, 128, 28672),
        ("llama3_1_405b", 126, 16384, 128, 8, 128, 53248),
        ("mixtral_8x7b", 32, 4096, 32, 8, 128, 14336),
        ("mixtral_8x22b", 56, 6144, 48, 8, 128, 16384),
        ("mixtral_scaled", 8, 1024, 16, 2, 64, 3584),
        ("qwen3_30b_a3b", 48, 2048, 32, 4, 128, 6144),
        ("qwen3_235b_a22b", 94, 4096, 64, 4, 128, 12288),
        ("gpt_oss_120b", 36, 2880, 64, 8, 64, 2880),
        ("nemotron4_340b", 96, 18432, 96, 8, 192, 73728),
        ("deepseek_v3", 61, 7168, 128, 128, 128, 18432),
    ],
)
def test_shapes(
    name: str, layers: int, hidden: int, heads: int, groups: int, head_dim: int, ffn: int
) -> None:
    spec = load(name)
    assert (spec.num_layers, spec.hidden_size, spec.ffn_hidden_size) == (layers, hidden, ffn)
    assert (spec.num_attention_heads, spec.query_groups, spec.head_dim) == (heads, groups, head_dim)


def test_bert_is_an_encoder_of_the_old_kind() -> None:
    spec = load("bert_large")
    assert spec.family is ModelFamily.BERT
    assert (spec.position_embedding_type, spec.normalization) == ("learned_absolute", "LayerNorm")
    assert spec.add_bias_linear
    assert not spec.untie_embeddings_and_output_weights


def test_deepseek_v3_routes_after_three_dense_layers() -> None:
    spec = load("deepseek_v3")
    kinds = spec.layer_kinds()
    assert kinds[1:4] == (LayerKind.DENSE,) * 3
    assert kinds[4:62] == (LayerKind.MOE,) * 58
    assert kinds[62:] == (LayerKind.MTP, LayerKind.HEAD)
    assert (spec.q_lora_rank, spec.kv_lora_rank, spec.moe_router_topk) == (1536, 512, 8)


def test_gpt_oss_slides_on_every_other_layer() -> None:
    spec = load("gpt_oss_120b")
    assert (spec.window_size, spec.window_attn_skip_freq) == (128, 2)
    assert (spec.softmax_type, spec.activation) == ("learnable", "quick_gelu")


@pytest.mark.parametrize(
    ("name", "published"),
    [("gemma2_2b", 2_614_341_888), ("gemma2_9b", 9_241_705_984), ("gemma2_27b", 27_227_128_320)],
)
def test_gemma_has_norms_behind_its_blocks(name: str, published: int) -> None:
    """Parameters as of the published weights."""
    assert total_parameters(load(name)) == published


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(UserInputError, match=r"hiden_size = 64.*Did you mean hidden_size"):
        spec_from_mapping({**TINY, "hiden_size": 64})


@pytest.mark.parametrize(
    ("fields", "lacking"),
    [
        ({"moe_router_topk": 4}, "num_experts"),
        ({"moe_ffn_hidden_size": 99}, "num_experts"),
        ({"q_lora_rank": 100}, "multi_latent_attention"),
        ({"window_attn_skip_freq": 4}, "window_size"),
    ],
)
def test_a_field_that_says_nothing_without_another_is_refused(
    fields: dict[str, object], lacking: str
) -> None:
    with pytest.raises(UserInputError, match=f"it says nothing without {lacking}"):
        spec_from_mapping({**TINY, **fields})


def test_the_expanded_pattern_is_not_a_key() -> None:
    assert "moe_layer_freq" in known_keys()
    with pytest.raises(UserInputError, match="moe_layer_freq"):
        spec_from_mapping({**TINY, "moe_layer_pattern": [0, 1, 0, 1]})


def test_missing_key_is_named() -> None:
    with pytest.raises(UserInputError, match=r"num_layers.*no default.*Add num_layers"):
        spec_from_mapping({key: value for key, value in TINY.items() if key != "num_layers"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", "4"),
        ("num_layers", 4.0),
        ("num_layers", True),
        ("num_layers", 0),
        ("hidden_size", -64),
        ("hidden_size", math.nan),
        ("num_query_groups", 0),
        ("window_size", -1),
        ("layernorm_epsilon", math.nan),
        ("layernorm_epsilon", math.inf),
        ("layernorm_epsilon", "1e-5 "),
        ("rotary_percent", 1.5),
        ("rotary_percent", 0),
        ("qk_layernorm", 1),
        ("qk_layernorm", "yes"),
        ("name", 7),
        ("vocab_size", None),
    ],
)
def test_wrong_value_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UserInputError, match=key):
        spec_from_mapping({**TINY, key: value})


@pytest.mark.parametrize("key", sorted(CHOICES))
def test_unknown_choice_lists_the_known_ones(key: str) -> None:
    with pytest.raises(UserInputError, match=f"{key}.*must be one of.*{CHOICES[key][0]}"):
        spec_from_mapping({**TINY, key: "nonsense"})


def test_null_means_the_default_rule_where_one_exists() -> None:
    spec = spec_from_mapping({**TINY, "num_query_groups": None, "mtp_num_layers": 0})
    assert (spec.query_groups, spec.num_mtp_layers) == (4, 0)


def test_experts_without_a_pattern_stand_on_every_layer() -> None:
    assert spec_from_mapping({**TINY, "num_experts": 4}).moe_layer_pattern == (1, 1, 1, 1)


def test_a_pattern_without_experts_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"moe_layer_freq.*Set num_experts"):
        spec_from_mapping({**TINY, "moe_layer_freq": 2})
    assert spec_from_mapping({**TINY, "moe_layer_freq": 1}).moe_layer_pattern == ()


@pytest.mark.parametrize(
    ("freq", "expected"),
    [
        (1, (1, 1, 1, 1)),
        (2, (1, 0, 1, 0)),
        (3, (1, 0, 0, 1)),
        ([0, 1, 1, 1], (0, 1, 1, 1)),
        ((0, 1, 1, 1), (0, 1, 1, 1)),
        ("([0]*1+[1]*3)", (0, 1, 1, 1)),
        ("[0,1]*2", (0, 1, 0, 1)),
        (" 2*[0, 1] ", (0, 1, 0, 1)),
        ("[0]+[1]+[0]*2", (0, 1, 0, 0)),
        ("2", (1, 0, 1, 0)),
    ],
)
def test_layer_pattern(freq: object, expected: tuple[int, ...]) -> None:
    assert moe_layer_pattern(freq, 4) == expected


@pytest.mark.parametrize(
    "freq",
    [
        0,
        -1,
        True,
        1.0,
        math.nan,
        None,
        "",
        "abc",
        "[0]*3",
        "[2]*4",
        "[[0, 1]]*2",
        "[0]*[1]",
        "2*3",
        "1+[0]*3",
        "[0]**4",
        "[0]*-4",
        "[0]*10**9",
        "[0]*99999999999",
        "__import__('os').getcwd()",
        "(" * 9000,
        "[0]" * 9000,
        [0, 1],
        [0, 1, "1", 1],
        [0, 1, 2, 1],
        [0, 1, True, 1],
    ],
)
def test_bad_layer_pattern_is_refused(freq: object) -> None:
    with pytest.raises(UserInputError, match="moe_layer_freq"):
        moe_layer_pattern(freq, 4)


def test_catalogue_names_are_sorted_and_unknown_groups_refused() -> None:
    assert list(NAMES) == sorted(NAMES)
    with pytest.raises(UserInputError, match="Did you mean model"):
        catalogue_names("modle")


#: Entries, and the models of ``hugging_face_published.yaml`` that they are.
PUBLISHED_AS = {
    "bloom_176b": "bloom-176b",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v2_lite": "DeepSeek-V2-Lite",
    "deepseek_v3": "DeepSeek-V3",
    "gemma2_27b": "gemma-2-27b",
    "gemma2_9b": "gemma-2-9b",
    "gemma3_1b": "gemma-3-1b",
    "gemma_2b": "gemma-2b",
    "gemma_7b": "gemma-7b",
    "glm4_5": "GLM-4.5",
    "glm4_5_air": "GLM-4.5-Air",
    "gpt_oss_120b": "gpt-oss-120b",
    "gpt_oss_20b": "gpt-oss-20b",
    "kimi_k2": "Kimi-K2",
    "llama2_7b": "Llama-2-7B",
    "llama3_1_405b": "Llama-3.1-405B",
    "llama3_2_1b": "Llama-3.2-1B",
    "llama4_maverick": "Llama-4-Maverick",
    "llama4_scout": "Llama-4-Scout",
    "mistral_7b": "Mistral-7B-v0.1",
    "mistral_nemo_12b": "Mistral-Nemo-12B",
    "mixtral_8x22b": "Mixtral-8x22B",
    "mixtral_8x7b": "Mixtral-8x7B",
    "moonlight_16b_a3b": "Moonlight-16B-A3B",
    "nemotron3_nano": "Nemotron-3-Nano-30B-A3B",
    "nemotron4_340b": "Nemotron-4-340B",
    "nemotron_h_8b": "Nemotron-H-8B",
    "olmo2_32b": "OLMo-2-32B",
    "olmo2_7b": "OLMo-2-7B",
    "olmoe_7b_a1b": "OLMoE-1B-7B",
    "phi3_mini": "Phi-3-mini",
    "phi4_14b": "Phi-4",
    "qwen1_5_moe_a2p7b": "Qwen1.5-MoE-A2.7B",
    "qwen2_57b_a14b": "Qwen2-57B-A14B",
    "qwen2_5_500m": "Qwen2.5-0.5B",
    "qwen2_5_72b": "Qwen2.5-72B",
    "qwen2_5_7b": "Qwen2.5-7B",
    "qwen3_235b_a22b": "Qwen3-235B-A22B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "qwen3_600m": "Qwen3-0.6B",
    "qwen3_8b": "Qwen3-8B",
    "qwen3_next_80b_a3b": "Qwen3-Next-80B-A3B",
    "starcoder2_7b": "starcoder2-7b",
    "starcoder_15b": "starcoder-15b",
}
#: Where an entry is not as its model was published: it is as NeMo trains it.
OTHERWISE = {
    "llama4_maverick": {"attention_chunk_size", "no_rope_freq"},
    "llama4_scout": {"attention_chunk_size", "no_rope_freq"},
    "phi3_mini": {"window_size"},
    "qwen2_5_500m": {"untie_embeddings_and_output_weights"},
    "starcoder2_7b": {"untie_embeddings_and_output_weights"},
    "starcoder_15b": {"untie_embeddings_and_output_weights"},
}
#: Of no shape, of our own choice, or not stated in the published file's extract.
_FREE = {"name", "source", "seq_length", "max_position_embeddings", "layernorm_epsilon"}
_FREE |= {"rotary_base", "make_vocab_size_divisible_by", "hidden_dropout", "attention_dropout"}


def _stated(spec: TransformerSpec) -> dict[str, object]:
    """Fields of a model, with Megatron's defaults in the place of ``None``."""
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    values |= {"num_query_groups": spec.query_groups, "kv_channels": spec.head_dim}
    values |= {"moe_ffn_hidden_size": spec.is_moe and spec.expert_ffn_hidden_size}
    return {name: value for name, value in values.items() if name not in _FREE}


@pytest.mark.parametrize("name", PUBLISHED_AS)
def test_an_entry_is_the_published_model(name: str) -> None:
    text = Path(__file__).with_name("hugging_face_published.yaml").read_text(encoding="utf-8")
    config, own = yaml.safe_load(text)[PUBLISHED_AS[name]], load(name)
    published = read_hf_model(config, name).spec
    found, wanted = _stated(own), _stated(published)
    if base := config.get("rope_theta"):
        assert own.rotary_base == base
    assert {key for key in wanted if found[key] != wanted[key]} == OTHERWISE.get(name, set())
