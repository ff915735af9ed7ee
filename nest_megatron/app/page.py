"""The page of one tab: a form, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from nicegui import app, ui
from nicegui.events import KeyEventArguments

import nest_megatron
from nest_megatron.app.run import Run
from nest_megatron.app.task import (
    BATCH,
    CHANGES,
    CLUSTER,
    CLUSTER_FILE,
    COMMAND,
    FREE,
    GPUS,
    MODEL,
    MODEL_FILE,
    RELEASE,
    SETTINGS,
    Answer,
    Task,
    Work,
)
from nest_megatron.layout.rulebook.facts import DEFAULT_VERSION, RELEASES

_MODEL, _COMMAND = "A model", "My Megatron-LM command"
_SOURCE = "Source"
#: The button that searches nothing, by what it prices.
_PRICES = {_MODEL: "What does this layout cost?", _COMMAND: "What does my command cost?"}
#: A form that shows what a plan is: one of a model, and one beside a command that runs today.
_EXAMPLES = {
    _MODEL: {MODEL: "llama3_8b", CLUSTER: "dgx_h100", GPUS: "64", BATCH: "512"},
    _COMMAND: {
        COMMAND: "torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py --num-layers 32 "
        "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --seq-length 8192 "
        "--max-position-embeddings 8192 --position-embedding-type rope --vocab-size 128256 "
        "--swiglu --normalization RMSNorm --disable-bias-linear "
        "--untie-embeddings-and-output-weights --bf16 --tensor-model-parallel-size 8 "
        "--sequence-parallel --use-distributed-optimizer --micro-batch-size 1 "
        "--global-batch-size 512",
        FREE: "all",
        CLUSTER: "dgx_h100",
    },
}
_GUIDE = """
1. Choose a **model** of the catalogue{or_command}.
2. Choose the **cluster** that it runs on, and how many **GPUs** of it.
3. **Plan** finds the fastest layout that is expected to fit, with its launch command.
   **{price}** searches nothing.
