"""Megatron-LM's arguments that state a layout, and how arguments are named to a user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
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


def states_stages(dest: str, value: object) -> bool:
    """Whether an argument of ``STAGE_OPTIONS`` is given; a pattern without ``|`` cuts nothing.

    >>> states_stages("hybrid_layer_pattern", "M*M*"), states_stages("hybrid_layer_pattern", "M|*")
    (False, True)
    """
    if dest == "hybrid_layer_pattern":
        return isinstance(value, str) and "|" in value
    return value is not None and value is not False


@cache
def _roles() -> dict[str, Any]:
    found: dict[str, Any] = packaged(__package__, "arguments_data/roles.toml")
    return found


def arguments_of(role: str) -> tuple[str, ...]:
    """The arguments of one table of ``arguments_data/roles.toml``."""
    return tuple(name for names in _roles()[role].values() for name in names)


def reasons(kind: str) -> dict[str, str]:
    """Why arguments are ``refused``, ``set`` or ``removed``, by destination; from the same file."""
    found: dict[str, str] = _roles()["reasons"][kind]
    return found


def flag_of(dest: str) -> str:
    """An argument as it is typed."""
    return f"--{dest.replace('_', '-')}"


def first_releases() -> dict[str, str]:
    """Arguments that plans write, by the release that has them first; the newest first."""
    return {name: release for release, names in _roles()["since"].items() for name in names}


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
    new = {flag_of(name): release for name, release in first_releases().items()}
    new = {flag: release for flag, release in new.items() if flag in flags}
    if not new:
        return ""
    newest = next(iter(new.values()))
    named = ", ".join(flag for flag, release in new.items() if release == newest)
    return f"No release of Megatron-LM before core_v{newest} has {named}."


def flag_error(dest: str, value: object, limit: str, fix: str) -> UserInputError:
    """What is wrong with an argument, by its flag."""
    return UserInputError(flag_of(dest), value, limit, fix)
