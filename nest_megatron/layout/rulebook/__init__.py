"""Megatron's rules, each one row of one ordered table.

A search evaluates a rule as soon as the facts that it reads are decided (``search``), the check of
a launch evaluates all, ``docs/rules.md`` prints them: what a search returns, a launch accepts. A
rule stands in the table of its subject, and all are joined here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.rulebook.degrees import DEGREE_RULES
from nest_megatron.layout.rulebook.devices import DEVICE_RULES, OPTIMIZER_RULES, SHARDING_RULES
from nest_megatron.layout.rulebook.execution import EXECUTION_RULES, FORMAT_RULES, RECOMPUTE_RULES
from nest_megatron.layout.rulebook.facts import LaunchRequest, Rule, violations
from nest_megatron.layout.rulebook.options import (
    COMMAND_RULES,
    ENGINE_RULES,
    JOB_RULES,
    OPTION_RULES,
)
from nest_megatron.layout.rulebook.schedule import SCHEDULE_RULES, STAGE_RULES
from nest_megatron.model.spec import TransformerSpec

#: What of a layout is said by its degrees, its batch and its ZeRO stage.
LAYOUT_RULES = (*DEGREE_RULES, *SCHEDULE_RULES, *SHARDING_RULES)

RULES = (
    *LAYOUT_RULES,
    *RECOMPUTE_RULES,
    *FORMAT_RULES,
    *JOB_RULES,
    *STAGE_RULES,
    *ENGINE_RULES,
    *EXECUTION_RULES,
    *OPTION_RULES,
    *OPTIMIZER_RULES,
    *COMMAND_RULES,
    *DEVICE_RULES,
)


def check(
    request: LaunchRequest, *, but: Collection[str] = ()
) -> Iterator[tuple[Rule, UserInputError]]:
    """Rules that a request breaks, in the order of ``RULES``, but those that ``but`` names."""
    return violations(request.facts, (rule for rule in RULES if rule.id not in but))


def first_broken(request: LaunchRequest, *, but: Collection[str] = ()) -> str:
    """Who refuses a request, with the first rule that it breaks and its source; empty for none."""
    for rule, found in check(request, but=but):
        who = f"{rule.who(request.facts)} refuses it"
        if rule.ours:
            who = "nest-megatron does not plan it"
        return f"{who}: {found.what} = {found.value}: {found.limit} ({rule.file})"
    return ""


def require_launchable(request: LaunchRequest, *, but: Collection[str] = ()) -> None:
    """Raise on the first broken rule, those of the names in ``but`` apart."""
    for rule, found in check(request, but=but):
        who = rule.who(request.facts).partition(" ")[0]
        raise UserInputError(
            found.what, found.value, f"{found.limit} ({who} {rule.file})", found.fix
        )


def require_legal(request: LaunchRequest) -> None:
    """Refuse degrees, a batch and a ZeRO stage that break one of Megatron's rules.

    Raises:
        UserInputError: for the first rule broken.
    """
    for _, broken in violations(request.facts, LAYOUT_RULES):
        raise broken


def is_legal_grid(spec: TransformerSpec, dims: ParallelDims, *, sequence_parallel: bool) -> bool:
    """Whether Megatron builds this model on this grid, whatever the batch and the ZeRO stage."""
    request = LaunchRequest(
        spec=spec,
        dims=dims,
        micro_batch_size=1,
        global_batch_size=dims.world_size,
        sequence_parallel=sequence_parallel,
    )
    return not any(violations(request.facts, LAYOUT_RULES))
