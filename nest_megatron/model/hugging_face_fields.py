"""Typed access to a parsed ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping

from nest_megatron.errors import UserInputError


class ConfigFields:
    """Typed access to a configuration, with errors that name the field."""

    __slots__ = ("_config", "_name")

    def __init__(self, config: Mapping[str, object], name: str) -> None:
        self._config = config
        self._name = name

    def get(self, key: str, default: object = None) -> object:
        """A field, or the default where it is absent or null."""
        value = self._config.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least ``least``; required where no default is given."""
        value = self.get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, f"it must be a whole number of at least {least}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, "it must be a number")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "it must be true or false")
        return value

    def wrong(self, key: str, limit: str) -> UserInputError:
        """The error for a field that cannot be used."""
        return UserInputError(
            f"model {self._name}: config.json: {key}",
            value=self._config.get(key),
            limit=limit,
            fix="Check that this is the model's own config.json.",
        )
