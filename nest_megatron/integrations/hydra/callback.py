"""Plan before an application starts, so that a job without a plan ends at once.

Hydra's launchers carry callbacks to the processes that run the jobs; there the import of this
module makes ``${nest:NAME}`` known.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from nest_megatron.errors import settings_typed_as
from nest_megatron.integrations.hydra import register
from nest_megatron.report.failure import ending_on_errors

register()

#: Settings of the planning job that have keys of the group.
_OWN_KEYS = ("cluster", "model", "plan")


def _typed(key: str) -> str:
    """A setting of the planning job on the application's command line."""
    return f"nest.{key}" if key in _OWN_KEYS else f"+nest.overrides.{key}"


class PlanBeforeJob(Callback):
    """Find the plan of each job, say what it is, and keep it beside the job's output."""

    def on_run_start(self, config: Any, *, config_name: str | None = None, **_: Any) -> None:
        """Make sure that the application has the planned fields, and would read them."""
        from hydra.core.global_hydra import GlobalHydra
        from hydra.errors import HydraException
        from hydra.types import RunMode

        from nest_megatron.integrations.hydra.view import require_own_fields, view_of

        with settings_typed_as(_typed), ending_on_errors():
            loader = GlobalHydra.instance().config_loader()
            try:  # the application's configuration, which may need overrides
                own = loader.load_configuration(config_name, overrides=[], run_mode=RunMode.RUN)
            except HydraException:
                return
            plain: Any = OmegaConf.to_container(own, resolve=False)
            require_own_fields(view_of(config), plain)

    on_multirun_start = on_run_start

    def on_job_start(self, config: Any, **_: Any) -> None:
        """Plan; any failure ends the process, since Hydra makes warnings of callbacks' errors.

        The planned values are written into the file in which Hydra has kept the configuration.
        """
        from nest_megatron.integrations.hydra.plans import plan_job

        with settings_typed_as(_typed), ending_on_errors():
            task = _task_config()
            plan_job(config, task)
            folder = config.hydra.output_subdir
            if task is not None and folder is not None:
                path = Path(config.hydra.runtime.output_dir, folder, "config.yaml")
                if path.is_file():
                    OmegaConf.save(task, path)


def _task_config() -> Any:
    """What the application is about to get: Hydra copies the configuration before it calls us.

    A callback is not given the copy, so it is looked for where ``hydra.core.utils.run_job`` has it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        task = frame.f_locals.get("task_cfg") if frame.f_code.co_name == "run_job" else None
        if isinstance(task, DictConfig):
            return task
        frame = frame.f_back
    return None
