"""Megatron-LM's arguments that state a layout, and how arguments are named to a user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nest_megatron.documents import packaged
from nest_megatron.errors import UserInputError
from nest_megatron.layout.execution_arguments import EXECUTION_ARGUMENTS

#: Megatron's arguments by destination.
Values = Mapping[str, Any]
#: Arguments that say how many virtual stages a rank has.
VIRTUAL_STAGES = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
#: Arguments that state the stage boundaries.
STAGE_OPTIONS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "hybrid_layer_pattern",  # with a | in it, see ``states_stages``
)
#: Arguments that state the recomputation.
RECOMPUTE = (
    "recompute_granularity",
    "recompute_activations",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "moe_layer_recompute",
)
#: Arguments that a plan may set; what a user gives of them stays fixed.
PARALLEL_ARGUMENTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "use_tp_pp_dp_mapping",
    *VIRTUAL_STAGES,
    *STAGE_OPTIONS,
    "micro_batch_size",
    *RECOMPUTE,
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "data_parallel_sharding_strategy",
    "overlap_grad_reduce",
    "overlap_param_gather",
    *(name for names in EXECUTION_ARGUMENTS.values() for name in names),
)


def states_stages(values: Values, dest: str) -> bool:
    """Whether an argument of ``STAGE_OPTIONS`` is given; a pattern without ``|`` cuts nothing.

    >>> [states_stages({"hybrid_layer_pattern": text}, STAGE_OPTIONS[-1]) for text in ("M*", "M|*")]
    [False, True]
    """
    value = values.get(dest)
    if dest == "hybrid_layer_pattern":
        return isinstance(value, str) and "|" in value
    return value is not None and value is not False


_ROLES = packaged(__package__, "arguments_data/roles.toml")
#: Why arguments are ``refused``, ``set`` or ``removed``, by destination.
REASONS: Mapping[str, Mapping[str, str]] = _ROLES["reasons"]
#: Arguments that plans write, by the release that has them first; the newest first.
SINCE: Mapping[str, Sequence[str]] = _ROLES["since"]


def arguments_of(role: str) -> tuple[str, ...]:
    """The arguments of one table of ``arguments_data/roles.toml``."""
    return tuple(name for names in _ROLES[role].values() for name in names)


def flag_of(dest: str) -> str:
    """An argument as it is typed."""
    return f"--{dest.replace('_', '-')}"


def newest_flags(argv: Iterable[str], given: Iterable[str] = ()) -> str:
    """The first release of Megatron-LM that has all flags of a command, in words.

    Args:
        given: arguments whose flags are there already.

    >>> newest_flags(["--bf16", "--pipeline-model-parallel-layout", "Et|tL"])
    'No release of Megatron-LM before core_v0.13.0 has --pipeline-model-parallel-layout.'
    >>> newest_flags(["--bf16"])
    ''
    """
    flags = {word.partition("=")[0] for word in argv} - {word.partition("=")[0] for word in given}
    for release, names in SINCE.items():
        if new := [flag for flag in map(flag_of, names) if flag in flags]:
            return f"No release of Megatron-LM before core_v{release} has {', '.join(new)}."
    return ""


def flag_error(dest: str, value: object, limit: str, fix: str) -> UserInputError:
    """What is wrong with an argument, by its flag."""
    return UserInputError(flag_of(dest), value, limit, fix)
