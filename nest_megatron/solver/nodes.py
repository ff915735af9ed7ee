"""Entries of the search's heap.

Six kinds of nodes, from coarse to fine, each with an admissible bound (no plan below the node is
faster):

* *shard*: tensor, context, expert degrees and micro batch. A replica's work on one micro batch is
  known, and the best pipeline can do is to divide it evenly with no bubble at all. Work that expert
  degrees do not change is its first bound: that of experts is priced once a shard comes up.
* *grid*: pipeline size and rank order on top.
* *schedule*: plain or with virtual stages, and the execution of layers; for the plain schedule the
  bound holds the fill and drain of a balanced pipeline.
* *members*: the number of virtual stages and the ZeRO stage on top, with the stage solver's own
  lower bound, in unlimited memory and without recomputation, which only make a partition slower.
* *blocks*: full recomputation of the first layers of each chunk, block sizes rising lazily; the
  bound holds what every rank recomputes at least.
* *variant*: another recompute setting on top, judged by the stage solver.
"""

from __future__ import annotations

from typing import NamedTuple

from nest_megatron.cost_model.stage_problems import StageProblems
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import Recompute
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
