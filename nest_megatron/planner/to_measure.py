"""Which plans could be the fastest, and what to measure then: which profile, how long, on what.

A profile of layers needs one GPU: blocks are timed without their collectives. One of the network
needs the nodes that the groups of the layouts cross.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.compute import operator_times
from nest_megatron.cost_model.mechanisms import Mechanism
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.shortlist import (
    LAYERS,
    NETWORK,
    Measurement,
    measurements,
    shortlist,
)
from nest_megatron.layout.estimate import SURE, Shortlist
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rank_order import GroupKind, group_level
from nest_megatron.model.operators import block_graph
from nest_megatron.model.spec import ModelFamily
from nest_megatron.plain import frozen
from nest_megatron.planner.choice import Candidate
from nest_megatron.profile.choose import MEASURE_COMMAND
from nest_megatron.profile.records import Source
from nest_megatron.profile.session import BUDGET_S, Task, divides, telling_apart
from nest_megatron.units import Seconds, counted

#: Until the first block is timed: Python, torch, megatron-core and the device. For each block: its
#: layer is built and run before passes count. Estimates, as ``tuning`` has for the start of a job.
_START_S: Seconds = 30.0
_BUILD_S: Seconds = 2.0
#: Passes of a block at most (``layer_timer.Measuring``): two by themselves, three to warm up, 30
#: that count, one for what it saves; each is two forward and one backward, a third more than one
#: of each where backward takes twice as long as forward.
_PASSES = 36 * 4 / 3
#: A block is dropped after so long: 10 s, and half as much to warm up.
_MOST_S: Seconds = 15.0

#: Groups of ranks whose traffic a mechanism is.
_GROUPS = {
    Mechanism.TENSOR: (GroupKind.TP, GroupKind.ETP),
    Mechanism.CONTEXT: (GroupKind.CP,),
    Mechanism.EXPERT: (GroupKind.EP,),
    Mechanism.EXPERT_NETWORK: (GroupKind.EP,),
    Mechanism.REPLICAS: (GroupKind.DP_CP, GroupKind.EDP),
    Mechanism.FSDP: (GroupKind.DP_CP, GroupKind.EDP),
}


@frozen
class Profile:
    """A profile that can be made.

    Args:
        num_shapes: blocks in shapes of which the layouts have not all; 0 of one of the network.
        num_nodes: that it runs on; 0 is one GPU.
    """

    mechanisms: frozenset[Mechanism]
    seconds: Seconds
    num_shapes: int = 0
    num_nodes: int = 0


def undecided(plan: ParallelPlan) -> tuple[int, ...]:
    """Numbers of those that could be the fastest, 0 the plan: its shortlist, else what ties."""
    if plan.shortlist is not None:
        return plan.shortlist.numbers
    others = enumerate(plan.alternatives, start=1)
    ties = [n for n, other in others if other.chance_slower and other.chance_slower < SURE]
    return (0, *ties)


def minutes(seconds: Seconds) -> str:
    """A time in whole minutes, for people, who need no more of an estimate.

    >>> minutes(61.0)
    'about 2 minutes'
    """
    return f"about {counted(math.ceil(seconds / 60), 'minute')}"


def profile_s(model: CostModel, tasks: Sequence[Task]) -> Seconds:
    """How long it takes to time blocks one after the other, on one of a cluster's GPUs."""
    device, settings, times_s = model.cluster.accelerator, model.settings, []
    for task in tasks:
        operators = block_graph(model.spec, task.block, task.shard).operators
        pass_s = math.fsum(s for op in operators for s in operator_times(op, device, settings))
        times_s.append(_BUILD_S + min(_MOST_S, _PASSES * pass_s))
    return _START_S + math.fsum(times_s)


def tasks_between(model: CostModel, grids: Sequence[PartialLayout]) -> tuple[Task, ...]:
    """Blocks that are timed to tell layouts apart; none of a job whose layers are not built."""
    spec = model.spec
    if spec.family is not ModelFamily.GPT or model.settings.precision is not Precision.BF16:
        return ()
    built = [g for g in grids if divides(spec, g.dims.tensor_model_parallel_size)]
    return telling_apart(spec, [model.shard(grid) for grid in built])


def profiles(
    model: CostModel, listed: Sequence[PartialLayout], undecided: Sequence[PartialLayout]
) -> Iterator[Profile]:
    """The profiles that can be made to tell plans apart.

    Args:
        listed: layouts of all plans that are compared.
        undecided: layouts of those that could be the fastest.
    """
    untimed = {
        block
        for grid in undecided
        for block, source in model.sources(grid).items()
        if source is Source.ANALYTIC
    }
    tasks = [task for task in tasks_between(model, undecided) if task.block in untimed]
    if tasks:
        yield Profile(mechanisms=LAYERS, seconds=profile_s(model, tasks), num_shapes=len(tasks))
    sizes = model.cluster.group_sizes()
    far = frozenset(
        mechanism
        for mechanism in NETWORK
        for grid, kind in product(listed, _GROUPS[mechanism])
        if group_level(grid.dims, kind, sizes) > 0
    )
    if model.cluster.gpus_per_node > 1:
        yield Profile(mechanisms=NETWORK - far, seconds=_START_S + BUDGET_S, num_nodes=1)
    if far:
        yield Profile(mechanisms=NETWORK, seconds=_START_S + BUDGET_S, num_nodes=2)


def shortlisted(model: CostModel, plans: Sequence[Candidate]) -> Shortlist:
    """Few plans of which one is as fast as the fastest, and what to measure to know more."""
    steps, layouts = [each.step for each in plans], [each.solved.layout for each in plans]
    found = shortlist(steps, SURE)
    can_be_made = [*profiles(model, layouts, [layouts[number] for number in found.plans])]
    measured = measurements(steps, SURE, [each.mechanisms for each in can_be_made])
    return Shortlist(
        numbers=found.plans,
        chance=found.chance,
        chances=tuple(found.chances[number] for number in found.plans),
        measurements=tuple(
            _words(each, None if each.profile is None else can_be_made[each.profile])
            for each in measured
        ),
    )


def _words(found: Measurement, profile: Profile | None) -> str:
    """A measurement, its cost and its gain, for people."""
    faster = f"to make the choice {found.gain_percent:.1f} % faster"
    if profile is not None and profile.num_nodes:
        # how far a prediction can be off does not follow from a network that was measured
        return f"{_time(profile)} on {_NODES[profile.num_nodes]} (the network): expected {faster}"
    if profile is None:
        what = "a run of " + ("the plan" if found.plan == 0 else f"runner-up {found.plan}")
    else:
        what = f"{_time(profile)} on one GPU ({profile.num_shapes} shapes of layers)"
    return f"{what}: expected to leave {found.shortlist_size:.1f} plans and {faster}"


_NODES = {1: "one node", 2: "two nodes"}


def _time(profile: Profile) -> str:
    return f"{minutes(profile.seconds)} of `{MEASURE_COMMAND} --for PLAN.YAML`"
