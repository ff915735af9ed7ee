"""Factories for NeMo-Run's command line: the entry point ``nemo_run.cli``.

``nemo`` loads this for each of its commands and only prints what goes wrong, so it imports nothing
of NeMo: the recipe is found when it is used. NeMo-Run reads the annotations of a factory as
they are, so they must be types and not text, and its parser does not know ``str | None``.
"""
# ruff: noqa: UP045

import contextlib
import importlib
import sys
from typing import Any, Optional

import nemo_run as run

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.nemo_run.plugin import NestPlugin
from nest_megatron.integrations.nemo_run.task import TaskOptions, plan_recipe
from nest_megatron.integrations.plan_output import launched_report
from nest_megatron.report.console import show

_RECIPES = "nemo.collections.llm.recipes"


@run.cli.factory
def nest(
    mode: str = "auto", cluster: Optional[str] = None, plan: Optional[str] = None
) -> run.Config[run.Plugin]:
    """The plugin: ``run.plugins=nest run.plugins.cluster=dgx_h100``, and any of its fields."""
    return run.Config(NestPlugin, mode=mode, cluster=cluster, plan=plan)


@run.cli.factory(namespace="nemo.collections.llm.api.pretrain")
def nest_auto(
    recipe: str,
    num_nodes: int = 1,
    num_gpus_per_node: int = 8,
    cluster: Optional[str] = None,
    overrides: Optional[list[str]] = None,
    keep: Optional[list[str]] = None,
    vocab_size: Optional[int] = None,
) -> run.Partial[Any]:
    """A recipe of NeMo with its plan, to be seen with ``--dryrun`` and ``--to-yaml``.

    Args:
        recipe: a name in ``nemo.collections.llm.recipes``.
        cluster: a name of the catalogue or a file; the GPUs of this host if not given.
        overrides: settings as ``nest-megatron plan`` takes them.
        keep: choices that stay as the recipe states them.
        vocab_size: of the tokenizer, where its files are not here.

    Raises:
        NestError: if there is no such recipe, or no plan for it.
    """
    try:
        make = importlib.import_module(f"{_RECIPES}.{recipe}").pretrain_recipe
    except (ModuleNotFoundError, AttributeError) as error:
        raise UserInputError(
            "nest_auto recipe",
            recipe,
            str(error),
            f"Give the name of a module in {_RECIPES} that has a pretrain_recipe.",
        ) from error
    task = make(num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node)
    options = TaskOptions(
        cluster=cluster, overrides=overrides or [], keep=keep or [], vocab_size=vocab_size
    )
    plan, changes, notes = plan_recipe(task, options, None)
    with contextlib.redirect_stdout(sys.stderr):  # the task's own YAML may go to standard output
        show(launched_report(plan, changes, notes, "fields"))
    return task
