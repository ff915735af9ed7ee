"""Heterogeneous models: how their layers are written, read, counted and refused."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.model.heterogeneous import (
    block_configs,
    heterogeneous_layers,
    read_heterogeneous_layers,
)
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.parameters import model_parameters, unit_parameters
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import from_plain, to_plain
from tests import catalogue

SIZES = {
    "hidden_size": 768,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 3072,
}
OWN = {"n_heads_in_group": 4}, {"ffn_mult": 1.0}
NO_OP = {"no_op": True, "n_heads_in_group": None}, {"no_op": True, "ffn_mult": None}
LINEAR = (
    {"replace_with_linear": True, "num_query_groups": None},
    {"replace_with_linear": True, "ffn_hidden_size": None},
)


def _read(attention: object, mlp: object) -> str:
    (kind,) = heterogeneous_layers([{"attention": attention, "ffn": mlp}], "layers", **SIZES)
    return kind.value


@pytest.mark.parametrize(
    ("attention", "mlp", "kind"),
    [
        (*OWN, "attention[2]+dense[512]"),
        (NO_OP[0], OWN[1], "dense[512]"),
        (OWN[0], NO_OP[1], "attention[2]"),
        (*NO_OP, "no_op"),
        (*LINEAR, "linear_for_attention+linear_for_mlp"),
        ({"num_query_groups": None}, {"ffn_hidden_size": None}, "attention[4]+dense[3072]"),
        ({"num_query_groups": 8}, {"ffn_mult": 2.625}, "attention[8]+dense[1536]"),
    ],
)
def test_block_configs_are_read(attention: object, mlp: object, kind: str) -> None:
    assert _read(attention, mlp) == kind


@pytest.mark.parametrize(
    ("attention", "mlp"),
    [
        ({"n_heads_in_group": 3}, OWN[1]),
        ({"no_op": True, "n_heads_in_group": 4}, OWN[1]),
        (OWN[0], {"replace_with_linear": True, "ffn_hidden_size": 8}),
        ({}, OWN[1]),
        (OWN[0], None),
        (OWN[0], {"ffn_hidden_size": -1}),
    ],
)
def test_what_megatron_cannot_build_is_refused(attention: object, mlp: object) -> None:
    with pytest.raises(UserInputError, match="layers: layer 0"):
        _read(attention, mlp)


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", '{"block_configs": 3}'])
def test_what_is_no_list_of_layers_is_refused(text: str) -> None:
    with pytest.raises(UserInputError, match=r"cannot be read|cannot build"):
        read_heterogeneous_layers(text, None, str, **SIZES)


def test_layers_as_megatron_reads_them_are_the_same_again() -> None:
    for name in ("llama33_nemotron_super_49b", "llama31_nemotron_ultra_253b"):
        spec = catalogue.model(name)
        sizes = {field: getattr(spec, field) for field in SIZES}
        text = json.dumps(block_configs(spec.heterogeneous_layers))
        layers = read_heterogeneous_layers(text, None, str, **sizes)
        assert layers == spec.heterogeneous_layers


def test_kinds_are_equal_by_their_text() -> None:
    one, other = LayerKind("attention[8]+dense[64]"), LayerKind("attention[8]+dense[64]")
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.blocks == (LayerBlock("attention[8]"), LayerBlock("dense[64]"))
    assert (one.letter, one.has_mlp, one.is_layer, one.begins_with_mlp) == ("t", True, True, False)
    assert [block.mixes_tokens for block in one.blocks] == [True, False]
    for text in ("dense[0]", "dense[8]+attention[8]", "attention[8]+experts[8]", "no_op+dense[8]"):
        with pytest.raises(ValueError, match="not a valid"):
            LayerKind(text)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama33_nemotron_super_49b", 49.87), ("llama31_nemotron_ultra_253b", 253.4)],
)
def test_parameters_are_those_of_the_published_model(name: str, billions: float) -> None:
    assert model_parameters(catalogue.model(name)) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_layer_that_does_nothing_has_no_parameters() -> None:
    spec = catalogue.model("llama31_nemotron_ultra_253b")
    counts = unit_parameters(spec, 1, 1, 1, single_stage=True)
    idle = [at for at, kind in enumerate(spec.layer_kinds()) if kind is LayerKind.NO_OP]
    assert len(idle) == 81
    assert not any(counts[at].total for at in idle)


def test_a_model_comes_back_from_its_file() -> None:
    spec = catalogue.model("llama33_nemotron_super_49b")
    plain = json.loads(json.dumps(to_plain(spec)))
    assert plain["heterogeneous_layers"][:2] == [
        "attention[8]+dense[14336]",
        "attention[8]+dense[28672]",
    ]
    again = from_plain(TransformerSpec, plain)
    assert again == spec
    assert again.heterogeneous_layers[0].blocks == spec.heterogeneous_layers[0].blocks


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_layers": 3}, "num_layers is 3"),
        ({"heterogeneous_layers": ("dense", "dense")}, "no layers of this kind"),
        ({"heterogeneous_layers": ("attention[3]", "no_op")}, "must divide num_attention_heads"),
        ({"mtp_num_layers": 1}, "mtp_num_layers"),
        ({"window_size": 64}, "window_size"),
        ({"multi_latent_attention": True}, "multi_latent_attention"),
    ],
)
def test_what_has_no_heterogeneous_layers_is_refused(
    changes: dict[str, object], named: str
) -> None:
    fields = to_plain(
        TransformerSpec(
            name="m",
            num_layers=2,
            hidden_size=64,
            ffn_hidden_size=128,
            num_attention_heads=8,
            seq_length=64,
            vocab_size=64,
            heterogeneous_layers=(LayerKind("attention[4]+dense[64]"), LayerKind.NO_OP),
        )
    )
    with pytest.raises(UserInputError, match=named):
        from_plain(TransformerSpec, {**fields, **changes})


def test_sizes_of_layers_are_those_that_tensor_ranks_divide() -> None:
    spec = catalogue.model("llama33_nemotron_super_49b")
    assert spec.query_group_counts == (8,)
    assert spec.ffn_hidden_sizes == (2816, 5632, 7168, 14336, 17920, 28672)
    plain = dataclasses.replace(catalogue.model("llama3_70b"))
    assert (plain.query_group_counts, plain.ffn_hidden_sizes) == ((8,), (28672,))
