"""Frozen records to plain data and back, strictly: the one converter for YAML and JSON.

cattrs builds the records and keeps the path of a value that does not fit; what a user reads of it
is worded here (decision 011 of ``docs/decisions.md``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NewType, TypeVar, dataclass_transform

from nest_megatron.errors import UserInputError, nearest
from nest_megatron.units import is_quantity, read_quantity

if TYPE_CHECKING:
    from cattrs import Converter

Record = TypeVar("Record")
Hook = Callable[[Any, Any], Any]

#: Types of fields of another program's file, whose records check nothing themselves.
Count = NewType("Count", int)
Index = NewType("Index", int)
Positive = NewType("Positive", float)
NonNegative = NewType("NonNegative", float)
_RESTRICTED = ((Count, int, 1), (Index, int, 0), (Positive, float, None), (NonNegative, float, 0))


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def frozen(kind: type[Record]) -> type[Record]:
    """A frozen dataclass with slots, whose fields are passed by name.

    >>> @frozen
    ... class Point:
    ...     x: int = 0
    >>> Point(x=1)
    Point(x=1)
    """
    return dataclass(frozen=True, slots=True, kw_only=True)(kind)


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
        fields = (f for f in dataclasses.fields(value) if f.init and not _is_left_out(f, value))
        return {key_of(f): to_plain(getattr(value, f.name)) for f in fields}
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


def _is_left_out(field: dataclasses.Field[Any], value: object) -> bool:
    return is_added(field) and getattr(value, field.name) == field.default


def from_plain(kind: type[Record], value: object, where: str = "", source: Source = OWN) -> Record:
    """Build a record from plain data.

    Args:
        where: path of the value in its file, or what it is, with a colon behind it; for errors.

    Raises:
        UserInputError: for a missing or unknown key, a value of the wrong type, or a number that
            is not finite; the record's own checks run as well.
    """
    from cattrs.errors import BaseValidationError

    try:
        return _converter(source).structure(value, kind)
    except (BaseValidationError, _WrongError) as error:
        raise _reported(error, where, source) from None


class _WrongError(Exception):
    """A value, or its field ``name``, that is not what is asked for; the source has a fix too."""

    def __init__(self, value: object, limit: str, *, name: str = "", fix: str = "") -> None:
        super().__init__(limit)
        self.value, self.limit, self.name, self.fix = value, limit, name, fix


def _reported(error: BaseException, where: str, source: Source) -> BaseException:
    """The first error as a user reads it; a record's own stays as it is."""
    from cattrs.errors import BaseValidationError

    path = _path(error)
    while isinstance(error, BaseValidationError):
        kind, error = error.cl, error.exceptions[0]
        path += _path(error, kind)
    if not isinstance(error, _WrongError):
        return error
    path += f".{error.name}" if error.name else ""
    joined = f"{where} {path.lstrip('.')}" if where.endswith(":") else f"{where}{path}".lstrip(".")
    what, fix = joined.rstrip(": ") or "file", error.fix or source.correct
    return UserInputError(what, error.value, limit=error.limit, fix=fix)


def _path(error: BaseException, kind: Any = None) -> str:
    """Where an error was found in a record; cattrs notes its place from the inside outwards."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    keys = {f.name: key_of(f) for f in fields}
    parts = []
    for note in reversed(getattr(error, "__notes__", ())):
        name = getattr(note, "name", None)
        place = getattr(note, "index", None) if name is None else keys.get(name, name)
        parts.append(f"[{place}]" if isinstance(place, int) else f".{place}")
    return "".join(parts)


@functools.cache
def _converter(source: Source) -> Converter:
    """A converter of cattrs with a strict hook for each form of annotation that records have."""
    from cattrs import Converter

    converter = Converter()
    scalar = functools.partial(_scalar, source)
    for kind in (bool, int, float, str, Enum):  # an enumeration of texts is dispatched as a text
        converter.register_structure_hook(kind, scalar)
    converter.register_structure_hook_func(lambda hint: hint is object, lambda value, _: value)
    for restricted, number, least in _RESTRICTED:
        hook = functools.partial(_restricted, source, number, least)
        converter.register_structure_hook(restricted, hook)
    for predicate, factory in (
        (dataclasses.is_dataclass, functools.partial(_record_hook, source)),
        (functools.partial(_has_origin, (tuple,)), _tuple_hook),
        (_is_mapping, _mapping_hook),
        (functools.partial(_has_origin, (typing.Union, types.UnionType)), _union_hook),
    ):
        converter.register_structure_hook_factory(predicate, functools.partial(factory, converter))
    return converter


def _has_origin(origins: tuple[Any, ...], hint: Any) -> bool:
    return typing.get_origin(hint) in origins


def _is_mapping(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _record_hook(source: Source, converter: Converter, kind: Any) -> Hook:
    """Reads a record's fields, after its keys are checked."""
    from cattrs.gen import make_dict_structure_fn, override

    fields = {key_of(f): f for f in dataclasses.fields(kind) if f.init}
    renamed: Any = {f.name: override(rename=key) for key, f in fields.items() if key != f.name}
    build = make_dict_structure_fn(kind, converter, **renamed)

    def structure(value: Any, _: Any) -> Any:
        for key, item in _mapping(value).items():
            if key not in fields and not source.is_foreign:
                limit, fix = "there is no such field", nearest(str(key), fields)
                raise _WrongError(item, limit, name=str(key), fix=fix)
        for name, field in fields.items():
            if name not in value and field.default is field.default_factory:  # both are missing
                limit, fix = "it is missing, and has no default", source.add.format(name=name)
                raise _WrongError(None, limit, name=name, fix=fix)
        if source.has_units:
            value = {key: _plain_number(item, fields[key]) for key, item in value.items()}
        return build(value, kind)

    return structure


