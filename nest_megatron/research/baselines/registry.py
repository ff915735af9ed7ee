"""The baselines by name, in the order in which tables list them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nest_megatron.errors import UserInputError, nearest
from nest_megatron.research.baselines import (
    aceso,
    alpa_e,
    autoconfigurator,
    manual,
    mcmc,
    network_blind,
)
from nest_megatron.research.baselines.job import BaselineChoice, ComparisonJob


@dataclass(frozen=True, slots=True)
class Baseline:
    """A planner: its name, what it is in a few words, and the plan that it chooses for a job."""

    name: str
    title: str
    find: Callable[[ComparisonJob], BaselineChoice]


BASELINES = (
    Baseline("manual", "NVIDIA's recipe or Megatron's rule of thumb", manual.find),
    Baseline("mcmc", "random walk (FlexFlow, TopoOpt)", mcmc.find),
    Baseline("phaze", "exact, blind to the network (Phaze)", network_blind.find_phaze),
    Baseline("alpa_e", "sharding, then stages, then memory (Alpa)", alpa_e.find),
    Baseline("mist", "memory-aware, blind to the network (Mist)", network_blind.find_mist),
    Baseline("aceso", "relieves the bottleneck (Aceso)", aceso.find),
    Baseline("autoconfigurator", "table of degrees, all measured (NeMo)", autoconfigurator.find),
)
NAMES = tuple(baseline.name for baseline in BASELINES)


def baselines_named(names: Iterable[str]) -> tuple[Baseline, ...]:
    """The baselines of some names, in the order given.

    Raises:
        UserInputError: for a name that is none, with the list.
    """
    by_name = {baseline.name: baseline for baseline in BASELINES}
    wanted = tuple(names)
    for name in wanted:
        if name not in by_name:
            raise UserInputError(
                "planners",
                value=name,
                limit=f"the planners are nest, {', '.join(NAMES)}",
                fix=nearest(name, ("nest", *NAMES)),
            )
    return tuple(by_name[name] for name in wanted)
