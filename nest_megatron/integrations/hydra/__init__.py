"""Any Hydra application: ``+nest=auto`` composes, ``${nest:NAME}`` is a value of the plan.

Every Hydra application on the machine imports this module, so it imports nothing itself.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make the resolver known to OmegaConf; doing so twice is doing so once."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("nest", value_of, replace=True)


def value_of(name: str, *, _root_: Any) -> Any:
    """A value of the plan for the configuration that asks; ``NestError`` if there is none."""
    from nest_megatron.integrations.hydra.plans import PLANS
    from nest_megatron.integrations.hydra.view import value_named

    return value_named(PLANS.of(_root_).values, name)