def is_number(field: dataclasses.Field[Any]) -> bool:
    """Whether a field holds a number, or numbers in a list or a mapping."""
    return re.search(r"\b(int|float)\b", str(field.type)) is not None


def without_unit(value: Any, name: str, what: str = "") -> Any:
    """Numbers of a field that are written with a unit as plain ones, all else as it is.

    Raises:
        UserInputError: for a unit of something else than the field's name says.
    """
    if isinstance(value, Mapping):
        return {key: without_unit(item, name, what) for key, item in value.items()}
    if isinstance(value, str) and is_quantity(value):
        return read_quantity(value, name, what)
    return value


def _plain_number(value: Any, field: dataclasses.Field[Any]) -> Any:
    if not is_number(field):
        return value
    try:
        return without_unit(value, field.name)
    except UserInputError as error:
        raise _WrongError(error.value, error.limit, name=key_of(field), fix=error.fix) from None


def _tuple_hook(converter: Converter, hint: Any) -> Hook:
    arguments = typing.get_args(hint)

    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _WrongError(value, "it must be a list")
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(value) != len(kinds):
            raise _WrongError(value, f"it must be a list of {len(kinds)}")
        pairs = enumerate(zip(kinds, value, strict=True))
        return tuple(_item(converter, kind, item, at) for at, (kind, item) in pairs)

    return structure


def _mapping_hook(converter: Converter, hint: Any) -> Hook:
    names, items = typing.get_args(hint)

    def structure(value: Any, _: Any) -> Any:
        return {
            _item(converter, names, key, str(key)): _item(converter, items, item, str(key))
            for key, item in _mapping(value).items()
        }

    return structure


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _WrongError(value, "it must be a mapping of names to values")
    return value


def _item(converter: Converter, kind: Any, value: Any, place: int | str) -> Any:
    """An item of a collection; an error takes a note of its place, as cattrs notes a field's."""
    from cattrs.errors import IterableValidationNote

    try:
        return converter.structure(value, kind)
    except Exception as error:
        error.add_note(IterableValidationNote(f"at {place}", place, kind))
        raise


def _union_hook(converter: Converter, hint: Any) -> Hook:
    """Tries the members of a union in order; the error is the last one's."""
    *kinds, last = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    optional = types.NoneType in typing.get_args(hint)

    def structure(value: Any, _: Any) -> Any:
        if value is None and optional:
            return None
        for kind in kinds:
            with contextlib.suppress(Exception):
                return converter.structure(value, kind)
        return converter.structure(value, last)

    return structure


def _scalar(source: Source, value: Any, kind: Any) -> Any:
    """A number, a truth value, a text or a member of an enumeration."""
    if issubclass(kind, Enum):
        return _member(kind, value)
    if kind is bool and source.is_foreign and isinstance(value, int) and value in (0, 1):
        return bool(value)
    accepted, wanted = _SCALARS[kind]
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, accepted):
        raise _WrongError(value, wanted)
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise _WrongError(value, "it must be a finite number")
    is_whole = source.whole_floats and isinstance(value, float) and value.is_integer()
    if kind is int and isinstance(value, float) and not is_whole:
        raise _WrongError(value, wanted)
    return kind(value)


_SCALARS: Mapping[type, tuple[Any, str]] = {
    bool: (bool, "it must be true or false"),
    int: (int | float, "it must be a whole number"),
    float: (int | float, "it must be a number"),
    str: (str, "it must be text"),
}


def _member(kind: type[Enum], value: Any) -> Enum:
    try:
        return kind(value)
    except ValueError:
        known = [str(member.value) for member in kind]
        fix = nearest(value, known) if isinstance(value, str) else ""
        raise _WrongError(value, f"it must be one of {', '.join(known)}", fix=fix) from None


def _restricted(source: Source, kind: type, least: float | None, value: Any, _: Any) -> Any:
    """A number of at least so much, or above 0."""
    found = _scalar(source, value, kind)
    if least is None and found <= 0:
        raise _WrongError(value, "it must be above 0")
    if least is not None and found < least:
        raise _WrongError(value, f"it must be at least {least}")
    return found
