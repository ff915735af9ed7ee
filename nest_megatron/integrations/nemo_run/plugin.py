"""``NestPlugin``: each task of an experiment is planned as it is added.

NeMo-Run's command line reads the types of the plugin's fields, and does not know ``str | None``.
"""
# ruff: noqa: UP045

import dataclasses
import functools
import logging
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import nemo_run as run
from nemo_run.run import api

from nest_megatron.integrations.launched import fields_report
from nest_megatron.integrations.nemo_run.task import (
    TaskOptions,
    adapt,
    plan_recipe,
    script_words,
    stated_layout,
)
from nest_megatron.integrations.plan_output import told_where
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.report.console import say, show

_log = logging.getLogger(__name__)

#: Plugins that no task has called yet.
_waiting: "weakref.WeakSet[NestPlugin]" = weakref.WeakSet()


@dataclass(kw_only=True, eq=False)
class NestPlugin(run.Plugin):
    """Plan each task that it is given to: a recipe of NeMo 2.x, or a script that takes ``+nest``.

    A recipe gets the plan in its fields where the experiment is put together; the caller's recipe
    stays as it is. A script (``pretrain_gpt.py`` of Megatron-LM, ``run_recipe.py`` of
    Megatron-Bridge) gets the words with which it plans as it starts.

    ``run.run(recipe, executor=executor, plugins=[NestPlugin(cluster="dgx_h100")])``

    Args: as ``TaskOptions``.
    """

    __hash__ = object.__hash__  # the base class compares fields, and so has none

    mode: str = "auto"
    cluster: Optional[str] = None
    plan: Optional[str] = None
    overrides: list[str] = field(default_factory=list)
    free: Optional[list[str]] = None
    keep: list[str] = field(default_factory=list)
    vocab_size: Optional[int] = None
    watch: Optional[int] = None

    def __post_init__(self) -> None:
        self.options()
        _watch_direct_runs()
        _waiting.add(self)

    def options(self) -> TaskOptions:
        """What is wanted, checked; ``UserInputError`` if it contradicts itself."""
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(TaskOptions)}
        return TaskOptions(**own)

    def setup(self, task: Any, executor: Any) -> None:
        """Plan a copy of a task; ``NestError`` if there is no plan, so that nothing is launched."""
        _waiting.discard(self)
        if isinstance(task, run.Script):
            words = script_words(task, self.options())
            task.args.extend(words)
            say(f"nest: {task.path} plans as it starts: {' '.join(words)}")
            return
        before = stated_layout(task)
        try:
            size = executor.nnodes(), executor.nproc_per_node()
        except NotImplementedError:
            size = None
        plan, changes = plan_recipe(task, self.options(), size)
        variables = getattr(executor, "env_vars", None)
        show(fields_report(plan, changes))
        for sentence in () if variables is None else adapt(variables, before, plan):
            say(f"nest: {sentence}")
        say(told_where(_store(plan, executor)))


def _store(plan: ParallelPlan, executor: Any) -> Path:
    """Write the plan beside the experiments.

    The experiment's own folder does not exist yet, and NeMo-Run makes it only where none is.
    """
    folder = Path(executor.experiment_dir)
    base = folder.parents[2] if len(folder.parents) > 2 else folder.parent
    path = base / "nest_plans" / f"{executor.experiment_id}-{Path(executor.job_dir).name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    plan_file.write(plan, path)
    return path


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
