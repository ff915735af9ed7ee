"""NeMo 2.x: a plan in the fields of a recipe, before it is launched.

>>> from nest_megatron.integrations.nemo import auto_recipe
>>> recipe = llm.recipes.llama3_70b.pretrain_recipe(num_nodes=8)  # doctest: +SKIP
>>> plan, changes = auto_recipe(recipe, cluster="dgx_h100")  # doctest: +SKIP

Nothing of NeMo, torch or Fiddle is loaded here: a recipe is read by the names of its fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.overrides import parse
from nest_megatron.integrations.megatron_lm.search_space import free_parameters
from nest_megatron.integrations.nemo.recipe import (
    apply_plan,
    plan_changes,
    read_recipe,
    require_language_models,
    watch_recipe,
)
from nest_megatron.integrations.plan_recipe import plan_recipe
from nest_megatron.layout.diff import Change
from nest_megatron.layout.plan import ParallelPlan

__all__ = [
    "apply_plan",
    "auto_recipe",
    "plan_changes",
    "read_recipe",
    "require_language_models",
    "watch_recipe",
]


def auto_recipe(
    recipe: Any,
    *,
    cluster: str | Cluster | None = None,
    overrides: Sequence[str] = (),
    free: Sequence[str] | None = None,
    keep: Sequence[str] = (),
    vocab_size: int | None = None,
) -> tuple[ParallelPlan, tuple[Change, ...]]:
    """Plan a recipe and write the plan into it.

    A recipe's factory sets every degree, and its defaults cannot be told from its user's settings,
    so all of them are free unless they are kept (``docs/decisions/006-what-a-recipe-keeps.md``).

    Args:
        recipe: as for ``read_recipe``; changed in place.
        cluster: a name of the catalogue or a file, taken with the recipe's number of GPUs; a
            record; or ``None`` for the GPUs of this host.
        overrides: settings as ``nest-megatron plan`` takes them, the model and the batch apart.
        free: the only choices that may change; ``None`` is all of them.
        keep: choices that stay as the recipe states them, such as ``tensor_model_parallel_size``,
            ``micro_batch_size``, ``recompute``, ``zero_stage``, ``stage_layout``.
        vocab_size: of the tokenizer, where the recipe names one whose files are not here.

    Returns:
        The plan, and every field that has another value now, with the reason.

    Raises:
        NothingFitsError: if no plan fits in memory, naming the missing bytes.
        SearchEndedError: if time ended the search before it had a plan.
        UserInputError: for a recipe that cannot be planned, or a choice that cannot be kept.
    """
    job = read_recipe(recipe, vocab_size=vocab_size)
    job = dataclasses.replace(job, free=free_parameters(free, keep))
    plan, _ = plan_recipe(job, cluster=cluster, overrides=parse(overrides))
    return plan, apply_plan(recipe, plan, free=("num_gpus",))
