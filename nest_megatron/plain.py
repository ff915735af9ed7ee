"""Frozen records to plain data and back, strictly."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from nest_megatron.errors import UserInputError, nearest

Record = TypeVar("Record")


def to_plain(value: object) -> Any:
    """Records, enums, tuples and mappings as dicts, lists, numbers and text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f for f in dataclasses.fields(value) if f.init and not _is_left_out(f, value))
        return {f.name: to_plain(getattr(value, f.name)) for f in fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def added(default: Any) -> Any:
    """A field that a released record did not have: written where it is not the default.

    Files written before, and their checksums, stay as they are.
    """
    return dataclasses.field(default=default, metadata={_ADDED: True})


_ADDED = "added"


def _is_left_out(field: dataclasses.Field[Any], value: object) -> bool:
    return bool(field.metadata.get(_ADDED)) and getattr(value, field.name) == field.default


def from_plain(kind: type[Record], value: object, where: str = "") -> Record:
    """Build a record from plain data.

    Args:
        where: path of the value in its file, for errors.

    Raises:
        UserInputError: for a missing or unknown key, a value of the wrong type, or a number that
            is not finite; the record's own checks run as well.
    """
    if not isinstance(value, Mapping):
        raise _wrong(where, value, f"a mapping for {kind.__name__}")
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    for key in value:
        if key not in fields:
            raise UserInputError(
                f"{where}.{key}".lstrip("."),
                value=value[key],
                limit=f"{kind.__name__} has no such field",
                fix=nearest(str(key), fields),
            )
    missing = [
        name
        for name, f in fields.items()
        if name not in value
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserInputError(
            where or kind.__name__,
            value=sorted(map(str, value)),
            limit=f"it lacks {', '.join(missing)}",
            fix="The file is incomplete; write it again.",
        )
    return kind(
        **{
            name: _convert(hints[name], item, f"{where}.{name}".lstrip("."))
            for name, item in value.items()
        }
    )


def _convert(hint: Any, value: object, where: str) -> Any:
    """One value as its annotation asks for."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is tuple:
        return _convert_tuple(arguments, value, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(where, value, "a mapping")
        key_hint, item_hint = arguments
        return {
            _convert(key_hint, key, f"{where}.{key}"): _convert(item_hint, item, f"{where}.{key}")
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, value, where)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _convert_enum(hint, value, where)
    return _convert_scalar(hint, value, where)


def _convert_union(arguments: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None:
        if type(None) in arguments:
            return None
        raise _wrong(where, value, "a value")
    kinds = [kind for kind in arguments if kind is not type(None)]
    for kind in kinds[:-1]:
        try:
            return _convert(kind, value, where)
        except UserInputError:
            continue
    return _convert(kinds[-1], value, where)


def _convert_tuple(arguments: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong(where, value, "a list")
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(value) != len(arguments):
        raise _wrong(where, value, f"a list of {len(arguments)}")
    pairs = enumerate(zip(arguments, value, strict=True))
    return tuple(_convert(hint, item, f"{where}[{i}]") for i, (hint, item) in pairs)


def _convert_enum(hint: type[Enum], value: object, where: str) -> Enum:
    try:
        return hint(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in hint)
        raise _wrong(where, value, f"one of {known}") from None


def _convert_scalar(hint: Any, value: object, where: str) -> Any:
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise _wrong(where, value, "a finite number")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise _wrong(where, value, f"a value of type {hint.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(where, value, "a finite number")
    return value


def _wrong(where: str, value: object, wanted: str) -> UserInputError:
    return UserInputError(
        where or "file",
        value=value,
        limit=f"it must be {wanted}",
        fix="Correct it or write the file again.",
    )
