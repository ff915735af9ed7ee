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

Left out: tensor degrees and recomputation of its own for each stage, which Megatron does not
launch. Given to it beyond the paper: raising and lowering expert parallelism. It has no ZeRO, no
context parallelism and no virtual stages.

Budget: ``EVALUATIONS`` priced layouts, divided evenly among the numbers of stages; nothing in it is
random.
"""

from __future__ import annotations

from collections.abc import Iterator

from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.recompute import Recompute, RecomputeGranularity
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.research.baselines.bottleneck import Resource, bottleneck
from nest_megatron.research.baselines.job import (
    BaselineChoice,
    ComparisonJob,
    chosen,
    fastest,
    restricted,
)
from nest_megatron.research.baselines.partitions import Boundaries
from nest_megatron.research.baselines.walk import Layouts, State, nearest, pipeline_of, shard_of
from nest_megatron.solver.ranking import SolvedGrid

EVALUATIONS = 3_000
HOPS = 4
#: Results of single primitives from which a search of several goes on.
_WIDTH = 3
_WITHOUT = ("context_parallel_size", "virtual_pipeline_model_parallel_size")

#: Primitives that relieve a resource, as the paper's table has them: fields of ``Shard`` that rise
#: or fall, layers that move out of the stage, layers that are recomputed.
_RELIEF: dict[Resource, tuple[tuple[str, int], ...]] = {
    Resource.MEMORY: (
        ("recompute", 1),
        ("layers", -1),
        ("tensor", 1),
        ("expert", 1),
        ("micro_batch", -1),
    ),
    Resource.COMPUTE: (
        ("layers", -1),
        ("recompute", -1),
        ("micro_batch", 1),
        ("tensor", 1),
        ("tensor", -1),
    ),
    Resource.COMMUNICATION: (
        ("tensor", -1),
        ("expert", -1),
        ("micro_batch", 1),
        ("tensor", 1),
        ("layers", -1),
    ),
}


def find(job: ComparisonJob, *, evaluations: int = EVALUATIONS) -> BaselineChoice:
    """The best state that fits over all numbers of stages."""
    layouts = Layouts(job, restricted(job, _WITHOUT, zero_stages=(ZeroStage.NONE,)))
    starts = _starts(layouts)
    share = evaluations // max(1, len(starts))
    best = fastest([_Climb(layouts, share).run(start) for start in starts])
    reason = f"the best end of local searches from {len(starts)} balanced pipelines"
    return chosen(best, layouts.priced, reason)


def _starts(layouts: Layouts) -> list[Grid]:
    """For each number of stages the grid with the smallest degrees and micro batch."""
    found: dict[int, Grid] = {}
    for shard in sorted(layouts.shards):
        for grid in layouts.families(shard):
            found.setdefault(pipeline_of(grid).stages, grid)
    return [found[stages] for stages in sorted(found)]


class _Climb:
    """The search with one number of stages, which prices so many layouts at most."""

    def __init__(self, layouts: Layouts, evaluations: int) -> None:
        self.layouts = layouts
        self.left = evaluations
        self.seen: set[tuple[Grid, Boundaries]] = set()

    def run(self, start: Grid) -> SolvedGrid | None:
        """The state that no few primitives improve, or the last when the budget ends."""
        best: State | None = self.layouts.state(start)
        plan = None
        while best is not None:
            plan = best.plan
            best = self._better(best, _score(best), HOPS)
        return plan

    def _better(self, state: State, than: tuple[int, int], hops: int) -> State | None:
        """A state better than a score, some primitives away."""
        for resource in (worst := bottleneck(self.layouts.job.model, state)).resources:
            reached = []
            for grid, boundaries in self._relieved(state, worst.stage, resource):
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
    ) -> Iterator[tuple[Grid, Boundaries]]:
        """What each primitive makes of a state."""
        for name, direction in _RELIEF[resource]:
            if name == "layers":
                yield from (
                    (state.grid, boundaries) for boundaries in _lightened(state.boundaries, stage)
                )
            elif name == "recompute":
                for setting in self._other_settings(state.grid, direction):
                    yield self.layouts.recomputed(state.grid, setting), state.boundaries
            else:
                for grid in self._other_shard(state.grid, name, direction):
                    yield grid, state.boundaries

    def _other_settings(self, grid: Grid, direction: int) -> list[Recompute]:
        """One layer more or fewer recomputed, four of them, and as far as it goes."""
        ladder = [
            setting
            for setting in self.layouts.grids.recompute_settings(grid)
            if setting.granularity is not RecomputeGranularity.SELECTIVE
        ]
        at = ladder.index(grid.recompute) if grid.recompute in ladder else 0
        rest = ladder[at + 1 :] if direction > 0 else ladder[:at][::-1]
        return [rest[step] for step in (0, 3, len(rest) - 1) if 0 <= step < len(rest)]

    def _other_shard(self, grid: Grid, name: str, direction: int) -> list[Grid]:
        """The next larger or smaller value of one field; the experts' own degree may follow."""
        now = shard_of(grid)
        value = getattr(now, name)
        changed = [
            shard
            for shard in self.layouts.one_step_from(now)
            if (getattr(shard, name) - value) * direction > 0
        ]
        step = min((abs(getattr(shard, name) - value) for shard in changed), default=0)
        return [
            self.layouts.recomputed(found, grid.recompute)
            for shard in changed
            if abs(getattr(shard, name) - value) == step
            for found in nearest(self.layouts.families(shard), grid)
            if pipeline_of(found).stages == pipeline_of(grid).stages
        ]


def _score(state: State) -> tuple[int, int]:
    """What is missing first, then time: less is better."""
    return state.missing_bytes, state.iteration


def _lightened(boundaries: Boundaries, stage: int) -> Iterator[Boundaries]:
    """Partitions in which a unit leaves a stage, for the stage before it or the one behind."""
    if boundaries[stage + 1] - boundaries[stage] < 2:
        return
    if stage > 0:
        yield _moved(boundaries, stage, 1)
    if stage + 2 < len(boundaries):
        yield _moved(boundaries, stage + 1, -1)


def _moved(boundaries: Boundaries, at: int, by: int) -> Boundaries:
    return (*boundaries[:at], boundaries[at] + by, *boundaries[at + 1 :])
