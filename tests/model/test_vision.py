"""Encoders of transformers' in front of a language model: read, sized by settings, priced."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.schema import with_values
from nest_megatron.config.space import buildable_degrees
from nest_megatron.config.train import with_images
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.target_defaults import target_named
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
)
from nest_megatron.model.hugging_face import read_hf_model
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.operators import block_graph
from nest_megatron.model.parameters import model_parameters, unit_parameters
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import Request
from nest_megatron.solver.space import SearchSpace
from tests import catalogue
from tests.cli.runs import run

#: config.json of Qwen/Qwen2.5-VL-7B-Instruct.
QWEN25_VL_7B: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
    "image_token_id": 151655,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}


def qwen(**train: int) -> TransformerSpec:
    spec = read_hf_model(QWEN25_VL_7B, "q").spec
    return with_images(spec, with_values(compose(()).train, **train)) if train else spec


def test_a_published_file_has_the_parameters_of_its_weights() -> None:
    assert model_parameters(qwen()) == 8_292_166_656  # of model.safetensors.index.json
    read = read_hf_model(QWEN25_VL_7B, "q")
    assert read.unread == ()
    assert "alone" not in " ".join(read.notes)


@pytest.mark.parametrize(
    ("deepstack_layers", "name"), [(0, "context"), (3, "context"), (3, "virtual_pipeline_model")]
)
def test_what_megatron_bridge_cannot_divide_is_refused(deepstack_layers: int, name: str) -> None:
    spec, degree = qwen(), f"{name}_parallel_size"
    vision = dataclasses.replace(spec.vision, deepstack_layers=deepstack_layers)
    spec = dataclasses.replace(spec, vision=vision)
    bridge = target_named("megatron_bridge")
    assert buildable_degrees(spec, bridge, {})[degree] == 1
    with pytest.raises(UserInputError, match=rf"parallel\.{degree} = 2: .* needs 1: it"):
        buildable_degrees(spec, bridge, {degree: 2})


def test_a_misspelt_field_of_the_encoder_is_refused() -> None:
    vision = {**QWEN25_VL_7B["vision_config"], "attention_windows": 3}
    with pytest.raises(UserInputError, match=r"vision_config: .*: attention_windows"):
        read_hf_model({**QWEN25_VL_7B, "vision_config": vision}, "q")


def test_tokens_of_images_are_patches_of_the_encoder() -> None:
    vision = qwen(image_tokens=1000, images=3).vision
    assert vision is not None
    assert (vision.num_images, vision.num_projected_tokens, vision.num_patches) == (3, 334, 1336)


@pytest.mark.parametrize(
    ("train", "what"),
    [
        ({"image_tokens": 8193}, "a sequence has 8192 tokens"),
        ({"image_tokens": 0}, "train.image_tokens = 0"),
        ({"image_tokens": 4, "images": 5}, "train.images = 5"),
        ({"images": 5}, "train.image_tokens = None"),
    ],
)
def test_impossible_images_are_refused(train: dict[str, int], what: str) -> None:
    with pytest.raises(UserInputError, match=what):
        qwen(**train)


def test_a_model_that_sees_none_takes_none() -> None:
    with pytest.raises(UserInputError, match="llama3_8b sees no images"):
        with_images(catalogue.model("llama3_8b"), with_values(compose(()).train, image_tokens=5))


def encoder_flops(spec: TransformerSpec) -> tuple[float, float]:
    ops = block_graph(spec, LayerBlock.ENCODER, LayerShard()).operators
    return sum(op.flops for op in ops), sum(op.backward_flops for op in ops)


def test_windows_make_attention_grow_with_the_image_and_not_with_its_square() -> None:
    spec = qwen(image_tokens=4096)
    assert spec.vision is not None
    everywhere = dataclasses.replace(spec.vision, window_patches=None)
    whole = dataclasses.replace(spec, vision=everywhere)
    scores = 4.0 * 1280 * (4 * 4096) ** 2  # of one layer, forward
    saved = encoder_flops(whole)[0] - encoder_flops(spec)[0]
    assert saved == pytest.approx(28 * scores * (1 - 64 / (4 * 4096)), rel=1e-6)


def test_what_is_frozen_has_no_gradients() -> None:
    spec = qwen(image_tokens=1024)
    assert spec.vision is not None
    for frozen, projector_frozen in ((True, False), (False, True), (True, True)):
        vision = dataclasses.replace(spec.vision, frozen=frozen, projector_frozen=projector_frozen)
        found = dataclasses.replace(spec, vision=vision)
        count = unit_parameters(found, 4, 1, 1, single_stage=True)[0]
        assert (count.frozen_dense > 0) is True
        assert (encoder_flops(found)[1] == 0) is frozen
        ops = block_graph(found, LayerBlock.PROJECTOR, LayerShard()).operators
        back = sum(op.backward_flops for op in ops) / sum(op.flops for op in ops)
        assert back == (2 if not projector_frozen else 0 if frozen else 1)
    both = unit_parameters(found, 4, 1, 1, single_stage=True)[0]
    plain = unit_parameters(dataclasses.replace(spec, vision=None), 4, 1, 1, single_stage=True)[0]
    assert both.dense - both.frozen_dense == plain.dense


def test_layers_of_deepstack_lie_on_the_first_stage() -> None:
    spec = qwen(image_tokens=1024)
    assert spec.vision is not None
    deep = dataclasses.replace(spec, vision=dataclasses.replace(spec.vision, deepstack_layers=3))
    cluster = catalogue.cluster("dgx_h100", 16)
    request = Request(spec=deep, cluster=cluster, global_batch_size=64)
    assert request.space.even_stages
    assert request.space.limits["pipeline_model_parallel_size"] == 28 // 3
    with pytest.raises(UserInputError, match="its first stage must hold 3 layers"):
        Request(
            spec=deep,
            cluster=cluster,
            global_batch_size=64,
            space=SearchSpace(fixed={"pipeline_model_parallel_size": 14}),
        )
    assert not Request(spec=spec, cluster=cluster, global_batch_size=64).space.even_stages


def test_the_command_line_asks_for_the_images(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN25_VL_7B))
    words = ("plan", f"model={path}", "cluster=dgx_h100", "cluster.num_gpus=8")
    asked = run(*words)
    assert asked.code == 2
    assert "train.image_tokens=1024" in asked.err
    images = ("train.image_tokens=1024", "search.num_alternatives=0")
    assert "cannot build such a model" in " ".join(run(*words, *images).err.split())
    bridge = (*images, "target=megatron_bridge_0.3", "train.global_batch_size=32")
    found = run(*words, *bridge)
    assert found.code == 0
    said = " ".join(found.out.split())
    assert "Confidence low" in said
    assert "one image has 1,024" in said
    assert "tp_comm_overlap" not in said
    refused = run(*words, *bridge, "train.precision=fp8")
    assert "an encoder of images is priced in 16 bits" in " ".join(refused.err.split())
    refused = run(*words, *bridge, "peft.scheme=lora")
    assert "adapters: adapters beside an encoder of images are not planned" in refused.err
    assert "PeftScheme" not in refused.err


def test_the_encoder_of_transformers_is_not_recomputed() -> None:
    spec = qwen(image_tokens=1024)
    model = CostModel(spec, catalogue.cluster("dgx_h100", 8), CostSettings())
    places = model.places(ParallelDims(data_parallel_size=8))
    full = Recompute(
        granularity=RecomputeGranularity.FULL, method=RecomputeMethod.UNIFORM, num_layers=1
    )
    runs = [
        model.run(LayerKind.EMBEDDING, places, LayerShard(), recompute)
        for recompute in (NO_RECOMPUTE, full)
    ]
    assert runs[0] == runs[1]
