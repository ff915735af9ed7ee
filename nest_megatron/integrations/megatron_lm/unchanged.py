"""What a user typed and did not free is in the command that was written, and means the plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nest_megatron.config.job import ReadCommand
from nest_megatron.errors import FaultError
from nest_megatron.integrations.megatron_lm.incompatible_options import contradicted
from nest_megatron.integrations.megatron_lm.layout_arguments import RECOMPUTE, VIRTUAL_STAGES
from nest_megatron.integrations.megatron_lm.parser import read_argv
from nest_megatron.integrations.megatron_lm.read import read_recompute
from nest_megatron.integrations.megatron_lm.rewrite import Rewrite
from nest_megatron.integrations.megatron_lm.stage_options import STAGE_OPTIONS, stated_partition
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.parallel.recompute import NO_RECOMPUTE


def require_kept(
    rewrite: Rewrite, command: ReadCommand, plan: ParallelPlan, kept: Collection[str]
) -> None:
    """Compare a rewritten command with what the user typed, and with the plan.

    Options that contradict the plan (``incompatible_options``) are taken back with their reason;
    any other difference is a fault of this package.

    Args:
        kept: destinations that the user set and did not free.

    Raises:
        FaultError: naming every difference.
    """
    if not kept:
        return
    refused = contradicted(plan, command.values, command.version).keys()
    again = read_argv(command.script, rewrite.argv, command.version).values
    typed = read_argv(command.script, command.argv, command.version).values
    changed = [
        f"--{name.replace('_', '-')} {typed[name]} -> {again[name]}"
        for name in sorted(set(kept) - refused)
        if again[name] != typed[name] or name in rewrite.written
    ]
    # a value that is not typed comes from the arguments of a checkpoint
    values = {**command.values, **{name: again[name] for name in rewrite.written & again.keys()}}
    found = [*changed, *_other_meanings(values, plan, kept)]
    if found:
        raise FaultError(
            f"the plan would change what you set and did not free: {'; '.join(found)}. That is a "
            "fault of nest-megatron; launch without it and report it."
        )


def _other_meanings(
    values: Mapping[str, Any], plan: ParallelPlan, kept: Collection[str]
) -> Iterator[str]:
    """Kept flags that Megatron would read as another layout than the plan's."""
    if set(kept) & {*STAGE_OPTIONS, *VIRTUAL_STAGES}:
        pp = plan.parallel.pipeline_model_parallel_size
        if stated_partition(plan.model, values, pp) not in (None, plan.partition()):
            yield f"the stages are not {plan.parallel.pipeline_model_parallel_layout}"
    if set(kept) & set(RECOMPUTE) and (read_recompute(values) or NO_RECOMPUTE) != (
        plan.grid().recompute
    ):
        yield f"the recomputation is not {plan.grid().recompute.label()}"
