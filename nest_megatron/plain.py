"""Frozen records and names; records to plain data and back, strictly, by the one converter.

No number is made of a text but of one with a unit or an exponent, and an error names the place of
the value in its file (decision 011 of ``docs/decisions.md``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, NewType, TypeVar, cast, dataclass_transform

import msgspec
import msgspec.structs

from nest_megatron.errors import UserInputError, nearest
from nest_megatron.units import is_quantity, read_quantity

Record = TypeVar("Record")

#: Types of fields of another program's file, whose records check nothing themselves.
Count = NewType("Count", int)
Index = NewType("Index", int)
Positive = NewType("Positive", float)
NonNegative = NewType("NonNegative", float)
#: The number behind each of them, and the least that it may be; ``None`` is above 0.
_RESTRICTED: Mapping[Any, tuple[type, float | None]] = {
    Count: (int, 1),
    Index: (int, 0),
    Positive: (float, None),
    NonNegative: (float, 0),
}


class Name(StrEnum):
    """An enumeration whose members hash as fast as the text they are.

    ``Enum`` hashes a member's name in Python; members are keys of dictionaries that a search looks
    up millions of times.
    """

    __hash__ = str.__hash__


class _Frozen(msgspec.StructMeta):
    """Makes classes that C code constructs, copies and hashes, with the fields of a dataclass."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
        declare = dataclass(init=False, repr=False, eq=False, match_args=False, kw_only=True)
        declared: Any = declare(type(name, (), dict(namespace)))
        fields: dict[str, dataclasses.Field[Any]] = declared.__dataclass_fields__
        for each, field in fields.items():
            namespace.pop(each, None)
            if field.default_factory is not dataclasses.MISSING:
                namespace[each] = msgspec.field(default_factory=field.default_factory)
            elif field.default is not dataclasses.MISSING:
                namespace[each] = field.default
        inherited = (getattr(base, "__dataclass_fields__", {}) for base in reversed(bases))
        namespace["__dataclass_fields__"] = functools.reduce(operator.or_, (*inherited, fields))
        return super().__new__(
            cls, name, bases, namespace, frozen=True, kw_only=True, cache_hash=True, gc=False
        )


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def frozen(kind: type[Record]) -> type[Record]:
    """A frozen dataclass with slots, whose fields are passed by name, as a ``msgspec.Struct``.

    >>> @frozen
    ... class Point:
    ...     x: int = 0
    >>> Point(x=1)
    Point(x=1)
    """
    if msgspec.Struct in kind.__mro__:  # a subclass of a record is one
        return kind
    namespace = {name: each for name, each in vars(kind).items() if name not in _OF_ALL_CLASSES}
    bases = tuple(base for base in kind.__bases__ if base is not object)
    return cast(type[Record], _Frozen(kind.__name__, (*bases, msgspec.Struct), namespace))


_OF_ALL_CLASSES = ("__dict__", "__weakref__")


def set_field(record: object, name: str, value: object) -> None:
    """Set a field of a frozen record, in its ``__post_init__``."""
    msgspec.structs.force_setattr(cast(msgspec.Struct, record), name, value)


if TYPE_CHECKING:
    from dataclasses import replace as replace  # noqa: PLC0414
else:
    replace = msgspec.structs.replace


@frozen
class Source:
    """Who wrote plain data: how strictly it is read, and what errors advise.

    Args:
        correct: what to do about a wrong value.
        add: what to do about a missing field, with its ``{name}``.
        whole_floats: 8e10 is taken as the whole number that it is.
        is_foreign: another program's, which writes more fields than are read here, and 0 and 1 for
            truth values.
        has_units: a number may have a unit behind it ("100GB/s"); the field's name says of what.
    """

    correct: str = "Correct it or write the file again."
    add: str = "The file is incomplete; write it again."
    whole_floats: bool = False
    is_foreign: bool = False
    has_units: bool = False


#: Files that this package writes.
OWN = Source()


def to_plain(value: object) -> Any:
    """Records, enums, tuples, sets and mappings as dicts, lists, numbers and text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {f: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        kept = {f: item for f, item in held.items() if not (is_added(f) and item == f.default)}
        return {key_of(f): to_plain(item) for f, item in kept.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(map(to_plain, value))
    return value


def added(default: Any) -> Any:
    """A field that files leave out where it has its default."""
    return dataclasses.field(default=default, metadata={_ADDED: True})


def is_added(field: dataclasses.Field[Any]) -> bool:
    """Whether files leave the field out where it has its default."""
    return bool(field.metadata.get(_ADDED))


def written_as(name: str) -> Any:
    """A field that files have under another name."""
    return dataclasses.field(metadata={_WRITTEN_AS: name})


_ADDED, _WRITTEN_AS = "added", "written_as"


def key_of(field: dataclasses.Field[Any]) -> str:
    """The name that files give a record's field."""
    name: str = field.metadata.get(_WRITTEN_AS, field.name)
    return name


def from_plain(kind: type[Record], value: object, where: str = "", source: Source = OWN) -> Record:
    """Build a record from plain data.

    Args:
        where: path of the value in its file, or what it is, with a colon behind it; for errors.

    Raises:
        UserInputError: for a missing or unknown key, a value of the wrong type, or a number that
            is not finite; the record's checks run as well.
    """
    return cast(Record, _read(kind, value, where, source))


