"""JSON objects read strictly: each wrong value is named with its place, its limit and a fix."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nest_megatron.documents import parse_json
from nest_megatron.errors import UserInputError
from nest_megatron.files import read_text

_FIX = "Correct it in the file."


def wrong(where: str, value: object, limit: str, fix: str = _FIX) -> UserInputError:
    """The error for one value."""
    return UserInputError(where, value=value, limit=limit, fix=fix)


def read_json(path: Path, what: str) -> Fields:
    """The JSON object in a file.

    Raises:
        UserInputError: if it cannot be read, is no JSON, repeats a key or is no object.
    """
    text = read_text(path, what)
    return fields_of(parse_json(text, what, name=str(path), pairs=_once), "")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise wrong("key", twice[0], "it stands twice in one object")
    return found


def fields_of(value: object, where: str) -> Fields:
    """An object of the file, its place kept for errors."""
    if not isinstance(value, Mapping):
        raise wrong(where or "file", value, "it must be an object with named fields")
    return Fields(where=where, values=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """An object of a file.

    Args:
        where: its place, such as ``nodes.1[3]``; empty for the whole file.
    """

    where: str
    values: Mapping[str, Any]

    def place(self, name: str) -> str:
        """The place of a field."""
        return f"{self.where}.{name}".lstrip(".")

    def get(self, name: str) -> Any:
        """A field that must be there."""
        if name not in self.values:
            known = ", ".join(sorted(map(str, self.values))) or "nothing"
            raise wrong(
                self.place(name), None, f"it is missing; there are {known}", "Add it to the file."
            )
        return self.values[name]

    def number(self, name: str, *, least: float = 0.0, above: bool = False) -> float:
        """A finite number, not below ``least`` or, with ``above``, not at it either."""
        return number(self.get(name), self.place(name), least=least, above=above)

    def whole(self, name: str, *, most: int | None = None) -> int:
        """A whole number of at least 1; 4096.0 is one."""
        found = whole(self.get(name), self.place(name))
        if most is not None and found > most:
            raise wrong(self.place(name), found, f"it must be at most {most:,}")
        return found

    def flag(self, name: str) -> bool:
        """A truth value; 0 and 1 are some."""
        value = self.get(name)
        if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
            return bool(value)
        raise wrong(self.place(name), value, "it must be true or false")

    def items(self, name: str) -> list[Any]:
        """A list."""
        value = self.get(name)
        if not isinstance(value, list):
            raise wrong(self.place(name), value, "it must be a list")
        return value

    def objects(self, name: str) -> Iterator[Fields]:
        """A list of objects."""
        for index, value in enumerate(self.items(name)):
            yield fields_of(value, f"{self.place(name)}[{index}]")

    def inner(self, name: str) -> Fields:
        """An object inside this one."""
        return fields_of(self.get(name), self.place(name))

    def beyond(self, known: Collection[str]) -> list[str]:
        """Names that are not known."""
        return sorted(str(name) for name in self.values if name not in known)


def number(value: object, where: str, *, least: float = 0.0, above: bool = False) -> float:
    """A finite number that is large enough."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong(where, value, "it must be a number")
    if not _is_finite(value):
        raise wrong(where, value, "it must be finite")
    if value < least or (above and value == least):
        raise wrong(where, value, f"it must be {'above' if above else 'at least'} {least:g}")
    return float(value)


def _is_finite(value: float) -> bool:
    """Whether a double holds it; JSON's whole numbers have no largest one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def whole(value: object, where: str, *, least: int | None = 1) -> int:
    """A whole number that is large enough; ``None`` asks for no least one."""
    found = number(value, where, least=-math.inf if least is None else least)
    if not found.is_integer():
        raise wrong(where, value, "it must be a whole number")
    return int(found)
