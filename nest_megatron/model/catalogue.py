"""From a plain mapping, as a catalogue file holds it, to a ``TransformerSpec``."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from nest_megatron.errors import UserInputError, nearest
from nest_megatron.model.layer_pattern import moe_layer_pattern
from nest_megatron.model.spec import ModelFamily, TransformerSpec

#: Values that the cost model knows how to price.
CHOICES: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "family": tuple(family.value for family in ModelFamily),
        "position_embedding_type": ("rope", "learned_absolute", "none"),
        "normalization": ("RMSNorm", "LayerNorm"),
        "activation": ("gelu", "silu", "squared_relu", "quick_gelu"),
        "softmax_type": ("vanilla", "learnable"),
    }
)
_MAY_BE_ZERO = ("mtp_num_layers", "hidden_dropout", "attention_dropout")


def known_keys() -> tuple[str, ...]:
    """Keys that a model description may have.

    They are the fields of ``TransformerSpec``, the pattern of expert layers written as Megatron's
    ``moe_layer_freq``.
    """
    return tuple(
        "moe_layer_freq" if name == "moe_layer_pattern" else name for name in _field_types()
    )


def spec_from_mapping(mapping: Mapping[str, object]) -> TransformerSpec:
    """Check a model description and build its spec.

    Args:
        mapping: one value for each field of ``TransformerSpec`` that differs from its default, with
            ``moe_layer_freq`` in the place of ``moe_layer_pattern``.

    Raises:
        UserInputError: for an unknown or missing key, a value of the wrong type (numbers written as
            text included), a number that is NaN, infinite or not positive, or an impossible shape.
    """
    model = f"model {mapping.get('name', '(no name)')}"
    _refuse_unknown(model, mapping)
    _require_all(model, mapping)
    values: dict[str, Any] = {
        key: _checked(f"{model}: {key}", key, value)
        for key, value in mapping.items()
        if key != "moe_layer_freq"
    }
    values["moe_layer_pattern"] = _pattern(model, values, mapping.get("moe_layer_freq"))
    return TransformerSpec(**values)


def _refuse_unknown(model: str, mapping: Mapping[str, object]) -> None:
    known = known_keys()
    for key, value in mapping.items():
        if key not in known:
            raise UserInputError(
                f"{model}: {key}",
                value=value,
                limit="there is no such field",
                fix=nearest(str(key), known),
            )


def _require_all(model: str, mapping: Mapping[str, object]) -> None:
    for field in dataclasses.fields(TransformerSpec):
        optional = field.default is not dataclasses.MISSING
        if not optional and mapping.get(field.name) is None:
            raise UserInputError(
                f"{model}: {field.name}",
                value=None,
                limit="this field has no default",
                fix=f"Add {field.name} to the model's description.",
            )


def _pattern(model: str, values: Mapping[str, object], freq: object) -> tuple[int, ...]:
    num_layers = values["num_layers"]
    assert isinstance(num_layers, int)
    if values.get("num_experts") is not None:
        return moe_layer_pattern(1 if freq is None else freq, num_layers)
    if freq not in (None, 1):
        raise UserInputError(
            f"{model}: moe_layer_freq",
            value=freq,
            limit="it names expert layers but num_experts is not set",
            fix="Set num_experts, or drop moe_layer_freq.",
        )
    return ()


@functools.cache
def _field_types() -> Mapping[str, tuple[type, bool]]:
    """For each field its type, and whether it may be ``None``."""
    hints = typing.get_type_hints(TransformerSpec)
    table = {}
    for field in dataclasses.fields(TransformerSpec):
        members = typing.get_args(hints[field.name])
        optional = type(None) in members
        table[field.name] = (members[0] if optional else hints[field.name], optional)
    return types.MappingProxyType(table)


def _checked(what: str, key: str, value: object) -> object:
    kind, optional = _field_types()[key]
    if value is None and optional:
        return None
    if key in CHOICES:
        return _choice(what, key, value)
    if kind is bool:
        return _of_type(what, value, isinstance(value, bool), "it must be true or false")
    if kind is str:
        return _of_type(what, value, isinstance(value, str), "it must be text")
    if kind is float:
        if key in _MAY_BE_ZERO and value == 0:
            return 0.0
        share = key == "rotary_percent" or key.endswith("_dropout")
        return _positive_float(what, value, most=1.0 if share else math.inf)
    return _whole(what, value, least=0 if key in _MAY_BE_ZERO else 1)


def _choice(what: str, key: str, value: object) -> object:
    if value not in CHOICES[key]:
        raise UserInputError(
            what,
            value=value,
            limit=f"it must be one of {', '.join(CHOICES[key])}",
            fix=nearest(str(value), CHOICES[key]),
        )
    return ModelFamily(value) if key == "family" else str(value)


def _of_type(what: str, value: object, right: bool, limit: str) -> object:
    if not right:
        raise UserInputError(what, value=value, limit=limit, fix="Correct the model's description.")
    return value


def _whole(what: str, value: object, *, least: int) -> object:
    right = isinstance(value, int) and not isinstance(value, bool) and value >= least
    return _of_type(what, value, right, f"it must be a whole number of at least {least}")


def _positive_float(what: str, value: object, *, most: float) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and 0.0 < value <= most and math.isfinite(value):  # type: ignore[operator,arg-type]
        return float(value)  # type: ignore[arg-type]
    limit = "above 0" if most == math.inf else f"above 0 and at most {most:g}"
    raise UserInputError(
        what,
        value=value,
        limit=f"it must be a finite number {limit}",
        fix="Correct the model's description.",
    )
