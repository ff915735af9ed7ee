"""A user's own arguments with a plan's flags in the place of theirs; every change has a reason.

Only the destinations in ``WRITABLE`` are touched; everything else keeps its words and its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nest_megatron.config.job import Option, ReadCommand
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    PARALLEL_ARGUMENTS,
    REASONS,
    RECOMPUTE,
    STAGE_OPTIONS,
    VIRTUAL_STAGES,
    Values,
)
from nest_megatron.integrations.megatron_lm.parser import namespace_values, options_for
from nest_megatron.layout.diff import Change, reason
from nest_megatron.layout.execution_rules import EXECUTION_ARGUMENTS, EXECUTION_FIELDS
from nest_megatron.layout.knobs import execution_reason
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.options import OPTION_RULES, contradicted
from nest_megatron.units import format_gib

#: Set together with the layout; those in the second row only where the user says nothing.
_WITH_LAYOUT = (
    "global_batch_size",
    "ckpt_format",
    "padded_vocab_size",
    "init_model_with_meta_device",
    "megatron_fsdp_main_grads_dtype",
)
_IF_ABSENT = "moe_grouped_gemm"
#: Set where a job comes to Megatron-FSDP; one that has it already knows its Transformer Engine.
_WITH_NEW_FSDP = "gradient_accumulation_fusion"

#: Several spellings of one choice: where the user's own stays, none is added.
_STATEMENTS = (RECOMPUTE, (*STAGE_OPTIONS, *VIRTUAL_STAGES), *EXECUTION_ARGUMENTS.values())

#: What a plan sets, and with the options that it contradicts every destination that it may write.
#: Nothing else of a job is ever changed.
_SET = frozenset((*PARALLEL_ARGUMENTS, *_WITH_LAYOUT, _IF_ABSENT, _WITH_NEW_FSDP))
WRITABLE = _SET | {rule.what for rule in OPTION_RULES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A rewritten command's arguments, and what changed.

    Args:
        changes: flags before and after; ``None`` is an absent flag, empty text a bare switch.
        values: what the plan decided, by destination; of what it leaves out Megatron's default.
    """

    argv: tuple[str, ...]
    changes: tuple[Change, ...]
    values: Values


def rewrite(
    command: ReadCommand,
    planned: Values,
    plan: ParallelPlan,
    kept: Collection[str] = (),
) -> Rewrite:
    """Put a plan's flags into a user's arguments.

    Args:
        planned: the plan's arguments, from ``write.planned_arguments``.
        kept: destinations whose flags stay as the user wrote them; the plan was searched under
            them, so it says nothing else.
    """
    given, version = command.options, command.version
    stated = {dest for flags in _STATEMENTS if set(flags) & set(kept) for dest in flags}
    refused = contradicted(plan, command.values, command.version)
    settled = stated.union(kept).difference(refused.keys() & EXECUTION_FIELDS.keys())
    settled |= command.explicit & {_IF_ABSENT}
    if command.values.get("use_megatron_fsdp"):
        settled |= {_WITH_NEW_FSDP}
    wanted = {
        option.dest: option
        for option in options_for(planned, version)
        if option.dest is not None and option.dest in _SET - settled
    }
    free = {*PARALLEL_ARGUMENTS} - settled
    if plan.model.num_experts is None:  # a dense model's expert grid is the user's own
        free -= {"expert_tensor_parallel_size"}
    owned = free | wanted.keys() | refused.keys()
    tokens: list[str] = []
    placed: set[str] = set()
    for option in given:
        if option.dest not in owned:
            tokens += option.tokens
        elif option.dest in wanted and option.dest not in placed:
            new = wanted[option.dest]  # the user's own spelling where the value is the same
            tokens += option.tokens if option.value == new.value else new.tokens
            placed.add(option.dest)
    for dest, option in wanted.items():
        if dest not in placed:
            tokens += option.tokens
    assert owned <= WRITABLE
    values = {dest: planned[dest] for dest in wanted}
    return Rewrite(
        argv=tuple(tokens),
        changes=tuple(_changes(given, owned, wanted, plan, refused)),
        values=namespace_values(values, owned, version),
    )


def _changes(
    given: Sequence[Option],
    owned: Collection[str],
    wanted: Mapping[str, Option],
    plan: ParallelPlan,
    refused: Mapping[str, str],
) -> Iterator[Change]:
    mine = {option.dest: option for option in given if option.dest and option.dest in owned}
    for dest in dict.fromkeys((*mine, *wanted)):
        before = mine[dest].value if dest in mine else None
        after = wanted[dest].value if dest in wanted else None
        if before == after or (before is None and after and _is_default(dest, after, plan)):
            continue
        if after is None:
            reason = refused.get(dest) or REASONS["removed"].get(dest, "the plan does not need it")
        else:
            reason = _reason(dest, plan)
        flag = (wanted if dest in wanted else mine)[dest].flag
        yield Change(field=flag, before=before, after=after, reason=reason)


def _is_default(dest: str, value: str, plan: ParallelPlan) -> bool:
    """What Megatron takes anyway: writing it out changes nothing."""
    if dest == "expert_tensor_parallel_size":
        return value == str(plan.layout.dims.tensor_model_parallel_size)
    return dest.endswith("_parallel_size") and value == "1"


def _reason(dest: str, plan: ParallelPlan) -> str:
    if dest in EXECUTION_FIELDS:
        return execution_reason(EXECUTION_FIELDS[dest])
    if dest == "expert_tensor_parallel_size" and not plan.model.is_moe:
        return reason(plan, dest)
    count, predicted = plan.layout.num_microbatches, plan.predicted
    return (
        REASONS["set"]
        .get(dest, "belongs to the plan")
        .format(
            level=plan.placement.group_levels,
            microbatches=f"{count} micro batch{'es' * (count > 1)}",
            peak=format_gib(predicted.peak_memory_bytes),
            capacity=format_gib(predicted.capacity_bytes),
        )
    )
