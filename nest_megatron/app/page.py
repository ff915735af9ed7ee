"""The page of one tab: a form, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from nicegui import ui

import nest_megatron
from nest_megatron.app.asked import Answer, Asked, Work
from nest_megatron.app.run import Run

_MODEL, _COMMAND = "A model", "My Megatron-LM command"
_RELEASES = ("0.16.1", "0.20")
_PRINTED = "whitespace-pre-wrap break-words font-mono text-sm w-full"


class Page:
    """What one tab shows; no other tab sees it.

    Args:
        is_local: only this machine reaches the page, so that what is typed may name files.
    """

    def __init__(self, *, is_local: bool) -> None:
        self._is_local = is_local
        self._run: Run | None = None
        self._planned, self._shown = Asked(work=Work.PLAN), Answer(text="")
        ui.context.client.on_delete(self._cancel)
        with ui.row(wrap=False).classes("w-full items-start gap-8"):
            with ui.column().classes("w-96 shrink-0"):
                self._make_form()
            with ui.column().classes("grow min-w-0"):
                self._make_results()

    def _make_form(self) -> None:
        ui.label("Plan a Megatron training job").classes("text-h6").props("role=heading")
        self._source = ui.toggle([_MODEL, _COMMAND], value=_MODEL).classes("w-full")
        self._source.visible = self._is_local
        with ui.column().classes("w-full") as by_model:
            self._model = _choice("Model", nest_megatron.models(), "llama3_8b")
            self._own_model = self._text("Instead: path or contents of a model file")
        with ui.column().classes("w-full") as by_command:
            self._command = self._text("Command, or path of the script that launches it")
            self._free = ui.input("Flags that may change", value="all").classes("w-full")
            self._release = _choice("Megatron-LM release", _RELEASES, _RELEASES[0])
        by_model.bind_visibility_from(self._source, "value", value=_MODEL)
        by_command.bind_visibility_from(self._source, "value", value=_COMMAND)
        self._cluster = _choice("Cluster", nest_megatron.clusters(), "dgx_h100")
        self._own_cluster = self._text("Instead: path or contents of a cluster file")
        with ui.row(wrap=False).classes("w-full"):
            self._gpus = ui.input("GPUs", placeholder="as given")
            self._batch = ui.input("Global batch size", placeholder="as given")
        self._settings = ui.textarea(
            "More settings, one a line", placeholder="parallel.tensor_model_parallel_size=8"
        )
        self._settings.classes("w-full").props("autogrow")
        with ui.row():
            self._buttons = [
                ui.button("Plan", on_click=lambda: self._start(Work.PLAN)),
                ui.button("Price as it is", on_click=lambda: self._start(Work.ESTIMATE)),
            ]
            self._buttons[1].props("outline").tooltip(
                "Nothing is searched: the layout of the "
                "command, or of the settings with Megatron's defaults"
            )

    def _text(self, label: str) -> ui.textarea:
        """A field for a path or for contents, where those are taken."""
        field = ui.textarea(label).classes("w-full").props("autogrow")
        field.visible = self._is_local
        return field

    def _make_results(self) -> None:
        with ui.row().classes("items-center") as self._working:
            ui.spinner()
            self._progress = ui.label().props("role=status")
            ui.button("Cancel", on_click=self._cancel).props("flat")
        self._error = ui.label().classes(f"{_PRINTED} text-negative").props("role=alert")
        with ui.column().classes("w-full") as self._found:
            with ui.row():
                ui.button("Save the plan", on_click=self._save_plan).props("outline")
                ui.button("Save the report", on_click=self._save_report).props("outline")
            with ui.row(wrap=False).classes("w-full items-center"):
                example = "gpus=16,32 memory=141GiB"
                self._changes = ui.input("What if", placeholder=example).classes("grow")
                compare = ui.button("Compare", on_click=self._compare).props("outline")
                self._buttons.append(compare)
            self._table = ui.label().classes(_PRINTED)
            with ui.expansion("As the command line prints it").classes("w-full"):
                self._printed = ui.label().classes(_PRINTED)
            self._report = ui.element("iframe").props(
                'sandbox="allow-scripts" allow="clipboard-write *" title="Report of the plan"'
            )
            self._report.classes("w-full border-0").style("height: 90vh")
        self._working.visible = self._found.visible = False

    def _asked(self, work: Work) -> Asked:
        by_command = self._source.value == _COMMAND
        return Asked(
            work=work,
            is_local=self._is_local,
            model="" if by_command else _first(self._own_model.value, self._model.value),
            cluster=_first(self._own_cluster.value, self._cluster.value),
            command=_first(self._command.value) if by_command else "",
            free=_first(self._free.value),
            megatron_version=self._release.value,
            num_gpus=_first(self._gpus.value),
            global_batch_size=_first(self._batch.value),
            settings=_first(self._settings.value),
        )

    async def _start(self, work: Work) -> None:
        await self._answer(self._asked(work))

    async def _compare(self) -> None:
        """Plan the job that is shown again, changed; the form may be another by now."""
        changes, plan_file = _first(self._changes.value), self._shown.plan_file
        job = dataclasses.replace(self._planned, work=Work.WHATIF, plan_file=plan_file)
        await self._answer(dataclasses.replace(job, changes=changes))

    async def _answer(self, asked: Asked) -> None:
        if self._run is not None:  # a button that is pressed twice
            return
        self._run = Run(asked)
        self._set_working(True)
        try:
            async for message in self._run.messages():
                if isinstance(message, Answer):
                    self._show(asked, message)
                else:
                    self._progress.text = f"{message.text}, {message.elapsed_s:.0f} s"
        finally:
            self._run = None
            self._set_working(False)

    def _set_working(self, is_working: bool) -> None:
        self._progress.text, self._working.visible = "planning", is_working
        for button in self._buttons:
            button.set_enabled(not is_working)

    def _show(self, asked: Asked, answer: Answer) -> None:
        self._error.text = answer.text if answer.is_error else ""
        if answer.is_error:
            return
        if asked.work is Work.WHATIF:
            self._table.text = answer.text
            return
        self._planned, self._shown, self._table.text = asked, answer, ""
        self._printed.text = answer.text
        self._report.props["srcdoc"] = answer.page
        self._report.update()
        self._found.visible = True

    def _cancel(self) -> None:
        if self._run is not None:
            self._run.cancel()

    def _save_plan(self) -> None:
        ui.download.content(self._shown.plan_file, "plan.yaml")

    def _save_report(self) -> None:
        ui.download.content(self._shown.page, "plan.html")


def _choice(label: str, names: Iterable[str], chosen: str) -> ui.select:
    return ui.select([*names], label=label, value=chosen, with_input=True).classes("w-full")


def _first(*texts: str | None) -> str:
    """The first that is not empty, without the space around it."""
    return next((text.strip() for text in texts if text and text.strip()), "")
