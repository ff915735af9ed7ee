"""Entries of the search's heap, and how many candidates lie below them.

Six kinds of nodes, from coarse to fine, each with an admissible bound (no plan below the node is
faster):

* *shard*: tensor, context, expert degrees and micro batch. A replica's work on one micro batch is
  known, and the best pipeline can do is to divide it evenly with no bubble at all. Work that expert
  degrees do not change is its first bound: that of experts is priced once a shard comes up.
* *grid*: pipeline size and rank order on top.
* *schedule*: plain or with virtual stages, and how layers are carried out; for the plain schedule
  the bound holds the fill and drain of a balanced pipeline.
* *members*: the number of virtual stages and the ZeRO stage on top, with the stage solver's own
  lower bound, in unlimited memory and without recomputation, which only make a partition slower.
* *blocks*: full recomputation of the first layers of each chunk, block sizes rising lazily; the
  bound holds what every rank recomputes at least.
* *variant*: another recompute setting on top, judged by the stage solver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model.stage_problems import StageProblems
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import Recompute
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.solver.grids import GridSpace
from nest_megatron.units import Ticks

SHARD, GRID, SCHEDULE, MEMBERS, BLOCKS, VARIANT = range(6)


class Node(NamedTuple):
    """A heap entry; ``serial`` keeps the order of equal bounds fixed.

    ``stages`` are the grid's stage problems, from *members* on.
    """

    bound: Ticks
    serial: int
    grid: PartialLayout
    level: int
    recompute: Recompute
    stages: StageProblems | None

    def problems(self) -> StageProblems:
        """The stage problems of a node that has them."""
        assert self.stages is not None, "made when the family is expanded"
        return self.stages


class CandidateCounts(Caching):
    """Counts the candidates of a space; parts of the same shape are counted once."""

    def __init__(self, grids: GridSpace) -> None:
        self.grids = grids

    @cached_by(
        lambda self, shard: (
            shard.dims.world_size,
            shard.dims.tensor_model_parallel_size * shard.dims.context_parallel_size,
            shard.dims.expert_ranks,
            shard.micro_batch_size,
            self.grids.ways.key(shard),
        )
    )
    def of_shard(self, shard: PartialLayout) -> int:
        """Candidates below a shard."""
        zero_stages = self.grids.zero_stages
        return sum(self.of_grid(grid, zero_stages(grid.dims)) for grid in self.grids.grids(shard))

    @cached_by(
        lambda self, grid, zeros: (
            self.grids.ways.key(grid),
            grid.dims.pipeline_model_parallel_size,
            self.grids.virtual_sizes(grid),
            tuple(zeros),
        )
    )
    def of_grid(self, grid: PartialLayout, zeros: Sequence[ZeroStage]) -> int:
        """Candidates of a grid under these ZeRO stages.

        Virtual stages or none and Megatron-FSDP or not decide how layers are executed, and with it
        which recomputation is allowed; how many virtual stages there are decides the largest block.
        """
        pp, sizes = grid.dims.pipeline_model_parallel_size, self.grids.virtual_sizes(grid)
        num_zeros = Counter(zero.is_fsdp for zero in zeros)
        total = 0
        for schedule in self.grids.unexecuted_schedules(grid, zeros):
            is_plain = schedule.dims.virtual_pipeline_model_parallel_size == 1
            blocks = [self.grids.largest_block(pp * v) for v in sizes if (v == 1) is is_plain]
            total += num_zeros[schedule.zero.is_fsdp] * sum(
                len(self.grids.allowed_settings(block, kinds))
                for kinds in self.grids.ways.possible(schedule).values()
                for block in blocks
            )
        return total

    def of_family(self, family: PartialLayout) -> int:
        """Candidates of a grid whose virtual stages, ZeRO stage and execution are chosen."""
        return len(self.grids.recompute_settings(family))
