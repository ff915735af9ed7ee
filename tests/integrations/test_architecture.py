"""Only models whose class and fields are known are planned; any other is refused by its name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import nest_megatron
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations import architecture
from nest_megatron.integrations.megatron_bridge import auto_recipe, plan_changes, read_recipe
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from tests import catalogue
from tests.integrations import frameworks
from tests.integrations.frameworks import bridge_config
from tests.integrations.test_read import BASE


def default_layer_spec() -> None:
    """Stands for the frameworks' function of that name."""


def build_step35_layer_spec() -> None:
    """Stands for a family's own layers."""


@dataclass
class GPTModelProvider(frameworks.GPTModelProvider):
    """Megatron-Bridge's, with what makes the layers and the model."""

    transformer_layer_spec: Any = default_layer_spec

    def provide(self) -> None:
        """Build the model."""

    def finalize(self) -> None:
        """Check the sizes."""


@dataclass
class TransformerConfig(GPTModelProvider):
    """Megatron-core's of a newer release, which has fields that are not known here."""

    is_new: bool = True
    new_sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    new_count: int = 0


@dataclass
class ExactSizes(GPTModelProvider):
    """A family that only states sizes, as a user's own class may."""

    qk_layernorm: bool = True
    normalization: str = "RMSNorm"


@dataclass
class Gemma4DenseProvider(GPTModelProvider):
    """As in Megatron-Bridge: it builds a model of its own."""

    def provide(self) -> None:
        """Build another model."""


@dataclass
class MiniMaxM3ModelProvider(GPTModelProvider):
    """As in Megatron-Bridge: it changes its fields when it is made."""

    def finalize(self) -> None:
        """Set fields."""


@dataclass
class KimiK3ModelProvider(GPTModelProvider):
    """As in Megatron-Bridge: fields of its own say what its layers are."""

    kimi_linear_num_heads: int = 96


@dataclass
class Step35ModelProvider(GPTModelProvider):
    """As in Megatron-Bridge: its layers are made by a function of its own."""

    transformer_layer_spec: Any = build_step35_layer_spec


@dataclass
class Gemma3ModelProvider(GPTModelProvider):
    """As in Megatron-Bridge, whose attention takes a window as a number of tokens."""


def _config(kind: Callable[..., Any], **fields: Any) -> Any:
    cfg = bridge_config(catalogue.model("llama3_8b"))
    own = {f.name for f in dataclasses.fields(frameworks.GPTModelProvider)}
    cfg.model = kind(**{name: getattr(cfg.model, name) for name in own})
    for name, value in fields.items():
        setattr(cfg.model, name, value)
    return cfg


def test_sizes_alone_make_no_other_family() -> None:
    assert read_recipe(_config(ExactSizes), environment={}).spec.hidden_size == 4096


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Gemma4DenseProvider, "'Gemma4DenseProvider': its own provide"),
        (MiniMaxM3ModelProvider, "'MiniMaxM3ModelProvider': its own finalize"),
        (KimiK3ModelProvider, "model.kimi_linear_num_heads = '96'"),
        (Step35ModelProvider, "model.transformer_layer_spec = 'build_step35_layer_spec'"),
    ],
)
def test_an_unknown_family_is_refused_by_name(kind: Callable[..., Any], named: str) -> None:
    with pytest.raises(UnplannableModelError) as raised:
        read_recipe(_config(kind), environment={})
    assert named in str(raised.value)


def test_a_window_of_gemma_3_is_a_number_of_tokens() -> None:
    with pytest.raises(UnplannableModelError, match=r"model.window_size = \(512, 0\)"):
        read_recipe(_config(Gemma3ModelProvider, window_size=(512, 0)), environment={})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("qk_l2_norm", True),
        ("attn_logit_softcapping", 50.0),
        ("hybrid_override_pattern", "M*M*"),
        ("experimental_attention_variant", "gated_delta_net"),
        ("apply_residual_connection_post_layernorm", True),
        ("gtp_weight_remat_size", 2),
        ("layer_types", ["sliding_attention"]),
        ("some_new_field_of_megatron", True),
        ("transformer_layer_spec", functools.partial(build_step35_layer_spec)),
    ],
)
def test_a_field_that_is_set_and_not_read_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UnplannableModelError, match=f"model.{field}"):
        read_recipe(_config(GPTModelProvider, **{field: value}), environment={})


def test_a_field_that_is_off_is_no_reason_to_refuse() -> None:
    off = {"qk_l2_norm": False, "some_new_field_of_megatron": None, "gtp_weight_remat_size": 1}
    read_recipe(_config(GPTModelProvider, **off), environment={})


