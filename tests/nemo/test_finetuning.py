"""Fine-tuning recipes of NeMo and Megatron-Bridge, built and validated by the frameworks.

A plan keeps what the data and the restored checkpoint need.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

from nest_megatron.integrations import megatron_bridge, nemo
from nest_megatron.model.parameters import total_parameters

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("nemo_run", reason="nemo-run is not installed (.ci/nemo installs it)")
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed (.ci/nemo installs it)", allow_module_level=True)

from tests.nemo import bridge, hugging_face, recipes, substitutes

pytestmark = pytest.mark.nemo
LONG = 65_536


@pytest.fixture(scope="module", autouse=True)
def importable() -> None:
    substitutes.install()


def _sft(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron-Bridge's recipe of a model, without a network."""
    where, _, function = name.partition(":")
    module = importlib.import_module(f"megatron.bridge.recipes.{where}")
    hugging_face.go_offline(monkeypatch, module)
    with bridge.on_hopper():
        return getattr(module, function)()


def _plan_bridge(cfg: Any, *, free: tuple[str, ...] | None = None) -> Any:
    plan, _ = megatron_bridge.auto_recipe(
        cfg,
        cluster="dgx_h100",
        overrides=["cluster.num_gpus=64"],
        environment={},
        vocab_size=152_000,
        free=free,
    )
    bridge.validate(cfg, 64)
    return plan


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_8b", "mixtral_8x7b"])
def test_nemo_builds_and_accepts_a_finetuning_job(name: str, packed: bool) -> None:
    source = recipes.finetune(name, packed_sequence=packed)
    plan, _ = nemo.auto_recipe(source, cluster="dgx_h100", vocab_size=152_000, free=["all"])
    recipes.validate(source)
    assert not plan.layout.uses_megatron_fsdp  # it restores torch_dist
    assert not packed or plan.layout.micro_batch_size == 1
    assert nemo.plan_changes(source, plan) == ()


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
def test_bridge_accepts_packed_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = _sft(name, monkeypatch)
    assert cfg.dataset.packed_sequence_specs.packed_sequence_size > 0
    plan = _plan_bridge(cfg, free=("all",))
    assert plan.layout.micro_batch_size == 1
    assert not plan.layout.uses_megatron_fsdp  # it restores torch_dist
    cp = plan.layout.dims.context_parallel_size
    assert cp == 1 or cfg.dataset.packed_sequence_specs.pad_seq_to_mult % (2 * cp) == 0


@pytest.mark.parametrize("packed", [False, True])
def test_bridge_accepts_long_sequences(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = _sft("qwen.qwen3:qwen3_8b_sft_config", monkeypatch)
    cfg.model.seq_length = cfg.dataset.seq_length = LONG
    if packed:
        cfg.dataset.packed_sequence_specs.packed_sequence_size = LONG
    else:
        cfg.dataset.packed_sequence_specs = None
    plan = _plan_bridge(cfg)
    assert plan.layout.dims.context_parallel_size > 1
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
    ],
)
def test_families_of_bridge_have_the_parameters_of_their_checkpoints(
    recipe: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import transformers

    spec = megatron_bridge.read_recipe(
        _sft(recipe, monkeypatch), environment={}, vocab_size=152_000
    ).spec
    with torch.device("meta"):
        hub = hugging_face.configuration(model)
        checkpoint = transformers.AutoModelForCausalLM.from_config(hub)
    assert total_parameters(spec) == sum(p.numel() for p in checkpoint.parameters())
