"""The one way to work a value out once, with ``functools`` for functions of hashable arguments.

An object keeps the values of its methods by *keys*: the fields of their arguments that the values
depend on. A search asks for thousands of layouts that differ in none of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

_Record = TypeVar("_Record")
_Owner = TypeVar("_Owner", bound="Caching")
_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")

#: Values of one method that an object keeps; beyond them it starts with none.
MOST_VALUES = 1 << 20
_NONE_YET = object()
#: New objects after which cyclic garbage is looked for meanwhile; 700 by default.
_NEW_OBJECTS = 1_000_000


class Key(Generic[_Record]):
    """The fields of a record that some values depend on; ``of`` reads them.

    A field that is named nowhere, or twice, is an ``AssertionError``: a new field of a record has
    to be put into each of its keys.

    Args:
        reads: fields, or properties that are worked out of several.
        without_effect: fields that change no value while those that are read stay as they are.
        parts: keys of the fields that are records themselves.
    """

    def __init__(
        self,
        record: type[_Record],
        *,
        reads: tuple[str, ...],
        without_effect: tuple[str, ...] = (),
        **parts: Key[Any],
    ) -> None:
        self.reads: tuple[str, ...] = (
            *reads,
            *(f"{name}.{each}" for name in parts for each in parts[name].reads),
        )
        self.without_effect = without_effect
        self.of: Callable[[_Record], Any] = operator.attrgetter(*self.reads)
        fields = [each.name for each in dataclasses.fields(cast(Any, record)) if each.init]
        named = [each for each in (*reads, *without_effect, *parts) if each in fields]
        assert sorted(named) == sorted(fields), f"{record.__name__}: {sorted(fields)}"


class Caching:
    """An object whose methods are ``cached_by`` keys; copies of it share what they keep."""

    kept: defaultdict[str, dict[Hashable, Any]]

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        """An object that keeps nothing yet."""
        made = super().__new__(cls)
        object.__setattr__(made, "kept", defaultdict(dict))
        return made


def cached_by(
    key: Key[Any] | Callable[..., Hashable],
) -> Callable[
    [Callable[Concatenate[_Owner, _Arguments], _Value]],
    Callable[Concatenate[_Owner, _Arguments], _Value],
]:
    """Work a method out once for each key of its arguments, which are passed by place.

    Args:
        key: of a method's only argument; or a function that takes what the method takes, and gives
            what its value depends on.
    """

    def decorate(
        method: Callable[Concatenate[_Owner, _Arguments], _Value],
    ) -> Callable[Concatenate[_Owner, _Arguments], _Value]:
        name, compute = method.__name__, cast(Callable[..., _Value], method)
        function = cast(Callable[..., Hashable], key.of if isinstance(key, Key) else key)

        def keep(self: Any, found: Hashable, *args: Any) -> Any:
            kept, value = self.kept[name], compute(self, *args)
            if len(kept) >= MOST_VALUES:
                kept.clear()
            kept[found] = value
            return value

        def by_function(self: Any, *args: Any) -> Any:
            found = function(self, *args)
            value = self.kept[name].get(found, _NONE_YET)
            return keep(self, found, *args) if value is _NONE_YET else value

        def by_fields(self: Any, record: Any) -> Any:
            found = function(record)
            value = self.kept[name].get(found, _NONE_YET)
            return keep(self, found, record) if value is _NONE_YET else value

        cached = functools.wraps(method)(by_fields if isinstance(key, Key) else by_function)
        cast(Any, cached).key = key  # for the tests
        return cast(Callable[Concatenate[_Owner, _Arguments], _Value], cached)

    return decorate


@contextlib.contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """For work that makes millions of small objects and keeps most of them."""
    usual = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
