"""The settings of a job that no other part of its plan's file says."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from nest_megatron.config.overrides import value_text
from nest_megatron.config.schema import PlanConfig
from nest_megatron.parallel.objective import Objective
from nest_megatron.parallel.plan import ParallelPlan

#: Their values where nobody says another (``hydra_configs/plan.yaml``), as typed.
DEFAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "search.objective": "expected",
        "search.tie_percent": "1.0",
        "search.max_out_of_memory_percent": "5.0",
        "search.failed_start_percent": "4.0",
        "search.keep": "[]",
        "search.packages": "[]",
        "memory.priced_margin": "null",
        "train.fp8_recipe": "null",
        "checks.plausibility": "true",
    }
)
#: Certificates of plans that no objective has chosen.
_UNCHOSEN = ("fixed", "runner-up")


def given_settings(config: PlanConfig) -> tuple[str, ...]:
    """Those that a configuration has, for the plan's file."""
    values = {key: value_text(attrgetter(key)(config)) for key in DEFAULTS}
    return tuple(f"{key}={value}" for key, value in values.items() if value != DEFAULTS[key])


def given_of(plan: ParallelPlan) -> dict[str, str]:
    """All of them as a plan was made with; files of earlier versions say few."""
    found = dict(DEFAULTS)
    if plan.choice is not None:
        found["search.objective"] = plan.choice.objective.value
        found["search.tie_percent"] = value_text(plan.choice.tie_percent)
    elif plan.search.certificate not in _UNCHOSEN:
        found["search.objective"] = Objective.NOMINAL.value
    pairs = (text.partition("=") for text in plan.provenance.given)
    return found | {key: value for key, _, value in pairs}
