"""Megatron-Bridge's own recipes and validators on a machine without a GPU and without a network."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pkgutil
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from nest_megatron.model.spec import TransformerSpec
from tests.nemo import hugging_face
from tests.nemo.building import count, make_plain, one_rank

RECIPES = (
    "llama.llama3:llama3_8b_pretrain_config",
    "llama.llama3:llama3_70b_pretrain_config",
    "llama.llama3:llama31_405b_pretrain_config",
    "qwen.qwen3_moe:qwen3_30b_a3b_pretrain_config",
    "qwen.qwen3_moe:qwen3_235b_a22b_pretrain_config",
    "deepseek.deepseek_v3:deepseek_v3_pretrain_config",
    "gpt_oss.gpt_oss:gpt_oss_20b_pretrain_config",
    "gpt_oss.gpt_oss:gpt_oss_120b_pretrain_config",
    "gpt.gpt3_175b:gpt3_175b_pretrain_config",
)


def config(name: str, **options: Any) -> Any:
    """Megatron-Bridge's configuration of a recipe, ``MODULE:FUNCTION``, without a network."""
    where, _, function = name.partition(":")
    module = importlib.import_module(f"megatron.bridge.recipes.{where}")
    return built(getattr(module, function), **options)


def recipes(pattern: str) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Recipes by a pattern in their names: module, name, function; each once, where it is made."""
    package = importlib.import_module("megatron.bridge.recipes")
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", lambda _: None):
        try:
            module = importlib.import_module(info.name)
        except ImportError:
            continue
        for name, make in list(vars(module).items()):
            if re.search(pattern, name) and getattr(make, "__module__", "") == module.__name__:
                yield info.name.removeprefix(f"{package.__name__}."), name, make


def built(make: Callable[..., Any], **options: Any) -> Any:
    """What a recipe returns, without a GPU and without a network."""
    with on_hopper() as patch:
        hugging_face.go_offline(patch)
        return make(**options)


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
        patch.setattr(utils, "_te_version", Version("2.14.0"))
        yield patch


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
    if hasattr(changed.model, "dsa_kernel_backend"):  # it needs CUDA
        changed.model.dsa_kernel_backend = "none"
    changed.optimizer.use_precision_aware_optimizer = False
    for name in ("main_grads", "main_params", "exp_avg", "exp_avg_sq"):
        setattr(changed.optimizer, f"{name}_dtype", torch.float32)
    if changed.peft is not None or changed.checkpoint.pretrained_checkpoint is not None:
        changed.checkpoint.pretrained_checkpoint = tempfile.gettempdir()  # it has to be there
    with on_hopper() as patch:
        patch.setenv("WORLD_SIZE", str(num_gpus))
        # what one recipe's env_vars set is gone before the next
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
        patch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
        runtime_config_update(changed)
    return changed
