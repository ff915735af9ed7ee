"""Megatron-Bridge: a plan in the fields of a ``ConfigContainer``, before training starts.

>>> from nest_megatron.integrations.megatron_bridge import auto_recipe
>>> cfg = llama3_70b_pretrain_config()  # doctest: +SKIP
>>> plan, changes = auto_recipe(
...     cfg, cluster="dgx_h100", overrides=["cluster.num_gpus=64"]
... )  # doctest: +SKIP

Nothing of Megatron-Bridge or torch is loaded here: a configuration is read by its fields' names.
"""

from __future__ import annotations

from nest_megatron.integrations.megatron_bridge.config import (
    apply_plan,
    auto_recipe,
    plan_changes,
    read_recipe,
    to_dotlist,
    to_yaml,
)

__all__ = [
    "apply_plan",
    "auto_recipe",
    "plan_changes",
    "read_recipe",
    "to_dotlist",
    "to_yaml",
]
