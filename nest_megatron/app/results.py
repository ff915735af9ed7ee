"""Parts of the page: fields for names, and what came of a form with buttons that save files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from nicegui import ui

from nest_megatron.app.task import Answer

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


#: As the command line prints it: a table that is too wide has a scroll bar of its own.
_PRINTED = "whitespace-pre overflow-x-auto font-mono text-sm w-full"


class Section:
    """The answers of one kind, the last of which is shown.

    Args:
        heading: what they are.
        saved: by the text of its button the name of a file, and its contents.
        is_table: the text stands open above the report.
        make_more: adds controls between the buttons and the answer.
    """

    def __init__(
        self,
        heading: str,
        saved: Mapping[str, tuple[str, Callable[[Answer], str]]],
        *,
        is_table: bool = False,
        make_more: Callable[[], None] = lambda: None,
    ) -> None:
        self.answer = Answer(text="")
        with ui.column().classes("w-full min-w-0") as self._column:
            self._heading = heading_label(heading, level=2)
            with ui.row():
                for label, (name, contents) in saved.items():
                    self._add_save(label, name, contents)
            make_more()
            printed = "As the command line prints it"
            with ui.expansion(printed, value=is_table).classes("w-full"):
                box = f'tabindex=0 role=region aria-label="{heading}, as printed"'
                self._printed = ui.label().classes(_PRINTED).props(box)
            self._report = ui.element("iframe").props(
                f'sandbox="allow-scripts" allow="clipboard-write *" title="Report: {heading}"'
            )
            self._report.classes("w-full border-0").style("height: 90vh")
        self.hide()

    def _add_save(self, label: str, name: str, contents: Callable[[Answer], str]) -> None:
        def save() -> None:
            ui.download.content(contents(self.answer), name)

        ui.button(label, on_click=save).props("outline")

    def show(self, answer: Answer) -> None:
        """Show an answer in the place of the last one."""
        self.answer, self._printed.text = answer, answer.text
        self._report.props["srcdoc"] = answer.page
        self._report.visible = bool(answer.page)
        self._report.update()
        self._column.visible = True

    def hide(self) -> None:
        """Show nothing."""
        self._column.visible = False

    def focus(self) -> None:
        """Let the keyboard go on from here."""
        focus(self._heading)


def heading_label(text: str, *, level: int) -> ui.label:
    """A heading that the keyboard can be sent to."""
    label = ui.label(text).classes("text-h6" if level == 1 else "text-lg font-medium")
    return label.props(f"role=heading aria-level={level} tabindex=-1").classes("outline-none")


def focus(element: ui.element) -> None:
    """Send the keyboard to an element, unless the user has sent it elsewhere by then."""
    ui.run_javascript(
        f"const to = getHtmlElement({element.id}), from = document.activeElement;"
        "if (!from || from === document.body || from.closest('.moves-focus')) to?.focus();"
    )
