"""Names and columns of public measurements give the model that was measured, or a reason."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.model.parameters import model_parameters, total_parameters
from nest_megatron.model.spec import ModelFamily
from nest_megatron.validation.job import job_of
from nest_megatron.validation.model_names import candidates, key_of, read_name
from nest_megatron.validation.models import ModelBook, ModelMatch
from nest_megatron.validation.rows import RefusedRowError
from tests import catalogue
from tools.golden import shape_of_test

DATA = Path(__file__).parent / "data"
BOOK = ModelBook.load()
TABLE = (
    "name,layers,hidden,ffn,heads,kv_heads,vocab,seq,experts,topk,moe_ffn,gated_mlp,attention,extra"
)


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def outcome(row: Mapping[str, str]) -> str:
    try:
        return BOOK.spec(row).spec.name
    except RefusedRowError as refused:
        return f"refused: {refused.reason}"


def named(model: str, **columns: str) -> ModelMatch:
    return BOOK.spec({"model": model, "seq": "4096", **columns})


ARCHITECTURES = rows("architectures.csv")
NAMED = rows("named_rows.csv")
TESTS = rows("functional_tests.csv")

REFUSED_ARCHITECTURES = (
    *("Mamba-", "BaseMamba", "Hyena", "Embedding", "Reranker", "Ultra253B", "Super49B", "Llama4-"),
)


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row["name"])
def test_every_public_architecture_is_found_or_refused(row: dict[str, str]) -> None:
    row = {**row, "model": row["name"], "source": "nemo"}
    if any(word in row["name"] for word in REFUSED_ARCHITECTURES) and "Experts" not in row["name"]:
        with pytest.raises(RefusedRowError):
            BOOK.spec(row)
        return
    spec = BOOK.spec(row).spec
    assert spec.name in catalogue.names("model")
    stated = (int(row["layers"]), int(row["hidden"]), int(row["ffn"]), int(row["heads"]))
    found = (spec.num_layers, spec.hidden_size, spec.ffn_hidden_size, spec.num_attention_heads)
    assert found == stated


@pytest.mark.parametrize("row", NAMED, ids=lambda row: f"{row['model']}-{row['hidden']}")
def test_every_measured_model(row: dict[str, str]) -> None:
    assert outcome(row) == row["expected"]


def test_keys_of_the_catalogue_are_distinct_and_stand_for_themselves() -> None:
    keys = [key_of(name) for name in catalogue.names("model")]
    assert len(set(keys)) == len(keys)
    assert {
        name for name in catalogue.names("model") if BOOK.entries[key_of(name)] != name
    } == set()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Llama 3.1 405b 24.09 proxy-21L", "llama3_1_405b"),
        ("meta-llama/Llama-2-13b-hf", "llama2_13b"),
        ("LLAMA3_70B_LoRA", "llama3_70b"),
        ("Qwen3-30B", "qwen3_30b_a3b"),
        ("Qwen2.5-1.5B", "qwen2_5_1p5b"),
        ("Qwen3 0.6B", "qwen3_600m"),
        ("Nemotron-340B", "nemotron4_340b"),
        ("Nemotron V3 Nano 30B", "nemotron3_nano"),
        ("Nemotron-H 56B", "nemotron_h_56b"),
        ("Nemotron-8B", "nemotron3_8b"),
        ("Turing-NLG 530B", "megatron_530b"),
        ("DSV3", "deepseek_v3"),
        ("Kimi-K2 1T", "kimi_k2"),
        ("Grok-1", "grok1_314b"),
        ("LLAMA4-Maverick 400B", "llama4_maverick"),
        ("Qwen3.5-122B", "qwen3_5_122b_a10b"),
        ("qwen3.6-35b-a3b", "qwen3_5_35b_a3b"),
        ("qwen3.8-27b", "qwen3_5_27b"),
        ("Nemotron V3 Ultra 550B", "nemotron3_ultra"),
    ],
)
def test_spellings(text: str, name: str) -> None:
    assert named(text).spec.name == name


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Nemotron-H 30B", "hybrid of Mamba and attention layers"),
        ("Qwen3_VL_235B_A22B", "more than a language model"),
        ("deepseek-v4-pro", "sparse attention"),
        ("GLM-5", "sparse attention"),
        ("gemma-4-26b-a4b-it", "layers of different shapes"),
        ("Kimi K3", "architecture not public here"),
        ("T5-11B", "encoder and decoder"),
        ("flux1", "not a language model"),
        ("DeepSeek-V3 27B", "unknown model"),
        ("GPT-20B", "shape not stated"),
        ("Nobody's 9B", "unknown model"),
        ("", "unknown model"),
    ],
)
def test_refusals_are_counted_by_reason(text: str, reason: str) -> None:
    with pytest.raises(RefusedRowError) as refused:
        named(text)
    assert refused.value.reason == reason


def test_a_truncated_model_keeps_the_layers_and_experts_of_its_name() -> None:
    spec = named("Qwen3.5-35B-A3B 8L 8E (PROXY)").spec
    assert (spec.name, spec.num_layers, spec.num_experts, spec.moe_router_topk) == (
        *("qwen3_5_35b_a3b", 8, 8, 8),
    )
    assert spec.num_mtp_layers == 0


def test_columns_come_before_the_name() -> None:
    spec = named("Llama3-70B", layers="12", vocab="32000", kv_heads="64", seq="16384").spec
    assert (spec.num_layers, spec.vocab_size, spec.query_groups) == (12, 32000, 64)
    assert (spec.seq_length, spec.max_position_embeddings) == (16384, 16384)


def test_another_width_is_another_model() -> None:
    match = named("GPT-20B", layers="8", hidden="14400", heads="32", vocab="250000", params_b="20")
    assert (match.spec.name, match.spec.hidden_size) == ("GPT-20B", 14400)
    assert "the sizes make 23.6 billion parameters, the row says 20" in match.assumptions


@pytest.mark.parametrize(
    ("text", "layers"),
    [("DeepSeekV3", 1), ("DeepSeekV3 (w/o MTP)", None), ("DeepSeek-V3 671B no MTP", None)],
)
def test_multi_token_prediction(text: str, layers: int | None) -> None:
    match = named(text)
    assert match.spec.mtp_num_layers == layers
    assert bool(match.assumptions) == (text == "DeepSeekV3")


def test_a_cut_mixture_keeps_layers_with_experts() -> None:
    match = named("deepseekv3 truncated to 4 layers")
    assert match.spec.moe_layer_pattern == (0, 1, 1, 1)
    assert match.spec.mtp_num_layers is None
    assert len(match.assumptions) == 2
    assert named("deepseekv3 proxy-21L").spec.moe_layer_pattern == (0,) * 3 + (1,) * 18


def test_llm_foundry_counts_the_same_parameters() -> None:
    stated = [row for row in NAMED if row["model"].startswith("MPT-")]
    assert len(stated) > 5
    for row in stated:
        billions = total_parameters(BOOK.spec(row).spec) / 1e9
        assert billions == pytest.approx(float(row["params_b"]), abs=6e-5)


def test_layers_are_derived_only_where_one_number_fits() -> None:
    columns = {"hidden": "14400", "heads": "96", "vocab": "250000"}
    assert named("GPT-205B", params_b="205", pp="9", **columns).spec.num_layers == 81
    for size, stages in (("200", "8"), ("194", "6"), ("205", "8")):
        with pytest.raises(RefusedRowError, match="number of layers not stated"):
            named(f"GPT-{size}B", params_b=size, pp=stages, **columns)


def test_an_embedding_is_untied_where_only_that_makes_the_size() -> None:
    columns = {"layers": "92", "hidden": "10240", "heads": "80", "vocab": "131072"}
    assert named("GPT-119B", params_b="119", **columns).spec.untie_embeddings_and_output_weights
    columns = {"layers": "96", "hidden": "12288", "heads": "96", "vocab": "51200"}
    tied = named("GPT-174.6B", params_b="174.6", **columns)
    assert not tied.spec.untie_embeddings_and_output_weights


def test_a_bert_is_an_encoder() -> None:
    spec = BOOK.spec(
        {"model": "BERT L24 h1024", "layers": "24", "hidden": "1024", "heads": "16"}
    ).spec
    assert (spec.family, spec.vocab_size, spec.seq_length) == (ModelFamily.BERT, 30522, 512)


@pytest.mark.parametrize(
    "columns",
    [
        {"layers": "2", "hidden": "100", "heads": "3"},
        {"layers": "2", "hidden": "64", "heads": "4", "kv_heads": "3"},
        {"layers": "-2", "hidden": "64", "heads": "4"},
    ],
)
def test_impossible_shapes_are_refused(columns: dict[str, str]) -> None:
    with pytest.raises(RefusedRowError):
        named("GPT x", **columns)


def test_a_users_table_comes_first(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(
        f"{TABLE}\nLlama3-70B,10,,,,,,,,,,,,\n"
        'Tiny MoE 1B,4,64,128,4,2,1000,128,8,2,32,True,GQA,"{""tied"": true}"\n',
        encoding="utf-8",
    )
    book = ModelBook.load([table])
    llama = book.spec({"model": "LLAMA3_70B", "seq": "512"}).spec
    assert (llama.num_layers, llama.hidden_size) == (10, 8192)
    tiny = book.spec({"model": "tiny-moe-1b", "seq": "64"}).spec
    assert (tiny.num_experts, tiny.moe_router_topk, tiny.moe_ffn_hidden_size) == (8, 2, 32)
    assert (tiny.query_groups, tiny.untie_embeddings_and_output_weights) == (2, False)
    assert book.spec({"model": "Llama3-8B", "seq": "64"}).spec.num_layers == 32


def test_a_bad_table_names_its_fault(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("name,layers\nx,1\n", encoding="utf-8")
    with pytest.raises(UserInputError, match=r"hidden, heads"):
        ModelBook.load([table])


@pytest.mark.parametrize("row", TESTS, ids=lambda row: row["test_case"])
def test_functional_tests(row: dict[str, str]) -> None:
    if row["family"] in ("t5", "hybrid", "mimo", "multimodal-llava", "nemotron"):
        with pytest.raises(RefusedRowError):
            shape_of_test(row)
        return
    spec = shape_of_test(row).spec
    assert (spec.num_layers, spec.hidden_size) == (int(row["layers"]), int(row["hidden"]))
    assert spec.is_moe == bool(row["experts"])
    assert spec.multi_latent_attention == (row["mla"] == "1")
    assert spec.num_mtp_layers == int(row["mtp_layers"] or 0)
    assert spec.add_bias_linear != ("disable-bias-linear=True" in row["extra_args"])
    assert spec.gated_linear_unit == (row["swiglu"] == "1")


def test_flags_that_were_cut_are_noted() -> None:
    cut = [row for row in TESTS if len(row["extra_args"]) >= 900 and row["mla"] == "1"]
    assert cut
    for row in cut:
        match = shape_of_test(row)
        assert any("beyond 900" in note for note in match.assumptions)
        assert match.spec.q_lora_rank in (256, 1536)


def test_candidates_follow_more_than_one_alias() -> None:
    assert [key for key, _ in candidates(read_name("Qwen2 0.5B"))] == [
        "qwen20p5b",
        "qwen2500m",
        "qwen25500m",
    ]


#: Parameters in billions, and the page that states them.
CARDS = {
    "Nemotron-H 47B": (47, "https://huggingface.co/nvidia/Nemotron-H-47B-Base-8K"),
    "Nemotron-H 56B": (56, "https://huggingface.co/nvidia/Nemotron-H-56B-Base-8K"),
    "Nemotron 3 Nano 30B-A3B": (31.6, "https://www.open-source-ai.tech/models/nemotron-3-nano"),
    "Nemotron 3 Super 120B-A12B": (
        120,
        "https://llmtree.kevinbytes.com/models/model-nemotron3-super",
    ),
    "Qwen3.5-27B": (27, "https://huggingface.co/Qwen/Qwen3.5-27B"),
    "Qwen3.5-35B-A3B": (35, "https://huggingface.co/Qwen/Qwen3.5-35B-A3B"),
    "Qwen3.5-122B-A10B": (122, "https://huggingface.co/Qwen/Qwen3.5-122B-A10B"),
    "Qwen3.5-397B-A17B": (397, "https://huggingface.co/Qwen/Qwen3.5-397B-A17B"),
    "Nemotron 3 Ultra 550B-A55B": (
        550,
        "https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-Base-BF16",
    ),
    "Qwen3-Coder-480B-A35B": (
        480,
        "https://docs.api.nvidia.com/nim/reference/qwen-qwen3-coder-480b-a35b-instruct",
    ),
    "Qwen3-30B-A3B-Instruct-2507": (
        30.5,
        "https://huggingface.co/Qwen/Qwen3-30B-A3B-Instruct-2507",
    ),
    "QwQ-32B LoRA": (32.5, "https://epium.com/news/qwen-qwq-32b-reasoning-model-overview"),
    "Moonlight-16B-A3B": (
        16,
        "https://docs.nvidia.com/nemo/automodel/latest/model-coverage/llm/moonshotai/moonlight.html",
    ),
    # of DeepSeek-V2-Lite, which has its shape
    "DeepSeek-V3 16B": (15.7, "https://huggingface.co/mzwing/DeepSeek-V2-Lite-Chat-GGUF"),
}


@pytest.mark.parametrize(
    ("text", "billions"), [(text, billions) for text, (billions, _) in CARDS.items()]
)
def test_models_known_by_name_have_the_parameters_of_their_cards(
    text: str, billions: float
) -> None:
    assert model_parameters(named(text).spec) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Jamba 1.5 Mini", "hybrid of Mamba and attention layers"),
        ("Zebra-Llama-1B GDN pure", "linear attention"),
        ("Grug MoE 359.6B-A20.9B", "unknown model"),
    ],
)
def test_what_is_not_known_is_refused_for_what_it_is(text: str, reason: str) -> None:
    assert outcome({"model": text, "seq": "4096"}) == f"refused: {reason}"


@pytest.mark.parametrize(
    ("framework", "model", "depths"),
    [
        ("NeMo AutoModel (FSDP2, TE, DeepEP)", "DeepSeekV3", 0),
        ("NeMo AutoModel (FSDP2, TE, DeepEP)", "DeepSeekV3 + MTP", 1),
        ("NeMo AutoModel (FSDP2, TE, DeepEP)", "Nemotron V3 Super 120B", 2),
        ("Megatron-Bridge/MCore 26.08 NeMo Container", "DeepSeekV3", 1),
        ("Megatron-Bridge/MCore 26.08 NeMo Container", "Nemotron V3 Super w/o MTP", 0),
    ],
)
def test_frameworks_on_fsdp2_build_no_multi_token_prediction(
    framework: str, model: str, depths: int
) -> None:
    row = {"model": model, "framework": framework, "gpu": "H100-80GB", "n_gpus": "256"}
    row |= {"seq": "4096", "gbs": "256", "mbs": "1", "tp": "1", "pp": "1", "ep": "64"}
    assert job_of(row, BOOK).spec.num_mtp_layers == depths