def test_a_field_at_its_default_is_no_reason_to_refuse() -> None:
    read_recipe(_config(TransformerConfig), environment={})


@pytest.mark.parametrize(
    ("field", "value"), [("is_new", False), ("new_sizes", [1]), ("new_count", 2)]
)
def test_a_field_that_is_not_at_its_default_is_refused_or_assumed_harmless(
    field: str, value: object
) -> None:
    cfg = _config(TransformerConfig, **{field: value})
    with pytest.raises(UnplannableModelError, match=rf"{field}.*--assume-harmless {field}"):
        read_recipe(cfg, environment={})
    job = read_recipe(cfg, environment={}, assume_harmless=[field])
    assert any(note.startswith(f"model.{field} = {value}") for note in job.notes)


def test_what_is_assumed_harmless_is_a_setting() -> None:
    cfg = _config(TransformerConfig, new_count=2)
    size = ["cluster.num_gpus=64", "search.num_alternatives=0"]
    known = {"environment": {}, "cluster": "dgx_h100"}
    with pytest.raises(UnplannableModelError, match="new_count"):
        auto_recipe(cfg, overrides=[*size, "assume_harmless=[other]"], **known)
    plan, _ = auto_recipe(cfg, overrides=[*size, "assume_harmless=[new_count]"], **known)
    with pytest.raises(UnplannableModelError, match="new_count"):
        plan_changes(cfg, plan, environment={})
    assert plan_changes(cfg, plan, environment={}, assume_harmless=["model.new_count"]) == ()


def test_it_names_fields_of_a_recipe_alone() -> None:
    with pytest.raises(UserInputError, match="assume_harmless"):
        nest_megatron.plan(
            model="llama3_8b", cluster="dgx_h100", num_gpus=8, **{"assume_harmless": "[x]"}
        )


def test_a_field_beside_the_model_that_is_not_known_is_noted() -> None:
    cfg = _config(GPTModelProvider)
    cfg.ddp.shards_by_magic = True
    notes = read_recipe(cfg, environment={}).notes
    assert notes == (
        "ddp.shards_by_magic = True is not known here, and a plan leaves it out of account.",
    )


def test_what_is_left_out_of_account_is_said() -> None:
    found = read_recipe(_config(GPTModelProvider, qk_clip=True), environment={})
    assert found.notes == (
        "qk_clip = True is not modelled: the largest scores are found at no cost.",
    )


def test_a_user_may_stand_before_a_model_of_nemo() -> None:
    known = type("LlamaModel", (), {"__module__": "nemo.collections.llm"})
    mine = type("MyModel", (known,), {"__module__": "mine"})
    other = type("ReadsImages", (known,), {"__module__": "nemo.collections.vlm"})
    config = bridge_config(catalogue.model("llama3_8b")).model
    for model in (mine(), SimpleNamespace()):
        architecture.refuse_unplannable(config, model)
    with pytest.raises(UnplannableModelError, match=r"ReadsImages.*such a model is not supported"):
        architecture.refuse_unplannable(config, other())


@pytest.mark.parametrize(
    "flag",
    [
        "--apply-residual-connection-post-layernorm",
        "--hybrid-context-parallel",
    ],
)
def test_megatrons_own_flags_are_refused_alike(flag: str) -> None:
    with pytest.raises(UnplannableModelError, match=flag.partition(" ")[0]):
        read_job(read_command(f"{BASE} {flag}"))


def test_megatrons_own_flags_are_noted_alike() -> None:
    job = read_job(read_command(f"{BASE} --deterministic-mode"))
    assert any("deterministic_mode" in note for note in job.notes)


def test_every_field_of_megatron_core_is_classified() -> None:
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    found = {field.name for field in dataclasses.fields(config.MLATransformerConfig)}
    assert found <= architecture.CLASSIFIED
    assert len(found) > 200


@pytest.mark.parametrize("family", ["HybridModelProvider", "MambaModelProvider", "SSMConfig"])
def test_another_number_of_layers_beside_a_pattern_is_refused(family: str) -> None:
    """Megatron-Bridge and megatron-core end; the pattern alone was priced."""
    config = SimpleNamespace(hybrid_layer_pattern="M-|M*/E", mtp_num_layers=1, num_layers=4)
    assert architecture.FAMILIES[family].fields(config)["num_layers"] == 4
    config.num_layers = 8
    with pytest.raises(UserInputError, match="num_layers = 8: the pattern of the model has 4"):
        architecture.FAMILIES[family].fields(config)
