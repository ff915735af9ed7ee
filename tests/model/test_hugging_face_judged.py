"""Every Hugging Face type has the parameters that transformers builds, to the last one."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.model.hugging_face import FAMILIES, read_hf_model
from nest_megatron.model.parameters import (
    active_model_parameters,
    model_parameters,
    total_parameters,
)
from tests.model.hugging_face_configs import NEWER, OWN_CODE, SPACES, generated

HERE = Path(__file__).parent
MODELS: list[dict[str, Any]] = [
    model
    for name in (
        *("hugging_face_judged.json", "hugging_face_judged_5.json"),
        "hugging_face_judged_own.json",
    )
    for model in json.loads((HERE / name).read_text("utf-8"))["models"]
]
#: Judged otherwise: BERT's heads are Megatron's own, ChatGLM's code is not in transformers.
_OWN = {"bert", "chatglm"}
#: Layers of Megatron's pattern that a layer of a hybrid family becomes.
_LAYERS_OF_ONE = {"bamba": 2, "granitemoehybrid": 2}
_SEEDS = range(40)


def counts(config: dict[str, Any]) -> dict[str, int]:
    """What the reader makes of a configuration."""
    read = read_hf_model(config, "x")
    assert read.unread == ()
    spec = read.spec
    return {
        "parameters": model_parameters(spec),
        "active_parameters": active_model_parameters(spec),
        "num_layers": spec.num_layers // _LAYERS_OF_ONE.get(config["model_type"], 1),
    }


@pytest.mark.parametrize("model", MODELS, ids=[model["name"] for model in MODELS])
def test_parameters_are_those_of_transformers(model: dict[str, Any]) -> None:
    want = {key: model[key] for key in ("parameters", "active_parameters", "num_layers")}
    assert counts(model["config"]) == want


def test_every_type_is_judged() -> None:
    judged = {model["config"]["model_type"] for model in MODELS}
    assert judged == set(FAMILIES) - _OWN == {*SPACES, *NEWER, *OWN_CODE}
    assert len(judged) >= 50


def test_chatglm3_has_the_parameters_of_its_checkpoint() -> None:
    config = {
        "model_type": "chatglm",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "ffn_hidden_size": 13696,
        "hidden_size": 4096,
        "kv_channels": 128,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "num_attention_heads": 32,
        "num_layers": 28,
        "padded_vocab_size": 65024,
        "post_layer_norm": True,
        "rmsnorm": True,
        "seq_length": 8192,
        "tie_word_embeddings": False,
    }
    # the sum over the files of THUDM/chatglm3-6b: pytorch_model.bin.index.json has 12,487,168,064
    # bytes in 16 bits, the rotary frequencies (32 numbers) among them
    assert counts(config)["parameters"] == 6_243_584_000


def test_the_page_is_written_from_the_readers() -> None:
    docs = HERE.parents[1] / "docs"
    written = runpy.run_path(str(docs / "make_hugging_face.py"))["page"]()
    page = (docs / "hugging_face.md").read_text("utf-8")
    assert page == written, "run python docs/make_hugging_face.py"


def test_a_published_count_leaves_out_padding_and_predicted_tokens() -> None:
    named = {model["name"]: model for model in MODELS}
    spec = read_hf_model(named["DeepSeek-V3"]["config"], "x").spec
    assert spec.num_mtp_layers == 1
    assert total_parameters(spec) > model_parameters(spec) == 671_026_404_352
    spec = read_hf_model(named["gpt2-xl"]["config"], "x").spec
    padding = (spec.padded_vocab_size(1) - spec.vocab_size) * spec.hidden_size
    assert total_parameters(spec) - padding == model_parameters(spec)
    assert dataclasses.replace(spec, vocab_is_padded=True).padded_vocab_size(8) == 50257


def require_release(model_type: str) -> None:
    """Skip where the installed transformers is not of the release that judges a type."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    release = 5 if model_type in NEWER else 4
    if int(transformers.__version__.split(".")[0]) != release:
        pytest.skip(f"transformers {release} is not installed")


@pytest.mark.nemo
@pytest.mark.parametrize("model_type", sorted({*SPACES, *NEWER}))
def test_transformers_builds_the_same_at_sizes_that_nobody_published(model_type: str) -> None:
    require_release(model_type)
    from tests.model.judge_hugging_face import counted

    for seed in _SEEDS:
        judged = counted(generated(model_type, 1_000 + seed))
        config = judged.pop("config")
        assert counts(config) == judged, config


@pytest.mark.nemo
@pytest.mark.parametrize("model_type", sorted({*SPACES, *NEWER, "bert"}))
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    require_release(model_type)
    from tests.model.make_hugging_face_defaults import WRITTEN, WRITTEN_5, defaults

    written = WRITTEN_5 if model_type in NEWER else WRITTEN
    assert json.loads(written.read_text("utf-8"))["types"][model_type] == defaults(model_type)
