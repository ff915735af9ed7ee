"""Megatron-Bridge's own recipes and validators, on a machine without a GPU and without a network.

A recipe asks the Hugging Face Hub for a model's configuration; here it is given.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from nest_megatron.model.spec import TransformerSpec
from tests.nemo.building import count, make_plain, one_rank

_LLAMA = {
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
_QWEN = {
    "vocab_size": 151_936,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
}
#: Recipe -> kind of the Hugging Face configuration, and its fields; sizes are the models' own.
HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama.llama3:llama3_8b_pretrain_config": (
        "Llama",
        {
            **_LLAMA,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 14_336,
        },
    ),
    "llama.llama3:llama3_70b_pretrain_config": (
        "Llama",
        {
            **_LLAMA,
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "intermediate_size": 28_672,
        },
    ),
    "llama.llama3:llama31_405b_pretrain_config": (
        "Llama",
        {
            **_LLAMA,
            "hidden_size": 16_384,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "intermediate_size": 53_248,
        },
    ),
    "qwen.qwen3_moe:qwen3_30b_a3b_pretrain_config": (
        "Qwen3Moe",
        {
            **_QWEN,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
        },
    ),
    "qwen.qwen3_moe:qwen3_235b_a22b_pretrain_config": (
        "Qwen3Moe",
        {
            **_QWEN,
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "intermediate_size": 12_288,
            "moe_intermediate_size": 1536,
        },
    ),
    "deepseek.deepseek_v3:deepseek_v3_pretrain_config": (
        "DeepseekV3",
        {
            "aux_loss_alpha": 0.0001,
            "num_nextn_predict_layers": 1,
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    "gpt_oss.gpt_oss:gpt_oss_20b_pretrain_config": (
        "GptOss",
        {"num_hidden_layers": 24, "num_local_experts": 32},
    ),
    "gpt_oss.gpt_oss:gpt_oss_120b_pretrain_config": (
        "GptOss",
        {"num_hidden_layers": 36, "num_local_experts": 128},
    ),
    "gpt.gpt3_175b:gpt3_175b_pretrain_config": ("", {}),
}


def config(name: str) -> Any:
    """Megatron-Bridge's configuration of a model."""
    where, _, function = name.partition(":")
    module = importlib.import_module(f"megatron.bridge.recipes.{where}")
    kind, fields = HUGGING_FACE[name]
    with on_hopper() as patch:
        if kind:
            patch.setattr(module, "AutoBridge", _offline(kind, fields))
        return getattr(module, function)()


@contextlib.contextmanager
def on_hopper() -> Iterator[pytest.MonkeyPatch]:
    """Let Megatron-Bridge believe that it has an H100 and a recent Transformer Engine."""
    import torch
    from megatron.core import utils
    from packaging.version import Version

    hopper = mock.Mock(major=9, minor=0)
    hopper.name = "NVIDIA H100"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: hopper)
        patch.setattr(utils, "_te_version", Version("2.9.0"))
        yield patch


def _offline(kind: str, fields: dict[str, Any]) -> Any:
    import transformers
    from megatron.bridge import AutoBridge

    make = getattr(transformers, f"{kind}Config")
    hub = make(architectures=[f"{kind}ForCausalLM"], torch_dtype="bfloat16", **fields)

    class Offline:
        @staticmethod
        def from_hf_pretrained(*_: object, **__: object) -> Any:
            return AutoBridge.from_hf_config(hub)

    return Offline


def own_parameters(cfg: Any, spec: TransformerSpec) -> int:
    """Parameters of the model that Megatron-Bridge builds, with megatron-core's local layers."""
    provider = copy.deepcopy(cfg.model)
    make_plain(provider)
    provider.vocab_size, provider.should_pad_vocab = spec.vocab_size, not spec.vocab_is_padded
    from megatron.bridge.models import gpt_provider
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.process_groups_config import ProcessGroupCollection

    def layers(config: Any, vp_stage: int | None = None) -> Any:
        return specs.get_gpt_decoder_block_spec(config, **_local(config))

    def predictors(config: Any, vp_stage: int | None = None) -> Any:
        if not config.mtp_num_layers:
            return None
        last = specs.get_gpt_decoder_layer_specs(config, **_local(config))[-1]
        return specs.get_gpt_mtp_block_spec(config, last, use_transformer_engine=False)

    with one_rank(spec), mock.patch.object(gpt_provider, "mtp_block_spec", predictors):
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        provider.transformer_layer_spec = layers
        provider.finalize()
        return count(provider.provide(pre_process=True, post_process=True))


def _local(config: Any) -> dict[str, Any]:
    return {"use_transformer_engine": False, "normalization": config.normalization}


def copied(cfg: Any) -> Any:
    """A copy of a configuration; of a ``GPTModelConfig`` deepcopy returns that of its layers."""
    found = copy.copy(cfg)
    for name, value in vars(cfg).items():
        setattr(found, name, value if name == "model" else copy.deepcopy(value))
    if hasattr(cfg.model, "transformer"):
        found.model = copy.copy(cfg.model)
        found.model.transformer = copy.deepcopy(cfg.model.transformer)
    else:
        found.model = copy.deepcopy(cfg.model)
    return found


def validate(cfg: Any, num_gpus: int) -> Any:
    """Ask Megatron-Bridge whether a configuration can be launched; raises what it raises.

    Returns:
        The configuration as it trains.
    """
    import torch
    from megatron.bridge.training.config import runtime_config_update

    changed = copied(cfg)
    for name in ("apply_rope_fusion", "moe_permute_fusion", "bias_activation_fusion"):
        if hasattr(changed.model, name):  # they need Transformer Engine
            setattr(changed.model, name, False)
    changed.optimizer.use_precision_aware_optimizer = False
    for name in ("main_grads", "main_params", "exp_avg", "exp_avg_sq"):
        setattr(changed.optimizer, f"{name}_dtype", torch.float32)
    if changed.peft is not None or changed.checkpoint.pretrained_checkpoint is not None:
        changed.checkpoint.pretrained_checkpoint = tempfile.gettempdir()  # it has to be there
    with on_hopper() as patch:
        patch.setenv("WORLD_SIZE", str(num_gpus))
        runtime_config_update(changed)
    return changed
