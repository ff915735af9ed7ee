"""Megatron-Bridge: a plan in the fields of a ``ConfigContainer``, before training starts.

>>> from nest_megatron.integrations.megatron_bridge import auto_recipe
>>> cfg = llama3_70b_pretrain_config()  # doctest: +SKIP
>>> plan, changes = auto_recipe(
...     cfg, cluster="dgx_h100", overrides=["cluster.num_gpus=64"]
... )  # doctest: +SKIP

Nothing of Megatron-Bridge or torch is loaded here: a configuration is read by its fields' names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.overrides import parse
from nest_megatron.integrations.megatron_bridge.config import apply_plan, plan_changes, read_recipe
from nest_megatron.integrations.megatron_bridge.write import to_dotlist, to_yaml
from nest_megatron.integrations.megatron_lm.search_space import free_parameters
from nest_megatron.integrations.plan_recipe import plan_recipe
from nest_megatron.layout.diff import Change
from nest_megatron.layout.plan import ParallelPlan

__all__ = [
    "apply_plan",
    "auto_recipe",
    "plan_changes",
    "read_recipe",
    "to_dotlist",
    "to_yaml",
]


def auto_recipe(
    cfg: Any,
    *,
    cluster: str | Cluster | None = None,
    overrides: Sequence[str] = (),
    free: Sequence[str] | None = None,
    keep: Sequence[str] = (),
    vocab_size: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[ParallelPlan, tuple[Change, ...]]:
    """Plan a configuration and write the plan into it, as ``nemo.auto_recipe`` does a recipe.

    Args:
        cfg: as for ``read_recipe``; changed in place.
        cluster: a name of the catalogue or a file; a record; or ``None`` for the GPUs of this host.
            Its size is the launcher's number of ranks, or ``cluster.num_gpus`` in ``overrides``.
        overrides, free, keep, vocab_size: as for ``nemo.auto_recipe``.
        environment: the launcher's variables; those of this process if not given.

    Returns, Raises: as ``nemo.auto_recipe``.
    """
    job = read_recipe(cfg, vocab_size=vocab_size, environment=environment)
    job = dataclasses.replace(job, free=free_parameters(free, keep))
    plan, _ = plan_recipe(job, cluster=cluster, overrides=parse(overrides))
    return plan, apply_plan(cfg, plan, environment=environment)
