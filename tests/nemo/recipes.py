"""NeMo's own recipes and validators, on a machine without a GPU."""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

from nest_megatron.integrations.restore import is_finetuning
from nest_megatron.model.spec import TransformerSpec
from tests.nemo.building import count, make_plain, one_rank

#: One recipe of each kind; those in ``PARAMETERS_ONLY`` have no pretraining.
RECIPES = (
    "llama3_8b",
    "llama3_70b",
    "llama31_405b",
    "mixtral_8x7b",
    "mixtral_8x22b",
    "nemotron3_8b",
    "nemotron4_340b",
    "qwen3_30b_a3b",
    "qwen3_235b_a22b",
    "deepseek_v2_lite",
    "deepseek_v3",
    "gpt3_175b",
    "t5_220m",
    "t5_11b",
)
PARAMETERS_ONLY = ("gpt_oss_20b", "gpt_oss_120b", "llama4_e16", "llama4_e128")
#: Families whose layers NeMo builds by code of its own, and what a plan of them must be.
FAMILIES: dict[str, dict[str, int | None]] = {
    "gemma2_2b": {"context_parallel_size": 1, "virtual_pipeline_model_parallel_size": None},
    "gemma3_1b": {"context_parallel_size": 1, "virtual_pipeline_model_parallel_size": None},
    "llama4_e16": {},
    "mamba2_hybrid_8b": {"virtual_pipeline_model_parallel_size": None},
    "nemotron_nano_9b_v2": {"virtual_pipeline_model_parallel_size": None},
}
REFUSED = {
    "hyena_7b": "convolution",
}


def recipe(name: str, *, num_nodes: int = 1) -> Any:
    """NeMo's recipe of a model; one without pretraining borrows another's trainer and data."""
    module = importlib.import_module(f"nemo.collections.llm.recipes.{name}")
    if hasattr(module, "pretrain_recipe"):
        return module.pretrain_recipe(
            name="nest", dir="/nowhere", num_nodes=num_nodes, num_gpus_per_node=8
        )
    borrowed = recipe("llama3_8b", num_nodes=num_nodes)
    borrowed.model = module.model()
    return borrowed


def finetune(name: str, scheme: str = "none", **options: Any) -> Any:
    """NeMo's recipe that trains all weights of a model further, or the adapters of a scheme."""
    module = importlib.import_module(f"nemo.collections.llm.recipes.{name}")
    return module.finetune_recipe(
        name="nest", dir="/nowhere", num_nodes=8, num_gpus_per_node=8, peft_scheme=scheme, **options
    )


def own_parameters(source: Any, spec: TransformerSpec) -> int:
    """Parameters of the model that NeMo builds; T5's final norms are the engine's in any case."""
    import fiddle
    from megatron.core.models.T5 import t5_spec

    config = copy.deepcopy(source.model.config)
    make_plain(config)
    config.init_model_with_meta_device = True
    tokenizer = SimpleNamespace(vocab_size=spec.vocab_size)
    norms = mock.patch.object(t5_spec, "TENorm", t5_spec.LNImpl)
    with one_rank(spec), norms, _local_llama4():
        built = fiddle.build(config)
        ends = {} if spec.family == "t5" else {"pre_process": True, "post_process": True}
        return count(built.configure_model(tokenizer, **ends))


def _local_llama4() -> Any:
    """Llama 4 asks for megatron-core's layers with Transformer Engine; the local ones are here."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from nemo.collections.llm.gpt.model import llama4_utils

    def local(config: Any, **_: Any) -> Any:
        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        )

    return mock.patch.object(llama4_utils, "get_gpt_decoder_block_spec", local)


def validate(source: Any) -> None:
    """Ask NeMo and megatron-core whether a recipe can be launched; raises what they raise.

    As ``llm.pretrain`` does: the strategy's sizes go to the model's config, then all is checked.
    """
    import fiddle
    from nemo.collections.llm import api
    from nemo.lightning import _strategy_lib

    changed = copy.deepcopy(source)
    for name in ("apply_rope_fusion", "moe_permute_fusion", "bias_activation_fusion"):
        if hasattr(changed.model.config, name):  # they need Transformer Engine
            setattr(changed.model.config, name, False)
    model = SimpleNamespace(config=fiddle.build(changed.model.config), configure_model=None)
    strategy = fiddle.build(changed.trainer.strategy)
    strategy._precision_plugin = fiddle.build(changed.trainer.plugins)
    _strategy_lib.set_model_parallel_attributes(model, strategy.parallelism)
    trainer = SimpleNamespace(
        strategy=strategy,
        num_devices=changed.trainer.devices,
        num_nodes=changed.trainer.num_nodes,
    )
    if hasattr(changed.data, "tokenizer"):  # its files are not here
        changed.data.tokenizer = SimpleNamespace(vocab_size=32_000)
    # data for pretraining would fetch a tokenizer
    data = fiddle.build(changed.data) if is_finetuning(changed.data) else changed.data
    api._validate_config(model, data, trainer)
    _check_layers(model.config)


def _check_layers(config: Any) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    if config.pipeline_model_parallel_layout is not None:
        return  # its constructor has counted the layers
    virtual = config.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else range(virtual)
    ranks = range(config.pipeline_model_parallel_size)
    built = sum(
        get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)
        for rank in ranks
        for stage in stages
    )
    assert built == config.num_layers
