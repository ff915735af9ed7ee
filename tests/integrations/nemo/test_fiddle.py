"""The same on Fiddle's own ``Config``, which is what a recipe is made of."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.fields import ABSENT, attribute, changes, set_fields
from nest_megatron.integrations.nemo import apply_plan, plan_changes, read_recipe
from tests import catalogue
from tests.contract.test_adapters import laid_out
from tests.integrations.frameworks import TransformerConfig, nemo_recipe

fdl = pytest.importorskip("fiddle", reason="fiddle is not installed (.ci/nemo installs it)")


def as_configs(recipe: Any) -> Any:
    """A stand-in recipe with its dataclasses as unbuilt configs."""
    strategy = recipe.trainer.strategy
    recipe.model.config = as_config(recipe.model.config)
    recipe.trainer.strategy = as_config(strategy)
    recipe.trainer.strategy.ddp = as_config(strategy.ddp)
    recipe.trainer.plugins = as_config(recipe.trainer.plugins)
    recipe.data = as_config(recipe.data)
    return recipe


def as_config(record: Any) -> Any:
    """What is not at its default is set."""
    config = fdl.Config(type(record))
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            setattr(config, field.name, value)
    return config


def test_a_plan_is_written_into_configs() -> None:
    recipe, plan = as_configs(nemo_recipe(catalogue.model("mixtral_8x7b"))), None
    plan = laid_out("mixtral_8x7b", tp=2, pp=4, vpp=2, ep=8)
    assert read_recipe(recipe).spec.num_experts == 8
    assert apply_plan(recipe, plan)
    built = fdl.build(recipe.trainer.strategy)
    assert (built.tensor_model_parallel_size, built.expert_model_parallel_size) == (2, 8)
    assert plan_changes(recipe, plan) == ()


def test_defaults_of_factories_are_read() -> None:
    @dataclasses.dataclass
    class Pattern(TransformerConfig):
        moe_layer_freq: Any = dataclasses.field(default_factory=lambda: [0, 1])

    config = fdl.Config(Pattern, num_layers=2, hidden_size=8, num_attention_heads=2)
    assert attribute(config, "moe_layer_freq") == [0, 1]
    assert attribute(config, "no_such_field") is ABSENT


def test_nothing_is_set_where_one_field_is_missing() -> None:
    root = SimpleNamespace(config=fdl.Config(TransformerConfig))
    wanted = [
        ("config.seq_length", 4096, "asked"),
        ("config.no_such_field", 2, "asked"),
    ]
    with pytest.raises(UserInputError, match="no such field"):
        set_fields(root, changes(root, wanted))
    assert root.config.seq_length == 1024
