"""``NestPlugin``: each task of an experiment is planned as it is added."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nemo_run as run
from nemo_run.run import api

from nest_megatron.config.launch import Mode
from nest_megatron.integrations.nemo_run.task import (
    TaskOptions,
    adapt,
    divided_ranks,
    plan_recipe,
    script_words,
    size_of,
)
from nest_megatron.integrations.plan_output import (
    launched_report,
    plan_file_note,
    require_launch,
)
from nest_megatron.layout import plan_file
from nest_megatron.report.console import say, show

_log = logging.getLogger(__name__)

#: Plugins that no task has called yet.
_waiting: weakref.WeakSet[NestPlugin] = weakref.WeakSet()


@dataclass(kw_only=True, eq=False)
class NestPlugin(TaskOptions, run.Plugin):
    """Plan each task that it is given to: a recipe of NeMo 2.x, or a script that takes ``+nest``.

    A recipe gets the plan in its fields where the experiment is put together; the caller's recipe
    stays as it is. A script (``pretrain_gpt.py`` of Megatron-LM, ``run_recipe.py`` of
    Megatron-Bridge) gets the words with which it plans as it starts.

    ``run.run(recipe, executor=executor, plugins=[NestPlugin(cluster="dgx_h100")])``

    Args: as ``TaskOptions``.
    """

    __hash__ = object.__hash__  # the base class compares fields, and so has none

    def __post_init__(self) -> None:
        super().__post_init__()
        _watch_direct_runs()
        _waiting.add(self)

    def setup(self, task: Any, executor: Any) -> None:
        """Plan a copy of a task; ``NestError`` if there is no plan, so that nothing is launched."""
        _waiting.discard(self)
        if isinstance(task, run.Script):
            words = script_words(task, self)
            task.args.extend(words)
            say(f"nest: {task.path} plans as it starts: {' '.join(words)}")
            return
        require_launch(Mode(self.mode))
        before = divided_ranks(task)
        plan, changes, notes = plan_recipe(task, self, size_of(executor))
        variables = getattr(executor, "env_vars", None)
        show(launched_report(plan, changes, notes, "fields"))
        for sentence in () if variables is None else adapt(variables, before, plan):
            say(f"nest: {sentence}")
        # the experiment's own folder does not exist yet, and NeMo-Run makes it only where none is
        folder = Path(executor.experiment_dir)
        base = folder.parents[2] if len(folder.parents) > 2 else folder.parent
        stem = f"{executor.experiment_id}-{Path(executor.job_dir).name}"
        for number in itertools.count(1):  # tasks of a group, and those of one name, share a folder
            path = base / "nest_plans" / f"{stem}{'' if number == 1 else f'-{number}'}.yaml"
            if not path.exists():
                break
        path.parent.mkdir(parents=True, exist_ok=True)
        plan_file.write(plan, path)
        say(plan_file_note(path))


def _watch_direct_runs() -> None:
    """Say so where NeMo-Run calls no plugin: with ``direct=True``, or without an executor."""
    original = api.direct_run_fn
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def direct_run_fn(*args: Any, **kwargs: Any) -> Any:
        if _waiting:
            _log.warning(
                "nest: NestPlugin does nothing here: NeMo-Run calls no plugin with direct=True or "
                "without an executor, so this task runs as it was written. Use "
                "nest_megatron.integrations.nemo.auto_recipe(recipe), the factory nest_auto, or an "
                "executor."
            )
        return original(*args, **kwargs)

    api.direct_run_fn = direct_run_fn
