"""What a form asks for, and what the Python API answers."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nest_megatron
from nest_megatron.app.form import COMMAND, FREE, GPUS, Form, require_no_mistake
from nest_megatron.config.keywords import compose_keywords
from nest_megatron.config.overrides import read_counts
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.dry_run.launch import names_script
from nest_megatron.integrations.megatron_lm.parser import tokens
from nest_megatron.layout import plan_file
from nest_megatron.report.plan_rows import to_csv

if TYPE_CHECKING:
    from nest_megatron import Plan, WhatIf
    from nest_megatron.planner import Progress


class Work(Enum):
    """What is done with a form."""

    PLAN = "plan"
    ESTIMATE = "estimate"
    WHATIF = "whatif"
    SIZES = "sizes"
    PLANNERS = "planners"
    SHOW = "show"


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Form):
    """A form, and what is done with it."""

    work: Work

    def keywords(self) -> dict[str, Any]:
        """The settings, as the API takes them."""
        sizes = {
            "cluster.num_gpus": self.num_gpus.strip(),
            "train.global_batch_size": self.global_batch_size.strip(),
        }
        lines = (line.partition("=") for line in self.settings.splitlines() if line.strip())
        others = {key.strip(): value.strip() for key, _, value in lines}
        return {key: value for key, value in {**sizes, **others}.items() if value}

    def answer(
        self,
        on_progress: Progress | None = None,
        on_part: Callable[[str], None] = lambda text: None,
    ) -> Answer:
        """Ask the API; raises as it does.

        Args:
            on_progress: called while one plan is searched.
            on_part: called with what is planned next, where that is several.
        """
        with tempfile.TemporaryDirectory(prefix="nest-megatron-app-") as name, _named(Path(name)):
            folder = Path(name)
            require_no_mistake(self, self._model(folder), self._cluster(folder))
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
        settings = dataclasses.replace(self, num_gpus="").keywords()

        def told() -> Iterator[int]:
            for size in read_counts(self.num_gpus, GPUS, doubling=True):
                on_part(f"planning for {size} GPUs")
                yield size

        model, cluster = self._sources(folder)
        found = nest_megatron.plan_for_gpus(model=model, cluster=cluster, gpus=told(), **settings)
        plans = {size: plan_file.dump(each.record) for size, each in found.plans().items()}
        return Answer(text=str(found), table=to_csv(found.rows), plans=plans)

    def _planners(self, folder: Path, on_part: Callable[[str], None]) -> Answer:
        from nest_megatron.research.comparison_run import compare_composed

        self._require_model("the other planners know no commands")
        composed = compose_keywords(*self._sources(folder), self.keywords())
        found = compare_composed(composed, on_planner=lambda name: on_part(f"planning: {name}"))
        return Answer(text=str(found), page=found.to_html())

    def _require_model(self, why: str) -> None:
        if self.command:
            limit, fix = f"a model is planned here: {why}", "Choose a model."
            raise UserInputError(COMMAND, self.command, limit, fix)

    def _model(self, folder: Path) -> str | Path | None:
        """The model, as the API takes it; ``None`` where the form has none."""
        return _source(self.model, folder / "pasted.json") if self.model else None

    def _cluster(self, folder: Path) -> str | Path:
        """The cluster, as the API takes it."""
        return _source(self.cluster, folder / "cluster.yaml")

    def _sources(self, folder: Path) -> tuple[str | Path, str | Path]:
        """Both, where the form has a model."""
        model = self._model(folder)
        assert model is not None, "a form without model and command has a mistake"
        return model, self._cluster(folder)

    def _what_if(self, folder: Path, on_part: Callable[[str], None]) -> WhatIf:
        def on_job(text: str) -> None:
            on_part(f"planning {text}")

        changes = dict(change.partition("=")[::2] for change in self.changes.split())
        if not self.command:
            return nest_megatron.whatif(self._written(folder), changes, on_job=on_job)
        return nest_megatron.whatif_command(
            self._typed(),
            changes,
            cluster=self._cluster(folder),
            free=self._freed(),
            megatron_version=self.megatron_version,
            on_job=on_job,
            **self.keywords(),
        )

    def _typed(self) -> str | list[str]:
        """The command; the words of one that starts a script, which bash runs."""
        words = tokens(self.command)
        return words if names_script(words) else self.command

    def _freed(self) -> list[str]:
        return [name.strip() for name in self.free.split(",") if name.strip()]

    def _plan(self, folder: Path, on_progress: Progress | None) -> Plan:
        api, settings = nest_megatron, self.keywords()
        is_plan = self.work is Work.PLAN
        if self.command:
            cluster, version = self._cluster(folder), self.megatron_version
            if not is_plan:
                return api.estimate_command(
                    self._typed(), cluster=cluster, megatron_version=version, **settings
                )
            return api.plan_command(
                self._typed(),
                cluster=cluster,
                free=self._freed(),
                megatron_version=version,
                on_progress=on_progress,
                **settings,
            )
        model, cluster = self._sources(folder)
        if not is_plan:
            return api.estimate(model=model, cluster=cluster, **settings)
        return api.plan(model=model, cluster=cluster, on_progress=on_progress, **settings)


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
