"""The stage problems of one grid under every recompute setting; what they share is priced once."""

from __future__ import annotations

from nest_megatron.caching import Caching, cached_by
from nest_megatron.cost_model.keys import split_block
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import PipelineProblem, UnitCost
from nest_megatron.cost_model.unit_cost import overlap_window, unit_cost
from nest_megatron.errors import UserInputError
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import Recompute, RecomputeMethod
from nest_megatron.units import Bytes

_PASSES = ("forward", "backward", "block_backward")


class StageProblems(Caching):
    """Makes the stage problems of a grid, of whose recompute setting nothing is read.

    Args:
        capacity_bytes: the highest peak that a plan of the grid may have; the device's if not
            given.
    """

    def __init__(
        self, model: CostModel, grid: PartialLayout, capacity_bytes: Bytes | None = None
    ) -> None:
        self.model = model
        self.grid = grid
        self.capacity_bytes = model.capacity_bytes if capacity_bytes is None else capacity_bytes
        self._replica_costs = model.replica_costs(grid.dims, grid.zero)
        self._sends = model.sends(grid)
        self._constant = model.constant(grid)
        self._sequence = model.structure(grid.dims).sequence
        self._num_priced = priced_microbatches(grid)

    def problem(self, recompute: Recompute, *, hidden_reduce: bool = False) -> PipelineProblem:
        """Everything that a stage partition of the grid is judged by."""
        dims = self.grid.dims
        p, v = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
        forward, backward = self._sends
        return PipelineProblem(
            num_stages=p,
            num_virtual=v,
            num_microbatches=self._num_priced,
            unit_kinds=self._sequence,
            costs=self._unit_costs(*split_block(recompute), hidden_reduce),
            num_layers=self.model.spec.num_stacked_layers,
            block_num_layers=(
                (recompute.num_layers or 0) if recompute.method is RecomputeMethod.BLOCK else 0
            ),
            send_forward=forward,
            send_backward=backward,
            overlap_p2p=v > 1 and (p == 2 or self.model.settings.traits.overlap_p2p_comm),
            capacity_bytes=self.capacity_bytes,
            constant=self._constant,
        )

    @cached_by(lambda _, covered, elsewhere, hidden_reduce: (covered, hidden_reduce))
    def _unit_costs(
        self, covered: Recompute, elsewhere: Recompute, hidden_reduce: bool
    ) -> tuple[UnitCost, ...]:
        """Costs of the distinct units under a setting as ``split_block`` splits it."""
        count = self._num_priced
        window = overlap_window(self.grid.dims, count)
        share = self._share_of_larger_rounds() + share_kept_early(self.grid)
        costs = tuple(
            unit_cost(
                kind,
                replica,
                self.model.settings,
                window,
                early_share=share,
                hidden_reduce=hidden_reduce,
            )
            for kind, replica in zip(
                self.model.kinds_under(self.grid, covered, elsewhere),
                self._replica_costs,
                strict=True,
            )
        )
        return costs if count == self.grid.num_microbatches else tuple(map(self._longer, costs))

    def _longer(self, cost: UnitCost) -> UnitCost:
        """Fewer micro batches than there are take as long as all together."""
        count = self.grid.num_microbatches
        return cost._replace(
            **{name: -(-getattr(cost, name) * count // self._num_priced) for name in _PASSES}
        )

    def _share_of_larger_rounds(self) -> float:
        """What is saved more than in rounds of one micro batch a rank, as a share of that."""
        group = self.model.settings.traits.microbatch_group_size_per_vp_stage
        grid = self.grid
        p = grid.dims.pipeline_model_parallel_size
        v = grid.dims.virtual_pipeline_model_parallel_size
        if not group:
            return 0.0
        alive = (v - 1) * p + 1
        more = min((v - 1) * (group - p), grid.num_microbatches * v - alive) / alive
        return max(more, grid.num_microbatches / self._num_priced - 1, 0.0)


def priced_microbatches(grid: PartialLayout) -> int:
    """Micro batches in whole rounds of one a pipeline rank, as the schedule is priced.

    Raises:
        UserInputError: if there are virtual stages and fewer micro batches than pipeline ranks,
            which Megatron refuses too.
    """
    dims, count = grid.dims, grid.num_microbatches
    p = dims.pipeline_model_parallel_size if dims.virtual_pipeline_model_parallel_size > 1 else 1
    if count < p:
        raise UserInputError(
            "micro batches",
            count,
            f"virtual stages need one for each of the {p} pipeline ranks",
            "Enlarge the batch, or use no virtual stages.",
        )
    return count - count % p


def stage_problem(model: CostModel, grid: PartialLayout) -> PipelineProblem:
    """Everything that a stage partition of a grid is judged by, under its own recomputation."""
    return StageProblems(model, grid).problem(grid.recompute)


def share_kept_early(grid: PartialLayout) -> float:
    """What one forward pass more before the first backward pass adds to what a rank saves.

    The overlap of the token all-to-all runs it (``get_pp_rank_microbatches``,
    ``combined_1f1b_schedule_for_no_pipelining``). With virtual stages it is a chunk more beside
    those of the last rank, which has fewest; for the other ranks it is less.
    """
    if not grid.execution.overlap_moe_expert_parallel_comm:
        return 0.0
    dims, passes = grid.dims, priced_microbatches(grid)
    alive = dims.num_chunks - dims.pipeline_model_parallel_size + 1
    return min(1, passes * dims.virtual_pipeline_model_parallel_size - alive) / alive
