"""The framework that a plan is for, and what its defaults and the job's flags say."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from nest_megatron.cluster.records import Precision
from nest_megatron.config.job import Job
from nest_megatron.config.schema import PlanConfig
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.target_defaults import (
    DEFAULT_TARGET,
    MEGATRON_LM,
    target_named,
)
from nest_megatron.cost_model.target_limits import NUMERIC_FIELDS
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.model.execution import Execution
from nest_megatron.names import Name
from nest_megatron.parallel.numeric_knobs import NUMERIC_KNOBS
from nest_megatron.planner.request import NumericOffer

Choice = TypeVar("Choice", bound=Name)


def read_settings(config: PlanConfig, job: Job, accelerator: str = "") -> CostSettings:
    """The cost model's assumptions: the job's flags over its target's defaults, ``cost.*`` on top.

    Args:
        accelerator: the device's name.

    Raises:
        UserInputError: for a setting out of range, or another target than the job's own.
    """
    given = dataclasses.asdict(config.cost)
    given["memory_margin"] = config.memory.margin
    given["memory_reserve_bytes"] = config.memory.reserve_bytes
    said = {name: value for name, value in given.items() if value is not None}
    precision = read_precision(config, job.precision)
    return read_target(config, job.target).settings(
        accelerator, precision, job.memory_flags, has_experts=job.spec.is_moe, **said
    )


def read_execution(config: PlanConfig, job: Job, accelerator: str) -> Execution:
    """How layers are carried out: the job's flags over its target's defaults."""
    precision = read_precision(config, job.precision)
    return read_target(config, job.target).execution(
        accelerator, precision, job.memory_flags, has_experts=job.spec.is_moe
    )


def read_numeric_offers(config: PlanConfig, job: Job, accelerator: str) -> tuple[NumericOffer, ...]:
    """Choices that change numbers and that the job has not made."""
    target = read_target(config, job.target)
    precision = read_precision(config, job.precision)
    has_experts = job.spec.is_moe
    said = {name: value for name, value in job.memory_flags.items() if value is not None}
    own = {**target.flags(accelerator, precision, has_experts=has_experts), **said}
    fields = NUMERIC_FIELDS.get(target.fitted, {})
    if target in MEGATRON_LM:
        fields = {knob.flags: knob.flags for knob in NUMERIC_KNOBS}
    found = []
    for knob in NUMERIC_KNOBS:
        words = fields.get(knob.flags)
        if words is None or not knob.is_for(own, precision, accelerator, has_experts=has_experts):
            continue
        flags = {**job.memory_flags, **dict.fromkeys(knob.instead_of, False), **knob.values}
        asked = config
        if knob.precision is not None:
            train = dataclasses.replace(config.train, precision=knob.precision.value)
            asked = dataclasses.replace(config, train=train)
        changed = dataclasses.replace(job, memory_flags=flags)
        settings = read_settings(asked, changed, accelerator)
        found.append(NumericOffer(knob=knob, settings=settings, words=words))
    return tuple(found)


def fp8_recipe_of(settings: CostSettings) -> str | None:
    """How fp8 numbers are scaled; ``None`` in another format."""
    is_fp8 = settings.precision is Precision.FP8
    return settings.traits.fp8_recipe.value if is_fp8 else None


def read_precision(config: PlanConfig, own: Precision = Precision.BF16) -> Precision:
    """The number format.

    Args:
        own: the job's.
    """
    named = config.train.precision
    return own if named is None else choice("train.precision", named, Precision)


def read_target(config: PlanConfig, own: Target | None = None) -> Target:
    """The framework and release that the plan is for.

    Args:
        own: the job's, where it names one.

    Raises:
        UserInputError: for an unknown name, or another one than the job's own.
    """
    if config.target is None:
        return own or DEFAULT_TARGET
    named = target_named(config.target)
    if own is not None and named.name != own.name:
        raise UserInputError(
            "target",
            value=config.target,
            limit=f"the job runs on {own.framework}",
            fix="Leave it out, or plan from a model and a cluster.",
        )
    return named


def choice(what: str, value: str, kind: type[Choice]) -> Choice:
    """A member of an enum by its name.

    Raises:
        UserInputError: naming the members, and the nearest.
    """
    known = [member.value for member in kind]
    if value not in known:
        raise UserInputError(
            what, value=value, limit=f"it is one of {', '.join(known)}", fix=nearest(value, known)
        )
    return kind(value)
