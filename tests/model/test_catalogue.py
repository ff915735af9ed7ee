"""The model catalogue: every file loads, and a wrong description is refused with the fix."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from nest_megatron.catalogue_files import catalogue_names
from nest_megatron.errors import UserInputError
from nest_megatron.model.catalogue import CHOICES, known_keys, spec_from_mapping
from nest_megatron.model.frequency import moe_layer_pattern
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.parameters import total_parameters
from nest_megatron.model.spec import ModelFamily, TransformerSpec

CONFIGS = Path(__file__).parents[2] / "hydra_configs"
NAMES = catalogue_names("model", CONFIGS)

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
        ("layernorm_epsilon", "1e-5"),
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
        catalogue_names("modle", CONFIGS)
