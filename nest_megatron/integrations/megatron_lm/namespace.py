"""Megatron's own Namespace as a command that can be planned, and a plan written into it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from nest_megatron.config.job import ReadCommand
from nest_megatron.errors import NestError
from nest_megatron.integrations.megatron_lm.checkpoint_arguments import with_degrees_as_flags
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    PARALLEL_ARGUMENTS,
    Values,
    flag_error,
)
from nest_megatron.integrations.megatron_lm.parser import load_arguments, read_argv
from nest_megatron.integrations.megatron_lm.rewrite import WRITABLE
from nest_megatron.integrations.process_variables import set_variables
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.devices import ELEMENTWISE_OPTIMIZERS

#: Choices of a plan that Megatron's validation derives or checks.
_DERIVED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "use_megatron_fsdp",
)


def command_of(
    args: Namespace, argv: Sequence[str], script: str, version: str, defaults: Values
) -> ReadCommand:
    """The job as Megatron has parsed it, beside the words that the user typed.

    A value that differs from Megatron's default without being typed counts as the user's own: it
    comes from a checkpoint's arguments.

    Args:
        args: Megatron's Namespace before validation.
        argv: the script's arguments, without this package's own words.
    """
    typed = read_argv(script, argv, version, world_size=args.world_size)
    values = vars(with_defaults(Namespace(**{**typed.values, **vars(args)}), defaults))
    untyped = {
        argument.dest
        for argument in load_arguments(version)
        if argument.dest in PARALLEL_ARGUMENTS and values.get(argument.dest) != argument.default
    }
    merged = dataclasses.replace(typed, values=values, explicit=typed.explicit | untyped)
    return with_degrees_as_flags(merged)


def with_defaults(args: Namespace, defaults: Values) -> Namespace:
    """A copy of Megatron's arguments with what the script sets where the user says nothing."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    return Namespace(**{**vars(args), **defaults, **given})


def write(args: Namespace, values: Values, environment: Mapping[str, str | None]) -> None:
    """Set a plan's values in Megatron's Namespace, and the variables that go with them."""
    assert values.keys() <= WRITABLE
    for dest, value in values.items():
        if hasattr(args, dest):
            setattr(args, dest, value)
    set_variables(environment)


def require_planned(args: Namespace, plan: ParallelPlan) -> None:
    """Raise if Megatron derived something else than the plan has, naming it."""
    arguments, train = plan.arguments, plan.train
    wanted = {name: arguments[name] for name in _DERIVED} | {
        "micro_batch_size": plan.layout.micro_batch_size,
        "seq_length": train.seq_length,
        "num_layers": plan.model.num_layers,
    }
    if train.batch_schedule is None or train.batch_schedule.rampup_batch_size:
        wanted["global_batch_size"] = plan.final_batch_size  # else one micro batch on each replica
    if (getattr(args, "optimizer", None) or "adam") in ELEMENTWISE_OPTIMIZERS:
        # 0.20 divides an emerging optimizer's state by layers instead, and clears the flag
        wanted["use_distributed_optimizer"] = arguments["use_distributed_optimizer"]
    if plan.model.vision is not None:  # pretrain_vlm.py makes the language model's of others
        del wanted["seq_length"], wanted["num_layers"]
    for name, value in wanted.items():
        found = getattr(args, name)
        if found != value:
            raise NestError(
                f"after Megatron's own validation {name} is {found!r}, the plan has {value!r}; "
                "launch without nest and report it."
            )


def flags_of(version: str) -> dict[str, str]:
    """How a user writes each of Megatron's arguments; one that is switched off has both names."""
    flags: dict[str, str] = {}
    for argument in load_arguments(version):
        flag, off = argument.flags[0], argument.action == "store_false"
        flags.setdefault(argument.dest, f"{argument.dest} ({flag} makes it False)" if off else flag)
    return flags


def padded_vocab_size(args: Namespace, defaults: Values) -> int | None:
    """Rows of the embedding under the user's own tensor-parallel size; ``None`` without padding.

    Megatron's own tokenizer says it, on a copy of the arguments, because for most tokenizers the
    number is in their files alone.

    Raises:
        UserInputError: if the tokenizer cannot be built.
    """
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    if getattr(args, "pad_vocab_size", True) is False:
        return None
    copied = with_defaults(args, defaults)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Megatron says it all again when it starts
            _build_tokenizer()(copied)
    except Exception as error:
        raise flag_error(
            "tokenizer_type",
            copied.tokenizer_type,
            f"Megatron cannot build it: {error}",
            "Correct the tokenizer's flags, or give --padded-vocab-size.",
        ) from error
    return int(copied.padded_vocab_size)


def _build_tokenizer() -> Any:
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    except ImportError:  # 0.16
        from megatron.training.tokenizer import build_tokenizer
    return build_tokenizer
