"""Plans with some choices overwritten, as by a hand in their files."""

from __future__ import annotations

import dataclasses
from typing import Any

from nest_megatron.layout.dims import DEGREES
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.zero import DataParallelSharding, ZeroStage


def altered(plan: ParallelPlan, **changes: Any) -> ParallelPlan:
    """A plan whose layout has other values.

    Args:
        changes: degrees, the rank order, fields of ``Layout``, and Megatron's two switches.
    """
    degrees = {name: changes.pop(name) for name in (*DEGREES, "rank_order") if name in changes}
    if degrees:
        changes["dims"] = dataclasses.replace(plan.layout.dims, **degrees)
    if changes.pop("use_megatron_fsdp", False):
        changes["sharding"] = DataParallelSharding.MEGATRON_FSDP
    if (shards := changes.pop("use_distributed_optimizer", None)) is not None:
        changes["zero"] = ZeroStage.OPTIMIZER if shards else ZeroStage.NONE
    return dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, **changes))
