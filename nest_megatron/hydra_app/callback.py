"""Plan before an application starts, so that a job without a plan ends at once.

Hydra's launchers carry callbacks to the processes that run the jobs; there the import of this
module makes ``${nest:NAME}`` known.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

from nest_megatron.hydra_app.resolver import register

register()

_PLAN_FILE = "nest_plan.yaml"


class PlanBeforeJob(Callback):
    """Find the plan of each job, say what it is, and keep it beside the job's output."""

    def on_job_start(self, config: Any, **_: Any) -> None:
        """Plan; any failure ends the process, since Hydra makes warnings of callbacks' errors."""
        from nest_megatron.app.failure import ending_on_errors
        from nest_megatron.hydra_app.plans import PLANS
        from nest_megatron.hydra_app.size import is_first, launched
        from nest_megatron.hydra_app.view import view_of

        with ending_on_errors():
            found = PLANS.of(config)
            if is_first(launched(os.environ)):
                view = view_of(config)
                path = Path(view.settings.out or Path(config.hydra.runtime.output_dir, _PLAN_FILE))
                _tell(found, view)
                _keep(found, path.expanduser())


def _tell(found: Any, view: Any) -> None:
    from nest_megatron.app.output import show
    from nest_megatron.hydra_app.report import app_report

    show(app_report(found, view))


def _keep(found: Any, path: Path) -> None:
    from nest_megatron.app.output import say
    from nest_megatron.parallel import plan_file

    plan_file.write(found.plan, path)
    say(f"nest: the full plan is in {path} (`nest-megatron explain` shows it)")
