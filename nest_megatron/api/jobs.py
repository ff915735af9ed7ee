"""Jobs planned or priced: one of settings, and those of a sweep in the folder of their results.

``.jobs/list.json`` names the jobs of the sweep in their order; ``.jobs/KEY.json`` is the result of
one. The key covers what the job consists of and the version that plans it, so that a sweep that was
ended, or that grew, finds again what is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.resources
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nest_megatron.api.results import Plan
from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.config.compose import Settings, compose
from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.job import read_target
from nest_megatron.config.keywords import StrPath, require_function, require_release, words_of
from nest_megatron.config.overrides import Setting, first_line, type_limit
from nest_megatron.config.request import request_of
from nest_megatron.config.schema import PlanConfig
from nest_megatron.config.space import estimate_layout
from nest_megatron.documents import read_json
from nest_megatron.errors import (
    BAD_INPUT,
    ENDED_EARLY,
    NOTHING_FITS,
    OK,
    UserInputError,
    interruption_of,
)
from nest_megatron.files import expanded, write_text
from nest_megatron.integrations.megatron_lm.attach import require_launchable_model, with_launch
from nest_megatron.integrations.plan_job import RecipeJob, TypedCommand
from nest_megatron.plain import from_plain, frozen, to_plain
from nest_megatron.planner import Progress, Request
from nest_megatron.planner import plan as find_plan
from nest_megatron.printing import print_to_stderr
from nest_megatron.report.console import error_fields, progress
from nest_megatron.report.failure import WITHOUT_PLAN, require_plan
from nest_megatron.solver.space import SearchSpace
from nest_megatron.units import Seconds
from nest_megatron.version import __version__

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from omegaconf import DictConfig

    from nest_megatron.integrations.typed_command import CommandPlan


def job_of_settings(composed: Settings, **how: Any) -> Request:
    """What to plan for a job that settings say whole; ``how`` as ``request_of`` takes it.

    Raises:
        UserInputError: for a setting that is wrong, or a model that no command states.
    """
    request = request_of(composed, choose_execution=True, **how)
    require_launchable_model(request.spec, read_target(composed))
    return request


def plan_job(
    settings: Settings,
    *,
    begun_s: Seconds | None = None,
    shortlist: bool = False,
    source_job: RecipeJob | None = None,
    on_progress: Progress | None = None,
) -> Plan:
    """Plan a job of settings: what ``plan`` does, here and on the command line.

    Args:
        source_job: what the recipe of a plan file whose job it is says; ``None`` for no plan file.
        begun_s: when its ``search.max_seconds`` began (``time.monotonic``); ``None`` is now.
        on_progress: called while the search runs.
    """
    begun_s = time.monotonic() if begun_s is None else begun_s
    require_function("on_progress", on_progress)
    how: dict[str, Any] = {"begun_s": begun_s, "shortlist": shortlist}
    if source_job is None:
        request = job_of_settings(settings, **how)
    else:
        request = replace(source_job.request(settings), **how)
    return Plan(record=with_launch(require_plan(find_plan(request, on_progress), request.notes)))


def estimate_job(settings: Settings) -> Plan:
    """Price a layout of settings: what ``estimate`` does, here and on the command line."""
    found = estimate_layout(settings, request_of(settings, SearchSpace()))
    return Plan(record=with_launch(found))


_JOBS, _LIST = ".jobs", "list.json"
#: What a sweep leaves in its folder beside the plans.
TABLES = ("sweep.csv", "sweep.parquet", "sweep.svg")
#: How a job ended: the one key of its result, and the exit code that `nest-megatron plan` has.
_CODES = {"plan": OK, "no_plan": NOTHING_FITS, "ended_early": ENDED_EARLY, "error": BAD_INPUT}

Result = dict[str, Any]


def typed_command(
    command: StrPath | Sequence[str],
    free: Collection[str] = (),
    version: str | None = None,
    *,
    strict: bool = False,
) -> TypedCommand:
    """A command of a Python call, checked; a path names a script."""
    require_release(version)
    words: str | tuple[str, ...]
    if isinstance(command, os.PathLike):
        words = ("bash", *words_of("command", [command]))
    else:
        words = command if isinstance(command, str) else words_of("command", command)
    return TypedCommand(text=words, free=words_of("free", free), version=version, strict=strict)


def plan_typed(
    typed: TypedCommand,
    composed: Settings,
    begun_s: Seconds | None,
    on_progress: Progress | None = None,
    *,
    shortlist: bool = False,
) -> CommandPlan:
    """The plan of a command under the settings of a job, with what it becomes."""
    from nest_megatron.integrations.typed_command import plan_command

    return plan_command(
        typed, composed, begun_s=begun_s, shortlist=shortlist, on_progress=on_progress
    )


def estimate_typed(typed: TypedCommand, composed: Settings) -> Plan:
    """What a command is as it is typed, under the settings of a job."""
    from nest_megatron.integrations.typed_command import estimate_command

    return Plan(record=estimate_command(typed, composed))


def command_content(typed: TypedCommand, composed: Settings) -> object:
    """What a command consists of."""
    from nest_megatron.integrations.typed_command import read_typed

    job, _ = read_typed(typed, composed)
    said: tuple[object, ...] = (job.spec, job.values, job.memory_flags)
    if (command := job.command) is not None:
        said = (command.environment, command.launcher, command.script, command.argv)
    return to_plain((said, typed.free, typed.version, typed.strict))


@frozen
class SweepJob:
    """One job of a sweep.

    Args:
        settings: all its settings, as typed.
        varied: those of them in which the sweep's jobs differ.
        key: what it consists of, in one word.
        config_dir: the folder of the user's own files.
        command: that it plans; ``None`` where the settings name a model.
        source_job: by the recipe of the plan file whose job it is, as for ``plan_job``.
    """

    settings: tuple[Setting, ...]
    varied: tuple[Setting, ...]
    key: str
    config_dir: str | None = None
    command: TypedCommand | None = None
    source_job: RecipeJob | None = None

    def composed(self) -> Settings:
        """Its settings, behind the defaults of the site."""
        folder = None if self.config_dir is None else Path(self.config_dir)
        return compose(with_defaults(self.settings), folder)

    def plan(self, begun_s: Seconds, on_progress: Progress | None = None) -> Plan:
        """Its plan; raises as ``plan_job``."""
        if (command := self.command) is not None:
            found = plan_typed(command, self.composed(), begun_s, on_progress).plan
            notes = (*command.notes, *found.notes)
            return Plan(record=replace(found, notes=notes))
        composed, source_job = self.composed(), self.source_job
        return plan_job(composed, begun_s=begun_s, source_job=source_job, on_progress=on_progress)


def sweep_job(
    settings: tuple[Setting, ...],
    keys: Collection[str],
    config_dir: Path | None = None,
    command: TypedCommand | None = None,
    source_job: RecipeJob | None = None,
) -> SweepJob:
    """A job with its key: the composed values, files of the user included.

    Args:
        keys: of the settings in which the jobs of its sweep differ.
        config_dir, command, source_job: as of ``SweepJob``.
    """
    varied = tuple(setting for setting in settings if setting.key in keys)
    folder = None if config_dir is None else str(expanded(config_dir, "--config-dir").resolve())
    job = SweepJob(
        settings=settings,
        varied=varied,
        key="",
        config_dir=folder,
        command=command,
        source_job=source_job,
    )
    try:
        composed = job.composed()
        said = {each.name: getattr(composed, each.name) for each in dataclasses.fields(PlanConfig)}
        values: list[object] = [to_plain(said)]
        values += [] if command is None else [command_content(command, composed)]
        values += [] if source_job is None else [to_plain(source_job)]
    except UserInputError as error:  # its result is the error, and is never kept
        if interruption_of(error):
            raise
        values = [str(error), *map(str, settings)]
    text = json.dumps([__version__, *values], sort_keys=True, default=str)
    return replace(job, key=hashlib.sha256(text.encode()).hexdigest()[:16])


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[None]:
    """Make a sweep's folder and keep it to one sweep at a time."""
    from filelock import FileLock, Timeout

    taken = [name for name in TABLES if (folder / name).exists()]
    if taken and not (folder / _JOBS).is_dir():
        raise _refused(
            folder,
            f"it holds {', '.join(taken)}, and no sweep was run in it",
            "Name another folder.",
        )
    try:
        folder.mkdir(exist_ok=True)
        (folder / _JOBS).mkdir(exist_ok=True)
    except OSError as error:
        raise _refused(
            folder,
            f"results of jobs are kept in a folder, and it cannot be made: {error.strerror}",
            "Name one that you may write to.",
        ) from error
    try:
        with FileLock(folder / _JOBS / "lock", timeout=0):
            yield
    except Timeout as error:
        raise _refused(
            folder, "another sweep is writing into it", "Wait for it, or name another folder."
        ) from error


