"""NeMo 2.x: a plan in the fields of a recipe, before it is launched.

>>> from nest_megatron.integrations.nemo import auto_recipe
>>> recipe = llm.recipes.llama3_70b.pretrain_recipe(num_nodes=8)  # doctest: +SKIP
>>> plan, changes = auto_recipe(recipe, cluster="dgx_h100")  # doctest: +SKIP

Nothing of NeMo, torch or Fiddle is loaded here: a recipe is read by the names of its fields.
"""

from __future__ import annotations

from nest_megatron.integrations.nemo.recipe import (
    apply_plan,
    auto_recipe,
    plan_changes,
    read_recipe,
    require_language_models,
    watch_recipe,
)

__all__ = [
    "apply_plan",
    "auto_recipe",
    "plan_changes",
    "read_recipe",
    "require_language_models",
    "watch_recipe",
]
