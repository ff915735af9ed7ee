"""Rows of a recipe's vocabulary: by its tokenizer if that is here, else by the model it names."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.integrations import nemo
from nest_megatron.integrations.megatron_lm.rendezvous import within
from nest_megatron.integrations.nemo import read_recipe
from nest_megatron.integrations.vocabulary import hub_name, rows_of_model, without_hub
from tests import catalogue
from tests.integrations.frameworks import nemo_recipe

#: Where fine-tuning recipes of NeMo 2.7.3 start, and the rows of the model's ``config.json``.
BASES = {
    "baichuan-inc/Baichuan2-7B-Base": 125_696,
    "bigcode/starcoder2-15b": 49_152,
    "deepseek-ai/DeepSeek-V2": 102_400,
    "deepseek-ai/DeepSeek-V2-Lite": 102_400,
    "deepseek-ai/DeepSeek-V3-Base": 129_280,
    "google/gemma-7b": 256_000,
    "meta-llama/Llama-2-7b-hf": 32_000,
    "meta-llama/Llama-3.1-405B": 128_256,
    "meta-llama/Meta-Llama-3-8B": 128_256,
    "mistralai/Mistral-7B-v0.3": 32_768,
    "mistralai/Mixtral-8x7B-v0.1": 32_000,
    "nvidia/Minitron-4B-Base": 256_000,
}


def finetuning(base: str) -> Any:
    """A recipe without a tokenizer that starts from a model of the hub."""
    recipe = nemo_recipe(catalogue.model("llama3_8b"))
    recipe.model.config.vocab_size = None
    recipe.resume = SimpleNamespace(restore_config=SimpleNamespace(path=base))
    return recipe


@pytest.mark.parametrize("base", BASES)
def test_a_recipe_has_the_vocabulary_of_the_model_that_it_starts_from(base: str) -> None:
    found = read_recipe(finetuning(f"nemo://{base}"))
    assert found.spec.vocab_size == BASES[base]
    assert any(base in note and "vocab_size=" in note for note in found.notes)
    assert read_recipe(finetuning(f"nemo://{base}"), vocab_size=1000).spec.vocab_size == 1000


def test_names_that_are_none_or_like_others() -> None:
    assert rows_of_model("meta-llama/Meta-Llama-3") is None
    assert rows_of_model("bigcode/starcoder") == 49_152
    for path in ("nemo://", "/checkpoints/llama", None, 3):
        assert hub_name(path) is None


class Unbuilt:
    """A tokenizer of a recipe, as Fiddle has it before it is built."""

    __fn_or_cls__ = object

    def __init__(self, name: str) -> None:
        self.pretrained_model_name = name


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was built; one takes for ever, as without a network."""
    names: list[str] = []

    def build(tokenizer: Unbuilt) -> SimpleNamespace:
        names.append(tokenizer.pretrained_model_name)
        if tokenizer.pretrained_model_name == "mine/slow":
            time.sleep(600)
        return SimpleNamespace(vocab_size=77)

    monkeypatch.setitem(sys.modules, "fiddle", SimpleNamespace(build=build))
    monkeypatch.setattr(nemo, "FETCH_S", 0.2)
    return names


def with_tokenizer(name: str) -> Any:
    recipe = finetuning("nemo://")
    recipe.data.tokenizer = Unbuilt(name)
    return recipe


def test_a_tokenizer_is_not_fetched_for_what_is_known(built: list[str]) -> None:
    assert read_recipe(with_tokenizer("meta-llama/Llama-3.1-8B")).spec.vocab_size == 128_256
    assert built == []


def test_a_tokenizer_that_is_here_says_it(
    built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta-llama" / "Llama-3.1-8B").mkdir(parents=True)
    assert read_recipe(with_tokenizer("meta-llama/Llama-3.1-8B")).spec.vocab_size == 77
    assert built == ["meta-llama/Llama-3.1-8B"]


@pytest.mark.usefixtures("built")
def test_a_tokenizer_that_does_not_come_is_not_waited_for() -> None:
    with pytest.raises(UserInputError, match=r"mine/slow.*not within 0.2 s.*vocab_size="):
        read_recipe(with_tokenizer("mine/slow"))


def test_what_fails_in_time_fails_as_it_does() -> None:
    with pytest.raises(ZeroDivisionError):
        within(20.0, lambda: 1 // 0)


def test_libraries_are_online_again_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(HF_HUB_OFFLINE=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(constants=module))
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", module)
    with without_hub():
        assert module.HF_HUB_OFFLINE
    assert not module.HF_HUB_OFFLINE
