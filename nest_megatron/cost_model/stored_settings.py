"""The cost model's settings as a plan file keeps them: numbers and text by name, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.plain import from_plain

#: What stands before the name of a trait.
_TRAITS = "traits."


def stored_settings(settings: CostSettings) -> dict[str, float | str]:
    """All settings, and those of the job's traits that are not the defaults (``traits.NAME``)."""
    stored = {
        field.name: _stored(getattr(settings, field.name))
        for field in dataclasses.fields(settings)
        if field.name != "traits" and getattr(settings, field.name) is not None
    }
    for field in dataclasses.fields(settings.traits):
        value = getattr(settings.traits, field.name)
        if value != field.default:
            stored[_TRAITS + field.name] = _stored(value)
    return stored


def restored_settings(stored: Mapping[str, float | str]) -> CostSettings:
    """The settings that were stored; a plan file keeps all numbers as floats.

    Raises:
        UserInputError: for a setting that this version does not know.
    """
    traits = {
        name.removeprefix(_TRAITS): value
        for name, value in stored.items()
        if name.startswith(_TRAITS)
    }
    others = {name: value for name, value in stored.items() if not name.startswith(_TRAITS)}
    plain = _in_kind(CostSettings, others)
    plain["traits"] = _in_kind(ExecutionTraits, traits)
    return from_plain(CostSettings, plain, "provenance.settings")


def _stored(value: object) -> float | str:
    return float(value) if isinstance(value, int | float) else str(value)


def _in_kind(record: Any, stored: Mapping[str, float | str]) -> dict[str, object]:
    """Floats as the whole numbers and switches that the record's defaults are."""
    plain: dict[str, object] = dict(stored)
    for field in dataclasses.fields(record):
        value = stored.get(field.name)
        if isinstance(field.default, int) and isinstance(value, float) and value.is_integer():
            plain[field.name] = type(field.default)(value)
    return plain