"""
#: Of a work, those whose answers stay on the page beside its own.
_BESIDE = {
    Work.WHATIF: {Work.PLAN, Work.ESTIMATE, Work.SIZES, Work.SHOW},
    Work.SHOW: {Work.SIZES},
}
#: With a contrast of 4.5 to 1 and more on light and on dark pages. Of two rules that are important
#: the one in the earlier layer wins, and NiceGUI has Quasar's in a later one.
_STYLE = """
.q-btn { text-transform: none; }
.q-field__bottom--animated { position: static; transform: none; }
.q-field--with-bottom { padding-bottom: 0; }
body { --q-primary: #2a65a8 !important; }
body.body--dark { --q-primary: #8ab8ea !important; --q-negative: #ff8a80 !important; }
@layer theme { .body--dark .q-btn.bg-primary { color: #14171c !important; } }
"""
_ERROR = "whitespace-pre-wrap break-words font-mono text-sm w-full text-negative"


Field = TypeVar("Field", ui.input, ui.textarea, ui.select)


def labelled(field: Field) -> Field:
    """A field with its label above it, whatever it holds."""
    return field.props("stack-label outlined dense").classes("w-full")


class NameField:
    """A field for a name of a list; another that is typed stays, so that its mistake is shown.

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
        saved: by the text of its button the name of a file, and the field of an answer for it.
        is_table: the text stands open above the report.
        make_more: adds controls between the buttons and the answer.
    """

    def __init__(
        self,
        heading: str,
        saved: Mapping[str, tuple[str, str]],
        *,
        is_table: bool = False,
        make_more: Callable[[], None] = lambda: None,
    ) -> None:
        self.answer = Answer(text="")
        with ui.column().classes("w-full min-w-0") as self._column:
            self._heading = heading_label(heading, level=2)
            with ui.row():
                for label, (name, part) in saved.items():
                    save = partial(self._save, name, part)
                    ui.button(label, on_click=save).props("outline")
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

    def _save(self, name: str, part: str) -> None:
        ui.download.content(getattr(self.answer, part), name)

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


@dataclass(slots=True, kw_only=True)
class Kept:
    """What a tab has again after a reload.

    Args:
        form: values of the fields, by their labels.
        shown: the forms that were answered, in their order, with their answers.
    """

    form: dict[str, str] = field(default_factory=dict)
    shown: list[tuple[Task, Answer]] = field(default_factory=list)


class Page:
    """What one tab shows; no other tab sees it.

    Args:
        is_local: only this machine reaches the page, so that what is typed may name files.
    """

    def __init__(self, *, is_local: bool) -> None:
        self._is_local = is_local
        self._run: Run | None = None
        self._planned = self._sized = Task(work=Work.PLAN)
        self._is_closed = False
        self._kept: Kept | None = None
        self._form: dict[str, NameField | ui.input | ui.textarea] = {}
        ui.context.client.on_connect(self._restore)
        ui.context.client.on_delete(self._close)
        ui.add_css(_STYLE)
        self._keys = ui.keyboard(self._on_key, active=False, ignore=[])
        with ui.element("div").classes("w-full flex flex-col lg:flex-row lg:flex-nowrap gap-8"):
            with ui.column().classes("w-full lg:w-96 shrink-0"):
                self._make_form()
            with ui.column().classes("w-full lg:w-auto grow min-w-0"):
                self._make_results()
                self._make_guide()
        for each in (self._source, *self._form.values()):
            each.on_value_change(self._keep)

    def _make_form(self) -> None:
        heading_label("Plan a Megatron training job", level=1)
        self._source = ui.toggle([_MODEL, _COMMAND], value=_MODEL).props("no-caps spread")
        self._source.classes("w-full").visible = self._is_local
        with ui.column().classes("w-full") as by_model:
            self._form[MODEL] = NameField(MODEL, nest_megatron.models(), "llama3_8b")
            self._add_text(MODEL_FILE)
        with ui.column().classes("w-full") as by_command:
            self._add_text(COMMAND)
            self._add_line(FREE, value="all")
            self._form[RELEASE] = NameField(RELEASE, RELEASES, DEFAULT_VERSION)
        by_model.bind_visibility_from(self._source, "value", value=_MODEL)
        by_command.bind_visibility_from(self._source, "value", value=_COMMAND)
        self._form[CLUSTER] = NameField(CLUSTER, nest_megatron.clusters(), "dgx_h100")
        self._add_text(CLUSTER_FILE)
        with ui.row(wrap=False).classes("w-full"):
            gpus = self._add_line(GPUS, placeholder="8, or 8..64")
            gpus.tooltip("8..64, which doubles, or 8..64:8 plans each; the batch stays")
            self._add_line(BATCH, placeholder="as given")
        self._form[SETTINGS] = labelled(
            ui.textarea(SETTINGS, placeholder="parallel.tensor_model_parallel_size=8")
        ).props("autogrow")
        with ui.row().classes("moves-focus"):
            self._buttons = [
                ui.button("Plan", on_click=self._plan),
                ui.button(_PRICES[_MODEL], on_click=lambda: self._start(Work.ESTIMATE)),
                ui.button("Other planners", on_click=lambda: self._start(Work.PLANNERS)),
            ]
            self._buttons[2].props("outline").tooltip("The job of a model, by published planners")
            self._buttons[2].bind_visibility_from(self._source, "value", value=_MODEL)
            self._buttons[1].bind_text_from(self._source, "value", backward=_PRICES.get)
            self._buttons[1].props("outline").tooltip(
                "Nothing is searched: the layout of the "
                "command, or of the settings with Megatron's defaults"
            )

    def _add_line(self, label: str, value: str = "", placeholder: str | None = None) -> ui.input:
        """A field of one line, in which Enter plans."""
        field = self._form[label] = labelled(ui.input(label, value=value, placeholder=placeholder))
        return field.on("keydown.enter", self._plan)

    def _add_text(self, label: str) -> None:
        """A field for a path or for contents, where those are taken."""
        field = self._form[label] = labelled(ui.textarea(label)).props("autogrow")
        field.visible = self._is_local

    def _make_guide(self) -> None:
        """What to fill first, until there is an answer."""
        with ui.column().classes("w-full moves-focus") as self._guide:
            heading_label("What to fill first", level=2)
            ui.markdown().bind_content_from(self._source, "value", backward=self._guide_text)
            load = ui.button("Load an example", on_click=self._load_example)
            self._buttons.append(load.props("outline"))

    def _guide_text(self, source: str) -> str:
        other = f", or switch to **{_COMMAND}** and paste what you launch today"
        return _GUIDE.format(or_command=other if self._is_local else "", price=_PRICES[source])

    def _load_example(self) -> None:
        for label, value in _EXAMPLES[self._source.value].items():
            self._form[label].value = value

    def _make_results(self) -> None:
        with ui.row().classes("items-center moves-focus"):
            self._working = ui.spinner()
            self._progress = ui.label().props("role=status")
            self._elapsed = ui.label()  # apart, so that no second is read out
            self._stop = ui.button("Cancel", on_click=self._cancel).props("flat")
        self._error = ui.label().classes(_ERROR).props("role=alert tabindex=-1")
        saved = {"Save the table": ("sizes.csv", "table")}
        self._sizes = Section("By number of GPUs", saved, is_table=True, make_more=self._make_sizes)
        saved = {"Save this comparison": ("planners.html", "page")}
        self._planners = Section("Planners", saved)
        saved = {
            "Save the plan": ("plan.yaml", "plan_file"),
            "Save the report": ("plan.html", "page"),
        }
        self._found = Section("The plan", saved, make_more=self._make_what_if)
        self._working.visible = self._stop.visible = False

    def _make_sizes(self) -> None:
        with ui.row().classes("items-center moves-focus"):
            self._size = labelled(ui.select([], label="Plan for GPUs"))
            self._size.classes("w-32", remove="w-full")
            self._buttons.append(ui.button("Show", on_click=self._show_size).props("outline"))

    def _make_what_if(self) -> None:
        with ui.row(wrap=False).classes("w-full items-center moves-focus"):
            example = "gpus=16,32 memory=141GiB"
            changes = self._form[CHANGES] = labelled(ui.input(CHANGES, placeholder=example))
            changes.classes("grow").on("keydown.enter", self._compare)
            self._buttons.append(ui.button("Compare", on_click=self._compare).props("outline"))
        saved = {"Save this comparison": ("whatif.html", "page")}
        self._changed = Section("On changed clusters", saved, is_table=True)

    def _typed(self) -> dict[str, str]:
        """What each field holds, by its label."""
        return {label: (each.value or "").strip() for label, each in self._form.items()}

    def _task(self, work: Work) -> Task:
        typed, by_command = self._typed(), self._source.value == _COMMAND
        return Task(
            work=work,
            is_local=self._is_local,
            model="" if by_command else typed[MODEL_FILE] or typed[MODEL],
            cluster=typed[CLUSTER_FILE] or typed[CLUSTER],
            command=typed[COMMAND] if by_command else "",
            free=typed[FREE],
            megatron_version=typed[RELEASE],
            num_gpus=typed[GPUS],
            global_batch_size=typed[BATCH],
            settings=typed[SETTINGS],
        )

    async def _plan(self) -> None:
        await self._start(Work.SIZES if ".." in self._typed()[GPUS] else Work.PLAN)

    async def _start(self, work: Work) -> None:
        await self._answer(self._task(work))

    async def _compare(self) -> None:
        """Plan the job that is shown again, changed; the form may be another by now."""
        changes, plan_file = self._typed()[CHANGES], self._found.answer.plan_file
        job = dataclasses.replace(self._planned, work=Work.WHATIF, plan_file=plan_file)
        await self._answer(dataclasses.replace(job, changes=changes))

    async def _show_size(self) -> None:
        """Show the plan that was found for a number of GPUs."""
        if (plan_file := self._sizes.answer.plans.get(self._size.value)) is None:
            return  # no number has a plan
        await self._answer(dataclasses.replace(self._sized, work=Work.SHOW, plan_file=plan_file))

    async def _answer(self, task: Task) -> None:
        if self._run is not None:  # a button that is pressed twice
            return
        self._run = Run(task)
        self._set_working(True)
        try:
            async for message in self._run.messages():
                if self._is_closed:
                    continue  # until the process has ended
                if isinstance(message, Answer):
                    self._show(task, message)
                else:
                    self._progress.text = message.text
                    self._elapsed.text = f"{message.elapsed_s:.0f} s"
        finally:
            self._run = None
            if not self._is_closed:
                self._set_working(False)

    def _set_working(self, is_working: bool) -> None:
        self._working.visible = self._stop.visible = self._keys.active = is_working
        for button in self._buttons:
            button.set_enabled(not is_working)
        if is_working:
            self._progress.text, self._elapsed.text = "planning", ""
            focus(self._stop)

    def _keep(self) -> None:
        """Keep the form as it is now, for a reload."""
        if self._kept is not None:
            self._kept.form = {label: each.value for label, each in self._form.items()}
            self._kept.form[_SOURCE] = self._source.value

    def _restore(self) -> None:
        """Show what the tab had before a reload; called again where a connection was lost."""
        if self._kept is not None:
            return
        kept = app.storage.tab.setdefault("kept", Kept())
        for label, each in ((_SOURCE, self._source), *self._form.items()):
            if label in kept.form:
                each.value = kept.form[label]
        for task, answer in kept.shown:
            self._section(task, answer).show(answer)
        self._guide.visible = not kept.shown
        self._kept = kept

    def _show(self, task: Task, answer: Answer) -> None:
        self._error.text = answer.text if answer.is_error else ""
        for label, each in self._form.items():
            each.error = answer.mistakes.get(label)
        took, self._elapsed.text = self._elapsed.text, ""
        self._progress.text = "" if answer.is_error else f"Done after {took}."
        if answer.is_error:
            focus(self._error)
        else:
            section = self._section(task, answer)
            section.show(answer)
            section.focus()
            self._guide.visible = False
            if self._kept is not None:
                beside = _BESIDE.get(task.work, ())
                before = [each for each in self._kept.shown if each[0].work in beside]
                self._kept.shown = [*before, (task, answer)]

    def _section(self, task: Task, answer: Answer) -> Section:
        """Where an answer is shown; what it takes the place of is hidden."""
        if task.work is Work.WHATIF:
            return self._changed
        for section in (self._changed, self._found, self._planners):
            section.hide()
        if task.work is not Work.SHOW:
            self._sizes.hide()
        if task.work is Work.SIZES:
            self._sized = task
            sizes = [*answer.plans]
            self._size.set_options(sizes, value=sizes[0] if sizes else None)
            return self._sizes
        if task.work is Work.PLANNERS:
            return self._planners
        self._planned = task
        return self._found

    def _on_key(self, pressed: KeyEventArguments) -> None:
        if pressed.key.escape and pressed.action.keydown:
            self._cancel()

    def _close(self) -> None:
        self._is_closed = True
        self._cancel()

    def _cancel(self) -> None:
        if self._run is not None:
            self._run.cancel()
