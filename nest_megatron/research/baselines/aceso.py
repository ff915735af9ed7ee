"""Aceso: relieve the bottleneck, again and again.

Source: Liu et al., "Aceso: Efficient Parallel DNN Training through Iterative Bottleneck
Alleviation" (EuroSys 2024).

Kept: for each number of stages the search starts from a balanced layout (replicas only, micro batch
1). It finds the stage that holds the others up, or whose memory lacks most, and ranks what that
stage is short of: memory, computation, communication. A table names the primitives that relieve
each resource by putting the load on another (raise or lower tensor parallelism against replicas,
the micro batch, the layers recomputed, layers to a neighbouring stage). The first state that is
better is taken; where no single primitive helps, the search goes on from the best of their results
for up to ``HOPS`` steps. States are never priced twice.

Left out: tensor degrees and recomputation for each stage, which Megatron does not
launch. Given to it beyond the paper: raising and lowering expert parallelism. It has no ZeRO, no
context parallelism and no virtual stages.

Budget: ``EVALUATIONS`` priced layouts, divided evenly among the numbers of stages; nothing in it is
random.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import PipelineProblem, UnitCost, chunk_cost, rank_memory
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import RecomputeGranularity
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.plain import Name
from nest_megatron.research.baselines.job import (
    PLAIN,
    BaselineChoice,
    Boundaries,
    ComparisonJob,
    Layouts,
    State,
    chosen,
    layer_traffic,
    moved,
    nearest,
    pipeline_of,
    restricted,
    shard_of,
)
from nest_megatron.solver.ranking import SolvedLayout, fastest
from nest_megatron.units import Seconds, to_seconds

EVALUATIONS = 3_000
HOPS = 4
#: Results of single primitives from which a search of several goes on.
_WIDTH = 3


class Resource(Name):
    """What a stage can be short of."""

    MEMORY = "memory"
    COMPUTE = "compute"
    COMMUNICATION = "communication"


#: Primitives that relieve a resource, as the paper's table has them: fields of ``Shard`` that rise
#: or fall, layers that move out of the stage, layers that are recomputed.
_RELIEF: dict[Resource, tuple[str, ...]] = {
    Resource.MEMORY: ("+recompute", "-layers", "+tensor", "+expert", "-micro_batch"),
    Resource.COMPUTE: ("-layers", "-recompute", "+micro_batch", "+tensor", "-tensor"),
    Resource.COMMUNICATION: ("-tensor", "-expert", "+micro_batch", "+tensor", "-layers"),
}


def find(job: ComparisonJob, *, evaluations: int = EVALUATIONS) -> BaselineChoice:
    """The best state that fits over all numbers of stages."""
    layouts = Layouts(job, restricted(job, PLAIN, zero_stages=(ZeroStage.NONE,)))
    # for each number of stages the grid with the smallest degrees and micro batch
    found: dict[int, PartialLayout] = {}
    for shard in sorted(layouts.shards):
        for grid in layouts.families(shard):
            found.setdefault(pipeline_of(grid).stages, grid)
    starts = [found[stages] for stages in sorted(found)]
    share = evaluations // max(1, len(starts))
    best = fastest([_Climb(layouts, share).run(start) for start in starts])
    reason = f"the best end of local searches from {len(starts)} balanced pipelines"
    return chosen(best, layouts.priced, reason)


class _Climb:
    """The search with one number of stages, which prices so many layouts at most."""

    def __init__(self, layouts: Layouts, evaluations: int) -> None:
        self.layouts = layouts
        self.left = evaluations
        self.seen: set[tuple[PartialLayout, Boundaries]] = set()

    def run(self, start: PartialLayout) -> SolvedLayout | None:
        """The state that no few primitives improve, or the last when the budget ends."""
        best: State | None = self.layouts.state(start)
        plan = None
        while best is not None:
            plan = best.plan
            best = self._better(best, _score(best), HOPS)
        return plan

    def _better(self, state: State, than: tuple[int, int], hops: int) -> State | None:
        """A state better than a score, some primitives away."""
        stage, resources = bottleneck(self.layouts.job.model, state)
        for resource in resources:
            reached = []
            for grid, boundaries in self._relieved(state, stage, resource):
                if (grid, boundaries) in self.seen:
                    continue
                if self.left <= 0:
                    return None
                self.left -= 1
                self.seen.add((grid, boundaries))
                reached.append(self.layouts.state(grid, boundaries))
                if _score(reached[-1]) < than:
                    return reached[-1]
            if hops > 1:
                for near in sorted(reached, key=_score)[:_WIDTH]:
                    if found := self._better(near, than, hops - 1):
                        return found
        return None

    def _relieved(
        self, state: State, stage: int, resource: Resource
    ) -> Iterator[tuple[PartialLayout, Boundaries]]:
        """What each primitive makes of a state."""
        for primitive in _RELIEF[resource]:
            name, direction = primitive[1:], 1 if primitive[0] == "+" else -1
            grids, partitions = [state.grid], [state.boundaries]
            if name == "layers":
                partitions = _lightened(state.boundaries, stage)
            elif name == "recompute":
                grids = self._other_settings(state.grid, direction)
            else:
                grids = self._other_shards(state.grid, name, direction)
            yield from product(grids, partitions)

    def _other_settings(self, grid: PartialLayout, direction: int) -> list[PartialLayout]:
        """One layer more or fewer recomputed, four of them, and as far as it goes."""
        ladder = [
            setting
            for setting in self.layouts.grids.recompute_settings(grid)
            if setting.granularity is not RecomputeGranularity.SELECTIVE
        ]
        at = ladder.index(grid.recompute) if grid.recompute in ladder else 0
        rest = ladder[at + 1 :] if direction > 0 else ladder[:at][::-1]
        found = [rest[step] for step in (0, 3, len(rest) - 1) if 0 <= step < len(rest)]
        return [self.layouts.recomputed(grid, setting) for setting in found]

    def _other_shards(self, grid: PartialLayout, name: str, direction: int) -> list[PartialLayout]:
        """The next larger or smaller value of one field; the experts' tensor degree may follow."""
        now = shard_of(grid)
        steps = {
            shard: (getattr(shard, name) - getattr(now, name)) * direction
            for shard in self.layouts.one_step_from(now)
        }
        least = min((step for step in steps.values() if step > 0), default=0)
        return [
            self.layouts.recomputed(found, grid.recompute)
            for shard, step in steps.items()
            if step == least > 0
            for found in nearest(self.layouts.families(shard), grid)
            if pipeline_of(found).stages == pipeline_of(grid).stages
        ]


