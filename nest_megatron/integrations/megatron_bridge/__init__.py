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
from nest_megatron.integrations.megatron_bridge.overlay import to_dotlist, to_yaml
from nest_megatron.integrations.megatron_bridge.read import read_recipe
from nest_megatron.integrations.megatron_bridge.write import apply_plan, plan_changes
from nest_megatron.integrations.plan_recipe import free_parameters, plan_recipe
from nest_megatron.parallel.diff import Change
from nest_megatron.parallel.plan import ParallelPlan

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
    """Plan a configuration and write the plan into it.

    A recipe sets every degree, and its defaults cannot be told from its user's settings, so all of
    them are free unless they are kept (``docs/decisions/006-what-a-recipe-keeps.md``).

    Args:
        cfg: as for ``read_recipe``; changed in place.
        cluster: a name of the catalogue or a file; a record; or ``None`` for the GPUs of this host.
            Its size is the launcher's number of ranks, or ``cluster.num_gpus`` in ``overrides``.
        overrides: settings as ``nest-megatron plan`` takes them, the model and the batch apart.
        free: the only choices that may change; ``None`` is all of them.
        keep: choices held as the configuration states them, such as ``micro_batch_size``.
        vocab_size: of the tokenizer, where its files are not here.
        environment: the launcher's variables; those of this process if not given.

    Returns:
        The plan, and every field that has another value now, with the reason.

    Raises:
        NothingFitsError: if no plan fits in memory, naming the missing bytes.
        SearchEndedError: if time ended the search before it had a plan.
        UserInputError: for a job that cannot be planned, or a choice that cannot be kept.
    """
    parameters = free_parameters(free, keep)
    job = dataclasses.replace(
        read_recipe(cfg, vocab_size=vocab_size, environment=environment), free=parameters
    )
    plan = plan_recipe(job, cluster=cluster, overrides=parse(overrides))
    return plan, apply_plan(cfg, plan, environment=environment)