def _read(hint: Any, value: Any, path: str, source: Source) -> Any:
    """A value of the type that an annotation names.

    Args:
        path: of the value, from ``where`` on.
    """
    if dataclasses.is_dataclass(hint):
        return _record(hint, value, path, source)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return value if hint in (object, Any) else _scalar(hint, value, path, source)
    if origin in (typing.Union, types.UnionType):
        return _member(arguments, value, path, source)
    if origin in (tuple, frozenset):
        if not isinstance(value, list | tuple):
            raise _wrong(path, value, "it must be a list", source)
        is_long = origin is frozenset or arguments[-1] is Ellipsis
        kinds = arguments[:1] * len(value) if is_long else arguments
        if len(value) != len(kinds):
            raise _wrong(path, value, f"it must be a list of {len(kinds)}", source)
        pairs = enumerate(zip(kinds, value, strict=True))
        return origin(_read(each, item, _at(path, at), source) for at, (each, item) in pairs)
    names, items = arguments
    places = {key: _at(path, str(key)) for key in _mapping(value, path, source)}
    return {
        _read(names, key, at, source): _read(items, value[key], at, source)
        for key, at in places.items()
    }


def _at(path: str, place: str | int) -> str:
    """The path of a field, or of an item of a list."""
    part = f"[{place}]" if isinstance(place, int) else f".{place}"
    return f"{path} {part.lstrip('.')}" if path.endswith(":") else f"{path}{part}".lstrip(".")


def _wrong(path: str, value: object, limit: str, source: Source, fix: str = "") -> UserInputError:
    return UserInputError(path.rstrip(": ") or "file", value, limit, fix or source.correct)


def _mapping(value: Any, path: str, source: Source) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(path, value, "it must be a mapping of names to values", source)
    return value


#: The types of a record's fields.
_hints = functools.cache(typing.get_type_hints)


def _record(kind: Any, value: Any, path: str, source: Source) -> Any:
    """A record of fields, whose keys are checked before their values."""
    fields = {key_of(f): f for f in dataclasses.fields(kind) if f.init}
    for key, item in _mapping(value, path, source).items():
        if key not in fields and not source.is_foreign:
            fix = nearest(str(key), fields)
            raise _wrong(_at(path, str(key)), item, "there is no such field", source, fix)
    for key, field in fields.items():
        has_default = field.default is not field.default_factory  # else both are MISSING
        if key not in value and not has_default:
            limit, fix = "it is missing, and has no default", source.add.format(name=key)
            raise _wrong(_at(path, key), None, limit, source, fix)
    found = {}
    for key, field in fields.items():
        if key in value:
            item, at = value[key], _at(path, key)
            if source.has_units and is_number(field):
                item = without_unit(item, field.name, at)
            found[field.name] = _read(_hints(kind)[field.name], item, at, source)
    return kind(**found)


def is_number(field: dataclasses.Field[Any]) -> bool:
    """Whether a field holds a number, or numbers in a list or a mapping."""
    return re.search(r"\b(int|float)\b", str(field.type)) is not None


#: Numbers that YAML 1.1 takes for texts.
_WITHOUT_POINT = re.compile(r"[-+]?\d+[eE][-+]?\d+")


def without_unit(value: Any, name: str, what: str = "") -> Any:
    """Numbers of a field that are written with a unit or as 3e-05 as plain ones, all else as it is.

    Raises:
        UserInputError: for a unit of something else than the field's name says.
    """
    if isinstance(value, Mapping):
        return {key: without_unit(item, name, what) for key, item in value.items()}
    if isinstance(value, str):
        if is_quantity(value):
            return read_quantity(value, name, what)
        if _WITHOUT_POINT.fullmatch(value):
            return float(value)
    return value


def _member(kinds: Sequence[Any], value: Any, path: str, source: Source) -> Any:
    """A value of the first type of a union that it fits; the error is the last type's."""
    *others, last = [kind for kind in kinds if kind is not types.NoneType]
    if value is None and types.NoneType in kinds:
        return None
    for kind in others:
        with contextlib.suppress(Exception):
            return _read(kind, value, path, source)
    return _read(last, value, path, source)


def _scalar(kind: Any, value: Any, path: str, source: Source) -> Any:
    """A number, a truth value, a text or a member of an enumeration."""
    if kind in _RESTRICTED:
        number, least = _RESTRICTED[kind]
        found = _scalar(number, value, path, source)
        if least is None and found <= 0:
            raise _wrong(path, value, "it must be above 0", source)
        if least is not None and found < least:
            raise _wrong(path, value, f"it must be at least {least}", source)
        return found
    if issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            known = [str(member.value) for member in kind]
            fix = nearest(value, known) if isinstance(value, str) else ""
            limit = f"it must be one of {', '.join(known)}"
            raise _wrong(path, value, limit, source, fix) from None
    if kind is bool and source.is_foreign and isinstance(value, int) and value in (0, 1):
        return bool(value)
    accepted, wanted = _SCALARS[kind]
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, accepted):
        raise _wrong(path, value, wanted, source)
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise _wrong(path, value, "it must be a finite number", source)
    is_whole = source.whole_floats and isinstance(value, float) and value.is_integer()
    if kind is int and isinstance(value, float) and not is_whole:
        raise _wrong(path, value, wanted, source)
    return kind(value)


_SCALARS: Mapping[type, tuple[Any, str]] = {
    bool: (bool, "it must be true or false"),
    int: (int | float, "it must be a whole number"),
    float: (int | float, "it must be a number"),
    str: (str, "it must be text"),
}
