"""Megatron's own Namespace as a command that can be planned, and a plan written into it."""

from __future__ import annotations

import dataclasses
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nest_megatron.config.job import ReadCommand
from nest_megatron.errors import NestError
from nest_megatron.integrations.megatron_lm.layout_arguments import PARALLEL_ARGUMENTS
from nest_megatron.integrations.megatron_lm.parser import (
    VERSIONS,
    load_arguments,
    read_argv,
)
from nest_megatron.integrations.megatron_lm.rewrite import WRITABLE, Rewrite
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.parallel.rules import ELEMENTWISE_OPTIMIZERS


def recorded_version(release: str) -> str:
    """The recorded release whose options stand for an installed one.

    >>> recorded_version("0.16.1"), recorded_version("0.20.0rc0"), recorded_version("0.18.0")
    ('0.16.1', '0.20', '0.20')
    """
    major, _, rest = release.partition(".")
    minor = rest.partition(".")[0]
    newer = major != "0" or (minor.isdigit() and int(minor) > 16)
    return VERSIONS[-1] if newer else VERSIONS[0]


def command_of(
    args: Namespace, argv: Sequence[str], script: str, version: str, defaults: Mapping[str, Any]
) -> ReadCommand:
    """The job as Megatron has parsed it, beside the words that the user typed.

    A value that differs from Megatron's default without being typed counts as the user's own: it
    comes from a checkpoint's arguments.

    Args:
        args: Megatron's Namespace before validation.
        argv: the script's arguments, without this package's own words.
        version: one of ``parser.VERSIONS``.
        defaults: what the script sets where the user says nothing.
    """
    typed = read_argv(script, argv, version, world_size=args.world_size)
    values = {**typed.values, **vars(args)}
    for name, value in defaults.items():
        if values.get(name) is None:
            values[name] = value
    untyped = {
        argument.dest
        for argument in load_arguments(version)
        if argument.dest in PARALLEL_ARGUMENTS
        and values.get(argument.dest) != argument.default
        and argument.dest not in typed.explicit
    }
    return dataclasses.replace(
        typed, values=MappingProxyType(values), explicit=typed.explicit | untyped
    )


def written_values(rewrite: Rewrite, command: ReadCommand) -> dict[str, Any]:
    """What a rewritten command sets, by destination; options that it leaves out have defaults."""
    assert rewrite.written <= WRITABLE
    again = read_argv(command.script, rewrite.argv, command.version)
    return {dest: again.values[dest] for dest in sorted(rewrite.written) if dest in again.values}


def write(
    args: Namespace, values: Mapping[str, Any], environment: Mapping[str, str | None]
) -> None:
    """Set a plan's values in Megatron's Namespace, and the variables that go with them."""
    assert values.keys() <= WRITABLE
    for dest, value in values.items():
        if hasattr(args, dest):
            setattr(args, dest, value)
    for name, text in environment.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


def require_planned(args: Namespace, plan: ParallelPlan) -> None:
    """Compare Megatron's arguments after its own validation with the plan.

    Raises:
        NestError: if Megatron derived something else, naming it.
    """
    chosen, train = plan.parallel, plan.train
    wanted = {
        "tensor_model_parallel_size": chosen.tensor_model_parallel_size,
        "pipeline_model_parallel_size": chosen.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": chosen.virtual_pipeline_model_parallel_size,
        "context_parallel_size": chosen.context_parallel_size,
        "data_parallel_size": chosen.data_parallel_size,
        "expert_model_parallel_size": chosen.expert_model_parallel_size,
        "sequence_parallel": chosen.sequence_parallel,
        "use_megatron_fsdp": chosen.use_megatron_fsdp,
        "micro_batch_size": train.micro_batch_size,
        "global_batch_size": train.global_batch_size,
        "seq_length": train.seq_length,
        "num_layers": plan.model.num_layers,
    }
    if (getattr(args, "optimizer", None) or "adam") in ELEMENTWISE_OPTIMIZERS:
        # 0.20 divides an emerging optimizer's state by layers instead, and clears the flag
        wanted["use_distributed_optimizer"] = chosen.use_distributed_optimizer
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
        flag, dest = argument.flags[0], argument.dest
        switches_off = argument.action == "store_false"
        flags.setdefault(dest, f"{dest} ({flag} makes it False)" if switches_off else flag)
    return flags
