"""From a plain mapping, as a catalogue file holds it, to a ``TransformerSpec``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nest_megatron.errors import UserInputError, nearest
from nest_megatron.model.frequency import moe_layer_pattern
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.plain import Source, from_plain, without_unit

#: Values that the cost model knows how to price.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "family": tuple(ModelFamily),
    "position_embedding_type": ("rope", "learned_absolute", "none", "alibi"),
    "normalization": ("RMSNorm", "LayerNorm"),
    "activation": ("gelu", "silu", "relu", "squared_relu", "quick_gelu"),
    "softmax_type": ("vanilla", "learnable"),
}
_MAY_BE_ZERO = ("mtp_num_layers", "hidden_dropout", "attention_dropout")
_AT_MOST_ONE = ("rotary_percent", "hidden_dropout", "attention_dropout")
#: What the settings ``peft.*`` say; a plan file has it, too.
_NO_KEY = "adapters"
_SOURCE = Source(
    correct="Correct the model's description.",
    add="Add {name} to the model's description.",
    has_units=True,
)


def known_keys() -> tuple[str, ...]:
    """Fields of ``TransformerSpec``, the pattern of expert layers as ``moe_layer_freq``."""
    names = (field.name for field in dataclasses.fields(TransformerSpec) if field.name != _NO_KEY)
    return tuple("moe_layer_freq" if name == "moe_layer_pattern" else name for name in names)


def spec_from_mapping(mapping: Mapping[str, object]) -> TransformerSpec:
    """Check a model description and build its spec.

    Args:
        mapping: one value for each field of ``TransformerSpec`` that differs from its default, with
            ``moe_layer_freq`` in the place of ``moe_layer_pattern``. Numbers may have a prefix
            (``128Ki``).

    Raises:
        UserInputError: for an unknown or missing key, a value of the wrong type (numbers written as
            text without a prefix included), a number that is NaN, infinite or not positive, or an
            impossible shape.
    """
    model = f"model {mapping.get('name', '(no name)')}:"
    known = known_keys()
    for key, value in mapping.items():
        if key not in known and key != _NO_KEY:
            limit, fix = "there is no such field", nearest(str(key), known)
            raise UserInputError(f"{model} {key}", value, limit, fix)
    fields: dict[str, Any] = dict(mapping)
    if "num_layers" in fields:  # the pattern below is as long
        what = f"{model} num_layers"
        fields["num_layers"] = without_unit(fields["num_layers"], "num_layers", what)
    freq = fields.pop("moe_layer_freq", None)
    if fields.get("num_experts") is None:
        if freq not in (None, 1):
            limit = "it names expert layers but num_experts is not set"
            fix = "Set num_experts, or drop moe_layer_freq."
            raise UserInputError(f"{model} moe_layer_freq", freq, limit, fix)
    elif freq is None and fields.get("hybrid_layer_pattern"):
        pass  # it says which layers route
    elif isinstance(fields.get("num_layers"), int):  # what else it is, is refused below
        pattern = moe_layer_pattern(1 if freq is None else freq, fields["num_layers"])
        fields["moe_layer_pattern"] = pattern
    spec = from_plain(TransformerSpec, fields, model, _SOURCE)
    for field in dataclasses.fields(spec):
        _check_value(f"{model} {field.name}", field.name, getattr(spec, field.name))
    return spec


def _check_value(what: str, name: str, value: object) -> None:
    """Refuse a text that is not known, and a number outside of what its field means."""
    if name in CHOICES:
        if value not in CHOICES[name]:
            limit, fix = f"it must be one of {', '.join(CHOICES[name])}", CHOICES[name]
            raise UserInputError(what, value, limit, fix=nearest(str(value), fix))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        most = 1.0 if name in _AT_MOST_ONE else math.inf
        if not (0 < value <= most or (value == 0 and name in _MAY_BE_ZERO)):
            least = "of at least 0" if name in _MAY_BE_ZERO else "above 0"
            limit = f"it must be a number {least}" + (" and at most 1" if most == 1.0 else "")
            raise UserInputError(what, value, limit, fix=_SOURCE.correct)
