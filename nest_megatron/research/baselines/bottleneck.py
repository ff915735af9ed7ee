"""Which stage of a layout holds the others up, and what that stage is short of."""

from __future__ import annotations

from dataclasses import dataclass

from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import PipelineProblem, chunk_cost, rank_memory
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.names import Name
from nest_megatron.research.baselines.walk import State
from nest_megatron.units import Seconds, to_seconds


class Resource(Name):
    """What a stage can be short of."""

    MEMORY = "memory"
    COMPUTE = "compute"
    COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The worst stage, and its resources from the scarcest on."""

    stage: int
    resources: tuple[Resource, ...]


def bottleneck(model: CostModel, state: State) -> Bottleneck:
    """The stage that lacks most memory, or else the slowest one.

    Args:
        state: a layout without virtual stages.
    """
    problem = stage_problem(model, state.grid)
    stages = range(problem.num_stages)
    if state.missing_bytes:
        stage = max(stages, key=lambda rank: _memory(problem, state, rank))
    else:
        stage = max(stages, key=lambda rank: sum(_time(model, problem, state, rank)))
    compute, communication = _time(model, problem, state, stage)
    by_time = (Resource.COMPUTE, Resource.COMMUNICATION)
    if communication > compute:
        by_time = by_time[::-1]
    memory = (Resource.MEMORY,) if state.missing_bytes else ()
    return Bottleneck(stage=stage, resources=(*memory, *by_time))


def _memory(problem: PipelineProblem, state: State, stage: int) -> int:
    first, end = state.boundaries[stage : stage + 2]
    return rank_memory(problem, stage, [chunk_cost(problem, first, end)]).total


def _time(
    model: CostModel, problem: PipelineProblem, state: State, stage: int
) -> tuple[Seconds, Seconds]:
    """Computation and communication of a stage for one micro batch.

    What no pass hides of the replicas' traffic is shared among the micro batches.
    """
    first, end = state.boundaries[stage : stage + 2]
    cost = chunk_cost(problem, first, end)
    sequence, kinds = model.unit_kinds(state.grid)
    inside = 0.0
    for index in sequence[first:end]:
        run = kinds[index].own.run
        for one in (run.forward, run.backward):
            inside += one.tp + one.cp + one.ep
    sent = problem.send_forward[stage] + problem.send_backward[stage]
    edges = max(0, cost.gather_unhidden, cost.gather_hideable) + max(
        0, cost.reduce_unhidden, cost.reduce_hideable
    )
    between = to_seconds(sent) + to_seconds(edges) / problem.num_microbatches
    return to_seconds(cost.forward + cost.backward) - inside, inside + between
