"""Megatron-Bridge's recipes of Qwen-VL: parameters are transformers' own, plans are accepted."""

from __future__ import annotations

import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations import megatron_bridge
from nest_megatron.model.encoder import EncoderSpec
from nest_megatron.model.hugging_face import read_vision_config
from nest_megatron.model.parameters import unit_parameters
from tests import catalogue
from tests.nemo import substitutes

if not substitutes.bridge_is_here():
    pytest.skip("Megatron-Bridge is not installed (.ci/nemo installs it)", allow_module_level=True)

from tests.nemo import bridge

pytestmark = pytest.mark.nemo
RECIPES = {
    "qwen25_vl:qwen25_vl_7b_finetune_config": "Qwen2_5_VL",
    "qwen3_vl:qwen3_vl_8b_finetune_config": "Qwen3VL",
    "qwen3_vl:qwen3_vl_30b_a3b_pretrain_config": "Qwen3VLMoe",
}
IMAGES = "train.image_tokens=1024"


def _hub(kind: str) -> Any:
    """A model's configuration with transformers' own sizes of the encoder."""
    import transformers

    hub = getattr(transformers, f"{kind}Config")(
        architectures=[f"{kind}ForConditionalGeneration"], torch_dtype="bfloat16"
    )
    text = hub.get_text_config()
    text.num_hidden_layers, text.rope_scaling = 12, {"mrope_section": [24, 20, 20]}
    return hub


def _recipe(name: str, **options: Any) -> Any:
    where, _, function = name.partition(":")
    module = importlib.import_module(f"megatron.bridge.recipes.qwen_vl.{where}")
    from megatron.bridge import AutoBridge

    hub = _hub(RECIPES[name])
    offline = SimpleNamespace(from_hf_pretrained=lambda *_, **__: AutoBridge.from_hf_config(hub))
    with bridge.on_hopper() as patch:
        patch.setattr(module, "AutoBridge", offline)
        cfg = getattr(module, function)(**options)
    cfg.model.freeze_language_model = options.get("freeze_language_model", False)
    return cfg


@pytest.mark.parametrize("sizes", [{}, {"depth": 5, "hidden_size": 96, "num_heads": 4}])
@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe"])
def test_an_encoder_has_the_parameters_that_transformers_builds(
    kind: str, sizes: dict[str, int]
) -> None:
    import torch

    hub = _hub(kind).vision_config
    hub = type(hub)(**{**sizes, "out_hidden_size": 4096})
    part = {"Qwen2_5_VL": "Qwen2_5_VisionTransformerPretrainedModel"}.get(
        kind, f"{kind}VisionModel"
    )
    modules = importlib.import_module(
        f"transformers.models.{hub.model_type}.modeling_{hub.model_type}"
    )
    with torch.device("meta"):
        built = getattr(modules, part)._from_config(hub)
    read = read_vision_config(hub.to_dict(), "m", hub.model_type)
    assert read is not None
    plain = catalogue.model("llama3_8b")
    seeing = dataclasses.replace(plain, vision=EncoderSpec(**read.shape))
    ours = [unit_parameters(spec, 2, 1, 1, single_stage=True)[0].dense for spec in (seeing, plain)]
    assert ours[0] - ours[1] == sum(each.numel() for each in built.parameters())


@pytest.mark.parametrize("name", RECIPES)
def test_bridge_accepts_the_plan(name: str) -> None:
    cfg = _recipe(name)
    size = "cluster.num_gpus=64"
    with pytest.raises(UserInputError, match=r"train\.image_tokens"):
        _plan(cfg, size)
    plan = _plan(cfg, size, IMAGES)
    assert plan.model.vision is not None
    assert plan.model.vision.num_projected_tokens == 1024
    assert plan.layout.dims.context_parallel_size == 1
    assert not plan.layout.execution.tp_comm_overlap
    bridge.validate(cfg, 64)
    assert megatron_bridge.plan_changes(cfg, plan, environment={}) == ()


def _plan(cfg: Any, *overrides: str) -> Any:
    return megatron_bridge.auto_recipe(
        cfg,
        cluster="dgx_h100",
        overrides=overrides,
        environment={},
        vocab_size=152_064,
        free=["all"],
    )[0]


def test_what_is_frozen_is_read() -> None:
    name = next(iter(RECIPES))
    cfg = _recipe(name, freeze_vision_model=True, freeze_vision_projection=True)
    vision = megatron_bridge.read_recipe(cfg, vocab_size=152_064, environment={}).spec.vision
    assert vision is not None
    assert (vision.frozen, vision.projector_frozen) == (True, True)
    cfg.model.freeze_language_model = True
    with pytest.raises(UnplannableModelError, match="freeze_language_model"):
        megatron_bridge.read_recipe(cfg, vocab_size=152_064, environment={})
