"""What a form asks for, and what the Python API answers."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nest_megatron
from nest_megatron.config.catalogue import named_cluster, named_model, read_cluster, read_spec
from nest_megatron.config.compose import compose
from nest_megatron.config.keywords import compose_keywords
from nest_megatron.config.overrides import SHORT_KEYS, parse, read_counts
from nest_megatron.errors import NestError, UserInputError, require_known, shortened
from nest_megatron.integrations.dry_run import names_script
from nest_megatron.integrations.megatron_lm.parser import tokens
from nest_megatron.layout import plan_file
from nest_megatron.layout.rulebook.facts import DEFAULT_VERSION, known_release
from nest_megatron.plain import frozen
from nest_megatron.printing import one_line
from nest_megatron.report.plan_rows import to_csv

if TYPE_CHECKING:
    from nest_megatron import Plan, WhatIf
    from nest_megatron.planner import Progress

#: What each field of the form is called.
MODEL, MODEL_FILE = "Model", "Or a model file: path or contents"
COMMAND = "Command, or bash train.sh of the script that launches it"
FREE, RELEASE = "Flags that may change", "Megatron-LM release"
CLUSTER, CLUSTER_FILE = "Cluster", "Or a cluster file: path or contents"
GPUS, BATCH, SETTINGS = "GPUs", "Global batch size", "More settings, one a line"
CHANGES = "What if"
_EITHER = "Model or command"

_NUMBER = r"(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?[A-Za-z]*(?:/s)?|true|false)"
_SECTIONS = "cluster|cost|memory|parallel|reliability|search"
#: Settings that cannot name a file: numbers, with a unit or not.
_NUMBERS = re.compile(
    rf"(?:gpus|memory|train\.global_batch_size|(?:{_SECTIONS})\.[\w.]+)={_NUMBER}(?:,{_NUMBER})*"
)
_OTHERS = "paths are refused, for they would be read for whoever reaches this page"
_LOCALLY = "Start the app without --host and come through `ssh -L`, or use the command line."
#: Stands in for a cluster that cannot be read, so that the other fields are read all the same.
_ANY_CLUSTER = "dgx_h100"


class Work(Enum):
    """What is done with a form."""

    PLAN = "plan"
    ESTIMATE = "estimate"
    WHATIF = "whatif"
    SIZES = "sizes"
    PLANNERS = "planners"
    SHOW = "show"


@frozen
class Answer:
    """What came of a form.

    Args:
        text: as the command line prints it.
        is_error: the text says why there is no plan.
        page: the report of a plan, the heat maps of its job on changed clusters, or planners.
        plan_file: the contents of its file.
        table: plans for several numbers of GPUs as CSV.
        plans: the contents of their files, by the number.
        mistakes: what is wrong with fields of the form, by their labels.
    """

    text: str
    is_error: bool = False
    page: str = ""
    plan_file: str = ""
    table: str = ""
    plans: Mapping[int, str] = field(default_factory=dict)
    mistakes: Mapping[str, str] = field(default_factory=dict)


@frozen
class Task:
    """A form as it was filled in, and what is done with it; an empty field has an empty text.

    Args:
        is_local: the browser is on this machine, so that texts may name its files.
        model, cluster: a name of the catalogue, a path, or the contents of a file.
        command: a Megatron-LM command, in the place of a model.
        free: flags of the command that may change, separated by commas.
        num_gpus, global_batch_size: as typed; several numbers of GPUs as ``--for-gpus`` takes them.
        settings: others, a line of ``section.key=value`` each.
        plan_file: contents of the plan that is shown, or whose job is planned again where no
            command is given.
        changes: those of the job, as ``nest-megatron whatif`` takes them.
    """

    work: Work
    is_local: bool = True
    model: str = ""
    cluster: str = ""
    command: str = ""
    free: str = ""
    megatron_version: str = DEFAULT_VERSION
    num_gpus: str = ""
    global_batch_size: str = ""
    settings: str = ""
    plan_file: str = ""
    changes: str = ""

    def keywords(self) -> dict[str, Any]:
        """The settings, as the API takes them."""
        sizes = {
            "cluster.num_gpus": self.num_gpus.strip(),
            "train.global_batch_size": self.global_batch_size.strip(),
        }
        lines = (line.partition("=") for line in self.settings.splitlines() if line.strip())
        sizes |= {key.strip(): value.strip() for key, _, value in lines}
        return {key: value for key, value in sizes.items() if value}

    def answer(
        self,
        on_progress: Progress | None = None,
        on_part: Callable[[str], None] = lambda text: None,
    ) -> Answer:
        """Ask the API; raises as it does, or first ``MistakesError`` with all that is wrong.

        Args:
            on_progress: called while one plan is searched.
            on_part: called with what is planned next, where that is several.
        """
        with tempfile.TemporaryDirectory(prefix="nest-megatron-app-") as name, _named(Path(name)):
            folder = Path(name)
            mistakes = [] if self.is_local else list(_files(self))
            if not mistakes and not self.plan_file:  # of whose job the fields were right
                mistakes = list(_mistakes(self, self._model(folder), self._cluster(folder)))
            if mistakes:
                raise MistakesError(mistakes)
            if self.work is Work.WHATIF:
                changed = self._what_if(folder, on_part)
                return Answer(text=str(changed), page=changed.to_html())
            if self.work is Work.SIZES:
                return self._sizes(folder, on_part)
            if self.work is Work.PLANNERS:
                return self._planners(folder, on_part)
            if self.work is Work.SHOW:
                found = nest_megatron.load_plan(self._written(folder))
            else:
                found = self._plan(folder, on_progress)
        page = found.explain().to_html()
        return Answer(text=str(found), page=page, plan_file=plan_file.dump(found.record))

    def _written(self, folder: Path) -> Path:
        path = folder / "plan.yaml"
        path.write_text(self.plan_file, encoding="utf-8")
        return path

    def _sizes(self, folder: Path, on_part: Callable[[str], None]) -> Answer:
        self._require_model("what if gpus=16,32 beside its plan asks that of a command")

        def sizes() -> Iterator[int]:
            for size in read_counts(self.num_gpus, GPUS, doubling=True):
                on_part(f"planning for {size} GPUs")
                yield size

        job = dataclasses.replace(self, num_gpus="")._job(folder)
        found = nest_megatron.plan_for_gpus(gpus=sizes(), **job)
        plans = {size: plan_file.dump(each.record) for size, each in found.plans().items()}
        return Answer(text=str(found), table=to_csv(found.rows), plans=plans)

    def _planners(self, folder: Path, on_part: Callable[[str], None]) -> Answer:
        from nest_megatron.research.comparison_run import compare_composed

        self._require_model("the other planners know no commands")
        job = self._job(folder)
        composed = compose_keywords(job.pop("model"), job.pop("cluster"), job)
        found = compare_composed(composed, on_planner=lambda name: on_part(f"planning: {name}"))
        return Answer(text=str(found), page=found.to_html())

    def _require_model(self, why: str) -> None:
        if self.command:
            raise UserInputError(
                COMMAND, self.command, f"a model is planned here: {why}", "Choose a model."
            )

    def _model(self, folder: Path) -> str | Path | None:
        """The model, as the API takes it; ``None`` where the form has none."""
        return _source(self.model.strip(), folder / "pasted.json") if self.model else None

    def _cluster(self, folder: Path) -> str | Path:
        """The cluster, as the API takes it."""
        return _source(self.cluster.strip(), folder / "cluster.yaml")

    def _job(self, folder: Path) -> dict[str, Any]:
        """The job and the settings, as the API takes them."""
        job: dict[str, Any] = {"cluster": self._cluster(folder), **self.keywords()}
        if not self.command:
            return {"model": self._model(folder), **job}
        words = tokens(self.command)
        command = words if names_script(words) else self.command  # bash runs a script's words
        return {"command": command, "megatron_version": self.megatron_version, **job}

    def _what_if(self, folder: Path, on_part: Callable[[str], None]) -> WhatIf:
        def on_job(text: str) -> None:
            on_part(f"planning {text}")

        changes: dict[str, str] = {}
        for change in self.changes.split():
            key, _, value = change.partition("=")
            if key in changes:
                raise UserInputError(CHANGES, change, "it is given twice", "Write gpus=16,32.")
            changes[key] = value
        if not self.command:
            return nest_megatron.whatif(self._written(folder), changes, on_job=on_job)
        return nest_megatron.whatif_command(
            changes=changes, free=self._freed(), on_job=on_job, **self._job(folder)
        )

    def _freed(self) -> list[str]:
        return [name.strip() for name in self.free.split(",") if name.strip()]

    def _plan(self, folder: Path, on_progress: Progress | None) -> Plan:
        api, job = nest_megatron, self._job(folder)
        if self.work is Work.ESTIMATE:
            return api.estimate_command(**job) if self.command else api.estimate(**job)
        if self.command:
            return api.plan_command(free=self._freed(), on_progress=on_progress, **job)
        return api.plan(on_progress=on_progress, **job)


class MistakesError(NestError):
    """Fields of a form that cannot be used; each mistake names its field by its label.

    Attributes:
        texts: what is wrong with each field, by its label.
    """

    def __init__(self, mistakes: Sequence[UserInputError]) -> None:
        self.texts: dict[str, str] = {}
        lines = []
        for error in mistakes:
            shown = "" if error.value is None else f"{one_line(shortened(str(error.value)))}: "
            said = f"{shown}{error.limit}. {error.fix}"
            self.texts[error.what] = " ".join(filter(None, (self.texts.get(error.what), said)))
            lines.append(f"{error.what}: {said}")
        head = f"{len(lines)} entries of the form cannot be used." if lines[1:] else ""
        super().__init__("\n  ".join(filter(None, (head, *lines))))


def _files(form: Task) -> Iterator[UserInputError]:
    """What may name a file: a command, what the catalogue lacks, settings that are no numbers."""
    if form.command:
        yield UserInputError(
            COMMAND,
            form.command,
            "a command names files, which would be read for whoever reaches this page",
            _LOCALLY,
        )
    models, clusters = nest_megatron.models(), nest_megatron.clusters()
    if not form.command:
        yield from _wrong(MODEL, lambda: require_known(MODEL, form.model, models, _OTHERS))
    yield from _wrong(CLUSTER, lambda: require_known(CLUSTER, form.cluster, clusters, _OTHERS))
    for label, size in ((GPUS, form.num_gpus), (BATCH, form.global_batch_size)):
        if not re.fullmatch(r"[\d.:\sA-Za-z]*", size):
            yield UserInputError(label, size, "it is a number", "For example 8.")
    lines = [(SETTINGS, line.strip()) for line in form.settings.splitlines()]
    for label, line in (*lines, *((CHANGES, change) for change in form.changes.split())):
        if line and not _NUMBERS.fullmatch(line):
            yield UserInputError(
                label, line, f"with --host settings are numbers: {_OTHERS}", _LOCALLY
            )


def _mistakes(
    form: Task, model: str | Path | None, cluster: str | Path
) -> Iterator[UserInputError]:
    base = []
    if form.command:
        yield from _wrong(COMMAND, lambda: tokens(form.command))
        yield from _wrong(RELEASE, lambda: known_release(form.megatron_version))
    elif model is None:
        yield UserInputError(
            _EITHER,
            None,
            "neither is given",
            "Choose a model, or type the command that you launch.",
        )
    else:
        label = MODEL if form.model in nest_megatron.models() else _label(form.model, MODEL)
        wrong = list(_wrong(label, lambda: named_model(str(model)), form.model))
        base += [] if wrong else [f"model={model}"]
        yield from wrong
    label = _label(form.cluster, CLUSTER)
    wrong = list(_wrong(label, lambda: named_cluster(str(cluster)), form.cluster))
    base += [f"cluster={_ANY_CLUSTER if wrong else cluster}"]
    yield from wrong

    def read(*settings: str) -> None:
        composed = compose(parse([*base, *settings]))
        read_cluster(composed)
        if composed.model is not None and not form.command:
            read_spec(composed)

    if has_several := ".." in form.num_gpus:
        yield from _wrong(GPUS, lambda: list(read_counts(form.num_gpus, GPUS, doubling=True)))
    sizes = {"cluster.num_gpus": (GPUS, form.num_gpus.strip())}
    sizes["train.global_batch_size"] = (BATCH, form.global_batch_size.strip())
    seen = {key for key, (_, text) in sizes.items() if text}
    for key, (label, text) in sizes.items():
        if label == GPUS and has_several:
            continue
        if "," in text:
            yield UserInputError(
                label, text, "it is one number", "For example 64; 8..64 is several."
            )
        elif text:
            yield from _wrong(label, partial(read, f"{key}={text}"))
    lines = []
    for line in filter(None, map(str.strip, form.settings.splitlines())):
        key, _, value = (part.strip() for part in line.partition("="))
        key = SHORT_KEYS.get(key, key)
        if not value or key in (MODEL.lower(), CLUSTER.lower(), "out"):
            yield UserInputError(
                SETTINGS,
                line,
                "a setting is written section.key=value",
                "For example parallel.tensor_model_parallel_size=8.",
            )
        elif key in seen:
            yield UserInputError(SETTINGS, line, "it is given twice", "Leave one.")
        else:
            lines.append(f"{key}={value}")
        seen.add(key)
    if together := list(_wrong(SETTINGS, partial(read, *lines))):  # some need each other
        alone = [each for line in lines for each in _wrong(SETTINGS, partial(read, line), line)]
        yield from alone or together


def _label(text: str, label: str) -> str:
    """The field that a model or a cluster was typed into."""
    is_file = (
        "\n" in text or "/" in text or text.startswith("{") or text.endswith((".json", ".yaml"))
    )
    return {MODEL: MODEL_FILE, CLUSTER: CLUSTER_FILE}[label] if is_file else label


def _wrong(label: str, read: Callable[[], object], typed: str = "") -> Iterator[UserInputError]:
    """What reading a field says is wrong with it."""
    try:
        read()
    except UserInputError as error:
        is_pasted = "\n" in typed or typed.startswith("{")
        value = "what was pasted" if is_pasted else typed or error.value
        in_file = label in (MODEL_FILE, CLUSTER_FILE) and error.what not in ("model", "cluster")
        if in_file or (label == SETTINGS and not typed):
            value = f"{error.what} = {error.value}"
        yield UserInputError(label, value, error.limit, error.fix)


#: Options of the command line by the fields of the form that stand for them.
_FIELDS = {"--from": COMMAND, "--free": FREE}


@contextlib.contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Let errors name fields of the form, and not the files that hold what was pasted."""
    try:
        yield
    except UserInputError as error:
        error.what = _FIELDS.get(error.what, error.what)
        if str(folder) in str(error.value):
            error.value = "what was pasted"
        raise


def _source(text: str, path: Path) -> str | Path:
    """A name or a path as it was typed; the file of pasted contents."""
    if not text.startswith("{") and "\n" not in text:
        return text
    path = path if text.startswith("{") else path.with_suffix(".yaml")
    path.write_text(text, encoding="utf-8")
    return path
