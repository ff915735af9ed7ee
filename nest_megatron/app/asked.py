"""What a form asks for, and what the Python API answers."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nest_megatron
from nest_megatron.errors import UserInputError, require_known
from nest_megatron.parallel import plan_file

if TYPE_CHECKING:
    from nest_megatron import Plan, WhatIf
    from nest_megatron.planner import Progress

_NUMBER = r"(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?[A-Za-z]*(?:/s)?|true|false)"
_SECTIONS = "cluster|cost|memory|parallel|reliability|search"
#: Settings that cannot name a file: numbers, with a unit or not.
_NUMBERS = re.compile(
    rf"(?:gpus|memory|train\.global_batch_size|(?:{_SECTIONS})\.[\w.]+)={_NUMBER}(?:,{_NUMBER})*"
)


class Work(Enum):
    """What is done with a form."""

    PLAN = "plan"
    ESTIMATE = "estimate"
    WHATIF = "whatif"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a form.

    Args:
        text: as the command line prints it.
        is_error: the text says why there is no plan.
        page: the report of a plan, or the heat maps of its job on changed clusters.
        plan_file: the contents of its file.
    """

    text: str
    is_error: bool = False
    page: str = ""
    plan_file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A form as it was filled in; an empty field has an empty text.

    Args:
        is_local: the browser is on this machine, so that texts may name its files.
        model, cluster: a name of the catalogue, a path, or the contents of a file.
        command: a Megatron-LM command, in the place of a model.
        free: flags of the command that may change, separated by commas.
        num_gpus, global_batch_size: as typed.
        settings: others, a line of ``section.key=value`` each.
        plan_file: contents of the plan whose job is planned again, where no command is given.
        changes: those of the job, as ``nest-megatron whatif`` takes them.
    """

    work: Work
    is_local: bool = True
    model: str = ""
    cluster: str = ""
    command: str = ""
    free: str = ""
    megatron_version: str = "0.16.1"
    num_gpus: str = ""
    global_batch_size: str = ""
    settings: str = ""
    plan_file: str = ""
    changes: str = ""

    def _require_no_file(self) -> None:
        """Refuse a command, a model or a cluster that the catalogue lacks, and other texts."""
        fix = "Start the app without --host and come through `ssh -L`, or use the command line."
        if self.command:
            limit = "a command names files, which would be read for whoever reaches this page"
            raise UserInputError("command", value=self.command, limit=limit, fix=fix)
        require_known("model", self.model, nest_megatron.models(), _OTHERS)
        require_known("cluster", self.cluster, nest_megatron.clusters(), _OTHERS)
        for line in (*self.settings.splitlines(), *self.changes.split()):
            if line.strip() and not _NUMBERS.fullmatch(line.strip()):
                limit = f"with --host settings are numbers: {_OTHERS}"
                raise UserInputError("settings", value=line, limit=limit, fix=fix)

    def keywords(self) -> dict[str, Any]:
        """The settings, as the API takes them.

        Raises:
            UserInputError: for a line that is no setting, or one that has a value already.
        """
        sizes = {
            "cluster.num_gpus": self.num_gpus.strip(),
            "train.global_batch_size": self.global_batch_size.strip(),
        }
        given: dict[str, Any] = {key: value for key, value in sizes.items() if value}
        for line in filter(str.strip, self.settings.splitlines()):
            key, _, value = (part.strip() for part in line.partition("="))
            if not value or "." not in key:
                limit = "a setting is written section.key=value"
                fix = "For example parallel.tensor_model_parallel_size=8."
                raise UserInputError("settings", value=line, limit=limit, fix=fix)
            if key in given:
                raise UserInputError(key, value=value, limit="it is given twice", fix="Leave one.")
            given[key] = value
        return given

    def answer(self, on_progress: Progress | None = None) -> Answer:
        """Ask the API; raises as it does.

        Args:
            on_progress: called while a plan is searched.
        """
        if not self.is_local:
            self._require_no_file()
        with tempfile.TemporaryDirectory(prefix="nest-megatron-app-") as name, _named(Path(name)):
            folder = Path(name)
            if self.work is Work.WHATIF:
                changed = self._what_if(folder)
                return Answer(text=str(changed), page=changed.to_html())
            found = self._plan(folder, on_progress)
        page = found.explain().to_html()
        return Answer(text=str(found), page=page, plan_file=plan_file.dump(found.record))

    def _what_if(self, folder: Path) -> WhatIf:
        changes = dict(change.partition("=")[::2] for change in self.changes.split())
        if not self.command:
            path = folder / "plan.yaml"
            path.write_text(self.plan_file, encoding="utf-8")
            return nest_megatron.whatif(path, changes)
        return nest_megatron.whatif_command(
            self.command,
            changes,
            cluster=_source(self.cluster, folder / "cluster.yaml"),
            free=self._freed(),
            megatron_version=self.megatron_version,
            **self.keywords(),
        )

    def _freed(self) -> list[str]:
        return [name.strip() for name in self.free.split(",") if name.strip()]

    def _plan(self, folder: Path, on_progress: Progress | None) -> Plan:
        api, settings = nest_megatron, self.keywords()
        cluster = _source(self.cluster, folder / "cluster.yaml")
        is_plan = self.work is Work.PLAN
        if self.command:
            version = self.megatron_version
            if not is_plan:
                return api.estimate_command(
                    self.command, cluster=cluster, megatron_version=version, **settings
                )
            return api.plan_command(
                self.command,
                cluster=cluster,
                free=self._freed(),
                megatron_version=version,
                on_progress=on_progress,
                **settings,
            )
        if not self.model:
            limit, fix = "neither is given", "Choose a model, or type the command that you launch."
            raise UserInputError("model or command", value=None, limit=limit, fix=fix)
        model = _source(self.model, folder / "pasted.json")
        if not is_plan:
            return api.estimate(model=model, cluster=cluster, **settings)
        return api.plan(model=model, cluster=cluster, on_progress=on_progress, **settings)


_OTHERS = "paths are refused, for they would be read for whoever reaches this page"


#: Options of the command line by the fields of the form that stand for them.
_FIELDS = {"--from": "command", "--free": "flags that may change"}


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
