"""Every field and every class of NeMo and Megatron-Bridge is known, or refused by its name."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

from nest_megatron.errors import UnplannableModelError
from nest_megatron.integrations.architecture import CLASSIFIED, refuse_unplannable

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
for name in ("nemo.collections", "megatron.bridge"):
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"{name} is not installed (.ci/nemo installs it)", allow_module_level=True)

from tests.nemo import substitutes  # noqa: E402 - after the skips

pytestmark = pytest.mark.nemo
#: Configurations that a plan is made for; every other class is refused.
PLANNED = {
    "nemo.collections.llm.gpt.model": """BaseMamba NVIDIAMamba SSM
        Baichuan2 ChatGLM CodeGemma CodeLlama DeepSeek GPT GPTOSS
        Gemma Llama Mistral MistralNeMo MistralSmall3 Mixtral Nemotron Phi3 Qwen2 Qwen25 Qwen3
        Starcoder Starcoder2""",
    "nemo.collections.llm.bert.model": "MegatronBert Bert",
    "megatron.bridge.models": """CodeGemma CodeLlama DeepSeek GLM GPT GPTOSS Gemma KimiK2 Llama
        MLA Mamba OlMoE Mistral MistralSmall3 Moonlight Nemotron Qwen2 Qwen25 Qwen3""",
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import utils
    from packaging.version import Version

    monkeypatch.setattr(utils, "_te_version", Version("2.9.0"))  # some families ask for it
    substitutes.install()


def _configurations(package: str) -> Iterator[type]:
    """Every configuration of a model that a package defines."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    top = importlib.import_module(package)
    for module in pkgutil.walk_packages(top.__path__, f"{package}.", lambda _: None):
        if "hf_" in module.name.rpartition(".")[2]:
            continue
        try:
            loaded = importlib.import_module(module.name)
        except (ImportError, TypeError):  # without the packages of CUDA
            continue
        for each in vars(loaded).values():
            own = issubclass(type(each), type) and each.__module__ == module.name
            if own and issubclass(each, TransformerConfig):
                yield each


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("nemo.collections.llm.gpt.model.base", "GPTConfig"),
        ("nemo.collections.llm.bert.model.base", "BertConfig"),
        ("megatron.bridge.models.gpt_provider", "GPTModelProvider"),
        ("megatron.bridge.models.mla_provider", "MLAModelProvider"),
    ],
)
def test_every_field_is_classified(module: str, kind: str) -> None:
    config: Any = getattr(importlib.import_module(module), kind)
    assert {field.name for field in dataclasses.fields(config)} <= CLASSIFIED


@pytest.mark.parametrize("package", PLANNED)
def test_only_known_families_are_planned(package: str) -> None:
    planned = set()
    for kind in _configurations(package):
        config = kind.__new__(kind)
        for field in dataclasses.fields(kind):  # without the framework's own checks
            if field.default_factory is not dataclasses.MISSING:
                with contextlib.suppress(ImportError, NameError):  # without CUDA's packages
                    setattr(config, field.name, field.default_factory())
            elif field.default is not dataclasses.MISSING:
                setattr(config, field.name, field.default)
        for size in ("num_layers", "hidden_size", "num_attention_heads"):
            setattr(config, size, getattr(config, size, 0) or 8)
        try:
            refuse_unplannable(config)
        except UnplannableModelError:
            continue
        planned.add(kind.__name__)
    families = tuple(PLANNED[package].split())
    strangers = {name for name in planned if not name.startswith(families)}
    bases = {"TransformerConfig", "MLATransformerConfig", "HeterogeneousTransformerConfig"}
    assert strangers <= bases
    for family in families:
        assert any(name.startswith(family) for name in planned), family
