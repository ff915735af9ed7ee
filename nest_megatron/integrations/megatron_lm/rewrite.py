"""A user's own arguments with a plan's flags in the place of theirs; every change has a reason.

Only the destinations in ``WRITABLE`` are touched; everything else keeps its words and its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nest_megatron.config.job import ReadCommand
from nest_megatron.integrations.megatron_lm.incompatible_options import (
    INCOMPATIBLE_OPTIONS,
    contradicted,
)
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    PARALLEL_ARGUMENTS,
    RECOMPUTE,
    STAGE_OPTIONS,
    VIRTUAL_STAGES,
    reasons,
)
from nest_megatron.integrations.megatron_lm.parser import Argument, load_arguments
from nest_megatron.parallel.diff import Change, reason
from nest_megatron.parallel.execution_argv import EXECUTION_ARGUMENTS, EXECUTION_FIELDS
from nest_megatron.parallel.knobs import execution_reason
from nest_megatron.parallel.plan import ParallelPlan
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

#: Every destination that a plan may write. Nothing else of a job is ever changed.
WRITABLE = frozenset(
    {
        *PARALLEL_ARGUMENTS,
        *_WITH_LAYOUT,
        _IF_ABSENT,
        _WITH_NEW_FSDP,
        *(option.dest for option in INCOMPATIBLE_OPTIONS),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A rewritten command's arguments, and what changed.

    Args:
        changes: flags before and after; ``None`` is an absent flag, empty text a bare switch.
        written: destinations that the plan decided, those that it left out included.
    """

    argv: tuple[str, ...]
    changes: tuple[Change, ...]
    written: frozenset[str]


@dataclass(frozen=True, slots=True)
class Option:
    """A flag with its values, as they were typed; ``dest`` is ``None`` for what Megatron lacks."""

    dest: str | None
    tokens: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The flag alone."""
        return self.tokens[0].partition("=")[0]

    @property
    def value(self) -> str:
        """Its values as one text."""
        _, equals, inline = self.tokens[0].partition("=")
        return inline if equals else " ".join(self.tokens[1:])


def rewrite(
    command: ReadCommand, layout: Sequence[str], plan: ParallelPlan, kept: Collection[str] = ()
) -> Rewrite:
    """Put a plan's flags into a user's arguments.

    Args:
        layout: the plan's flags, from ``write.parallel_argv``.
        kept: destinations whose flags stay as the user wrote them; the plan was searched under
            them, so it says nothing else.
    """
    given = options_of(command.argv, command.version)
    stated = {dest for flags in _STATEMENTS if set(flags) & set(kept) for dest in flags}
    refused = contradicted(plan, command.values, command.version)
    settled = stated.union(kept).difference(refused.keys() & EXECUTION_FIELDS.keys())
    wanted = {
        option.dest: option
        for option in options_of(layout, command.version)
        if option.dest is not None and option.dest not in settled and _sets(option.dest, command)
    }
    owned = {
        option.dest
        for option in given
        if option.dest in refused
        or (option.dest not in settled and _owns(option.dest, wanted, plan))
    }
    tokens: list[str] = []
    placed: set[str] = set()
    for option in given:
        if option.dest not in owned:
            tokens += option.tokens
        elif option.dest in wanted and option.dest not in placed:
            planned = wanted[option.dest]  # the user's own spelling where the value is the same
            tokens += option.tokens if option.value == planned.value else planned.tokens
            placed.add(option.dest)
    for dest, option in wanted.items():
        if dest not in placed:
            tokens += option.tokens
    free = set(PARALLEL_ARGUMENTS) - settled
    decided = {dest for dest in free if _owns(dest, wanted, plan)}
    return Rewrite(
        argv=tuple(tokens),
        changes=tuple(_changes(given, owned, wanted, plan, refused)),
        written=frozenset({*decided, *wanted, *refused}),
    )


def _sets(dest: str, command: ReadCommand) -> bool:
    if dest == _IF_ABSENT:
        return dest not in command.explicit
    if dest == _WITH_NEW_FSDP:
        return not command.values.get("use_megatron_fsdp")
    return dest in (*PARALLEL_ARGUMENTS, *_WITH_LAYOUT)


def _owns(dest: str | None, wanted: Mapping[str, Option], plan: ParallelPlan) -> bool:
    """Whether the user's own flag gives way to the plan (or to its silence)."""
    if dest in (None, _IF_ABSENT):
        return False
    if dest in (*_WITH_LAYOUT, _WITH_NEW_FSDP):
        return dest in wanted
    if dest == "expert_tensor_parallel_size" and dest not in wanted:
        return plan.model.num_experts is not None
    return dest in PARALLEL_ARGUMENTS


def _changes(
    given: Sequence[Option],
    owned: set[str | None],
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
            reason = refused.get(dest) or reasons("removed").get(dest, "the plan does not need it")
        else:
            reason = _reason(dest, plan)
        flag = (wanted if dest in wanted else mine)[dest].flag
        yield Change(field=flag, before=before, after=after, reason=reason)


def _is_default(dest: str, value: str, plan: ParallelPlan) -> bool:
    """What Megatron takes anyway: writing it out changes nothing."""
    if dest == "expert_tensor_parallel_size":
        return value == str(plan.layout.dims.tensor_model_parallel_size)
    return dest.endswith("_parallel_size") and value == "1"


def options_of(argv: Sequence[str], version: str) -> list[Option]:
    """An argument vector as options; a word of an unknown flag has no destination."""
    table = {flag: a for a in load_arguments(version) for flag in a.flags}
    options, at = [], 0
    while at < len(argv):
        flag, equals, _ = argv[at].partition("=")
        argument = table.get(flag)
        count = 1 if argument is None or equals else 1 + _num_values(argument, argv[at + 1 :])
        dest = None if argument is None else argument.dest
        options.append(Option(dest, tuple(argv[at : at + count])))
        at += count
    return options


def _num_values(argument: Argument, rest: Sequence[str]) -> int:
    if argument.action not in ("store", "append"):
        return 0
    if argument.nargs is None:
        return 1
    if isinstance(argument.nargs, int):
        return argument.nargs
    until = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    return min(until, 1) if argument.nargs == "?" else until


def _reason(dest: str, plan: ParallelPlan) -> str:
    if dest in EXECUTION_FIELDS:
        return execution_reason(EXECUTION_FIELDS[dest])
    if dest == "expert_tensor_parallel_size" and not plan.model.is_moe:
        return reason(plan, dest)
    count, predicted = plan.layout.num_microbatches, plan.predicted
    return (
        reasons("set")
        .get(dest, "belongs to the plan")
        .format(
            level=plan.placement.group_levels,
            microbatches=f"{count} micro batch{'es' * (count > 1)}",
            peak=format_gib(predicted.peak_memory_bytes),
            capacity=format_gib(predicted.capacity_bytes),
        )
    )
