"""The baselines by name, in the order in which tables list them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from nest_megatron.errors import UserInputError, nearest
from nest_megatron.research.baselines import (
    aceso,
    alpa_e,
    autoconfigurator,
    manual,
    mcmc,
    mist,
    phaze,
)
from nest_megatron.research.baselines.job import BaselineChoice, ComparisonJob


class Find(Protocol):
    """A planner: a pure function of the job."""

    def __call__(self, job: ComparisonJob, /) -> BaselineChoice:
        """The plan that the method chooses, or why it finds none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A planner with its name.

    Args:
        title: what it is, in a few words.
    """

    name: str
    title: str
    find: Find


BASELINES = (
    Baseline(name="manual", title="NVIDIA's recipe or Megatron's rule of thumb", find=manual.find),
    Baseline(name="mcmc", title="random walk (FlexFlow, TopoOpt)", find=mcmc.find),
    Baseline(name="phaze", title="exact, blind to the network (Phaze)", find=phaze.find),
    Baseline(name="alpa_e", title="sharding, then stages, then memory (Alpa)", find=alpa_e.find),
    Baseline(name="mist", title="memory-aware, blind to the network (Mist)", find=mist.find),
    Baseline(name="aceso", title="relieves the bottleneck (Aceso)", find=aceso.find),
    Baseline(
        name="autoconfigurator",
        title="table of degrees, all measured (NeMo)",
        find=autoconfigurator.find,
    ),
)
NAMES = tuple(baseline.name for baseline in BASELINES)


def baselines_named(names: Iterable[str]) -> tuple[Baseline, ...]:
    """The baselines of some names, in the order given.

    Raises:
        UserInputError: for a name that is none, with the list.
    """
    by_name = {baseline.name: baseline for baseline in BASELINES}
    found = []
    for name in names:
        if name not in by_name:
            raise UserInputError(
                "planners",
                value=name,
                limit=f"the planners are nest, {', '.join(NAMES)}",
                fix=nearest(name, ("nest", *NAMES)),
            )
        found.append(by_name[name])
    return tuple(found)
