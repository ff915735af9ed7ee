"""What a profile holds: every field checked, and what makes two profiles alike."""

from __future__ import annotations

import dataclasses
import math

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import ProfileError
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import is_added
from nest_megatron.profile.records import (
    COMPARED,
    Machine,
    default_name,
    fingerprint,
    layer_shape,
    require_name,
)
from tests import catalogue
from tests.profile.profiles import CPU, H100, profile, timing

LLAMA = catalogue.model("llama3_8b")
#: Fields of a model that change no layer's time, or are read through others.
NOT_SHAPING = frozenset(
    {
        "name",
        "num_layers",
        "max_position_embeddings",
        "make_vocab_size_divisible_by",
        "vocab_is_padded",
        "rotary_base",
        "rotary_percent",
        "layernorm_epsilon",
        "apply_layernorm_1p",
        "untie_embeddings_and_output_weights",
        "moe_layer_pattern",
        "moe_router_enable_expert_bias",
        "source",
    }
)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", None, True])
@pytest.mark.parametrize("name", ["forward_s", "backward_s", "micro_batch_size", "repetitions"])
def test_a_timing_is_a_number_above_0(name: str, value: object) -> None:
    with pytest.raises(ProfileError, match=name):
        timing(**{name: value})


@pytest.mark.parametrize("name", ["spread", "optimizer_s", "peak_memory_bytes", "parameters"])
def test_what_may_be_0_may_not_be_less(name: str) -> None:
    timing(**{name: 0})
    with pytest.raises(ProfileError, match=name):
        timing(**{name: -1})


def test_a_shape_stands_once() -> None:
    with pytest.raises(ProfileError, match=r"timings\[1\]"):
        profile([timing(forward_s=1.0), timing(forward_s=2.0)])


@pytest.mark.parametrize("name", ["", "a/b", "a b", ".hidden", "analytic", "a:b"])
def test_a_name_makes_a_file_name(name: str) -> None:
    with pytest.raises(ProfileError, match="profile name"):
        require_name(name)


@pytest.mark.parametrize("created", ["yesterday", "2026-05-01T10:00:00", ""])
def test_a_time_has_its_zone(created: str) -> None:
    with pytest.raises(ProfileError, match="created"):
        profile([], created=created)


def test_every_field_of_a_model_shapes_its_layers_or_is_known_not_to() -> None:
    """A field that was ``added`` shapes layers wherever it is not at its default."""
    latent = layer_shape(catalogue.model("deepseek_v3"))
    shaping = {*layer_shape(LLAMA), *latent}
    fields = {field.name for field in dataclasses.fields(TransformerSpec) if not is_added(field)}
    assert shaping | NOT_SHAPING == fields
    assert not shaping & NOT_SHAPING


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other", "source": "elsewhere"},
        {"num_layers": 80},
        {"kv_channels": 128, "rotary_base": 10_000},
        {"vocab_size": 128_512, "vocab_is_padded": True},
    ],
)
def test_what_changes_no_layer_changes_no_fingerprint(changes: dict[str, object]) -> None:
    other = dataclasses.replace(LLAMA, **changes)  # type: ignore[arg-type]
    assert fingerprint(H100, other, Precision.BF16) == fingerprint(H100, LLAMA, Precision.BF16)


def test_padding_the_vocabulary_for_tensor_parallelism_changes_no_fingerprint() -> None:
    before = fingerprint(H100, LLAMA, Precision.BF16)
    for tp in (1, 2, 4, 8):
        assert fingerprint(H100, LLAMA.with_padded_vocab(tp), Precision.BF16) == before


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        ({"attention_output_gate": True}, True),
        ({"window_size": 512, "attention_chunk_size": 1024}, True),
        ({"attention_chunk_size": None, "no_rope_freq": 4}, False),
    ],
)
def test_an_added_field_shapes_layers_where_it_is_given(
    changes: dict[str, object], shapes: bool
) -> None:
    other = dataclasses.replace(LLAMA, **changes)  # type: ignore[arg-type]
    assert (layer_shape(other) != layer_shape(LLAMA)) is shapes


def test_where_experts_stand_changes_no_fingerprint() -> None:
    deep = catalogue.model("deepseek_v3")
    fewer = dataclasses.replace(deep, num_layers=4, moe_layer_pattern=(0, 1, 1, 1))
    assert layer_shape(deep) == layer_shape(fewer)


@pytest.mark.parametrize("name", [*COMPARED, "seq_length", "hidden_size", "vocab_size"])
def test_all_that_times_depend_on_is_in_the_fingerprint(name: str) -> None:
    before = fingerprint(H100, LLAMA, Precision.BF16)
    machine, spec = H100, LLAMA
    if name in COMPARED:
        machine = dataclasses.replace(H100, **{name: getattr(CPU, name) or "1"})
        if getattr(machine, name) == getattr(H100, name):
            machine = dataclasses.replace(H100, **{name: _other(H100, name)})
    else:
        spec = dataclasses.replace(LLAMA, **{name: 2 * getattr(LLAMA, name)})
    assert fingerprint(machine, spec, Precision.BF16) != before
    assert fingerprint(H100, LLAMA, Precision.FP8) != before


def _other(machine: Machine, name: str) -> object:
    value = getattr(machine, name)
    return value + 1 if isinstance(value, int) else f"{value}1"


def test_clocks_are_told_and_not_compared() -> None:
    slower = dataclasses.replace(H100, graphics_mhz=1200)
    assert fingerprint(slower, LLAMA, Precision.BF16) == fingerprint(H100, LLAMA, Precision.BF16)


@pytest.mark.parametrize("name", catalogue.CORE)
def test_blocks_are_those_of_the_layer_sequence(name: str) -> None:
    spec = catalogue.model(name)
    kinds, blocks = set(spec.layer_kinds()), set(spec.blocks)
    assert any(kind.has_mlp for kind in kinds) == (LayerBlock.DENSE in blocks)
    assert any(kind.has_experts for kind in kinds) == (LayerBlock.EXPERTS in blocks)
    assert (LayerKind.MTP in kinds) == (LayerBlock.MTP in blocks)
    assert {LayerBlock.ATTENTION, LayerBlock.EMBEDDING, LayerBlock.HEAD} <= blocks


def test_default_names_are_names() -> None:
    name = default_name(H100, LLAMA, Precision.BF16)
    assert require_name(name).startswith("llama3_8b-H100_80GB_HBM3-bf16-")
    odd = dataclasses.replace(LLAMA, name="../my model")
    require_name(default_name(CPU, odd, Precision.BF16))


def test_numbers_and_texts_are_plain_whatever_they_came_as() -> None:
    """A subclass of ``float`` or ``str`` compares equal and yet cannot be written."""

    class Number(float):
        pass

    class Text(str):
        pass

    assert type(timing(forward_s=Number(0.5)).forward_s) is float
    assert type(timing(backward_s=1).backward_s) is float
    assert type(dataclasses.replace(H100, torch=Text("2.6.0")).torch) is str
