"""``research.KEY=VALUE`` beside the settings of a job: what the recurrence may choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nest_megatron.config.compose import Composed
from nest_megatron.config.request import request_of
from nest_megatron.config.schema import PlanConfig
from nest_megatron.config.space import fixed_degrees
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.research.nest_dp.job import (
    Division,
    RecomputeChoice,
    ResearchChoices,
    ResearchJob,
)
from nest_megatron.research.nest_dp.links import Topology
from nest_megatron.research.nest_dp.memory import MemoryRule, Optimizer
from nest_megatron.research.nest_dp.records import Schedule
from nest_megatron.solver.space import SearchSpace

_PREFIX = "research."
_SWITCH = {"true": True, "false": False}
#: The values of each key by the word that is typed.
_WORDS: dict[str, Mapping[str, Any]] = {
    "schedule": {choice.value: choice for choice in Schedule},
    "recompute": {choice.value: choice for choice in RecomputeChoice},
    "zero": _SWITCH,
    "strategy_per_stage": _SWITCH,
    "memory": {choice.value: choice for choice in MemoryRule},
    "optimizer": {choice.value: choice for choice in Optimizer},
    "divide": {choice.value: choice for choice in Division},
    "topology": {choice.value: choice for choice in Topology},
    "flash_attention": _SWITCH,
}
#: Degrees that a stage has, or a pipeline.
_DEGREES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "micro_batch_size",
)
_FIXED = (*_DEGREES, "pipeline_model_parallel_size", "data_parallel_size")


def split_research(texts: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """Overrides of the job, and the recurrence's own settings.

    Raises:
        UserInputError: for a key or a value that does not exist, naming the nearest.

    >>> split_research(["model=llama3_8b", "research.zero=false"])
    (['model=llama3_8b'], {'zero': False})
    """
    job: list[str] = []
    found: dict[str, Any] = {}
    for text in texts:
        if not text.startswith(_PREFIX):
            job.append(text)
            continue
        key, _, value = text.removeprefix(_PREFIX).partition("=")
        found[key] = _value(key, value)
    return job, found


def _value(key: str, value: str) -> Any:
    if key not in _WORDS:
        known = [f"{_PREFIX}{name}" for name in _WORDS]
        raise UserInputError(
            f"{_PREFIX}{key}",
            value=value,
            limit="there is no such setting",
            fix=nearest(f"{_PREFIX}{key}", known),
        )
    words = _WORDS[key]
    if value.lower() not in words:
        raise UserInputError(
            f"{_PREFIX}{key}",
            value=value,
            limit=f"it is one of {', '.join(words)}",
            fix=nearest(value, words),
        )
    return words[value.lower()]


def research_job(
    composed: Composed, given: Mapping[str, Any]
) -> tuple[ResearchJob, tuple[str, ...]]:
    """The job for the recurrence, and what was assumed.

    Args:
        given: the recurrence's own settings.

    Raises:
        UserInputError: if something is missing or wrong, or fixed that the recurrence has not.
    """
    _refuse_unread(composed.given)
    request, config = request_of(composed, SearchSpace()), composed.config
    limits = {name: getattr(config.search, f"max_{name}") for name in _FIXED}
    choices = ResearchChoices(
        **given,
        fixed=_fixed(config),
        limits={name: value for name, value in limits.items() if value is not None},
    )
    job = ResearchJob(
        spec=request.spec,
        cluster=request.cluster,
        settings=request.settings,
        global_batch_size=request.global_batch_size,
        choices=choices,
        times=request.times,
    )
    return job, request.notes


def _refuse_unread(given: Iterable[str]) -> None:
    """Refuse settings that would be passed over.

    Raises:
        UserInputError: for the first of them.
    """
    read = {"search.backend", *(f"search.max_{name}" for name in _FIXED)}
    for key in sorted(given):
        if key == "out" or (key.startswith("search.") and key not in read):
            raise UserInputError(
                key,
                value=None,
                limit="the recurrence does not know it",
                fix="Leave it out; --json prints the plan for programs.",
            )


def _fixed(config: PlanConfig) -> dict[str, int]:
    """Degrees held at a value.

    Raises:
        UserInputError: for another setting of ``parallel``, or a degree below 1.
    """
    found = fixed_degrees(config)
    for name in vars(config.parallel):
        value = getattr(config.parallel, name)
        if value is not None and name not in _FIXED:
            raise UserInputError(
                f"parallel.{name}",
                value=value,
                limit="the recurrence does not know it",
                fix=f"Leave it out; {', '.join(_FIXED)} can be fixed, and research.* be set.",
            )
    for name, value in found.items():
        if value < 1:
            raise UserInputError(
                f"parallel.{name}", value=value, limit="it is at least 1", fix="Use 1 or more."
            )
    return found
