"""A user's own arguments with a plan's flags in the place of theirs; every change has a reason.

Only the destinations in ``WRITABLE`` are touched; everything else keeps its words and its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from nest_megatron.config.job import ReadCommand
from nest_megatron.integrations.megatron_lm.incompatible_options import (
    INCOMPATIBLE_OPTIONS,
    contradicted,
)
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    PARALLEL_ARGUMENTS,
    RECOMPUTE,
    VIRTUAL_STAGES,
)
from nest_megatron.integrations.megatron_lm.parser import Argument, load_arguments
from nest_megatron.integrations.megatron_lm.stage_options import STAGE_OPTIONS
from nest_megatron.parallel.diff import Change
from nest_megatron.parallel.execution_argv import (
    EXECUTION_ARGUMENTS,
    EXECUTION_FIELDS,
)
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
_IF_ABSENT = ("moe_grouped_gemm",)
#: Set where a job comes to Megatron-FSDP; one that has it already knows its Transformer Engine.
_WITH_NEW_FSDP = "gradient_accumulation_fusion"

#: Several spellings of one choice: where the user's own stays, none is added.
_STATEMENTS = (RECOMPUTE, (*STAGE_OPTIONS, *VIRTUAL_STAGES), *EXECUTION_ARGUMENTS.values())

#: Every destination that a plan may write. Nothing else of a job is ever changed.
WRITABLE = frozenset(
    {
        *PARALLEL_ARGUMENTS,
        *_WITH_LAYOUT,
        *_IF_ABSENT,
        _WITH_NEW_FSDP,
        *(dest for each in INCOMPATIBLE_OPTIONS for dest in each.dests),
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
class _Option:
    """One option of an argument vector, with its tokens."""

    dest: str | None
    tokens: tuple[str, ...]

    @property
    def flag(self) -> str:
        return self.tokens[0].partition("=")[0]

    @property
    def value(self) -> str:
        _, equals, inline = self.tokens[0].partition("=")
        return inline if equals else " ".join(self.tokens[1:])


def rewrite(
    command: ReadCommand,
    layout: Sequence[str],
    plan: ParallelPlan,
    kept: Collection[str] = (),
) -> Rewrite:
    """Put a plan's flags into a user's arguments.

    Args:
        layout: the plan's flags, from ``write.parallel_argv``.
        plan: the plan, for the reasons.
        kept: destinations whose flags stay as the user wrote them; the plan was searched under
            them, so it says nothing else.
    """
    given = _options(command.argv, command.version)
    stated = {dest for flags in _STATEMENTS if set(flags) & set(kept) for dest in flags}
    refused = contradicted(plan, command.values, command.version)
    settled = stated.union(kept).difference(refused.keys() & EXECUTION_FIELDS.keys())
    wanted = {
        option.dest: option
        for option in _options(layout, command.version)
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
            tokens += _same_or_new(option, wanted[option.dest])
            placed.add(option.dest)
    for dest, option in wanted.items():
        if dest not in placed:
            tokens += option.tokens
    changes = _changes(given, owned, wanted, plan, refused)
    free = set(PARALLEL_ARGUMENTS) - settled
    decided = {dest for dest in free if _owns(dest, wanted, plan)}
    return Rewrite(
        argv=tuple(tokens),
        changes=tuple(changes),
        written=frozenset({*decided, *wanted, *refused}),
    )


def _sets(dest: str, command: ReadCommand) -> bool:
    """Whether the plan's flag for a destination goes into this user's command."""
    if dest in _IF_ABSENT:
        return dest not in command.explicit
    if dest == _WITH_NEW_FSDP:
        return not command.values.get("use_megatron_fsdp")
    return dest in PARALLEL_ARGUMENTS or dest in _WITH_LAYOUT


def _owns(dest: str | None, wanted: Mapping[str, _Option], plan: ParallelPlan) -> bool:
    """Whether the user's own flag gives way to the plan (or to its silence)."""
    if dest is None or dest in _IF_ABSENT:
        return False
    if dest in (*_WITH_LAYOUT, _WITH_NEW_FSDP):
        return dest in wanted
    if dest == "expert_tensor_parallel_size" and dest not in wanted:
        return plan.model.num_experts is not None
    return dest in PARALLEL_ARGUMENTS


def _same_or_new(mine: _Option, planned: _Option) -> tuple[str, ...]:
    """The user's own spelling where the value is the same."""
    return mine.tokens if mine.value == planned.value else planned.tokens


def _changes(
    given: Sequence[_Option],
    owned: set[str | None],
    wanted: Mapping[str, _Option],
    plan: ParallelPlan,
    refused: Mapping[str, str],
) -> list[Change]:
    before = {option.dest: option for option in given if option.dest in owned}
    found = []
    for dest in [*before, *(dest for dest in wanted if dest not in before)]:
        assert dest is not None
        old, new = before.get(dest), wanted.get(dest)
        if old is not None and new is not None and old.value == new.value:
            continue
        if old is None and new is not None and _is_default(dest, new.value, plan):
            continue
        shown = new or old
        assert shown is not None
        found.append(
            Change(
                field=shown.flag,
                before=None if old is None else old.value,
                after=None if new is None else new.value,
                reason=_reason(dest, new is None, plan, refused),
            )
        )
    return found