def _refused(folder: Path, limit: str, fix: str) -> UserInputError:
    return UserInputError("out", str(folder), limit, fix)


def write_list(folder: Path, jobs: Sequence[SweepJob], *, tell: bool) -> None:
    """Write what the sweep consists of, for the processes that run its jobs.

    Args:
        tell: whether they say how far they are.
    """
    text = json.dumps({"tell": tell, "jobs": to_plain(jobs)}, indent=1)
    write_text(folder / _JOBS / _LIST, text)


def write_result(folder: Path, job: SweepJob, result: Result) -> None:
    """Keep how a job ended: ``plan``, ``no_plan``, ``ended_early`` or ``error`` with its fields."""
    write_text(folder / _JOBS / f"{job.key}.json", json.dumps(result, default=str))


def read_result(folder: Path, job: SweepJob) -> Result | None:
    """How a job ended, if it did; a file that cannot be read counts as none."""
    try:
        result: Result = read_json(folder / _JOBS / f"{job.key}.json", "sweep")
        code_of(result)  # one that is known
    except (ValueError, LookupError, TypeError):
        return None
    return result


def code_of(result: Result) -> int:
    """The exit code of a job."""
    (ending,) = result
    return _CODES[ending]


def is_done(folder: Path, job: SweepJob) -> bool:
    """Whether a job need not run again.

    One with bad input runs again, for its files may change; and so does one that time ended without
    a plan, for the machine may be less busy.
    """
    result = read_result(folder, job)
    return result is not None and code_of(result) not in (BAD_INPUT, ENDED_EARLY)


