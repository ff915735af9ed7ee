"""The fields of the form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from nicegui import ui

Field = TypeVar("Field", ui.input, ui.textarea, ui.select)


def labelled(field: Field) -> Field:
    """A field with its label above it, whatever it holds."""
    return field.props("stack-label outlined dense").classes("w-full")


class NameField:
    """A field for a name of a list; another that is typed stays, so that its mistake is told.

    Quasar's own drops it in silence, some time after the field is left.
    """

    def __init__(self, label: str, names: Iterable[str], chosen: str) -> None:
        self._names, self._typed, self._is_left = [*names], "", True
        options = self._names.copy()
        self._field = labelled(ui.select(options, label=label, value=chosen, with_input=True))
        self._field.on("focus", self._enter)
        self._field.on("input-value", lambda event: self._type(event.args))
        self._field.on_value_change(lambda: self._type(""))
        self._field.on("blur", self._leave)

    @property
    def value(self) -> str:
        """What the user sees in it."""
        return self._typed or self._field.value or ""

    @value.setter
    def value(self, value: str) -> None:
        if value not in self._names:
            self._field.set_options(list(dict.fromkeys([*self._names, value])))
        self._field.value = value

    @property
    def error(self) -> str | None:
        """What is wrong with it; it goes away as the field changes."""
        error: str | None = self._field.error
        return error

    @error.setter
    def error(self, error: str | None) -> None:
        self._field.error = error

    def on_value_change(self, call: Callable[[], None]) -> None:
        """Call when another value is chosen."""
        self._field.on_value_change(call)

    def _enter(self) -> None:
        self._is_left = False

    def _type(self, text: object) -> None:
        self._typed = "" if self._is_left else str(text or "").strip()

    def _leave(self) -> None:
        self._is_left, value = True, self.value
        if value not in (self._field.value, ""):
            self._field.set_options(list(dict.fromkeys([*self._names, value])), value=value)
