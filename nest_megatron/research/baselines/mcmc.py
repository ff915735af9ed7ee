"""MCMC: a random walk over layouts, as in FlexFlow and TopoOpt.

Sources: Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks" (MLSys 2019),
whose execution optimizer samples by Metropolis and Hastings; Wang et al., "TopoOpt" (NSDI 2023),
which searches parallelization with it.

Kept: from a random start the walk changes one thing at a time (a degree, the micro batch, virtual
stages, ZeRO, recomputation, one layer's stage), prices the result with the full cost model, network
included, and moves there if it is faster, or with a probability that falls exponentially with the
loss if it is not. The best of all states that fit is the answer.

Left out: a sharding for each operator, which Megatron does not launch, and TopoOpt's
search for the network itself. Added to it: every dimension of our space, so
that what it loses is lost by the walk. Neither paper says how memory counts; here a state that
lacks a tenth of the memory counts as ``1 + MEMORY_PENALTY / 10`` times as slow, so that the walk
finds its way to where states fit.

Budget: ``SEEDS`` walks of ``STEPS`` proposals each; the same seeds give the same plan.
"""

from __future__ import annotations

import math
import random
from itertools import product

from nest_megatron.layout.layout import PartialLayout
from nest_megatron.research.baselines.job import (
    BaselineChoice,
    Boundaries,
    ComparisonJob,
    Layouts,
    State,
    chosen,
    differing,
    moved,
    nearest,
    pipeline_of,
    restricted,
    shard_of,
)
from nest_megatron.solver.ranking import SolvedLayout, fastest

SEEDS = 10
STEPS = 500
#: Loss, as a share of the present time, that is accepted with a probability of 1/e. Neither this
#: nor the penalty is in the papers: they are chosen in the walk's favour, by trial.
TEMPERATURE = 0.05
MEMORY_PENALTY = 4.0


def find(job: ComparisonJob, *, seeds: int = SEEDS, steps: int = STEPS) -> BaselineChoice:
    """The best state that fits of all walks."""
    layouts = Layouts(job, restricted(job, rank_orders=job.space.rank_orders))
    starts = [grid for shard in layouts.shards for grid in layouts.families(shard)]
    if not starts:
        return chosen(None, 0, "")
    walks = (_Walk(layouts, starts, random.Random(seed)) for seed in range(seeds))
    best = fastest([walk.run(steps) for walk in walks])
    return chosen(best, layouts.priced, f"the best of {seeds} random walks of {steps} steps")


class _Walk:
    """One random walk, which draws from one generator alone."""

    def __init__(self, layouts: Layouts, starts: list[PartialLayout], rng: random.Random) -> None:
        self.layouts = layouts
        self.rng = rng
        self.state = layouts.state(self._with_some_recompute(rng.choice(starts)))

    def run(self, steps: int) -> SolvedLayout | None:
        """The best state of the walk that fits."""
        best = self.state.plan
        for _ in range(steps):
            proposed = self._propose()
            if proposed is None:
                continue
            now = self._cost(self.state)
            loss = (self._cost(proposed) - now) / now
            if loss <= 0 or self.rng.random() < math.exp(-loss / TEMPERATURE):
                self.state = proposed
                best = fastest([best, proposed.plan])
        return best

    def _cost(self, state: State) -> float:
        lacking = state.missing_bytes / self.layouts.job.model.capacity_bytes
        return state.iteration * (1.0 + MEMORY_PENALTY * lacking)

    def _propose(self) -> State | None:
        """A state one move away, or ``None`` where the move drawn is not there."""
        grid, move = self.state.grid, self.rng.randrange(4)
        if move == 0:
            partitions = []
            # virtual stages stay balanced, as Megatron's are
            if grid.dims.virtual_pipeline_model_parallel_size == 1:
                partitions = shifted(self.layouts.job.model.spec.num_layers, self.state.boundaries)
            return self.layouts.state(grid, self.rng.choice(partitions)) if partitions else None
        if move == 1:
            return self.layouts.state(self._with_some_recompute(grid))
        grids = self._other_shards() if move == 2 else self._other_pipelines()
        if not grids:
            return None
        return self.layouts.state(self.layouts.recomputed(self.rng.choice(grids), grid.recompute))

    def _other_shards(self) -> list[PartialLayout]:
        """One of the degrees or the micro batch changes; the experts' tensor degree may follow."""
        others = self.layouts.one_step_from(shard_of(self.state.grid))
        if not others:
            return []
        return nearest(self.layouts.families(self.rng.choice(others)), self.state.grid)

    def _other_pipelines(self) -> list[PartialLayout]:
        """Stages, virtual stages, rank order or ZeRO stage change."""
        now = pipeline_of(self.state.grid)
        families = self.layouts.families(shard_of(self.state.grid))
        if self.rng.random() < 0.5:
            stages = sorted({pipeline_of(grid).stages for grid in families} - {now.stages})
            to = self.rng.choice(stages) if stages else now.stages
            return nearest((g for g in families if pipeline_of(g).stages == to), self.state.grid)
        return [grid for grid in families if differing(pipeline_of(grid), now) == 1]

    def _with_some_recompute(self, grid: PartialLayout) -> PartialLayout:
        settings = self.layouts.grids.recompute_settings(grid)
        return self.layouts.recomputed(grid, self.rng.choice(settings))


def shifted(num_layers: int, boundaries: Boundaries) -> list[Boundaries]:
    """Every partition of a plain pipeline in which one unit has moved to a neighbouring stage."""
    inner = product(range(1, len(boundaries) - 1), (-1, 1))
    found = ((at, moved(boundaries, at, by)) for at, by in inner)
    return [
        ends
        for at, ends in found
        if ends[at - 1] < ends[at] < ends[at + 1] and ends[1] <= num_layers + 1
    ]
