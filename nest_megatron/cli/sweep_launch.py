"""Run the jobs of a sweep by one of Hydra's launchers: basic, joblib, Ray, submitit (Slurm)."""

from __future__ import annotations

import importlib.resources
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.cli.planning import plan_with_progress
from nest_megatron.cli.sweep_folder import Result, SweepJob, is_done, read_job, write_result
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import Setting, first_line
from nest_megatron.errors import OK, UserInputError
from nest_megatron.report.console import error_fields
from nest_megatron.report.failure import WITHOUT_PLAN

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: Key of the choice of a launcher.
LAUNCHER = "hydra/launcher"
_PRIMARY = "sweep"
#: The package that brings a launcher, by the beginning of its name.
_PACKAGES = {
    "joblib": "hydra-joblib-launcher",
    "ray": "hydra-ray-launcher",
    "submitit": "hydra-submitit-launcher",
}
#: Settings that Hydra knows no names of: arguments of ``ray.init`` and ``ray.remote``.
_OPEN = "hydra.launcher.ray."
_QUIET = ("hydra/job_logging=none", "hydra/hydra_logging=none")


def check_launcher(settings: Sequence[Setting], *, has_folder: bool) -> None:
    """Refuse a launcher whose jobs run elsewhere where no folder is named."""
    name = _launcher(settings)
    if name.startswith(("submitit", "ray")) and not has_folder:
        limit = "its jobs may run on other machines, and leave their results in a folder"
        fix = "Add out=FOLDER on a file system that all of them share."
        raise UserInputError(LAUNCHER, value=name, limit=limit, fix=fix)


def launch(
    folder: Path, jobs: Sequence[SweepJob], numbers: Sequence[int], settings: Sequence[Setting]
) -> None:
    """Run jobs of a folder's list.

    Args:
        numbers: of the jobs to run.
        settings: the launcher and its own settings.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    where = str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    overrides = [f"folder='{where}'", *_QUIET]
    overrides += [f"++{s}" if s.key.startswith(_OPEN) else str(s) for s in settings]
    overrides.append(f"job={','.join(map(str, numbers))}")
    try:
        with (
            importlib.resources.as_file(catalogue_root()) as catalogue,
            hydra.initialize_config_dir(str(catalogue.resolve()), version_base="1.3"),
        ):
            instance = GlobalHydra.instance().hydra
            assert instance is not None
            instance.multirun(_PRIMARY, run_one, overrides, with_log_configuration=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise _plain_error(error, settings) from error


def run_one(config: DictConfig) -> int:
    """The task that a launcher runs, perhaps in another process or on another machine.

    Returns:
        The job's exit code; everything else is in the sweep's folder.
    """
    folder = Path(config.folder)
    job, config_dir = read_job(folder, config.job)
    if not is_done(folder, job):
        write_result(folder, job, _planned(job, config_dir))
    return OK


def _planned(job: SweepJob, config_dir: Path | None) -> Result:
    begun_s = time.monotonic()
    try:
        found = plan_with_progress(compose(job.settings, config_dir), begun_s)
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
