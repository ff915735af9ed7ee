"""The stage problems of one grid under every recompute setting; what they share is priced once."""

from __future__ import annotations

from nest_megatron.cost_model.keys import split_block
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import PipelineProblem, UnitCost
from nest_megatron.cost_model.unit_cost import overlap_window, unit_cost
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.recompute import Recompute, RecomputeMethod
from nest_megatron.units import Bytes


class StageProblems:
    """Makes the stage problems of a grid, of whose recompute setting nothing is read."""

    def __init__(self, model: CostModel, grid: Grid) -> None:
        self.model = model
        self.grid = grid
        self._replica_costs = model.replica_costs(grid.dims, grid.zero)
        self._sends = model.sends(grid)
        self._constant = model.constant(grid)
        self._sequence = model.structure(grid.dims).sequence
        self._costs: dict[object, tuple[UnitCost, ...]] = {}

    def problem(
        self,
        recompute: Recompute,
        *,
        capacity_bytes: Bytes | None = None,
        hidden_reduce: bool = False,
    ) -> PipelineProblem:
        """Everything that a stage partition of the grid is judged by."""
        dims = self.grid.dims
        forward, backward = self._sends
        block = recompute.method is RecomputeMethod.BLOCK
        return PipelineProblem(
            num_stages=dims.pipeline_model_parallel_size,
            num_virtual=dims.virtual_pipeline_model_parallel_size,
            num_microbatches=self.grid.num_microbatches,
            unit_kinds=self._sequence,
            costs=self._unit_costs(recompute, hidden_reduce),
            num_layers=self.model.spec.num_stacked_layers,
            block_num_layers=(recompute.num_layers or 0) if block else 0,
            send_forward=forward,
            send_backward=backward,
            overlap_p2p=dims.virtual_pipeline_model_parallel_size > 1,
            capacity_bytes=self.model.capacity_bytes if capacity_bytes is None else capacity_bytes,
            constant=self._constant,
        )

    def _unit_costs(self, recompute: Recompute, hidden_reduce: bool) -> tuple[UnitCost, ...]:
        """Costs of the distinct units; how many layers a block holds changes none."""
        covered, elsewhere = split_block(recompute)
        key = (covered, hidden_reduce)
        if key not in self._costs:
            dims, count = self.grid.dims, self.grid.num_microbatches
            p, v = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
            window, share = overlap_window(dims, count), 0.0
            if self.grid.execution.overlap_moe_expert_parallel_comm:
                share = early_forward_share(p, v, count)
            self._costs[key] = tuple(
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
        return self._costs[key]


def stage_problem(model: CostModel, grid: Grid) -> PipelineProblem:
    """Everything that a stage partition of a grid is judged by, under its own recomputation."""
    return StageProblems(model, grid).problem(grid.recompute)


def early_forward_share(p: int, v: int, num_microbatches: int) -> float:
    """What one forward pass more before the first backward pass adds to what a rank saves.

    The overlap of the token all-to-all runs it (``get_pp_rank_microbatches``,
    ``combined_1f1b_schedule_for_no_pipelining``). With virtual stages it is a chunk more beside
    those of the last rank, which has fewest; for the other ranks it is less.
    """
    alive = (v - 1) * p + 1
    return min(1, num_microbatches * v - alive) / alive
