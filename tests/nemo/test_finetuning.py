"""Fine-tuning recipes of NeMo and Megatron-Bridge, built and validated by the frameworks.

A plan keeps what the data and the restored checkpoint need.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest

from nest_megatron.integrations import megatron_bridge, nemo
from nest_megatron.model.parameters import total_parameters
from tests.nemo import substitutes

if not substitutes.bridge_is_here():
    pytest.skip("Megatron-Bridge is not installed (.ci/nemo installs it)", allow_module_level=True)

from tests.nemo import bridge, hugging_face, recipes

pytestmark = pytest.mark.nemo
LONG = 65_536


NEEDS_NEMO = pytest.mark.skipif(
    importlib.util.find_spec("nemo_run") is None, reason="NeMo is not installed (.ci/nemo)"
)


def _packs(cfg: Any) -> Any:
    """How sequences are packed beforehand; 0.6 has another name for it."""
    return getattr(cfg.dataset, _name_of_packs(cfg))


def _name_of_packs(cfg: Any) -> str:
    found = hasattr(cfg.dataset, "offline_packing_specs")
    return "offline_packing_specs" if found else "packed_sequence_specs"


def _plan_bridge(cfg: Any, *overrides: str, free: tuple[str, ...] | None = None) -> Any:
    plan, _ = megatron_bridge.auto_recipe(
        cfg,
        cluster="dgx_h100",
        overrides=["cluster.num_gpus=64", *overrides],
        environment={},
        vocab_size=152_000,
        free=free,
    )
    bridge.validate(cfg, 64)
    return plan


@NEEDS_NEMO
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_8b", "mixtral_8x7b"])
def test_nemo_builds_and_accepts_a_finetuning_job(name: str, packed: bool) -> None:
    source = recipes.finetune(name, packed_sequence=packed)
    plan, _ = nemo.auto_recipe(source, cluster="dgx_h100", vocab_size=152_000, free=["all"])
    recipes.validate(source)
    assert not plan.layout.uses_megatron_fsdp  # it restores torch_dist
    assert not packed or plan.layout.micro_batch_size == 1
    assert nemo.plan_changes(source, plan) == ()


@NEEDS_NEMO
def test_nemo_accepts_long_sequences() -> None:
    source = recipes.finetune("qwen3_8b")
    source.model.config.seq_length = source.data.seq_length = LONG
    plan, _ = nemo.auto_recipe(source, cluster="dgx_h100", vocab_size=152_000)
    assert plan.layout.dims.context_parallel_size > 1
    assert source.model.config.calculate_per_token_loss
    recipes.validate(source)


@pytest.mark.parametrize(
    "name",
    ["llama.llama3:llama3_8b_sft_config", "qwen.qwen2:qwen25_7b_sft_config"],
)
def test_bridge_accepts_packed_sequences(name: str) -> None:
    cfg = bridge.config(name)
    assert _packs(cfg).packed_sequence_size > 0
    plan = _plan_bridge(cfg, free=("all",))
    assert plan.layout.micro_batch_size == 1
    assert not plan.layout.uses_megatron_fsdp  # it restores torch_dist
    cp = plan.layout.dims.context_parallel_size
    assert cp == 1 or _packs(cfg).pad_seq_to_mult % (2 * cp) == 0


@pytest.mark.parametrize("packed", [False, True])
def test_bridge_accepts_long_sequences(packed: bool) -> None:
    cfg = bridge.config("qwen.qwen3:qwen3_8b_sft_config")
    cfg.model.seq_length = cfg.dataset.seq_length = LONG
    if packed:
        _packs(cfg).packed_sequence_size = LONG
    else:
        setattr(cfg.dataset, _name_of_packs(cfg), None)
        cfg.dataset.enable_offline_packing = False
    plan = _plan_bridge(cfg, "parallel.context_parallel_size=2")
    assert cfg.model.calculate_per_token_loss
    assert plan.train.seq_length == LONG


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("gemma.gemma2:gemma2_2b_pretrain_config", "google/gemma-2-2b"),
        ("gemma.gemma3:gemma3_1b_sft_config", "google/gemma-3-1b-pt"),
        pytest.param(
            "qwen.qwen3_next:qwen3_next_80b_a3b_sft_config",
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            marks=pytest.mark.slow,
        ),
        (
            "exaone.h100.exaone4:exaone4_1p2b_pretrain_1gpu_h100_bf16_config",
            "LGAI-EXAONE/EXAONE-4.0-1.2B",
        ),
        (
            "exaone.h100.exaone_moe:exaone_moe_236b_a23b_pretrain_64gpu_h100_bf16_config",
            "LGAI-EXAONE/K-EXAONE-236B-A23B",
        ),
        (
            "nemotronh.gb200.nemotron_3_nano:nemotron_3_nano_pretrain_8gpu_gb200_bf16_config",
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        ),
        (
            "nemotronh.h100.nemotron_3_super:nemotron_3_super_pretrain_16gpu_h100_bf16_config",
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
        ),
        ("glm.h100.glm5:glm52_pretrain_416gpu_h100_bf16_config", "zai-org/GLM-5.2"),
        (
            "qwen.gb200.qwen35:qwen35_text_9b_pretrain_8gpu_gb200_bf16_config",
            "Qwen/Qwen3.5-9B-Base",
        ),
    ],
)
def test_families_of_bridge_have_the_parameters_of_their_checkpoints(
    recipe: str, model: str
) -> None:
    import torch
    import transformers

    try:
        cfg = bridge.config(recipe)
    except ModuleNotFoundError as error:
        pytest.skip(f"this Megatron-Bridge has no such recipe ({error})")
    hub = hugging_face.configuration(model)
    hub = getattr(hub, "text_config", hub)
    spec = megatron_bridge.read_recipe(cfg, environment={}, vocab_size=hub.vocab_size).spec
    spec = dataclasses.replace(  # a checkpoint's class leaves out layers that predict more tokens
        spec,
        mtp_num_layers=None,
        hybrid_layer_pattern=spec.hybrid_layer_pattern.partition("/")[0],
    )
    with torch.device("meta"):
        checkpoint = transformers.AutoModelForCausalLM.from_config(hub)
    assert total_parameters(spec) == sum(p.numel() for p in checkpoint.parameters())