#: Key of the choice of a launcher.
LAUNCHER = "hydra/launcher"
#: The package that brings a launcher, by the beginning of its name.
_PACKAGES = {
    "joblib": "hydra-joblib-launcher",
    "ray": "hydra-ray-launcher",
    "submitit": "hydra-submitit-launcher",
}
#: Settings that Hydra knows no names of: arguments of ``ray.init`` and ``ray.remote``.
_OPEN = "hydra.launcher.ray."


#: Called with the number of each job that begins in this process.
ON_JOB = ContextVar[Callable[[int], None] | None]("on_job", default=None)


#: Hydra's launchers keep the configuration of the job that runs in a place of the process.
_LAUNCHING = threading.Lock()


def launch(folder: Path, numbers: Sequence[int], settings: Sequence[Setting]) -> None:
    """Run jobs of a folder's list, with the launcher and its own settings."""
    from hydra._internal.hydra import Hydra
    from hydra.core.utils import JobRuntime
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    where = str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    overrides = [f"folder='{where}'", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    overrides += [f"++{s}" if s.key.startswith(_OPEN) else str(s) for s in settings]
    overrides.append(f"job={','.join(map(str, numbers))}")
    try:
        with _LAUNCHING, importlib.resources.as_file(catalogue_root()) as catalogue:
            application = JobRuntime.instance().get("name")  # that runs us
            own = Hydra(application, _config_loader(catalogue.resolve()))
            ended = own.multirun("sweep", run_one, overrides, with_log_configuration=False)
    except (HydraException, OmegaConfBaseException, TypeError, ValueError) as error:
        raise _plain_error(error, settings) from error
    except OSError as error:
        limit = f"the jobs' launcher cannot write to it: {error.strerror}"
        raise _refused(folder, limit, "Name a folder where there is space.") from error
    for batch in ended:
        for job in batch:
            if job.return_value:
                raise job.return_value


def _config_loader(folder: Path) -> ConfigLoader:
    """What loads configurations of a folder, without the search path of an application."""
    import hydra
    from hydra import version
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra.core.plugins import Plugins

    Plugins.instance()  # knows how files and packages are read
    # no application has named one, which Hydra 1.4 asks for no more
    if hydra.__version__.startswith("1.3.") and not hasattr(version.getbase(), "major"):
        version.setbase("1.3")
    path = ConfigSearchPathImpl()
    for provider, place in (
        ("hydra", "pkg://hydra.conf"),
        ("main", f"file://{folder}"),
        ("schema", "structured://"),
    ):
        path.append(provider, place)
    return ConfigLoaderImpl(config_search_path=path)


def run_one(config: DictConfig) -> Exception | None:
    """The task that a launcher runs, perhaps elsewhere; what comes of it is in the folder.

    An error that the folder cannot hold is returned: Hydra prints one that is raised.
    """
    try:
        folder = Path(config.folder)
        listed = read_json(folder / _JOBS / _LIST, "sweep")
        job, tell = from_plain(SweepJob, listed["jobs"][config.job]), listed["tell"]
        if not is_done(folder, job):
            if (on_job := ON_JOB.get()) is not None:
                on_job(config.job)
            with progress() if tell else contextlib.nullcontext() as report:
                result = outcome(lambda begun_s: job.plan(begun_s, report))
            write_result(folder, job, result)
            if tell and sys.stderr.isatty():
                print_to_stderr(f"Job {config.job + 1} is done.")
    except Exception as error:  # noqa: BLE001 - it is raised where the sweep runs
        return error
    return None


def outcome(plan: Callable[[Seconds], Plan]) -> Result:
    """How a job ends.

    Args:
        plan: plans it, called with the moment when its ``search.max_seconds`` began.
    """
    try:
        found = plan(time.monotonic())
    except UserInputError as error:
        if interruption_of(error):
            raise
        return {"error": error_fields(error)}
    except WITHOUT_PLAN as error:
        return error.document()
    return {"plan": found.to_dict()}


def launcher_of(settings: Sequence[Setting]) -> str:
    """Name of the launcher that settings choose."""
    return next((str(s.value) for s in settings if s.key == LAUNCHER), "basic")


def _plain_error(error: Exception, settings: Sequence[Setting]) -> UserInputError:
    name, text = launcher_of(settings), str(error)
    about = next((s for s in settings if s.key.rpartition(".")[2] in text and "." in s.key), None)
    if about is not None:
        return UserInputError(
            about.key,
            about.value,
            type_limit(error.__cause__ or error),
            f"The settings of the launcher {name} are in its own documentation.",
        )
    package = next((p for start, p in _PACKAGES.items() if name.startswith(start)), None)
    fix = f"pip install {package}" if package else f"Known are basic, {', '.join(_PACKAGES)}."
    return UserInputError(LAUNCHER, name, first_line(error), fix)
