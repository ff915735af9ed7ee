"""The folder of a sweep: its jobs, the result of each, and the launcher of Hydra that runs them.

``.jobs/list.json`` names the jobs of the sweep in their order; ``.jobs/KEY.json`` is the result of
one. The key covers what the job consists of and the version that plans it, so that a sweep that was
ended, or that grew, finds again what is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.cli.planning import plan_with_progress
from nest_megatron.config.compose import compose
from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.overrides import Setting, first_line
from nest_megatron.documents import read_json
from nest_megatron.errors import BAD_INPUT, ENDED_EARLY, NOTHING_FITS, OK, UserInputError
from nest_megatron.files import write_text
from nest_megatron.plain import to_plain
from nest_megatron.report.console import error_fields
from nest_megatron.report.failure import WITHOUT_PLAN
from nest_megatron.version import __version__

if TYPE_CHECKING:
    from omegaconf import DictConfig


_JOBS, _LIST = ".jobs", "list.json"
#: What a sweep leaves in its folder beside the plans.
TABLES = ("sweep.csv", "sweep.parquet", "sweep.svg")
#: How a job ended: the one key of its result, and the exit code that `nest-megatron plan` has.
_CODES = {"plan": OK, "no_plan": NOTHING_FITS, "ended_early": ENDED_EARLY, "error": BAD_INPUT}

Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """One job of a sweep.

    Args:
        settings: all its settings, as typed.
        varied: those of them in which the sweep's jobs differ.
        key: what it consists of, in one word.
    """

    settings: tuple[Setting, ...]
    varied: tuple[Setting, ...]
    key: str


def sweep_job(
    settings: tuple[Setting, ...], varied: tuple[Setting, ...], config_dir: Path | None
) -> SweepJob:
    """A job with its key: the composed values, files of the user included."""
    try:
        values: object = to_plain(compose(with_defaults(settings), config_dir).config)
    except UserInputError as error:  # its result is the error, and is never kept
        values = [str(error), *map(str, settings)]
    text = json.dumps([__version__, values], sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return SweepJob(settings=settings, varied=varied, key=key)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[None]:
    """Make a sweep's folder and keep it to one sweep at a time."""
    from filelock import FileLock, Timeout

    taken = [name for name in TABLES if (folder / name).exists()]
    if taken and not (folder / _JOBS).is_dir():
        limit = f"it holds {', '.join(taken)}, and no sweep was run in it"
        raise _refused(folder, limit, "Name another folder.")
    try:
        folder.mkdir(exist_ok=True)
        (folder / _JOBS).mkdir(exist_ok=True)
    except OSError as error:
        limit = f"with --multirun it is a folder, and it cannot be made: {error.strerror}"
        raise _refused(folder, limit, "Name a folder inside one that is there.") from error
    try:
        with FileLock(folder / _JOBS / "lock").acquire(timeout=0):
            yield
    except Timeout as error:
        limit, fix = "another sweep is writing into it", "Wait for it, or name another folder."
        raise _refused(folder, limit, fix) from error


def _refused(folder: Path, limit: str, fix: str) -> UserInputError:
    return UserInputError("out", value=str(folder), limit=limit, fix=fix)


def write_list(folder: Path, jobs: Sequence[SweepJob], config_dir: Path | None) -> None:
    """Write what the sweep consists of, for the processes that run its jobs."""
    listed = [
        {"key": job.key, "settings": [[s.key, s.value] for s in job.settings]} for job in jobs
    ]
    where = None if config_dir is None else str(config_dir.expanduser().resolve())
    text = json.dumps({"config_dir": where, "jobs": listed}, indent=1)
    write_text(folder / _JOBS / _LIST, text)


def read_job(folder: Path, number: int) -> tuple[SweepJob, Path | None]:
    """A job of the list, and the folder of the user's own files."""
    listed = read_json(folder / _JOBS / _LIST, "sweep")
    job, config_dir = listed["jobs"][number], listed["config_dir"]
    settings = tuple(Setting(key=key, value=value) for key, value in job["settings"])
    found = SweepJob(settings=settings, varied=(), key=job["key"])
    return found, None if config_dir is None else Path(config_dir)


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


def check_launcher(settings: Sequence[Setting], *, has_folder: bool) -> None:
    """Refuse a launcher whose jobs run elsewhere where no folder is named."""
    name = _launcher(settings)
    if name.startswith(("submitit", "ray")) and not has_folder:
        limit = "its jobs may run on other machines, and leave their results in a folder"
        fix = "Add out=FOLDER on a file system that all of them share."
        raise UserInputError(LAUNCHER, value=name, limit=limit, fix=fix)


def launch(folder: Path, numbers: Sequence[int], settings: Sequence[Setting]) -> None:
    """Run jobs of a folder's list, with the launcher and its own settings."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    where = str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    overrides = [f"folder='{where}'", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    overrides += [f"++{s}" if s.key.startswith(_OPEN) else str(s) for s in settings]
    overrides.append(f"job={','.join(map(str, numbers))}")
    try:
        with (
            importlib.resources.as_file(catalogue_root()) as catalogue,
            hydra.initialize_config_dir(str(catalogue.resolve()), version_base="1.3"),
        ):
            instance = GlobalHydra.instance().hydra
            assert instance is not None
            instance.multirun("sweep", run_one, overrides, with_log_configuration=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise _plain_error(error, settings) from error


def run_one(config: DictConfig) -> int:
    """The task that a launcher runs, perhaps elsewhere; what comes of it is in the folder."""
    folder = Path(config.folder)
    job, config_dir = read_job(folder, config.job)
    if not is_done(folder, job):
        write_result(folder, job, _planned(job, config_dir))
        if sys.stderr.isatty():
            print(f"Job {config.job + 1} is done.", file=sys.stderr)
    return OK


def _planned(job: SweepJob, config_dir: Path | None) -> Result:
    begun_s = time.monotonic()
    try:
        found = plan_with_progress(compose(with_defaults(job.settings), config_dir), begun_s)
    except UserInputError as error:
        return {"error": error_fields(error)}
    except WITHOUT_PLAN as error:
        return error.document()
    return {"plan": found.to_dict()}


def _launcher(settings: Sequence[Setting]) -> str:
    return next((str(s.value) for s in settings if s.key == LAUNCHER), "basic")


def _plain_error(error: Exception, settings: Sequence[Setting]) -> UserInputError:
    name, text = _launcher(settings), str(error)
    about = next((s for s in settings if s.key.rpartition(".")[2] in text and "." in s.key), None)
    if about is not None:
        limit = first_line(error.__cause__ or error)
        fix = f"The settings of the launcher {name} are in its own documentation."
        return UserInputError(about.key, value=about.value, limit=limit, fix=fix)
    package = next((p for start, p in _PACKAGES.items() if name.startswith(start)), None)
    fix = f"pip install {package}" if package else f"Known are basic, {', '.join(_PACKAGES)}."
    return UserInputError(LAUNCHER, value=name, limit=first_line(error), fix=fix)
