"""The JSON Schema (draft 2020-12) of a record, from its annotations."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from nest_megatron.plain import key_of

Schema = dict[str, Any]
_SCALARS: Mapping[object, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    types.NoneType: {"type": "null"},
    Any: {},
    object: {},
}


def of_record(kind: type) -> Schema:
    """The schema of a record; the records inside it lie under ``$defs``."""
    records: dict[str, Schema] = {}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": kind.__name__}
    own = _fields(kind, records)
    return {**head, **own, "$defs": dict(sorted(records.items()))}


def _fields(kind: type, records: dict[str, Schema]) -> Schema:
    hints = typing.get_type_hints(kind)
    stored = [field for field in dataclasses.fields(kind) if field.init]
    return {
        "type": "object",
        "properties": {key_of(f): _of(hints[f.name], records) for f in stored},
        "required": [key_of(f) for f in stored if f.default is f.default_factory],
        "additionalProperties": False,
    }


def _of(hint: Any, records: dict[str, Schema]) -> Schema:
    """The schema of an annotation; records that it names are added to ``records``."""
    if hint in _SCALARS:
        return dict(_SCALARS[hint])
    if isinstance(hint, typing.NewType):
        return _of(hint.__supertype__, records)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if hint.__name__ not in records:
            records[hint.__name__] = {}  # a record may hold itself
            records[hint.__name__] = _fields(hint, records)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of(each, records) for each in inner]}
    if origin is tuple and inner[-1] is not ...:
        items = [_of(each, records) for each in inner]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if origin is tuple:
        return {"type": "array", "items": _of(inner[0], records)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of(inner[1], records)}
    raise TypeError(f"no JSON Schema for {hint}")