def _score(state: State) -> tuple[int, int]:
    """What is missing first, then time: less is better."""
    return state.missing_bytes, state.iteration


def _lightened(boundaries: Boundaries, stage: int) -> list[Boundaries]:
    """Partitions in which a unit leaves a stage, for the stage before it or the one behind."""
    if boundaries[stage + 1] - boundaries[stage] < 2:
        return []
    before = [moved(boundaries, stage, 1)] if stage > 0 else []
    behind = [moved(boundaries, stage + 1, -1)] if stage + 2 < len(boundaries) else []
    return before + behind


def bottleneck(model: CostModel, state: State) -> tuple[int, tuple[Resource, ...]]:
    """The stage that lacks most memory, or the slowest one; its scarcest resources first."""
    problem = stage_problem(model, state.grid)
    stages = range(problem.num_stages)
    costs = [chunk_cost(problem, *ends) for ends in pairwise(state.boundaries)]
    times = [_time(model, problem, state, rank, costs[rank]) for rank in stages]
    stage = max(stages, key=lambda rank: sum(times[rank]))
    if state.missing_bytes:
        stage = max(stages, key=lambda rank: rank_memory(problem, rank, [costs[rank]]).total)
    compute, communication = times[stage]
    by_time = (Resource.COMPUTE, Resource.COMMUNICATION)
    if communication > compute:
        by_time = by_time[::-1]
    return stage, (Resource.MEMORY, *by_time) if state.missing_bytes else by_time


def _time(
    model: CostModel, problem: PipelineProblem, state: State, stage: int, cost: UnitCost
) -> tuple[Seconds, Seconds]:
    """Computation and communication of a stage for one micro batch.

    What no pass hides of the replicas' traffic is shared among the micro batches.
    """
    inside = layer_traffic(model, state.grid, slice(*state.boundaries[stage : stage + 2]))
    sent = problem.send_forward[stage] + problem.send_backward[stage]
    edges = max(0, cost.gather_unhidden, cost.gather_hideable)
    edges += max(0, cost.reduce_unhidden, cost.reduce_hideable)
    between = to_seconds(sent) + to_seconds(edges) / problem.num_microbatches
    return to_seconds(cost.forward + cost.backward) - inside, inside + between
