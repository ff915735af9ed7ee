"""The fields of the form, and what is wrong with them: all at once, each by its label."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import nest_megatron
from nest_megatron.config.catalogue import named_cluster, named_model, read_cluster, read_spec
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse, read_counts
from nest_megatron.errors import NestError, UserInputError, require_known, shortened
from nest_megatron.integrations.megatron_lm.parser import tokens
from nest_megatron.layout.rulebook.facts import DEFAULT_VERSION, known_release
from nest_megatron.printing import one_line

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
#: A mistake with the label of its field.
Mistake = tuple[str, UserInputError]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form as it was filled in; an empty field has an empty text.

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


class MistakesError(NestError):
    """Fields of a form that cannot be used.

    Attributes:
        texts: what is wrong with each field, by its label.
    """

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.texts: dict[str, str] = {}
        lines = []
        for label, error in mistakes:
            shown = "" if error.value is None else f"{one_line(shortened(str(error.value)))}: "
            said = f"{shown}{error.limit}. {error.fix}"
            self.texts[label] = " ".join(filter(None, (self.texts.get(label), said)))
            lines.append(f"{label}: {said}")
        head = f"{len(lines)} entries of the form cannot be used." if lines[1:] else ""
        super().__init__("\n  ".join(filter(None, (head, *lines))))


def require_no_mistake(form: Form, model: str | Path | None, cluster: str | Path) -> None:
    """Refuse a form with all that is wrong in it, as far as each field tells by itself.

    Args:
        model: its name or its file; ``None`` where there is none.
        cluster: likewise.

    Raises:
        MistakesError: naming each field.
    """
    found = [] if form.is_local else list(_files(form))
    if not found and not form.plan_file:  # of whose job the fields were right
        found = list(_mistakes(form, model, cluster))
    if found:
        raise MistakesError(found)


def _files(form: Form) -> Iterator[Mistake]:
    """What may name a file: a command, what the catalogue lacks, settings that are no numbers."""
    if form.command:
        limit = "a command names files, which would be read for whoever reaches this page"
        yield COMMAND, UserInputError(COMMAND, form.command, limit, _LOCALLY)
    models, clusters = nest_megatron.models(), nest_megatron.clusters()
    if not form.command:
        yield from _wrong(MODEL, lambda: require_known(MODEL, form.model, models, _OTHERS))
    yield from _wrong(CLUSTER, lambda: require_known(CLUSTER, form.cluster, clusters, _OTHERS))
    for label, size in ((GPUS, form.num_gpus), (BATCH, form.global_batch_size)):
        if not re.fullmatch(r"[\d.:\sA-Za-z]*", size):
            yield label, UserInputError(label, size, limit="it is a number", fix="For example 8.")
    lines = [(SETTINGS, line.strip()) for line in form.settings.splitlines()]
    for label, line in (*lines, *((CHANGES, change) for change in form.changes.split())):
        if line and not _NUMBERS.fullmatch(line):
            limit = f"with --host settings are numbers: {_OTHERS}"
            yield label, UserInputError(label, line, limit, _LOCALLY)


def _mistakes(form: Form, model: str | Path | None, cluster: str | Path) -> Iterator[Mistake]:
    base = []
    if form.command:
        yield from _wrong(COMMAND, lambda: tokens(form.command))
        yield from _wrong(RELEASE, lambda: known_release(form.megatron_version))
    elif model is None:
        limit, fix = "neither is given", "Choose a model, or type the command that you launch."
        yield _EITHER, UserInputError(_EITHER, None, limit, fix)
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

    if ".." in form.num_gpus:
        yield from _wrong(GPUS, lambda: list(read_counts(form.num_gpus, GPUS, doubling=True)))
    sizes = {"cluster.num_gpus": (GPUS, form.num_gpus.strip())}
    sizes["train.global_batch_size"] = (BATCH, form.global_batch_size.strip())
    seen = {key for key, (_, text) in sizes.items() if text}
    for key, (label, text) in sizes.items():
        if text and ".." not in text:
            yield from _wrong(label, partial(read, f"{key}={text}"))
    lines = []
    for line in filter(None, map(str.strip, form.settings.splitlines())):
        key, _, value = (part.strip() for part in line.partition("="))
        if not value or "." not in key:
            limit = "a setting is written section.key=value"
            fix = "For example parallel.tensor_model_parallel_size=8."
            yield SETTINGS, UserInputError(SETTINGS, line, limit, fix)
        elif key in seen:
            yield SETTINGS, UserInputError(SETTINGS, line, "it is given twice", "Leave one.")
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


def _wrong(label: str, read: Callable[[], object], typed: str = "") -> Iterator[Mistake]:
    """What reading a field says is wrong with it."""
    try:
        read()
    except UserInputError as error:
        is_pasted = "\n" in typed or typed.startswith("{")
        value = "what was pasted" if is_pasted else typed or error.value
        if label == SETTINGS and not typed:
            value = f"{error.what} = {error.value}"
        yield label, UserInputError(label, value, error.limit, error.fix)