def _is_default(dest: str, value: str, plan: ParallelPlan) -> bool:
    """What Megatron takes anyway: writing it out changes nothing."""
    if dest == "expert_tensor_parallel_size":
        return value == str(plan.parallel.tensor_model_parallel_size)
    return dest.endswith("_parallel_size") and value == "1"


def _options(argv: Sequence[str], version: str) -> list[_Option]:
    """An argument vector as options; a word of an unknown flag has no destination."""
    table = {flag: a for a in load_arguments(version) for flag in a.flags}
    options, at = [], 0
    while at < len(argv):
        flag, equals, _ = argv[at].partition("=")
        argument = table.get(flag)
        count = 1 if argument is None or equals else 1 + _num_values(argument, argv[at + 1 :])
        dest = None if argument is None else argument.dest
        options.append(_Option(dest, tuple(argv[at : at + count])))
        at += count
    return options


def _num_values(argument: Argument, rest: Sequence[str]) -> int:
    """How many words after a flag are its values, as argparse counts them."""
    if argument.action not in ("store", "append"):
        return 0
    if argument.nargs is None:
        return 1
    if isinstance(argument.nargs, int):
        return argument.nargs
    until = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    return min(until, 1) if argument.nargs == "?" else until


def _reason(dest: str, removed: bool, plan: ParallelPlan, refused: Mapping[str, str]) -> str:
    if removed:
        return refused.get(dest) or _REMOVED.get(dest, "the plan does not need it")
    return _REASONS[dest](plan) if dest in _REASONS else "belongs to the plan"


_REMOVED = {
    "sequence_parallel": "needs tensor parallelism",
    "recompute_granularity": "everything fits without recomputing",
    "recompute_activations": "everything fits without recomputing",
    "use_tp_pp_dp_mapping": "the other rank order is faster",
    "use_distributed_optimizer": "the optimizer state fits on every replica",
    "num_layers_per_virtual_pipeline_stage": "the layout states the virtual stages",
    "num_virtual_stages_per_pipeline_rank": "the layout states the virtual stages",
    "pipeline_model_parallel_layout": "there is one pipeline rank",
    "decoder_first_pipeline_num_layers": "the layout states every stage",
    "decoder_last_pipeline_num_layers": "the layout states every stage",
    "account_for_embedding_in_pipeline_split": "the layout states every stage",
    "account_for_loss_in_pipeline_split": "the layout states every stage",
}


def _across(group: str) -> Callable[[ParallelPlan], str]:
    return lambda plan: f"its groups stay within the {plan.placement.group_levels[group]} level"


def _recompute(plan: ParallelPlan) -> str:
    predicted = plan.predicted
    peak, capacity = format_gib(predicted.peak_memory_bytes), format_gib(predicted.capacity_bytes)
    return f"so that peak memory per GPU is {peak} of {capacity}"


def _microbatches(plan: ParallelPlan) -> str:
    count = plan.grid().num_microbatches
    return f"{count} micro batch{'es' * (count > 1)} a step on each replica"


def _of_execution(field: str) -> Callable[[ParallelPlan], str]:
    return lambda _: execution_reason(field)


_REASONS: Mapping[str, Callable[[ParallelPlan], str]] = {
    "tensor_model_parallel_size": _across("tp"),
    "context_parallel_size": _across("cp"),
    "expert_model_parallel_size": _across("ep"),
    "expert_tensor_parallel_size": lambda _: "each expert is split this far",
    "pipeline_model_parallel_size": _across("pp"),
    "pipeline_model_parallel_layout": lambda _: "the stages that the plan was priced with",
    "sequence_parallel": lambda _: "same time, less memory under tensor parallelism",
    "use_tp_pp_dp_mapping": lambda _: "this rank order is faster",
    "micro_batch_size": _microbatches,
    "global_batch_size": lambda _: "the batch that was planned for",
    "recompute_granularity": _recompute,
    "recompute_method": _recompute,
    "recompute_num_layers": _recompute,
    "recompute_modules": _recompute,
    "use_distributed_optimizer": lambda _: "optimizer state is shared among replicas",
    "use_megatron_fsdp": lambda _: "gradients or weights are shared among replicas",
    "data_parallel_sharding_strategy": lambda _: "what the replicas share",
    "overlap_grad_reduce": lambda _: "gradient traffic hides under the backward pass",
    "overlap_param_gather": lambda _: "weight traffic hides under the forward pass",
    "padded_vocab_size": lambda _: "the embedding keeps the rows that it has without the plan",
    "ckpt_format": lambda _: "the format that Megatron-FSDP saves",
    "init_model_with_meta_device": lambda _: (
        "weights are made shard by shard; without it every GPU first holds the whole model"
    ),
    "gradient_accumulation_fusion": lambda _: (
        "Megatron-FSDP overwrites gradient buffers, which fused accumulation adds to"
    ),
    "megatron_fsdp_main_grads_dtype": lambda _: (
        "Megatron-FSDP would keep gradients in 16 bits; they stay in float32, as they are now"
    ),
    **{dest: _of_execution(field) for dest, field in EXECUTION_FIELDS.items()},
    "moe_grouped_gemm": lambda _: "one kernel for all local experts, as was priced",
}
